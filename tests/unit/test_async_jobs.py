"""Jobs and concurrent handlers ahead of their turn, over a broker in memory: order, results, limits, the end."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from typing import Any

import pytest

from streams import EventContext, EventSource, EventSourceConfig, ExecutionState
from streams.async_jobs import AsyncJobScheduler
from streams.errors import ConfigError, ProcessJobError, RegistrationError, StoreError
from streams.job_settings import JobRetry, SchedulerConfig
from streams.records import TYPE_HEADER
from tests.unit.jobs_kit import FEW, World, by_name, failures, finalize, schedule, shout
from tests.unit.runtime_kit import OUT, TOPIC, Bench, Named
from tests.unit.waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jobs", "concurrent handlers"])
async def test_all_run_at_once_and_have_their_effects_in_the_order_of_the_partition(bench: Bench, kind: str) -> None:
    world = World()
    early: list[Exception] = []

    async def handler(ctx: EventContext[Any], event: Named) -> None:
        try:
            ctx.store.get(event.name)
        except StoreError as error:
            early.append(error)
        result = await world.call(event)
        await ctx.turn()
        finalize(ctx, event, result)

    if kind == "jobs":
        schedule(bench, world.call)
    else:
        bench.make(None).register_event_type(Named, handler, concurrency=4)
    bench.begin("a", "b", "c")
    await bench.until(lambda: world.begun == ["a", "b", "c"], "all run at once")
    world.open("c", "b")
    assert bench.broker.outputs() == []
    world.open("a")
    await bench.until(lambda: bench.broker.outputs() == ["A", "B", "C"], "in order")
    assert bench.broker.offsets == {0: 3}
    assert len(early) == (0 if kind == "jobs" else 3), "the store is there from the turn on"


async def test_jobs_of_a_key_run_one_after_the_other(bench: Bench) -> None:
    world = World()
    schedule(bench, world.call, key=lambda event: event.name[0])
    bench.begin("a1", "a2", "b1")
    await bench.until(lambda: world.begun == ["a1", "b1"], "the second of the key waits")
    world.open("a1")
    await bench.until(lambda: world.begun == ["a1", "b1", "a2"], "now it runs")
    world.open("a2", "b1")
    await bench.until(lambda: bench.broker.outputs() == ["A1", "A2", "B1"], "in order")


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_waiting_for_the_turn_takes_no_slot(bench: Bench, concurrency: int) -> None:
    """Of two slots a slow one holds the first, and behind it one after the other comes up to its turn; with a single
    slot the last of many would never get it."""
    begun: list[str] = []
    slow = asyncio.Event()
    names = [*["slow"] * (concurrency - 1), *[f"n{number}" for number in range(50)]]

    async def handler(ctx: EventContext[Any], event: Named) -> None:
        begun.append(event.name)
        if event.name == "slow":
            await slow.wait()
        await ctx.turn()
        ctx.forward(OUT, event, key=event.name)

    bench.make(None).register_event_type(Named, handler, concurrency=concurrency)
    bench.begin(*names)
    await bench.until(lambda: begun == names, "all of them begin")
    assert concurrency == 1 or bench.broker.outputs() == []
    slow.set()
    await bench.until(lambda: bench.broker.outputs() == names, "in order")


async def test_threads_and_chains(bench: Bench) -> None:
    source = bench.make(None)

    async def second(text: str) -> str:
        return text + "2"

    def final(ctx: EventContext[Any], item: str, result: str) -> None:
        ctx.forward(OUT, Named(result), key=item)

    def first(event: Named) -> str:
        return event.name + "1"

    following = AsyncJobScheduler(source, second, final, config=SchedulerConfig(concurrency=1))
    scheduler = AsyncJobScheduler(source, first, config=SchedulerConfig(concurrency=3), then=following)
    scheduler.register_event_type(Named, key=lambda event: event.name)
    await bench.over("a", "b", "c")
    assert bench.broker.outputs() == ["a12", "b12", "c12"], "both stages"


async def test_interjections_pass_a_slow_job(bench: Bench) -> None:
    world = World()
    schedule(bench, world.call)
    bench.begin("a")
    await bench.until(lambda: world.begun == ["a"], "it runs")

    def answer(ctx: EventContext[Any]) -> int:
        ctx.forward(OUT, Named("tick"), key="t")
        return 42

    assert await asyncio.wait_for(bench.source.interject(0, answer), PATIENCE) == 42
    assert bench.broker.outputs() == ["tick"]
    assert bench.broker.offsets == {0: 0}
    world.open("a")
    await bench.until(lambda: bench.broker.outputs() == ["tick", "A"], "the job is not lost")


@pytest.mark.parametrize("blocking", [False, True])
async def test_schedule_in_a_handler_that_has_its_turn(bench: Bench, blocking: bool) -> None:
    source = bench.make(None)
    scheduler = AsyncJobScheduler(source, shout, finalize, config=FEW)

    def handler(ctx: EventContext[Any], event: Named) -> Any:
        return ExecutionState.COMPLETE if ctx.store.get(event.name, 0) else scheduler.schedule(ctx, event)

    source.register_event_type(Named, handler, blocking=blocking)
    await bench.over("a", "a", "b")
    assert bench.broker.outputs() == ["A", "B"]


async def test_nothing_to_do_completes_in_its_turn_without_the_finalizer(bench: Bench) -> None:
    world = World()
    schedule(bench, world.call, lambda record, event: None if event.name == "n" else (event.name, event))
    bench.begin("a", "n", "b")
    await bench.in_line(3)
    assert bench.broker.offsets == {}
    world.open("a", "b")
    await bench.committed()
    assert bench.broker.outputs() == ["A", "B"]


async def test_a_scheduler_without_finalizer_only_completes(bench: Bench) -> None:
    done: list[str] = []

    async def job(event: Named) -> None:
        done.append(event.name)

    schedule(bench, job, finalizer=None)
    await bench.over("a", "b")
    assert sorted(done) == ["a", "b"]


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_a_stop_waits_for_what_runs_and_drops_the_rest(bench: Bench) -> None:
    world = World()
    schedule(bench, world.call, config=SchedulerConfig(concurrency=2))
    bench.begin("a", "b", "c")
    await bench.until(lambda: world.begun == ["a", "b"], "two run")
    stopping = await bench.drain()
    world.open("a", "b")
    await stopping
    assert bench.broker.outputs() == ["A", "B"]
    assert world.begun == ["a", "b"]
    assert bench.broker.offsets == {0: 2}


async def test_a_stop_leaves_what_has_not_begun_to_the_next_owner(bench: Bench) -> None:
    """Also handlers behind the last job that runs; those between two jobs are needed for the second."""
    world = World()
    seen: list[bytes | None] = []
    schedule(bench, world.call)
    bench.source.register_default_handler(lambda ctx, value: seen.append(value))
    for name in ("a", "b"):
        bench.broker.send(name)
        bench.broker.append(TOPIC, 0, b"k", b"behind " + name.encode(), [(TYPE_HEADER, b"Unknown")])
    bench.run()
    await bench.in_line(4)
    stopping = await bench.drain()
    world.open("a", "b")
    await stopping
    assert bench.broker.outputs() == ["A", "B"]
    assert seen == [b"behind a"]
    assert bench.broker.offsets == {0: 3}


async def test_a_job_that_never_ends_is_cancelled_after_the_drain(bench: Bench) -> None:
    world = World()
    schedule(bench, world.call, made={"drain_timeout_seconds": 0.2})
    bench.begin("a", "b")
    await bench.until(lambda: len(world.begun) == 2, "they run")
    await bench.stop()
    assert world.cancelled == ["a", "b"]
    assert bench.broker.offsets == {}


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_a_long_line_pauses_its_partition_and_nobody_else(bench: Bench) -> None:
    world = World()
    world.open(*[f"n{number}" for number in range(600)], *[f"m{number}" for number in range(600)])
    schedule(bench, world.call, made={"partitions": 2, "max_queued_records": 100})
    bench.broker.send(*[f"m{number}" for number in range(600)], partition=1)
    bench.begin("slow", *[f"n{number}" for number in range(600)])
    await bench.until(lambda: bench.broker.offsets.get(1) == 600, "the other partition goes on")
    first = bench.source.statistics().partitions[0]
    assert first.paused
    assert 0 < first.events_ahead <= first.queued_records < 600
    world.open("slow")
    await bench.committed()
    assert bench.source.statistics().partitions[0].queued_records == 0


async def test_statistics_tell_what_runs_and_what_waits(bench: Bench) -> None:
    world = World()
    schedule(bench, world.call, name="calls", config=SchedulerConfig(concurrency=1, max_concurrent_keys=2))
    bench.begin("a", "a", "b", "c")
    await bench.in_line(3)  # the fourth finds no room
    [stage] = bench.source.statistics().stages
    assert (stage.name, stage.running, stage.waiting, stage.keys) == ("calls", 1, 2, 2)
    world.open("a", "b", "c")
    await bench.committed()


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_processes(bench: Bench) -> None:
    measured = schedule(bench, by_name, kind="process", config=SchedulerConfig(concurrency=2))
    bench.begin("a", "raise", "stubborn", "exit", "die", "lambda", "interrupt")
    deadline = time.monotonic() + 90.0  # a busy machine takes seconds to start each process
    while bench.broker.offsets.get(0) != 7:
        assert time.monotonic() < deadline, failures(measured)
        await asyncio.sleep(0.01)
    first, last = bench.broker.outputs()
    assert (first[:1], last[:9]) == ("a", "interrupt")
    assert str(os.getpid()) not in (first[1:], last[9:])
    told = failures(measured)
    assert told[0] == "ValueError: raised there"
    for text, said in zip(
        told[1:],
        [
            "cannot be sent between processes",
            "by_name raised SystemExit: 3",
            "the process of by_name died",
            "cannot be sent between processes",
        ],
        strict=True,
    ):
        assert said in text
        assert ProcessJobError.__name__ in text


# -- registering -------------------------------------------------------------------------------------------------------


async def test_what_does_not_fit_is_refused(bench: Bench) -> None:
    source = bench.make(None)
    other: EventSource[None] = EventSource(EventSourceConfig(group_id="o", topic="t", num_partitions=1))

    def plain(event: Named) -> str:
        return ""

    make: Any = functools.partial(AsyncJobScheduler, source)
    one_key: Any = {"key": lambda event: "k"}
    scheduler = make(shout)
    for said, wrong in [
        (r"a plain function; it cannot be of the kind 'async'", lambda: make(plain, kind="async")),
        (r"async; it cannot be of the kind 'thread'", lambda: make(shout, kind="thread")),
        (r"use one of async, thread, process", lambda: make(plain, kind="fiber")),
        (r"at the top of a module", lambda: make(plain, kind="process")),
        (r"at the top of a module", lambda: make(lambda event: "", kind="process")),
        (r"two event sources", lambda: make(shout, then=AsyncJobScheduler(other, shout))),
        (r"results go to one of them", lambda: make(shout, finalize, then=make(shout))),
        (r"not both", lambda: scheduler.register_event_type(Named, lambda record, event: None, **one_key)),
        (r"is async", lambda: scheduler.register_event_type(Named, shout)),
    ]:
        with pytest.raises(RegistrationError, match=said):
            wrong()
    scheduler.register_event_type(Named, **one_key)
    with pytest.raises(RegistrationError, match=r"has a handler already"):
        make(shout).register_event_type(Named, **one_key)
    await bench.start()
    for late in (lambda: make(shout), lambda: scheduler.register_event_type(Named, **one_key)):
        with pytest.raises(RegistrationError, match=r"too late"):
            late()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SchedulerConfig(concurrency=0), "SchedulerConfig.concurrency"),
        (lambda: SchedulerConfig(concurrency=True), "SchedulerConfig.concurrency"),
        (lambda: SchedulerConfig(concurrency=1, worker_queue_depth=-1), "SchedulerConfig.worker_queue_depth"),
        (lambda: SchedulerConfig(concurrency=1, max_concurrent_keys=0), "SchedulerConfig.max_concurrent_keys"),
        (lambda: SchedulerConfig(concurrency=1, timeout_seconds=0), "SchedulerConfig.timeout_seconds"),
        (lambda: SchedulerConfig(concurrency=1, timeout_seconds=float("nan")), "SchedulerConfig.timeout_seconds"),
        (lambda: JobRetry(attempts=0), "JobRetry.attempts"),
        (lambda: JobRetry(wait_initial_seconds=-1), "JobRetry.wait_initial_seconds"),
        (lambda: JobRetry(timeout_seconds=0), "JobRetry.timeout_seconds"),
        (lambda: JobRetry(on=(asyncio.CancelledError,)), "JobRetry.on"),  # type: ignore[arg-type]
    ],
)
async def test_settings_that_cannot_be_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        make()
