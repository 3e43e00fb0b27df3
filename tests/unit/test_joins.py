"""Joined tables: what is declared, what a handler sees, and what becomes of rows that cannot be taken."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from streams import (
    DEAD_LETTER,
    SKIP,
    EventContext,
    EventSource,
    EventSourceConfig,
    Retry,
    Update,
)
from streams.errors import ConfigError, EventFailure, RegistrationError, StoreError, TopicError
from streams.looks.letter_choice import problems_of
from streams.looks.letters import Letter
from streams.records import Record
from streams.runtime.replay import PartitionReplay
from streams.stores.joined import PARTITIONERS
from streams.testing import TestDriver
from tests.unit.joins_kit import CUSTOMERS, SEEN, Customer, Shop, place, row, rows, say, seen, update
from tests.vocabulary import Named, Ordered, Reserved, Ring

# -- declared ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_joined_table_is_refused() -> None:
    shop = Shop(update)
    source, table = shop.source, shop.customers
    given: dict[str, Any] = {"key": str, "value": Customer}
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: source.join(CUSTOMERS, **given), RegistrationError, "declared twice"),
        (lambda: source.input(CUSTOMERS), RegistrationError, "declared twice"),
        (lambda: source.join("orders", **given), RegistrationError, "event source's own"),
        (lambda: source.join("more", partitioner="md5", **given), ConfigError, "murmur2, crc32, fnv1a, or None"),  # type: ignore[arg-type]
        (lambda: source.join("more", on_error="skip", **given), ConfigError, "must be an error policy"),  # type: ignore[arg-type]
        (lambda: source.join("more", key=float, value=int, ordered=True), ConfigError, "in order|codec"),
        (lambda: source.register_update(table, update), RegistrationError, "has an update handler already"),
        (lambda: source.register_update(Shop().customers), RegistrationError, "no joined table of this source"),
        (lambda: Shop(lambda ctx: None), RegistrationError, r"called with \(ctx, update\)"),  # type: ignore[misc,arg-type]
    ]
    for call, error, text in refused:
        with pytest.raises(error, match=text):
            call()

    async def slow(ctx: EventContext[Any], row: Update[str, Customer]) -> None: ...

    with pytest.raises(RegistrationError, match="is async; it is a plain function"):
        Shop(slow)
    elsewhere = EventSource(
        EventSourceConfig(group_id="g", topic="t", num_partitions=2, source_bootstrap_servers="other:9092")
    )
    with pytest.raises(ConfigError, match="another cluster"):
        elsewhere.join("more", key=str, value=Customer)
    source._declared.router.freeze()
    with pytest.raises(RegistrationError, match="too late"):
        source.join("more", key=str, value=Customer)


def test_the_topic_is_compacted_and_the_topology_shows_it() -> None:
    source = Shop(update).source
    (spec,) = source.input_topics()
    assert (spec.name, spec.partitions, spec.configs["cleanup.policy"], spec.may_delete) == (
        CUSTOMERS,
        2,
        "compact",
        True,
    )
    topology = source.topology
    assert [topic.purpose for topic in topology.topics] == ["source", "changelog", "dead letters", "table"]
    assert [(one.event, one.kind) for one in topology.handlers if one.kind == "update"] == [(CUSTOMERS, "update")]
    assert '-- "rows" --> source' in topology.mermaid()
    assert [one.kind for one in Shop().source.topology.handlers] == ["plain", "batch"]


@pytest.mark.asyncio
async def test_a_replay_refuses_a_source_with_joined_tables_by_name() -> None:
    program = Shop().source.program()
    kind = next(route.kind for route in program.routes if route.name.startswith("kes.join."))
    assert pickle.loads(pickle.dumps(kind)).topic == CUSTOMERS
    with pytest.raises(ConfigError, match="customers"):
        PartitionReplay(program, 0, wall_ms=0)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_new_table_is_read_to_its_end_before_any_event() -> None:
    with TestDriver(Shop().source, start=False) as driver:
        place(driver, *[f"c{number}" for number in range(20)], wait=False)
        for number in range(300):
            driver.table(CUSTOMERS).put(f"c{number % 30}", Customer(f"n{number}"), wait=False)
        driver.start()
        driver.settle()
        assert sorted(seen(driver)) == sorted(f"c{number} is n{270 + number}" for number in range(20))
        driver.check()
        assert driver.committed_offsets(CUSTOMERS) == {
            number: driver._world.broker.log(CUSTOMERS, number).end for number in range(2)
        }


def test_a_table_with_rows_and_no_event() -> None:
    with TestDriver(Shop().source) as driver:
        for number in range(300):
            driver.table(CUSTOMERS).put(str(number), Customer("ann"), wait=False)
        driver.settle()
        assert len(rows(driver)) + len(rows(driver, 1)) == 300


def test_an_update_handler_gets_the_row_before_and_after() -> None:
    with TestDriver(Shop(update).source) as driver:
        table = driver.table(CUSTOMERS)
        table.put("ann", Customer("Ann"))
        place(driver, "ann", "bob")
        table.put("ann", Customer("Anna"))
        driver.crash()
        driver.restart()
        table.delete("ann")
        table.delete("ann")
        place(driver, "ann")
        assert seen(driver) == ["ann: - to Ann", "ann is Ann", "bob is -", "ann: Ann to Anna", "ann: Anna to -",
                                "ann: - to -", "ann is -"]  # fmt: skip
        driver.check()


@pytest.mark.parametrize("kind", ["journalled", "own"])
def test_each_attempt_sees_the_same_row_and_it_changes_whatever_the_handler_does(kind: str) -> None:
    attempts: list[str] = []

    def failing(ctx: EventContext[Any], row: Update[str, Customer]) -> None:
        old, now = row.old, ctx.joined(shop.customers).get(row.key)
        assert row.new is not None
        attempts.append(f"{None if old is None else old.name} {now and now.name}")
        ctx.forward(Record(SEEN, b"never", b"k", partition=0))
        row.new.name = "spoiled"  # its own copy
        if attempts[-1] != "None Ann":
            raise RuntimeError("no")

    store: Any = None
    if kind == "own":
        store = lambda _: Own()  # noqa: E731
    policy = Retry(attempts=3, backoff_seconds=0.01, then=DEAD_LETTER.then)
    shop = Shop(failing, store=store, on_update=policy)
    with TestDriver(shop.source) as driver:
        for name in ("Ann", "Anna"):
            driver.table(CUSTOMERS).put("ann", Customer(name))
        place(driver, "ann")
        assert attempts == ["None Ann", *["Ann Anna"] * 3]
        assert seen(driver) == ["never", "ann is Anna"]
        (letter,) = driver.dead_letters()
        assert letter.header("__kes_dlq_topic") == b"customers"
        assert rows(driver) | rows(driver, 1) == {b"ann": b'{"name":"Anna"}'}
        driver.check()


class Own:
    """A store that cannot be undone."""

    def receive_change(self, change: Any) -> None: ...
    def revoked(self) -> None: ...


# -- rows that cannot be taken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_headers", [0, 2_000_000])
@pytest.mark.parametrize("cause", ["row", "handler", "event"])
def test_a_letter_of_a_row_is_not_sent_again_and_says_what_to_do(cause: str, own_headers: int) -> None:
    """There may be a newer row by now, and it would be in its place: in the table's topic, and so here."""

    def failing(ctx: EventContext[Any], event: Any) -> None:
        raise RuntimeError("no")

    shop = Shop(failing, on_update=DEAD_LETTER, options={"on_error": DEAD_LETTER, "partitioner": None})
    shop.source._declared.router.routes[b"Ordered"].handler = failing
    shop.source._declared.router.routes[b"Ordered"].policy = DEAD_LETTER
    headers: Any = [("more", b"x" * own_headers)] if own_headers else None
    with TestDriver(shop.source) as driver:
        if cause == "event":
            driver.send(Ordered("ann"), key="ann", partition=0, headers=headers)
        else:
            value = b"no json" if cause == "row" else b'{"name":"Ann"}'
            driver.send_record(Record(CUSTOMERS, value, b"ann", headers, 0))
        (record,) = driver.dead_letters()
    box: Any = SimpleNamespace(partitions=lambda topic: 2)
    problems = problems_of(box, [Letter(record, 0, False)], {}, None)
    if cause == "event":
        assert problems == []
    else:
        (problem,) = problems
        assert "is a row of the joined table customers" in problem
        assert "`kes dlq drop` the letter" in problem


BAD: list[tuple[bytes | None, bytes | None, str]] = [
    (b"ann", b"no json", "JSON is malformed"),
    (b"ann", b'{"name": 1}', "Expected `str`"),
    (None, b'{"name":"Ann"}', "has a key"),
    (None, None, "has a key"),
    (b"\xff\xfe", b'{"name":"Ann"}', "utf-8|UTF-8"),
    (b"ann", b'{"name":"%s"}' % (b"x" * 2_000_000), "more than the"),
]


@pytest.mark.parametrize("handler", [None, update])
@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_row_that_cannot_be_taken_has_the_policy_of_its_table(number: int, handler: Any) -> None:
    key, value, text = BAD[number]
    with TestDriver(Shop(handler, options={"on_error": DEAD_LETTER, "partitioner": None}).source) as driver:
        row(driver, b"ann", b'{"name":"Ann"}')
        row(driver, key, value)
        row(driver, b"bob", b'{"name":"Bob"}')
        assert rows(driver) == {b"ann": b'{"name":"Ann"}', b"bob": b'{"name":"Bob"}'}, "the row before stays"
        assert len(driver.dead_letters()) == 1
        driver.check()
    with TestDriver(Shop(handler, options={"partitioner": None}).source) as driver:
        row(driver, b"ann", b'{"name":"Ann"}')
        with pytest.raises(EventFailure, match=text) as failed:
            row(driver, key, value)
        assert "customers[0]@1" in str(failed.value)


@pytest.mark.parametrize("handler", [None, update])
def test_a_row_that_the_changelog_refuses_is_one_that_cannot_be_taken(handler: Any) -> None:
    source = Shop(handler, options={"on_error": SKIP, "partitioner": None}).source
    with TestDriver(source) as driver:
        driver._world.broker.refuses = lambda topic, entry: (
            topic.endswith("changelog") and b"LARGE" in (entry.value or b"")
        )
        row(driver, b"ann", b'{"name":"Ann"}')
        row(driver, b"ann", b'{"name":"LARGE"}')
        row(driver, b"bob", None)
        assert rows(driver) == {b"ann": b'{"name":"Ann"}'}
        driver.check()


def test_what_an_update_sends_and_the_broker_refuses_does_not_keep_the_row_from_changing() -> None:
    with TestDriver(Shop(update, on_update=DEAD_LETTER, options={"partitioner": None}).source) as driver:
        driver._world.broker.refuses = lambda topic, entry: topic == SEEN
        row(driver, b"ann", b'{"name":"Ann"}')
        assert rows(driver) == {b"ann": b'{"name":"Ann"}'}
        assert len(driver.dead_letters()) == 1
        driver.check()


def test_what_an_update_stores_and_the_broker_refuses_does_not_keep_the_row_from_changing() -> None:
    """It is refused for the changelog, as a row may be, and is not the row."""

    def store(ctx: EventContext[Any], row: Update[str, Customer]) -> None:
        ctx.store.put("large", 1)

    with TestDriver(Shop(store, on_update=DEAD_LETTER, options={"partitioner": None}).source) as driver:
        driver._world.broker.refuses = lambda topic, entry: topic.endswith("changelog") and entry.key == b"large"
        row(driver, b"ann", b'{"name":"Ann"}')
        assert rows(driver) == {b"ann": b'{"name":"Ann"}'}
        assert len(driver.dead_letters()) == 1
        driver.check()


def test_own_records_of_another_changelog_are_passed_over() -> None:
    with TestDriver(Shop(update, options={"partitioner": None}).source) as driver:
        row(driver, b"\xff\xffkes.offset", b"{}")
        row(driver, b"ann", b'{"name":"Ann"}')
        row(driver, b"\xff\xffkes.timer.x", None)
        assert seen(driver) == ["ann: - to Ann"]
        assert driver.committed_offsets(CUSTOMERS) == {0: 3}


def test_an_event_cannot_pass_for_a_row() -> None:
    with TestDriver(Shop(decode_policy=SKIP).source) as driver:
        headers: Any = [("__grt__", b"kes.join.customers")]
        driver.send_record(Record("orders", b'{"name":"Eve"}', b"ann", headers, 0))
        assert rows(driver) == {}
        assert driver.committed_offsets() == {0: 1}


# -- co-partitioned ----------------------------------------------------------------------------------------------------


def test_the_partitioners_place_as_their_clients_do() -> None:
    assert [PARTITIONERS["crc32"](key, 10) for key in (b"a", b"bob")] == [
        zlib.crc32(key) % 10 for key in (b"a", b"bob")
    ]
    # FNV-1a of "foobar" is 0xbf9cf968; as Go's int32 -1080231576, whose remainder is -6, taken positive
    assert PARTITIONERS["fnv1a"](b"foobar", 10) == 6
    assert PARTITIONERS["fnv1a"](b"", 10) == abs(0x811C9DC5 - (1 << 32)) % 10


@pytest.mark.parametrize("name", ["crc32", "fnv1a"])
def test_rows_of_another_partitioner_stop_the_source_and_the_one_that_fits_is_named(name: Any) -> None:
    placed = [(f"c{number}".encode(), PARTITIONERS[name](f"c{number}".encode(), 2)) for number in range(40)]
    with TestDriver(Shop().source, start=False) as driver:
        for key, partition in placed:
            driver.send_record(Record(CUSTOMERS, b'{"name":"Ann"}', key, None, partition), wait=False)
        with pytest.raises(TopicError, match=r"belongs to partition . of 2 by murmur2") as failed:
            driver.start()
        assert f"'{name}'" in str(failed.value)
    with TestDriver(Shop(options={"partitioner": name}).source) as driver:
        for key, partition in placed:
            driver.send_record(Record(CUSTOMERS, b'{"name":"Ann"}', key, None, partition), wait=False)
        driver.settle()
        driver.check()


def test_a_key_of_another_partition_is_an_error() -> None:
    shop = Shop()
    elsewhere = next(f"c{number}" for number in range(9) if shop.customers.partition_of(f"c{number}".encode()) == 1)

    def look(ctx: EventContext[Any]) -> None:
        table = ctx.joined(shop.customers)
        assert table.get("ann", None) is None
        for call in (lambda: table.get(elsewhere), lambda: elsewhere in table):
            with pytest.raises(StoreError, match="belongs to partition 1, and this is partition 0"):
                call()
        with pytest.raises(StoreError, match="no joined table of this source"):
            ctx.joined(Shop().customers)
        kept.append(ctx)
        tables.append(table)

    kept: list[EventContext[Any]] = []
    tables: list[Any] = []
    key = next(f"d{number}" for number in range(9) if shop.customers.partition_of(f"d{number}".encode()) == 0)
    with TestDriver(shop.source) as driver:
        driver.table(CUSTOMERS).put(key, Customer("Dan"))
        driver.interject(0, look) if shop.customers.partition_of(b"ann") == 0 else None
        if not kept:  # "ann" is of partition 1
            pytest.skip("the keys are placed otherwise")
        with pytest.raises(StoreError, match="after the handler"):
            kept[0].joined(shop.customers)
        driver.leave()
        with pytest.raises(StoreError, match="revoked"):
            tables[0].get(key)
    loose = Shop(options={"partitioner": None})
    with TestDriver(loose.source) as driver:
        assert driver.joined(loose.customers, 0).get(elsewhere) is None


def test_timers_batches_and_work_ahead_read_rows_in_their_turn() -> None:
    shop = Shop()

    async def ahead(ctx: EventContext[Any], event: Ordered) -> None:
        with pytest.raises(StoreError, match=r"await ctx.turn\(\) first"):
            ctx.joined(shop.customers)
        await ctx.turn()
        shop.placed(ctx, event)

    def later(ctx: EventContext[Any], event: Ring) -> None:
        if ctx.timer is None:
            ctx.schedule_in(5, event)
        else:
            say(ctx, f"timer: {event.name} is {shop.name_of(ctx, event.name)}")

    shop.source.register_event_type(Reserved, ahead, concurrency=4)
    shop.source.register_event_type(Ring, later)
    with TestDriver(shop.source) as driver:
        driver.send(Ring("ann"), key="ann")
        driver.table(CUSTOMERS).put("ann", Customer("Ann"))
        driver.send(Reserved("ann"), key="ann")
        driver.send(Named("ann"), key="ann")
        driver.advance(10)
        assert seen(driver) == ["ann is Ann", "ann is Ann", "timer: ann is Ann"]
