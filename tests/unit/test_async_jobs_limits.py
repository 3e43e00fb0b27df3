"""Jobs ahead of their turn: limits, statistics, processes, and what is refused at once."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from streams import EventSource, EventSourceConfig
from streams.async_jobs import AsyncJobScheduler
from streams.errors import ConfigError, ProcessJobError, RegistrationError
from streams.job_settings import JobRetry, SchedulerConfig
from streams.records import TYPE_HEADER
from tests.unit.jobs_kit import by_name, ends, failures, finalize, schedule
from tests.unit.runtime_kit import PATIENCE, TOPIC, Bench, Named

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")]


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    if made.tasks and not made.tasks[-1].done():
        await asyncio.wait_for(made.source.stop(), PATIENCE)
        await made.tasks[-1]


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_a_long_line_pauses_its_partition_and_nobody_else(bench: Bench) -> None:
    gate = asyncio.Event()

    async def job(event: Named) -> str:
        if event.name == "slow":
            await gate.wait()
        return event.name

    schedule(bench, job, made={"partitions": 2, "max_queued_records": 100})
    bench.broker.send("slow", *[f"n{number}" for number in range(600)])
    bench.broker.send(*[f"m{number}" for number in range(600)], partition=1)
    bench.run()
    await bench.until(lambda: bench.broker.offsets.get(1) == 600, "the other partition goes on")
    first = bench.source.statistics().partitions[0]
    assert first.paused
    assert 0 < first.events_ahead <= first.queued_records < 600
    gate.set()
    await ends(bench, 601)
    assert bench.source.statistics().partitions[0].queued_records == 0


async def test_statistics_tell_what_runs_and_what_waits(bench: Bench) -> None:
    gate = asyncio.Event()

    async def job(event: Named) -> str:
        await gate.wait()
        return event.name

    schedule(bench, job, name="calls", config=SchedulerConfig(concurrency=1, max_concurrent_keys=2))
    bench.broker.send("a", "a", "b", "c")
    bench.run()
    await bench.until_active()
    await bench.until(lambda: bench.source.statistics().partitions[0].events_ahead == 3, "the fourth finds no room")
    [stage] = bench.source.statistics().stages
    assert (stage.name, stage.running, stage.waiting, stage.keys) == ("calls", 1, 2, 2)
    gate.set()
    await ends(bench, 4)


async def test_a_stop_leaves_what_has_not_begun_to_the_next_owner(bench: Bench) -> None:
    """Also handlers behind the last job that runs; those between two jobs are needed for the second."""
    gate = asyncio.Event()
    seen: list[bytes | None] = []

    async def job(event: Named) -> str:
        await gate.wait()
        return event.name

    schedule(bench, job)
    bench.source.register_default_handler(lambda ctx, value: seen.append(value))
    for name in ("a", "b"):
        bench.broker.send(name)
        bench.broker.append(TOPIC, 0, b"k", b"behind " + name.encode(), [(TYPE_HEADER, b"Unknown")])
    bench.run()
    await bench.until_active()
    await bench.until(lambda: bench.source.statistics().partitions[0].events_ahead == 4, "all are in line")
    stopping = asyncio.create_task(bench.source.stop())
    await bench.until(lambda: bench.source.statistics().partitions[0].state == "draining", "it drains")
    gate.set()
    await asyncio.wait_for(stopping, PATIENCE)
    assert bench.broker.outputs() == ["a", "b"]
    assert seen == [b"behind a"]
    assert bench.broker.offsets == {0: 3}


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_processes(bench: Bench) -> None:
    measured = schedule(bench, by_name, kind="process", config=SchedulerConfig(concurrency=2))
    bench.broker.send("a", "raise", "stubborn", "exit", "die", "lambda", "interrupt")
    bench.run()
    deadline = time.monotonic() + 90.0  # a busy machine takes seconds to start each process
    while bench.broker.offsets.get(0) != 7:
        assert time.monotonic() < deadline, failures(measured)
        await asyncio.sleep(0.01)
    first, last = bench.broker.outputs()
    assert (first[:1], last[:9]) == ("a", "interrupt")
    assert str(os.getpid()) not in (first[1:], last[9:])
    told = failures(measured)
    assert told[0] == "ValueError: raised there"
    assert "cannot be sent between processes" in told[1]
    assert "by_name raised SystemExit: 3" in told[2]
    assert "the process of by_name died" in told[3]
    assert "cannot be sent between processes" in told[4]
    assert all(ProcessJobError.__name__ in text for text in told[1:])


# -- registering -------------------------------------------------------------------------------------------------------


async def test_what_does_not_fit_is_refused(bench: Bench) -> None:
    source = bench.make(None)
    other: EventSource[None] = EventSource(EventSourceConfig(group_id="o", topic="t", num_partitions=1))

    async def job(event: Named) -> str:
        return ""

    def plain(event: Named) -> str:
        return ""

    make: Any = functools.partial(AsyncJobScheduler, source)
    with pytest.raises(RegistrationError, match=r"a plain function; it cannot be of the kind 'async'"):
        make(plain, kind="async")
    with pytest.raises(RegistrationError, match=r"async; it cannot be of the kind 'thread'"):
        make(job, kind="thread")
    with pytest.raises(RegistrationError, match=r"use one of async, thread, process"):
        make(plain, kind="fiber")
    with pytest.raises(RegistrationError, match=r"at the top of a module"):
        make(plain, kind="process")
    with pytest.raises(RegistrationError, match=r"at the top of a module"):
        make(lambda event: "", kind="process")
    with pytest.raises(RegistrationError, match=r"two event sources"):
        make(job, then=AsyncJobScheduler(other, job))
    with pytest.raises(RegistrationError, match=r"results go to one of them"):
        make(job, finalize, then=make(job))
    scheduler = make(job)
    with pytest.raises(RegistrationError, match=r"not both"):
        scheduler.register_event_type(Named, lambda record, event: None, key=lambda event: "k")
    with pytest.raises(RegistrationError, match=r"is async"):
        scheduler.register_event_type(Named, job)
    scheduler.register_event_type(Named, key=lambda event: "k")
    with pytest.raises(RegistrationError, match=r"has a handler already"):
        make(job).register_event_type(Named, key=lambda event: "k")
    bench.run()
    await bench.until_active()
    with pytest.raises(RegistrationError, match=r"too late"):
        make(job)
    with pytest.raises(RegistrationError, match=r"too late"):
        scheduler.register_event_type(Named, key=lambda event: "k")


async def test_a_scheduler_without_finalizer_only_completes(bench: Bench) -> None:
    done: list[str] = []

    async def job(event: Named) -> None:
        done.append(event.name)

    schedule(bench, job, finalizer=None)
    bench.broker.send("a", "b")
    bench.run()
    await ends(bench, 2)
    assert sorted(done) == ["a", "b"]


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
