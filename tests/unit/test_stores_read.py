"""``StateReader`` over a ``Stores``: each structure by its name, with the questions of a ``Table``; over the members of
a driver, whose service answers without a socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventSource, Heap, Index, NamedTable, Stores, Table, Windows
from streams.errors import ConfigError, StoreError
from streams.queries import StateReader, service
from streams.records import TopicPartition
from streams.runtime.queries import questions
from streams.runtime.queries.points import PointRead, is_point
from streams.runtime.queries.questions import Question, Reply, checked
from streams.settings.groups import QueryConfig
from streams.stores.windows import Window
from streams.testing import TestDriver
from tests.unit.cli_kit import Kes
from tests.unit.private_kit import private
from tests.vocabulary import config_of

pytestmark = pytest.mark.usefixtures("quiet")


class Order(msgspec.Struct, frozen=True):
    customer: str
    cents: int


class Shop(Stores):
    orders = NamedTable.of(
        str,
        Order,
        ordered=True,
        index={
            "customer": Index(str, lambda order: order.customer),
            "cents": Index(int, lambda order: order.cents),
            "both": Index(tuple[str, int], lambda order: (order.customer, order.cents)),
        },
    )
    carts = NamedTable.of(str, int, index={"size": Index(int, lambda size: size)}, expires=60)
    jobs = Heap.of(int, int, priority=Index(int, lambda due: due))
    clicks = Windows.tumbling(str, int, size=60, keep=3600, add=lambda old, n: (old or 0) + n)
    bare = NamedTable.of(str, int, ordered=True, bare=True)


ORDERS = {f"o{number:03}": Order(f"c{number % 7}", number * 37 % 100) for number in range(300)}
OF_C3 = [row for row in ORDERS.items() if row[1].customer == "c3"]
JOBS = {number: number * 31 % 97 for number in range(50)}
CLICKS = {("ann", 0): 2, ("ann", 60_000): 1, ("bob", 0): 1}


def fill(ctx: Any) -> None:
    """Each partition has its share, by the numbers of the keys."""
    number, store = ctx.topic_partition.partition, ctx.store
    for place, (key, order) in enumerate(ORDERS.items()):
        if place % 2 == number:
            store.orders.put(key, order)
            store.bare.put(key, order.cents)
    for key, due in JOBS.items():
        if key % 2 == number:
            store.jobs.put(key, due)
    for (key, at), count in CLICKS.items():
        if len(key) % 2 == number:
            store.clicks.add(key, count, at_ms=at)


class Direct(StateReader[Any, Any]):
    """Puts its questions to the services of a driver's members."""

    driver: TestDriver[Any]
    asked: list[Question]

    async def _ask(self, question: Question, timeout_seconds: float) -> tuple[Reply, float]:
        body = msgspec.json.encode(question)
        question = checked(msgspec.json.decode(body, type=Question), self.config.group_id, self.config.num_partitions)
        self.asked.append(question)
        owner = self.driver.owner(question.partition)
        assert owner is not None
        number = owner if question.max_staleness is None else 1 - owner
        run = self.driver._world.members[number].source._run
        if not is_point(question):
            answering = service._Service(self.driver._world.members[number].source, b"", lambda: "")
            return await answering._ask(question), self.driver.time()
        read = PointRead(question, asyncio.get_running_loop().create_future())
        run.queries().points.read([read], lambda one: one.waiter.set_result(None))
        await read.waiter
        if isinstance(read.outcome, Exception):
            raise read.outcome
        assert read.outcome is not None
        return read.outcome, self.driver.time()


def shop(path: Path, store: Any = None, **more: Any) -> EventSource[Any]:
    secret = private(path / "secret", "the secret of this group")
    settings = {"num_standbys": 1, "queries": QueryConfig(secret_file=str(secret))}
    config = config_of(group_id="shop", topic="in", num_partitions=2, bootstrap_servers="nowhere:1", **settings)
    return EventSource(config, Shop.factory() if store is None else store, **more)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[TestDriver[Any]]:
    with TestDriver(shop(tmp_path), members=2) as made:
        for number in range(2):
            made.interject(number, fill)
        yield made


def reader(driver: TestDriver[Any], table: str, **more: Any) -> Direct:
    made: Any = Direct.of(driver._world.members[0].source, table=table, **more)
    made.driver, made.asked = driver, []
    return made  # type: ignore[no-any-return]


async def rows(found: AsyncIterator[Any]) -> list[Any]:
    return [row async for row in found]


def in_order(rank: Callable[[Order], Any], *, reverse: bool = False) -> list[tuple[str, Order]]:
    found = sorted(ORDERS.items(), key=lambda row: (rank(row[1]), row[0]), reverse=reverse)
    return found


def job(reverse: bool = False) -> list[tuple[int, int]]:
    return sorted(JOBS.items(), key=lambda row: (row[1], row[0]), reverse=reverse)


@pytest.mark.parametrize(
    ("table", "ask", "expected"),
    [
        ("orders", lambda one: one.len(), len(ORDERS)),
        ("orders", lambda one: rows(one.range()), list(ORDERS.items())),
        ("orders", lambda one: rows(one.range(reverse=True)), list(ORDERS.items())[::-1]),
        ("orders", lambda one: rows(one.range("o010", "o013")), list(ORDERS.items())[10:13]),
        ("orders", lambda one: rows(one.range("o010", "o013", reverse=True)), list(ORDERS.items())[12:9:-1]),
        ("orders", lambda one: rows(one.prefix("o29")), list(ORDERS.items())[290:]),
        ("orders", lambda one: rows(one.by("customer", "c3")), OF_C3),
        ("orders", lambda one: rows(one.by("customer", "c")), []),
        ("orders", lambda one: rows(one.by_range("cents")), in_order(lambda order: order.cents)),
        ("orders", lambda one: rows(one.by_range("cents", reverse=True)), in_order(lambda o: o.cents, reverse=True)),
        (
            "orders",
            lambda one: rows(one.by_range("cents", 10, 12, page=3)),
            [row for row in in_order(lambda order: order.cents) if 10 <= row[1].cents < 12],
        ),
        (
            "orders",
            lambda one: rows(one.by_range("both", ("c2", 50), ("c3", 7), include_high=True, reverse=True, page=1)),
            [
                row
                for row in in_order(lambda order: (order.customer, order.cents), reverse=True)
                if ("c2", 50) <= (row[1].customer, row[1].cents) <= ("c3", 7)
            ],
        ),
        ("bare", lambda one: rows(one.range("o298")), [(key, order.cents) for key, order in ORDERS.items()][298:]),
        ("jobs", lambda one: one.min(), job()[0]),
        ("jobs", lambda one: one.max(), job()[-1]),
        ("jobs", lambda one: rows(one.by_range("priority", 40)), [row for row in job() if row[1] >= 40]),
        ("carts", lambda one: one.len(), 0),
        ("clicks", lambda one: rows(one.prefix(("ann",))), [(("ann", 0, 60_000), 2), (("ann", 60_000, 120_000), 1)]),
        (
            "clicks",
            lambda one: rows(one.by_range("end", None, 60_001)),
            [(("ann", 0, 60_000), 2), (("bob", 0, 60_000), 1)],
        ),
        ("clicks", lambda one: rows(one.by_range("end", 60_001)), [(("ann", 60_000, 120_000), 1)]),
    ],
)  # fmt: skip
def test_what_a_structure_answers(
    driver: TestDriver[Any], table: str, ask: Callable[[Any], Awaitable[Any]], expected: Any
) -> None:
    """As of an owner, in turns of pages; and as of a copy."""
    found = driver._run(ask(one := reader(driver, table)))
    assert found == expected
    assert {question.table for question in one.asked} == {table}


def test_a_copy_answers_by_an_index_too(driver: TestDriver[Any]) -> None:
    driver.advance(1.0)
    found = driver._run(rows(reader(driver, "orders").by("customer", "c3", max_staleness=5.0)))
    assert found == OF_C3


def test_a_point_of_each_structure(driver: TestDriver[Any]) -> None:
    """Also from a partition that is named, for keys by which no records go."""
    for table, key, number, expected in (
        ("orders", "o010", 0, Order("c3", 70)),
        ("orders", "o010", 1, None),
        ("bare", "o011", 1, 7),
        ("jobs", 5, 1, JOBS[5]),
        ("clicks", ("ann", *Window(0, 60_000)), 1, 2),
        ("clicks", ("ann", *Window(0, 60_001)), 1, None),
    ):
        answer = driver._run(reader(driver, table).get(key, partition=number))
        assert (answer.value, answer.partition, answer.due) == (expected, number, False), (table, key)
        confirmed = driver._run(reader(driver, table).get(key, partition=number, confirm=True))
        assert (confirmed.value, confirmed.due) == (expected, False)


def test_the_key_of_the_records_is_that_of_the_structure(driver: TestDriver[Any]) -> None:
    """Without the name in front, and without a window's span: its queue may be parked, and it names the partition."""
    for table, key, named in (("orders", "o1", b"o1"), ("clicks", ("ann", 0, 60_000), b"ann"), ("bare", "o1", None)):
        one = reader(driver, table)
        number = one._row_key and one.partition_of(key)
        driver._run(one.get(key))
        assert [(asked.record_key, asked.partition) for asked in one.asked] == [(named, number)]
    routed = reader(driver, "clicks", routed_by=lambda key: key[:1])
    assert routed.partition_of(("ann", 0, 1)) == routed.partition_of(("axl", 5, 6))
    with pytest.raises(ConfigError, match="say by routed_by"):
        reader(driver, "jobs").partition_of(5)


def test_what_has_expired_is_marked_until_it_is_deleted(
    driver: TestDriver[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ROWS_IN_A_TURN", 2)

    def put(ctx: Any) -> None:
        ctx.store.advance(1_000)
        for number in range(70):  # of which one event deletes 64
            ctx.store.carts.put(f"k{number:02}", number)

    driver.interject(0, put)
    one = reader(driver, "carts")
    assert not driver._run(one.get("k69", partition=0)).due
    driver.interject(0, lambda ctx: ctx.store.advance(61_000))
    for confirm in (False, True):
        answer = driver._run(one.get("k69", partition=0, confirm=confirm))
        assert (answer.value, answer.due) == (69, True)
    driver.interject(0, lambda ctx: ctx.store.carts.put("new", 65))
    found = driver._run(rows(one.by_range("size", 65, page=4)))
    assert [(*row, row.due) for row in found] == [
        *(("k65", 65, True), ("new", 65, False)), *((f"k{number}", number, True) for number in range(66, 70))
    ]  # fmt: skip
    driver.interject(0, lambda ctx: ctx.store.advance(61_001))
    assert driver._run(one.get("k69", partition=0)).value is None

    driver.interject(1, lambda ctx: ctx.store.advance(60_000 + 3_600_000 - 1))
    windows = reader(driver, "clicks")
    assert not driver._run(windows.get(("ann", 0, 60_000), partition=1)).due


@pytest.mark.parametrize(
    ("table", "ask", "says"),
    [
        ("orders", lambda one: rows(one.by("color", "red")), "'orders' has no index 'color'; it has customer, cents"),
        ("orders", lambda one: rows(one.by("customer", 5)), "index 'customer'"),
        ("orders", lambda one: rows(one.by("cents", "5")), "index 'cents'"),
        ("orders", lambda one: rows(one.by("both", ("c2", 5, 6))), "index 'both'"),
        ("clicks", lambda one: rows(one.by_range("start")), "windows, which have the index 'end' only"),
        ("carts", lambda one: rows(one.range()), "no order"),
    ],
)
def test_what_it_cannot_do_says_so(
    driver: TestDriver[Any], table: str, ask: Callable[[Any], Awaitable[Any]], says: str
) -> None:
    with pytest.raises(StoreError, match=says):
        driver._run(ask(reader(driver, table)))


def test_bounds_that_cannot_be(driver: TestDriver[Any]) -> None:
    one = reader(driver, "orders")
    for ask, says in (
        (lambda: one.by("customer", None), "no entries of None"),
        (lambda: one.by("cents", 1 << 80), "no bounds like"),
        (lambda: one.by("cents", object()), "no bounds like"),
    ):
        with pytest.raises(ConfigError, match=says):
            driver._run(rows(ask()))


class Other(Stores):
    """As ``Shop`` was, before it had more."""

    orders = NamedTable.of(str, int)


@pytest.mark.parametrize(
    ("asked", "store", "says"),
    [
        ({"table": "carts", "kind": "len"}, Other.factory(), "no structure 'carts'; it has orders"),
        ({"kind": "len"}, Shop.factory(), "several structures, so one is to be named; it has orders, carts"),
        ({"kind": "get", "key": b"o1"}, Other.factory(), "none of the structure 'orders'"),
        ({"kind": "get", "key": b"\xfecarts\x00", "table": "orders"}, Shop.factory(), "none of the structure 'orders'"),
        ({"table": "orders", "kind": "len"}, Table.factory(key=str, value=int), "one Table, without a structure"),
        ({"index": "cents"}, Table.factory(key=str, value=int, ordered=True), "a Table has no index"),
    ],
)  # fmt: skip
def test_a_question_to_a_store_of_another_release_is_refused(
    tmp_path: Path, asked: dict[str, Any], store: Any, says: str
) -> None:
    """Never answered from what else is there: the reader's release has these structures, this member's has not."""
    made = store(TopicPartition("in", 0))
    fields: dict[str, Any] = {"kind": "range", "bounds": questions.encode_bounds(None, None, False), **asked}
    with pytest.raises(StoreError, match=says):
        questions.read_of(Question(group="g", partition=0, **fields), made)


def test_a_release_without_structures_refuses_a_question_by_its_field() -> None:
    """One that only a ``Table`` needs is in today's bytes."""

    class Before(msgspec.Struct, forbid_unknown_fields=True):
        group: str
        kind: str
        partition: int

    plain = Question(group="g", kind="len", partition=0)
    assert msgspec.json.decode(msgspec.json.encode(plain), type=Before).kind == "len"
    with pytest.raises(msgspec.ValidationError, match="unknown field `table`"):
        msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(plain, table="orders")), type=Before)


def test_which_structures_a_source_has(tmp_path: Path) -> None:
    assert StateReader.of(shop(tmp_path, Other.factory()))._table == "orders", "a single one needs no name"
    for store, table, says in (
        (None, "", "several structures"),
        (None, "mails", "no structure 'mails'; it has orders, carts, jobs, clicks, bare"),
        (Table.factory(key=str, value=int), "orders", "one Table: leave the name"),
    ):
        with pytest.raises(ConfigError, match=says):
            StateReader.of(shop(tmp_path, store), table=table)


def test_the_command_line_asks_by_names_too(kes: Kes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shop", module := ModuleType("shop"))
    vars(module).update(source=shop(tmp_path))
    made = Shop(TopicPartition("in", 0))
    made.begin([])
    fill(SimpleNamespace(topic_partition=made.partition, store=made))
    made.end()

    async def answer(self: StateReader[Any, Any], question: Question, timeout_seconds: float) -> tuple[Reply, float]:
        found: Any = questions.read_of(question, made) if not question.partition else questions.TurnRows([], False)
        common: dict[str, Any] = {"partition": question.partition, "positions": (), "age_seconds": 0.0}
        if not isinstance(found, questions.TurnRows):
            return Reply(**common, served_by="w", **found), 1e3
        more = {"rows": tuple(found.rows), "places": tuple(found.places), "more": found.more}
        more["due_rows"] = frozenset(found.due)
        return Reply(**common, served_by="w", **more), 1e3

    monkeypatch.setattr(StateReader, "_ask", answer)

    def run(*words: str, code: int = 0) -> Any:
        return kes("state", words[0], "shop:source", *words[1:], "--ask-owner", "--json", code=code)

    def keys(*words: str) -> list[Any]:
        return [entry["key"] for entry in run("scan", *words).data["entries"]]

    (entry,) = run("get", "o010", "--table", "orders", "-p", "0").data["entries"]
    assert (entry["value"], entry["due"]) == ({"customer": "c3", "cents": 70}, False)
    assert keys("--table", "orders", "--prefix", "o29") == ["o290", "o292", "o294", "o296", "o298"]
    assert keys("--table", "orders", "--by", "cents=70", "-n", "2") == ["o010", "o110"]
    assert keys("--table", "orders", "--by", "customer=c3", "-n", "1") == ["o010"]
    assert keys("--table", "orders", "--by", 'both=["c3",70]', "-n", "1") == ["o010"]
    assert keys("--table", "jobs", "--by", "priority", "-n", "1") == [0]
    for words, says in (
        (["--table", "orders", "--by", "color=red"], "no index 'color'"),
        (["--table", "orders", "--by", "cents=red"], "--by cents=red"),
        (["--by", "cents=1"], "several structures"),
    ):
        assert says in run("scan", *words, code=2).words
    assert "--by need --ask-owner" in kes("state", "scan", "shop:source", "--by", "cents", code=2).words
