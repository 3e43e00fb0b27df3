"""A source with two inputs under faults, judged by a witness: between topics any order is right, so the program counts
its events, and says of each which one it was.

Counts have no gap and no repeat, and neither have the offsets of each input. So nothing was lost or handled twice, and
what was committed together belongs together.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import pytest

from streams import EventContext, EventSource, Retry, Table
from streams.core.position import offsets_of
from streams.events import event_type, to_record
from streams.outcomes import ErrorResponse
from streams.records import TYPE_HEADER, IncomingRecord, Record
from streams.runtime.ownership.takeover import TakeOvers
from streams.runtime.partition.batch_handlers import BatchContext
from streams.runtime.partition.merged_inputs import MergedInputs
from streams.runtime.partition.worker import PartitionWorker
from streams.testing import TestDriver
from streams.testing.schedule_search import SearchReport, search
from streams.testing.simulation.virtual_time import elapse
from tests.simulation.seeds import Removal, assert_search_misses
from tests.vocabulary import config_of

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS: Final = int(os.environ.get("SIM_SEEDS", "40"))
ORDERS, PAYMENTS, CLICKS, SEEN = "orders", "payments", "clicks", "seen"
PARTITIONS: Final = 2
REFUSED: Final = b"REFUSED"


class Numbered(msgspec.Struct, frozen=True):
    number: int


KINDS: Final[dict[str, Any]] = {
    name: event_type(name)(type(name, (Numbered,), {"__module__": __name__}, frozen=True))
    for name in ("In.Plain", "In.Slow", "In.Flaky", "In.Bulk", "In.Ahead", "In.Huge", "In.Late")
}


def witness(ctx: EventContext[Any], record: IncomingRecord) -> None:
    """Count the event, and say which one it is."""
    count = ctx.store.get("count", 0) + 1
    ctx.store.put("count", count)
    text = f"{count} {record.topic} {record.offset}"
    ctx.forward(Record(SEEN, text.encode(), b"%d" % record.partition, partition=record.partition))


def build(*inputs: str, **settings: Any) -> EventSource[Any]:
    config = config_of(
        group_id="shop",
        topic=ORDERS,
        num_partitions=PARTITIONS,
        error_policy=Retry(attempts=3, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER),
        num_standbys=1,
        **settings,
    )
    source = EventSource(config, Table.factory(key=str, value=int))
    for topic in inputs:
        source.input(topic)

    def plain(ctx: EventContext[Any], event: Any) -> None:
        assert ctx.input is not None
        assert ctx.topic_partition == (ctx.input.topic, ctx.input.partition)
        witness(ctx, ctx.input)

    async def slow(ctx: EventContext[Any], event: Any) -> None:
        await elapse(0.05)
        plain(ctx, event)

    def flaky(ctx: EventContext[Any], event: Any) -> None:
        plain(ctx, event)
        if ctx.attempt == 1:
            raise RuntimeError("not yet")

    def bulk(ctx: BatchContext[Any], events: list[Any]) -> None:
        for record in ctx.records:
            witness(ctx, record)
        if len(events) > 2:
            raise RuntimeError("not so many")

    async def ahead(ctx: Any, event: Any) -> None:
        await elapse(0.02 * (event.number % 3))
        await ctx.turn()
        plain(ctx, event)

    def huge(ctx: EventContext[Any], event: Any) -> None:
        plain(ctx, event)
        assert ctx.input is not None
        ctx.forward(Record(SEEN, REFUSED, b"r", partition=ctx.input.partition))

    def late(ctx: EventContext[Any], event: Any) -> None:
        plain(ctx, event)
        ctx.schedule_in(0.1, KINDS["In.Slow"](0), name=f"{ctx.offset}")
        ctx.cancel_timer(f"{ctx.offset}")

    handlers = {"Plain": plain, "Slow": slow, "Flaky": flaky, "Huge": huge, "Late": late}
    for name, handler in handlers.items():
        source.register_event_type(KINDS[f"In.{name}"], handler)
    source.register_event_type(KINDS["In.Bulk"], bulk, batch=True)
    source.register_event_type(KINDS["In.Ahead"], ahead, concurrency=4)
    return source


def scenario(driver: TestDriver[Any]) -> None:
    driver._world.broker.refuses = lambda _, entry: REFUSED in (entry.value or b"") and entry.key == b"r"
    rng = driver._world.rng
    kinds = list(KINDS.values())
    for number in range(24):
        topic = rng.choice((ORDERS, PAYMENTS))
        kind = kinds[rng.randrange(len(kinds))]
        driver.send(kind(number), topic=topic, partition=rng.randrange(PARTITIONS), wait=rng.random() < 0.15)
        if number == 12:
            rush(driver)
    driver.settle(200.0)


def rush(driver: TestDriver[Any]) -> None:
    """Send events for slices over both inputs: all at once, from times that alternate."""
    rng = driver._world.rng
    at_ms = driver._world.broker.wall_ms()
    kinds = [KINDS[f"In.{name}"] for name in ("Plain", "Plain", "Plain", "Flaky", "Huge", "Late", "Slow")]
    for number in range(24):
        topic, partition = rng.choice((ORDERS, PAYMENTS)), rng.randrange(PARTITIONS)
        record = to_record(topic, kinds[rng.randrange(len(kinds))](number), partition=partition)
        driver.send_record(msgspec.structs.replace(record, timestamp_ms=at_ms + number), wait=False)


def judge(driver: TestDriver[Any]) -> None:
    counts: dict[int, list[int]] = defaultdict(list)
    offsets: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in driver.outputs(SEEN):
        count, topic, offset = (record.value or b"").decode().split()
        counts[record.partition].append(int(count))
        offsets[topic, record.partition].append(int(offset))
    dead: dict[tuple[str, int], list[int]] = defaultdict(list)
    for letter in driver.dead_letters():
        topic, number, offset = (header_of(letter, name) for name in ("topic", "partition", "offset"))
        dead[topic, int(number)].append(int(offset))
    for partition, found in counts.items():
        assert found == list(range(1, len(found) + 1)), f"{partition}: counts {found}"
    broker = driver._world.broker
    for topic in driver._world.topics_read:
        for partition in range(PARTITIONS):
            sent = [record.offset for record in broker.log(topic, partition).committed(0, 1 << 30)]
            seen, letters = offsets[topic, partition], dead[topic, partition]
            assert sorted(seen + letters) == sent, f"{topic}[{partition}]: {seen} and letters {letters} of {sent}"
            assert seen == sorted(seen), f"{topic}[{partition}]: out of order: {seen}"
            huge = [
                offset
                for offset in sent
                if b"Huge" in dict(broker.log(topic, partition).entries[offset].headers or ())[TYPE_HEADER]
            ]
            assert letters == huge, f"{topic}[{partition}]: letters {letters}, of {huge}"


def header_of(letter: IncomingRecord, name: str) -> str:
    value = letter.header(f"__kes_dlq_{name}")
    assert value is not None
    return value.decode()


def run(seeds: int | Iterable[int]) -> SearchReport:
    return search(
        lambda: build(PAYMENTS), scenario, seeds=seeds, members=2, invariant=judge, compare=False, patience=120.0
    )


@pytest.mark.timeout(0)
def test_two_inputs_under_faults() -> None:
    report = run(SEEDS)
    assert len(report.happened) > 8, report


# -- each safeguard, taken out -----------------------------------------------------------------------------------------


def touched_inputs_only(patch: pytest.MonkeyPatch) -> None:
    """An offset record names the input that has its turn, and no other."""
    taken = MergedInputs.positions

    def positions(self: MergedInputs, *of: Any) -> Any:
        return {topic: at for topic, at in taken(self, *of).items() if topic == self.current.where.topic}

    patch.setattr(MergedInputs, "positions", positions)


def started_at_the_groups_offsets(patch: pytest.MonkeyPatch) -> None:
    """The further inputs go on where the group's coordinator says."""
    taken = TakeOvers._start_offset

    def start(self: TakeOvers, worker: PartitionWorker, found: Any, known: int | None) -> int:
        if found.topic == ORDERS:
            return taken(self, worker, found, known)
        return 0 if found.group_offset is None else int(found.group_offset)

    patch.setattr(TakeOvers, "_start_offset", start)


def turned_to_another_input_while_work_runs_ahead(patch: pytest.MonkeyPatch) -> None:
    """What is in the reorder buffer is admitted as if it were of the input that has its turn now."""
    taken = MergedInputs.take
    patch.setattr(MergedInputs, "take", lambda self, now, *, only_current: taken(self, now, only_current=False))


def inputs_committed_apart(patch: pytest.MonkeyPatch) -> None:
    """The position of an input is moved by the next transaction of the partition, not by that of its events."""
    taken = MergedInputs.moved_to

    def moved_to(self: MergedInputs, offset: int) -> tuple[int, tuple[int, ...]]:
        before = self.position
        place, position = taken(self, offset)
        return place, before if place else position

    patch.setattr(MergedInputs, "moved_to", moved_to)


def runs_committed_apart(patch: pytest.MonkeyPatch) -> None:
    """The same, for the inputs of one slice."""
    taken = MergedInputs.advance

    def advance(self: MergedInputs, *of: Any) -> Any:
        before = self.position
        position, done = taken(self, *of)
        return (offsets_of(position)[0], *before[1:]), done

    patch.setattr(MergedInputs, "advance", advance)


@pytest.mark.filterwarnings("ignore")  # tasks of an engine that was broken on purpose
@pytest.mark.parametrize(
    "removal",
    [
        touched_inputs_only,
        started_at_the_groups_offsets,
        turned_to_another_input_while_work_runs_ahead,
        inputs_committed_apart,
        runs_committed_apart,
    ],
)
def test_each_safeguard_is_missed(removal: Removal) -> None:
    assert_search_misses(run, removal, r"seed \d+ goes wrong|not done after|counts|pop from an empty|no offset of")
