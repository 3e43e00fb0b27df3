"""Records that are handled where they are delivered: by whom, in whose context, how many, and what is left to the task.
That nothing else is different is what the simulation is for (``ahead`` of its plans)."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from streams import EventContext, Retry
from streams.core.partition import PartitionState
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.partition.delivery import BACK_TO_BACK_SECONDS, DeliveredRecords
from streams.runtime.partition.hot_path import LONGEST_SLICE_SECONDS, SLICE
from streams.runtime.partition.inbox import Inbox
from streams.runtime.ports import Polled
from streams.runtime.signal import Signal
from streams.settings.jobs import SchedulerConfig
from tests.unit.runtime_kit import OUT, Bench, nothing
from tests.unit.waiting import until
from tests.vocabulary import Added, Named, config_of

WHO: ContextVar[str] = ContextVar("WHO", default="nobody")


class Ends(BaseException):
    """The end of the process."""


def forward(ctx: EventContext[Any], event: Named) -> None:
    ctx.forward(OUT, event, key=event.name)


def is_waiting(bench: Bench) -> bool:
    """Check whether the partition's task waits for records: a handler that runs is called where they are delivered."""
    return bench.engine.workers[0].delivery._waiting is not None


async def started(bench: Bench, handler: Any, **more: Any) -> asyncio.Task[None]:
    """Run a source whose partition waits for records."""
    bench.make()
    bench.source.register_event_type(Named, handler, **more)
    task = await bench.start()
    await bench.until(lambda: is_waiting(bench), "it waits")
    return task


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_waiting_partition_handles_what_is_delivered_unless_work_runs_ahead(bench: Bench, ahead: bool) -> None:
    at_once: list[bool] = []
    tasks: set[Any] = set()

    def handler(ctx: EventContext[Any], event: Named) -> None:
        at_once.append(is_waiting(bench))
        tasks.add(asyncio.current_task())
        with anyio.move_on_after(1):
            forward(ctx, event)

    async def other(ctx: EventContext[Any], event: Any) -> None: ...

    bench.make(handler)
    if ahead:
        bench.source.register_event_type(Added, other, concurrency=SchedulerConfig(concurrency=1))
    await bench.over("first")
    for name in "abc":
        bench.broker.send(name)
        await bench.committed()
    assert bench.broker.outputs() == ["first", "a", "b", "c"]
    assert at_once[1:] == [not ahead] * 3
    assert len(tasks) == 1, "all in the task of the partition, as it seems"
    await bench.stop()


async def test_handlers_have_the_context_of_the_partitions_task(bench: Bench) -> None:
    found: list[str] = []

    def handler(ctx: EventContext[Any], event: Named) -> None:
        found.append(WHO.get())
        WHO.set(event.name)

    token = WHO.set("whoever started it")
    await started(bench, handler)
    WHO.reset(token)
    bench.broker.send("a")
    await bench.committed()
    assert found == ["whoever started it"]
    assert WHO.get() == "nobody"
    await bench.stop()


async def test_a_failed_event_and_those_behind_it_are_the_tasks(bench: Bench) -> None:
    """No attempt is made twice, and none of the next events comes before it."""
    attempts: list[tuple[str, int, bool]] = []

    def handler(ctx: EventContext[Any], event: Named) -> None:
        attempts.append((event.name, ctx.attempt, is_waiting(bench)))
        forward(ctx, event)
        if event.name == "bad" and ctx.attempt < 3:
            raise RuntimeError("not yet")

    await started(bench, handler, on_error=Retry(attempts=3, backoff_seconds=0.01))
    bench.broker.send("a", "bad", "b")
    await bench.committed()
    assert bench.broker.outputs() == ["a", "bad", "b"]
    assert attempts[:-1] == [("a", 1, True), ("bad", 1, True), ("bad", 2, False), ("bad", 3, False)]
    assert bench.source.statistics().partitions[0].queued_records == 0
    await bench.stop()


async def test_what_ends_the_process_ends_the_run(bench: Bench) -> None:
    def handler(ctx: EventContext[Any], event: Named) -> None:
        forward(ctx, event)
        if event.name == "end":
            raise Ends

    task = await started(bench, handler)
    bench.broker.send("a", "end", "b")
    await asyncio.wait([task], timeout=10)
    with pytest.raises(Ends):
        task.result()
    assert set(bench.broker.outputs()) <= {"a"}


async def test_one_delivery_takes_no_longer_than_a_slice() -> None:
    """However many partitions wait for its records."""
    clock, handled = [100.0], [0]

    def take(records: list[Any], size: int, most: int) -> int:
        count = max(0, min(len(records), most))
        clock[0] += count * takes
        handled[-1] += count
        return count

    worker = SimpleNamespace(state=PartitionState.ACTIVE, epoch=1, delivery=SimpleNamespace(take=take))
    config = config_of(group_id="g", topic="t", num_partitions=40)
    member: Any = SimpleNamespace(
        further_inputs=(), config=config, workers=dict.fromkeys(range(40), worker), now=lambda: clock[0]
    )
    unused: Any = nothing
    partitions = Partitions(member, unused, unused, unused, {})
    partitions._placement_sample = 0
    numbers = range(40)
    records: list[Any] = [None] * 5
    batch = Polled(dict.fromkeys(numbers, records), dict.fromkeys(numbers, 5), dict.fromkeys(numbers, 1))

    def handle(rounds: int) -> list[int]:
        handled.clear()
        for _ in range(rounds):
            clock[0] += 2 * BACK_TO_BACK_SECONDS
            handled.append(0)
            partitions.deliver(batch)
        return handled

    takes = 0.0
    assert handle(8)[0] < SLICE, "nobody knows yet what the handlers take"
    assert handled[-1] == SLICE
    takes = LONGEST_SLICE_SECONDS / 5
    assert max(handle(20)[5:]) <= 10, "not more than twice as long"
    assert min(handled[5:]) >= 2
    takes = 1.0
    assert handle(20)[-10:] == [1] * 10
    takes = 0.0
    assert handle(10)[-1] == SLICE
    partitions.deliver(batch)
    assert handled[-1] == SLICE, "two that have waited for the loop together are as one"


@pytest.mark.parametrize(
    ("why", "most", "handled", "queued"),
    [
        ("all is handled", 9, 5, 0),
        ("no time for more", 2, 2, 3),
        ("no time at all", 0, 0, 5),
        ("no room in the transaction", 9, 0, 5),
        ("the task has something to do that comes before", 9, 0, 5),
        ("the intake is closed meanwhile", 2, 2, 0),
    ],
)
async def test_what_is_not_handled_at_once_is_queued(why: str, most: int, handled: int, queued: int) -> None:
    given_back: list[tuple[int, int]] = []

    def run(records: list[Any], start: int) -> tuple[int, None]:
        partition.is_closing = why == "the intake is closed meanwhile"
        return len(records), None

    wake, seen = Signal(), SimpleNamespace(unmeasured=0, rows=SimpleNamespace(next_s=None))
    news = SimpleNamespace(has_news=False)
    partition = SimpleNamespace(is_closing=False, timers=(), timekeeper=news, seen=seen, last_handled=None)
    source: Any = SimpleNamespace(handled=lambda *room: given_back.append(room))
    host: Any = SimpleNamespace(pool=SimpleNamespace(is_full=why == "no room in the transaction"), input=source)
    inbox = Inbox(config_of(group_id="g", topic="t", num_partitions=1), source, 0, wake)
    delivery = DeliveredRecords(cast("Any", partition), host, inbox, cast("Any", SimpleNamespace(run=run)), wake)
    task = asyncio.create_task(delivery.wait())
    await until(lambda: delivery._waiting is not None, "the task waits")
    if why == "the task has something to do that comes before":
        wake.notify()
    records: list[Any] = [None] * 5
    loop = asyncio.get_running_loop()
    taken = loop.create_future()
    loop.call_soon(lambda: taken.set_result((delivery.take(records, 50, most), wake.is_set)))
    assert await taken == (handled, queued > 0)
    assert (inbox.records, inbox.size) == (queued, 10 * queued)
    assert sum(count for count, _ in given_back) == 5 - queued
    assert sum(size for _, size in given_back) == 50 - 10 * queued
    task.cancel()
