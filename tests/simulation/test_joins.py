"""A source with a joined table under faults, judged by a witness: the program counts its events, and says of each which
one it was and which row it has seen. The judge folds again in the order of the counts, with a plain dict of rows.

So nothing was lost or handled twice, each event has met the rows as of its place, and each update the row before.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from streams import (
    BatchContext,
    EventContext,
    EventSource,
    EventSourceConfig,
    GroupConfig,
    Joined,
    Retry,
    StateConfig,
    Table,
    Update,
)
from streams.disk import SQLite
from streams.errors import ConfigError
from streams.events import event_type
from streams.outcomes import ErrorResponse
from streams.records import IncomingRecord, Record
from streams.runtime.ownership.missed_deletions import MissedDeletions
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.partition.joined_rows import JoinedRows
from streams.runtime.partition.joining import RowChange
from streams.testing import TestDriver
from streams.testing.driven_tables import committed_rows
from streams.testing.schedule_search import SearchReport, search
from streams.testing.simulation.virtual_time import elapse
from tests.simulation.seeds import Removal, assert_search_misses
from tests.unit.joins_kit import folded

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS: Final = int(os.environ.get("SIM_SEEDS", "30"))
ORDERS, CUSTOMERS, SEEN = "orders", "customers", "seen"
PARTITIONS: Final = 2
KEYS: Final = [f"c{number}" for number in range(8)]


class AnOrder(msgspec.Struct, frozen=True):
    customer: str


KINDS: Final[dict[str, Any]] = {
    name: event_type(name)(type(name, (AnOrder,), {"__module__": __name__}, frozen=True))
    for name in ("Jn.Plain", "Jn.Slow", "Jn.Flaky", "Jn.Bulk", "Jn.Ahead")
}


def build(folder: str = "", *, updates: bool = True) -> EventSource[Any]:
    """``folder``: of store and rows that are on disk. ``updates``: with an update handler."""
    engine = SQLite() if folder else None
    config = EventSourceConfig(
        group_id="shop",
        topic=ORDERS,
        num_partitions=PARTITIONS,
        error_policy=Retry(attempts=3, backoff_seconds=0.01, then=ErrorResponse.CONTINUE),
        group=GroupConfig(num_standbys=1),
        state=StateConfig(folder=folder, checkpoint_seconds=0.2),
    )
    source = EventSource(config, Table.factory(key=str, value=int, engine=engine))
    customers: Joined[str, int] = source.join(CUSTOMERS, key=str, value=int, engine=engine)

    def witness(ctx: EventContext[Any], record: IncomingRecord, *facts: object) -> None:
        count = ctx.store.get("count", 0) + 1
        ctx.store.put("count", count)
        value = msgspec.json.encode([count, record.topic, record.offset, *facts])
        ctx.forward(Record(SEEN, value, b"%d" % record.partition, partition=record.partition))

    def updated(ctx: EventContext[Any], row: Update[str, int]) -> None:
        assert ctx.input is not None
        witness(ctx, ctx.input, row.key, row.old, row.new)
        assert ctx.joined(customers).get(row.key) == row.new
        if ctx.attempt == 1 and (row.new or 0) % 3 == 1:
            raise RuntimeError("not yet")

    if updates:
        source.register_update(customers, updated)

    def plain(ctx: EventContext[Any], event: Any) -> None:
        assert ctx.input is not None
        witness(ctx, ctx.input, event.customer, ctx.joined(customers).get(event.customer))

    async def slow(ctx: EventContext[Any], event: Any) -> None:
        before = ctx.joined(customers).get(event.customer)
        await elapse(0.05)
        assert ctx.joined(customers).get(event.customer) == before, "rows stand still during an event"
        plain(ctx, event)

    def flaky(ctx: EventContext[Any], event: Any) -> None:
        plain(ctx, event)
        if ctx.attempt == 1:
            raise RuntimeError("not yet")

    def bulk(ctx: BatchContext[Any], events: list[Any]) -> None:
        for record, event in zip(ctx.records, events, strict=True):
            witness(ctx, record, event.customer, ctx.joined(customers).get(event.customer))

    async def ahead(ctx: Any, event: Any) -> None:
        await elapse(0.02)
        await ctx.turn()
        plain(ctx, event)

    for name, handler in {"Plain": plain, "Slow": slow, "Flaky": flaky}.items():
        source.register_event_type(KINDS[f"Jn.{name}"], handler)
    source.register_event_type(KINDS["Jn.Bulk"], bulk, batch=True)
    source.register_event_type(KINDS["Jn.Ahead"], ahead, concurrency=4)
    return source


def scenario(driver: TestDriver[Any]) -> None:
    rng, table = driver._world.rng, driver.table(CUSTOMERS)
    kinds = list(KINDS.values())
    for number in range(30):
        key, wait = rng.choice(KEYS), rng.random() < 0.15
        if rng.random() < 0.5:
            driver.send(kinds[rng.randrange(len(kinds))](key), key=key, wait=wait)
        elif rng.random() < 0.2:
            table.delete(key, wait=wait)
        else:
            table.put(key, number, wait=wait)
    driver.settle(200.0)


def judge(driver: TestDriver[Any]) -> None:
    said: dict[int, list[list[Any]]] = defaultdict(list)
    for record in driver.outputs(SEEN):
        said[record.partition].append(msgspec.json.decode(record.value or b""))
    broker = driver._world.broker
    for partition in range(PARTITIONS):
        sent = {topic: [*broker.log(topic, partition).committed(0, 1 << 30)] for topic in (ORDERS, CUSTOMERS)}
        rows = folded(partition, said[partition], CUSTOMERS, sent)
        kept = committed_rows(broker.log("shop.orders.changelog", partition), CUSTOMERS)
        assert {key.decode() for key in kept} == rows.keys(), "rows in the changelog"


def run(seeds: int | Iterable[int], folder: str = "") -> SearchReport:
    return search(
        lambda: build(folder), scenario, seeds=seeds, members=2, invariant=judge, compare=False, patience=120.0
    )


@pytest.mark.timeout(0)
def test_a_joined_table_under_faults() -> None:
    report = run(SEEDS)
    assert len(report.happened) > 8, report


@pytest.mark.timeout(0)
def test_a_joined_table_on_disk_under_faults(tmp_path: Path) -> None:
    for seed in range(max(4, SEEDS // 4)):
        run([seed], str(tmp_path / str(seed)))


def scenario_of_a_long_stop(driver: TestDriver[Any]) -> None:
    """All members are down while rows are deleted, for longer than their tombstones live."""
    table, broker = driver.table(CUSTOMERS), driver._world.broker
    scenario(driver)
    for member in driver.members:
        driver.crash(member)
    for number, key in enumerate(KEYS):
        if number % 3:
            table.delete(key, wait=False)
        elif number % 2:
            table.put(key, 1000 + number, wait=False)
    driver.advance(1.0)
    for key in KEYS:
        driver.send(KINDS["Jn.Plain"](key), key=key, wait=False)
    driver.advance(2 * 86_400.0)
    for partition in range(PARTITIONS):
        log = broker.log(CUSTOMERS, partition)
        log.compact(log.end)
        for entry in log.entries[:-1]:  # the last one is in a segment that is never compacted
            entry.gone |= entry.value is None and not entry.marker
    for member in range(2):
        with contextlib.suppress(ConfigError):  # it has come back by itself
            driver.restart(member)
    driver.settle(400.0)


def judge_rows(driver: TestDriver[Any]) -> None:
    """At the end rows are those of the topic, and an event that came last has met no row that is gone."""
    broker = driver._world.broker
    said: dict[int, list[list[Any]]] = defaultdict(list)
    for record in driver.outputs(SEEN):
        said[record.partition].append(msgspec.json.decode(record.value or b""))
    for partition in range(PARTITIONS):
        assert [line[0] for line in said[partition]] == list(range(1, len(said[partition]) + 1)), "counts"
        log = broker.log(CUSTOMERS, partition)
        there = {record.key for record in log.committed(0, log.end) if record.value is not None}
        kept = committed_rows(broker.log("shop.orders.changelog", partition), CUSTOMERS)
        assert kept.keys() == there, f"rows of partition {partition}"
        for key, row in {line[3]: line[4] for line in said[partition]}.items():
            assert row is None or key.encode() in there, f"the row of {key}"


def run_long_stops(seeds: int | Iterable[int], folder: str = "") -> SearchReport:
    return search(
        lambda: build(folder, updates=False), scenario_of_a_long_stop,
        seeds=seeds, members=2, invariant=judge_rows, compare=False, patience=400.0,
    )  # fmt: skip


@pytest.mark.timeout(0)
def test_rows_deleted_while_no_member_ran_under_faults() -> None:
    run_long_stops(max(6, SEEDS // 3))


# -- each safeguard, taken out -----------------------------------------------------------------------------------------


def rows_of_this_process_only(patch: pytest.MonkeyPatch) -> None:
    """Rows are not read from the changelog."""
    patch.setattr(JoinedRows, "receive", lambda self, change: None)


def rows_beside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """The change of a row reaches the changelog with the next one of the same key only."""
    taken, late = RowChange.admitted, dict[bytes, Any]()

    def admitted(self: RowChange, origin: int) -> Any:
        change = taken(self, origin)
        before, late[change.key] = late.get(change.key, change.value), change.value
        change.value = before
        return change

    patch.setattr(RowChange, "admitted", admitted)


def rows_that_a_failed_attempt_leaves(patch: pytest.MonkeyPatch) -> None:
    """A second attempt sees the row that the first one has made, as the one before."""
    patch.setattr(RowChange, "undo", lambda self: None)


def copies_that_stay_without_their_rows(patch: pytest.MonkeyPatch) -> None:
    """After a move, the donor's copy begins without rows."""
    taken = Replicas.adopt

    def adopt(self: Replicas, *arguments: Any) -> None:
        taken(self, *arguments[:7])

    patch.setattr(Replicas, "adopt", adopt)


def rows_that_stay_without_their_tombstones(patch: pytest.MonkeyPatch) -> None:
    """A start does not look for rows that were deleted while no member ran."""

    async def find(self: MissedDeletions, *_: object) -> dict[str, set[bytes]]:
        return {}

    patch.setattr(MissedDeletions, "find", find)


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.parametrize(
    "removal",
    [
        rows_of_this_process_only,
        rows_beside_the_transaction,
        rows_that_a_failed_attempt_leaves,
        copies_that_stay_without_their_rows,
        rows_that_stay_without_their_tombstones,
    ],
)
def test_each_safeguard_is_missed(removal: Removal) -> None:
    search_of = run_long_stops if removal is rows_that_stay_without_their_tombstones else run
    assert_search_misses(search_of, removal, r"seed \d+ goes wrong|the row|rows")
