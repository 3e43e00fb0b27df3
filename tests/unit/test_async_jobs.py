"""Jobs ahead of their turn, over a broker in memory: order, results, failures, limits, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from streams import EventContext, EventSource, ExecutionState
from streams.async_jobs import AsyncJobScheduler
from streams.errors import StoreError
from streams.job_settings import JobRetry, SchedulerConfig
from streams.outcomes import DEAD_LETTER
from tests.unit.runtime_kit import OUT, PATIENCE, Bench, Named, count

pytestmark = pytest.mark.asyncio


class World:
    """What jobs talk to: they end when they are told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []

    async def call(self, event: Named) -> str:
        name = event.name
        self.begun.append(name)
        try:
            await self.gates.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return name.upper()

    def open(self, *names: str) -> None:
        for name in names:
            self.gates.setdefault(name, asyncio.Event()).set()


def finalize(ctx: EventContext[Any], event: Named, result: str) -> None:
    count(ctx, event.name)
    ctx.forward(OUT, Named(result), key=event.name)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    if made.tasks and not made.tasks[-1].done():
        await asyncio.wait_for(made.source.stop(), PATIENCE)
        await made.tasks[-1]


def scheduled(bench: Bench, job: Any, **settings: Any) -> EventSource[Any]:
    source = bench.make(None)
    config = settings.pop("config", SchedulerConfig(concurrency=8))
    scheduler: AsyncJobScheduler[Any, Named, str] = AsyncJobScheduler(
        source, job, settings.pop("finalizer", finalize), config=config, **settings
    )
    scheduler.register_event_type(Named, key=lambda event: event.name[0])
    return source


async def test_finalizers_run_in_the_order_of_the_partition(bench: Bench) -> None:
    world = World()
    scheduled(bench, world.call)
    bench.broker.send("a", "b", "c")
    bench.run()
    await bench.until(lambda: world.begun == ["a", "b", "c"], "all jobs run at once")
    world.open("c", "b")
    assert bench.broker.outputs() == []
    world.open("a")
    await bench.until(lambda: bench.broker.outputs() == ["A", "B", "C"], "in order")
    assert bench.broker.offsets == {0: 3}


async def test_jobs_of_a_key_run_one_after_the_other(bench: Bench) -> None:
    world = World()
    scheduled(bench, world.call)
    bench.broker.send("a1", "a2", "b1")
    bench.run()
    await bench.until(lambda: world.begun == ["a1", "b1"], "the second of the key waits")
    world.open("a1")
    await bench.until(lambda: world.begun == ["a1", "b1", "a2"], "now it runs")
    world.open("a2", "b1")
    await bench.until(lambda: bench.broker.outputs() == ["A1", "A2", "B1"], "in order")


async def test_a_concurrent_handler_uses_the_store_from_its_turn_on(bench: Bench) -> None:
    world = World()
    early: list[Exception] = []
    source = bench.make(None)

    @source.register_event_type(Named, concurrency=4)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        try:
            ctx.store.get(event.name)
        except StoreError as error:
            early.append(error)
        result = await world.call(event)
        await ctx.turn()
        count(ctx, event.name)
        ctx.forward(OUT, Named(result), key=event.name)

    bench.broker.send("a", "b", "c")
    bench.run()
    await bench.until(lambda: world.begun == ["a", "b", "c"], "all run at once")
    world.open("c", "b")
    assert bench.broker.outputs() == []
    world.open("a")
    await bench.until(lambda: bench.broker.outputs() == ["A", "B", "C"], "in order")
    assert len(early) == 3


async def test_waiting_for_the_turn_takes_no_slot(bench: Bench) -> None:
    """Two may run: one that is slow, and behind it one after the other up to its turn."""
    begun: list[str] = []
    slow = asyncio.Event()
    source = bench.make(None)

    @source.register_event_type(Named, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        begun.append(event.name)
        if event.name == "slow":
            await slow.wait()
        await ctx.turn()
        ctx.forward(OUT, event, key=event.name)

    bench.broker.send("slow", "a", "b", "c")
    bench.run()
    await bench.until(lambda: begun == ["slow", "a", "b", "c"], "all of them begin")
    assert bench.broker.outputs() == []
    slow.set()
    await bench.until(lambda: bench.broker.outputs() == begun, "in order")


async def test_more_handlers_wait_for_their_turn_than_may_run(bench: Bench) -> None:
    """Waiting for the turn takes no slot: with one, the last would never get it."""
    source = bench.make(None)

    @source.register_event_type(Named, concurrency=1)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        await ctx.turn()
        ctx.forward(OUT, event, key=event.name)

    names = [f"n{number}" for number in range(50)]
    bench.broker.send(*names)
    bench.run()
    await bench.until(lambda: bench.broker.outputs() == names, "in order")


async def test_a_job_that_fails_is_tried_again_then_dead_lettered(bench: Bench) -> None:
    tries: list[str] = []

    async def job(event: Named) -> str:
        tries.append(event.name)
        raise RuntimeError("no")

    source = bench.make(None)
    retry = JobRetry(attempts=3, wait_initial_seconds=0.001, wait_jitter_seconds=0)
    scheduler = AsyncJobScheduler(source, job, finalize, config=SchedulerConfig(concurrency=2, retry=retry))
    scheduler.register_event_type(Named, key=lambda event: event.name, on_error=DEAD_LETTER)
    bench.broker.send("a")
    bench.run()
    await bench.until(lambda: bench.broker.offsets == {0: 1}, "it is passed")
    assert tries == ["a"] * 3
    assert len(bench.broker.logs[source.config.dead_letters, 0]) == 1


async def test_threads_and_chains(bench: Bench) -> None:
    source = bench.make(None)

    async def second(text: str) -> str:
        return text + "2"

    def final(ctx: EventContext[Any], item: str, result: str) -> None:
        ctx.forward(OUT, Named(result), key=item)

    following = AsyncJobScheduler(source, second, final, config=SchedulerConfig(concurrency=1))

    def first(event: Named) -> str:
        return event.name + "1"

    scheduler = AsyncJobScheduler(source, first, config=SchedulerConfig(concurrency=3), then=following)
    scheduler.register_event_type(Named, key=lambda event: event.name)
    bench.broker.send("a", "b", "c")
    bench.run()
    await bench.until(lambda: bench.broker.outputs() == ["a12", "b12", "c12"], "both stages")


async def test_a_stop_waits_for_what_runs_and_drops_the_rest(bench: Bench) -> None:
    world = World()
    source = scheduled(bench, world.call, config=SchedulerConfig(concurrency=2))
    bench.broker.send("a", "b", "c")
    bench.run()
    await bench.until(lambda: world.begun == ["a", "b"], "two run")
    stopping = asyncio.create_task(source.stop())
    await bench.until(lambda: source.statistics().partitions[0].state == "draining", "it drains")
    world.open("a", "b")
    await asyncio.wait_for(stopping, PATIENCE)
    assert bench.broker.outputs() == ["A", "B"]
    assert world.begun == ["a", "b"]
    assert bench.broker.offsets == {0: 2}


async def test_interjections_pass_a_slow_job(bench: Bench) -> None:
    world = World()
    source = scheduled(bench, world.call)
    bench.broker.send("a")
    bench.run()
    await bench.until(lambda: world.begun == ["a"], "it runs")

    def answer(ctx: EventContext[Any]) -> int:
        ctx.forward(OUT, Named("tick"), key="t")
        return 42

    assert await asyncio.wait_for(source.interject(0, answer), PATIENCE) == 42
    assert bench.broker.outputs() == ["tick"]
    assert bench.broker.offsets == {0: 0}
    world.open("a")
    await bench.until(lambda: bench.broker.outputs() == ["tick", "A"], "the job is not lost")


async def test_schedule_in_a_handler_that_has_its_turn(bench: Bench) -> None:
    source = bench.make(None)

    async def job(event: Named) -> str:
        return event.name.upper()

    scheduler = AsyncJobScheduler(source, job, finalize, config=SchedulerConfig(concurrency=1))

    @source.register_event_type(Named)
    def handler(ctx: EventContext[Any], event: Named) -> Any:
        if ctx.store.get(event.name, 0):
            return ExecutionState.COMPLETE
        return scheduler.schedule(ctx, event)

    bench.broker.send("a", "a", "b")
    bench.run()
    await bench.until(lambda: bench.broker.offsets == {0: 3}, "all done")
    assert bench.broker.outputs() == ["A", "B"]
