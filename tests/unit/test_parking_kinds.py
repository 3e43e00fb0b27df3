"""Parked keys whose events are handled in lists, change rows of a joined table, or visit keys."""

from __future__ import annotations

from typing import Any

import pytest

from streams import DEAD_LETTER, PARK, SKIP, EventContext, EventSource, Retry, Table
from streams.core.visits import VisitRequest
from streams.errors import RegistrationError
from streams.records import Record
from streams.settings import ParkingConfig
from streams.stores.joined_table import Update
from streams.testing import TestDriver
from tests.unit import visits_kit
from tests.unit.parking_kit import Bank, redeploy, send
from tests.vocabulary import config_of

pytestmark = pytest.mark.usefixtures("quiet")
Ctx = EventContext[Table[str, tuple[str, ...]]]


# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [PARK, Retry(attempts=3, waits="key", then=PARK.then)])
def test_the_culprit_of_a_batch_is_parked_and_none_of_the_others(policy: Retry) -> None:
    bank = Bank(policy, "batch")
    bank.broken = {64}
    keys = "abcdefgh"
    with bank.driver() as driver:
        for number in range(500, 628):  # of which slices get long
            send(driver, number, key="z")
        driver.settle()
        for number in range(128):
            send(driver, number, key=keys[number % 8])
        driver.settle()
        assert max(len(events) for events in bank.lists if 64 in events) > 90
        (parked,) = driver.parked()
        assert [record.offset - 128 for record in parked.events] == list(range(64, 128, 8))
        for place, key in enumerate(keys):
            assert driver.store(0).get(key) == tuple(range(place, 64 if key == "a" else 128, 8))
        bank.broken, bank.lists = set(), []
        send(driver, 200, key="b")
        redeploy(driver)
        assert driver.store(0).get("a") == tuple(range(0, 128, 8))
        assert all(len(events) == 1 for events in bank.lists)
        driver.check()


def test_what_a_broker_refuses_of_a_list_is_the_failure_of_one_event() -> None:
    bank = Bank(way="batch")
    with bank.driver() as driver:
        broker: Any = driver._world.broker
        broker.refuses = lambda topic, entry: topic == "out" and entry.value == b'{"number":3,"key":"a"}'
        for number in range(8):
            send(driver, number, key="ab"[number % 2] if number != 3 else "a")
        driver.settle()
        (parked,) = driver.parked()
        assert [record.offset for record in parked.events] == [3, 4, 6]
        assert dict(driver.store(0).items()) == {"a": (0, 2), "b": (1, 5, 7)}
        broker.refuses = lambda topic, entry: False
        redeploy(driver)
        assert driver.store(0).get("a") == (0, 2, 3, 4, 6)
        driver.check()


# -- rows --------------------------------------------------------------------------------------------------------------


class Shop:
    """Its update handler writes each change of a row into the row's key, and fails for ``broken`` new values."""

    def __init__(self, policy: Retry = PARK, **settings: Any) -> None:
        self.broken: set[str | None] = set()
        self.rows: list[str | None] = []  # as the update handler has seen them
        self.policy, self.settings = policy, settings

    def source(self) -> EventSource[Table[str, tuple[str, ...]]]:
        config = config_of(group_id="shop", topic="orders", num_partitions=1, error_policy=PARK, **self.settings)
        source = EventSource(config, Table.factory(key=str, value=tuple[str, ...]))
        rows = source.join("rows", key=str, value=str, on_error=SKIP)

        def write(ctx: Ctx, key: str, text: str) -> None:
            ctx.store.put(key, (*(ctx.store.get(key) or ()), text))

        @source.register_update(rows, on_error=self.policy)
        def on_row(ctx: Ctx, update: Update[str, str]) -> None:
            write(ctx, update.key, f"{update.old}>{update.new}")
            self.rows.append(ctx.joined(rows).get(update.key))
            if update.new in self.broken:
                raise RuntimeError(f"no {update.new}")
            ctx.forward(Record("out", f"{ctx.topic_partition.topic}@{ctx.offset}".encode(), update.key.encode()))

        @source.register_default_handler
        def on_order(ctx: Ctx, value: bytes | None) -> None:
            assert ctx.input is not None
            key = (ctx.input.key or b"").decode()
            write(ctx, key, f"{(value or b'').decode()} at {ctx.joined(rows).get(key)}")

        return source


def row(driver: TestDriver[Any], value: bytes | None, key: bytes = b"a") -> None:
    driver.send_record(Record("rows", value, key, None, 0))


def order(driver: TestDriver[Any], value: bytes, key: bytes = b"a") -> None:
    driver.send_record(Record("orders", value, key, None, 0))


@pytest.mark.parametrize("policy", [PARK, Retry(attempts=2, backoff_seconds=1, waits="key", then=PARK.then)])
@pytest.mark.parametrize("moved", [False, True])
def test_a_row_changes_at_once_and_its_update_waits_with_the_row_that_it_replaced(policy: Retry, moved: bool) -> None:
    shop = Shop(policy)
    with TestDriver(shop.source, members=2) as driver:
        row(driver, b"1")
        shop.broken = {"2"}
        row(driver, b"2")
        row(driver, None)
        row(driver, b"3")  # deleted and put again while its update waits
        order(driver, b"o1")
        row(driver, b"9", b"b")
        assert dict(driver.store(0).items()) == {"a": ("None>1",), "b": ("None>9",)}
        (parked,) = driver.parked()
        assert [record.topic for record in parked.events] == ["rows", "rows", "rows", "orders"]
        if moved:
            driver.leave(driver.owner(0))
        shop.broken, shop.rows = set(), []
        driver.retry_parked("a")
        driver.settle()
        assert driver.store(0).get("a") == ("None>1", "1>2", "2>None", "None>3", "o1 at 3")
        assert shop.rows == ["3", "3", "3"]
        assert [record.value for record in driver.outputs("out") if record.key == b"a"] == [
            b"rows@0", b"rows@1", b"rows@2", b"rows@3",
        ]  # fmt: skip
        driver.check()


def test_updates_queue_behind_a_parked_event_of_their_key_and_unreadable_rows_do_not() -> None:
    shop = Shop(parking=ParkingConfig(max_key_events=3))
    shop.broken = {"2"}
    with TestDriver(shop.source) as driver:
        row(driver, b"2")
        driver.send_record(Record("rows", b"x", None, None, 0))  # no key
        row(driver, b"\xff")  # no text
        row(driver, b"3")
        order(driver, b"o1")
        driver.send_record(Record("rows", b"4", b"a", None, 0), wait=False)  # for which there is no room
        driver.advance(5)
        assert driver.statistics().partitions[0].parking_full == "max_key_events"
        assert [record.offset for record in driver.parked()[0].events] == [0, 3, 0]
        shop.broken = set()
        driver.advance(120)
        driver.settle()
        assert driver.store(0).get("a") == ("None>2", "2>3", "o1 at 3", "3>4")
        driver.check()


def test_an_update_that_is_let_go_leaves_its_row() -> None:
    shop = Shop()
    shop.broken = {"2"}
    with TestDriver(shop.source) as driver:
        row(driver, b"2")
        assert driver.skip_head("a", dead_letter=True)
        (letter,) = driver.dead_letters()
        assert letter.value == b"2"
        order(driver, b"o1")
        assert driver.store(0).get("a") == ("o1 at 2",)
        driver.check()


# -- visits ------------------------------------------------------------------------------------------------------------


def test_a_visited_key_that_fails_is_a_letter_and_requests_pass_parked_keys() -> None:
    broken = {"k001"}

    def look(ctx: EventContext[Any], key: str, value: int) -> None:
        if key in broken:
            raise RuntimeError("no")
        visits_kit.look(ctx, key, value)

    def made() -> EventSource[Any]:
        source = visits_kit.build(look, error_policy=PARK, decode_policy=PARK)

        @source.register_default_handler
        def fail(ctx: EventContext[Any], value: bytes | None) -> None:
            raise RuntimeError("no")

        return source

    with TestDriver(made) as driver:
        visits_kit.fill(driver, 3)
        for key in (b"look", b"k002", None):  # whatever key a request has
            driver.send_record(Record("orders", b"x", key, None, 0))
        assert len(driver.parked()) == 3
        driver.send(VisitRequest("look", "run"), key=b"k002", topic=visits_kit.VISITS, partition=0)
        driver.settle()
        assert sorted(visits_kit.seen(driver)) == ["k000", "k002"]
        (letter,) = driver.dead_letters()
        assert letter.key == b"k001"
        driver.check()


def test_a_visit_that_would_park_is_refused_by_name() -> None:
    for policy in (PARK, Retry(waits="key")):
        with pytest.raises(RegistrationError, match="the visit 'look' parks a key"):
            visits_kit.build(on_error=policy)


def test_policies_without_a_key() -> None:
    assert PARK.unparked == DEAD_LETTER
    assert Retry(attempts=4, waits="key").unparked == Retry(attempts=4)
    assert SKIP.unparked is SKIP
