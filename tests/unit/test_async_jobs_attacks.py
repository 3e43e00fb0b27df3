"""Jobs and handlers ahead of their turn that do not behave, and what is said about it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from streams import EventContext, ExecutionState
from streams.async_jobs import AsyncJobScheduler
from streams.errors import EventFailure, PlanError, StoreError
from streams.job_settings import JobRetry, SchedulerConfig
from streams.metrics import JobEnded
from streams.outcomes import DEAD_LETTER, ErrorPolicy, ErrorResponse
from streams.records import TYPE_HEADER
from tests.unit.jobs_kit import FEW, ends, failures, finalize, schedule
from tests.unit.runtime_kit import OUT, PATIENCE, TOPIC, Bench, Named, Unforgiving, count

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")]


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    if made.tasks and not made.tasks[-1].done():
        await asyncio.wait_for(made.source.stop(), PATIENCE)
        await made.tasks[-1]


# -- what jobs may do --------------------------------------------------------------------------------------------------


async def test_a_job_that_is_cancelled_by_somebody_else_fails_its_event(bench: Bench) -> None:
    async def job(event: Named) -> str:
        task = asyncio.current_task()
        assert task is not None
        if event.name == "a":
            task.cancel()
        await asyncio.Event().wait() if event.name == "a" else None
        return event.name

    measured = schedule(bench, job)
    bench.broker.send("a", "b")
    bench.run()
    await ends(bench, 2)
    assert bench.broker.outputs() == ["b"]
    assert "not its own" in failures(measured)[0]


async def test_a_job_that_awaits_something_cancelled_fails_its_event(bench: Bench) -> None:
    async def job(event: Named) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    measured = schedule(bench, job)
    bench.broker.send("a")
    bench.run()
    await ends(bench, 1)
    assert "not its own" in failures(measured)[0]


class Exit(BaseException):
    """As ``SystemExit``, which would end the test, too."""


@pytest.mark.parametrize("where", ["job", "thread", "handler", "handler at its turn"])
async def test_what_is_no_exception_ends_the_source(bench: Bench, where: str) -> None:
    source = bench.make(None)

    async def job(event: Named) -> str:
        raise Exit

    def thread(event: Named) -> str:
        raise Exit

    async def handler(ctx: EventContext[Any], event: Named) -> None:
        if where == "handler at its turn":
            await ctx.turn()
        raise Exit

    if where in ("job", "thread"):
        scheduler: Any = AsyncJobScheduler(source, job if where == "job" else thread, finalize, config=FEW)
        scheduler.register_event_type(Named, key=lambda event: event.name)
    else:
        source.register_event_type(Named, handler, concurrency=2)
    bench.broker.send("a")
    task = bench.run()
    with pytest.raises(Exit):
        await asyncio.wait_for(task, PATIENCE)


async def test_a_thread_that_raises_stop_iteration_does_not_hang(bench: Bench) -> None:
    def job(event: Named) -> str:
        return next(iter([]))

    measured = schedule(bench, job)
    bench.broker.send("a")
    bench.run()
    await ends(bench, 1)
    assert "StopIteration" in failures(measured)[0]


@pytest.mark.parametrize("thread", [False, True])
async def test_a_job_that_takes_too_long_fails_and_is_tried_again(bench: Bench, thread: bool) -> None:
    tries: list[int] = []
    release = threading.Event()

    async def slow(event: Named) -> str:
        tries.append(1)
        if len(tries) == 1:
            await asyncio.Event().wait()
        return event.name

    def slow_thread(event: Named) -> str:
        tries.append(1)
        if len(tries) == 1:
            release.wait(PATIENCE)
        return event.name

    retry = JobRetry(attempts=2, wait_initial_seconds=0.001, wait_jitter_seconds=0)
    config = SchedulerConfig(concurrency=1, timeout_seconds=0.2, retry=retry)
    schedule(bench, slow_thread if thread else slow, config=config)
    bench.broker.send("a")
    bench.run()
    await ends(bench, 1)
    release.set()
    assert bench.broker.outputs() == ["a"]
    assert len(tries) == 2


async def test_a_timeout_says_which_setting_it_was(bench: Bench) -> None:
    async def job(event: Named) -> str:
        await asyncio.Event().wait()
        return ""

    measured = schedule(bench, job, config=SchedulerConfig(concurrency=1, timeout_seconds=0.01))
    bench.broker.send("a")
    bench.run()
    await ends(bench, 1)
    assert "timeout_seconds=0.01" in failures(measured)[0]


async def test_a_job_that_swallows_its_cancellation_is_not_passed_on(bench: Bench) -> None:
    begun = asyncio.Event()
    second: list[str] = []

    async def first(event: Named) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "all the same"
        return ""

    async def then(text: str) -> str:
        second.append(text)
        return text

    source = bench.make(None)
    following: Any = AsyncJobScheduler(source, then, config=FEW)
    AsyncJobScheduler(source, first, config=FEW, then=following).register_event_type(Named, key=lambda event: "k")
    bench.broker.send("a")
    task = bench.run()
    await asyncio.wait_for(begun.wait(), PATIENCE)
    source.stop_now()
    await asyncio.wait_for(task, PATIENCE)
    assert second == []
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kes-job")]


async def test_a_job_that_never_ends_is_cancelled_after_the_drain(bench: Bench) -> None:
    begun: list[str] = []
    cancelled: list[str] = []

    async def job(event: Named) -> str:
        begun.append(event.name)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(event.name)
        return ""

    schedule(bench, job, made={"drain_timeout_seconds": 0.2})
    bench.broker.send("a", "b")
    bench.run()
    await bench.until(lambda: len(begun) == 2, "they run")
    await asyncio.wait_for(bench.source.stop(), PATIENCE)
    assert cancelled == ["a", "b"]
    assert bench.broker.offsets == {}


async def test_jobs_do_not_inherit_from_each_other(bench: Bench) -> None:
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="")
    seen: list[str] = []
    source = bench.make(None)

    @source.register_event_type(Named, concurrency=1)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        seen.append(mark.get())
        mark.set(event.name)
        await ctx.turn()

    bench.broker.send("a", "b", "c")
    bench.run()
    await ends(bench, 3)
    assert seen == ["", "", ""]


# -- planners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ("ab", "answered str; it has to answer a tuple (key, item), or None"),
        (("k",), "answered tuple"),
        (([], "item"), "the key of Named by job is a list, which cannot be hashed"),
        (ValueError("no plan"), "ValueError: no plan"),
        (asyncio.CancelledError(), "not its own"),
    ],
)
async def test_what_a_planner_does_wrong_is_its_events_failure(bench: Bench, planned: Any, said: str) -> None:
    async def job(item: Any) -> str:
        return str(item)

    def plan(record: Any, event: Named) -> Any:
        if event.name != "bad":
            return event.name, event
        if isinstance(planned, BaseException):
            raise planned
        return planned

    measured = schedule(bench, job, plan, name="job", finalizer=lambda ctx, item, result: None)
    bench.broker.send("a", "bad", "b")
    bench.run()
    await ends(bench, 3)
    assert said in failures(measured)[0]
    if not isinstance(planned, BaseException):
        assert f"{TOPIC}[0]@1" in failures(measured)[0]
        assert issubclass(PlanError, Exception)
    assert len(bench.broker.logs[bench.source.config.dead_letters, 0]) == 1


async def test_nothing_to_do_completes_in_its_turn_without_the_finalizer(bench: Bench) -> None:
    gate = asyncio.Event()

    async def job(event: Named) -> str:
        await gate.wait()
        return event.name

    schedule(bench, job, lambda record, event: None if event.name == "n" else (event.name, event))
    bench.broker.send("a", "n", "b")
    bench.run()
    await bench.until_active()
    await bench.until(lambda: bench.source.statistics().partitions[0].events_ahead == 3, "all are in line")
    assert bench.broker.offsets == {}
    gate.set()
    await ends(bench, 3)
    assert bench.broker.outputs() == ["a", "b"]


async def test_bytes_that_nobody_can_read_wait_behind_jobs(bench: Bench) -> None:
    gate = asyncio.Event()

    async def job(event: Named) -> str:
        await gate.wait()
        return event.name

    seen: list[bytes | None] = []
    measured = schedule(bench, job, made={"decode_policy": DEAD_LETTER})
    bench.source.register_default_handler(lambda ctx, value: seen.append(value))
    bench.broker.send("a")
    bench.broker.append(TOPIC, 0, b"k", b"{not json", [(TYPE_HEADER, b"Named")])
    bench.broker.append(TOPIC, 0, b"k", b"raw", [(TYPE_HEADER, b"Unknown")])
    bench.broker.send("b")
    bench.run()
    await bench.until_active()
    await bench.until(lambda: bench.source.statistics().partitions[0].events_ahead == 4, "all are in line")
    assert (seen, failures(measured)) == ([], [])
    gate.set()
    await ends(bench, 4)
    assert bench.broker.outputs() == ["a", "b"]
    assert seen == [b"raw"]
    assert len(failures(measured)) == 1


# -- finalizers and handlers -------------------------------------------------------------------------------------------


async def test_finalizers_may_fail_wait_and_schedule_again(bench: Bench) -> None:
    source = bench.make(
        None, error_policy=ErrorPolicy(retries=2, backoff_seconds=0.001, then=ErrorResponse.DEAD_LETTER)
    )
    tries: list[str] = []

    async def job(event: Named) -> str:
        return event.name.upper()

    again: Any = AsyncJobScheduler(source, job, finalize, config=SchedulerConfig(concurrency=1))

    async def final(ctx: EventContext[Any], event: Named, result: str) -> Any:
        tries.append(event.name)
        count(ctx, event.name)
        match event.name:
            case "raise":
                raise RuntimeError("no")
            case "fail":
                return ctx.fail(RuntimeError("no"))
            case "twice" if ctx.attempt == 1:
                raise RuntimeError("not yet")
            case "again":
                return await again.schedule(ctx, Named("more"))
        ctx.forward(OUT, Named(result), key=event.name)
        return None

    scheduler: Any = AsyncJobScheduler(source, job, final, config=SchedulerConfig(concurrency=1))
    scheduler.register_event_type(Named, key=lambda event: event.name)
    bench.broker.send("raise", "fail", "twice", "again", "z")
    bench.run()
    await ends(bench, 5)
    assert bench.broker.outputs() == ["TWICE", "MORE", "Z"]
    assert tries == ["raise"] * 3 + ["fail"] * 3 + ["twice"] * 2 + ["again", "z"]
    assert len(bench.broker.logs[source.config.dead_letters, 0]) == 2


@pytest.mark.parametrize("ahead", [True, False])
async def test_a_handler_that_answers_fatal_stops_the_source(bench: Bench, ahead: bool) -> None:
    source = bench.make(None, error_policy=DEAD_LETTER)

    @source.register_event_type(Named, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Named) -> ExecutionState:
        if not ahead:
            await ctx.turn()
        return ExecutionState.FATAL if event.name == "b" else ExecutionState.COMPLETE

    bench.broker.send("a", "b", "c")
    task = bench.run()
    with pytest.raises(EventFailure, match=r"in\[0\]@1"):
        await asyncio.wait_for(task, PATIENCE)
    assert bench.broker.offsets == {0: 1}


async def test_a_handler_that_goes_on_after_it_was_given_up_touches_nothing(bench: Bench) -> None:
    source = bench.make(None, drain_timeout_seconds=0.1)
    reached, said = asyncio.Event(), asyncio.Event()
    errors: list[BaseException] = []

    @source.register_event_type(Named, concurrency=1)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        await ctx.turn()
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for use in (lambda: ctx.store.put("a", 1), lambda: ctx.forward(OUT, event, key="a")):
                try:
                    use()
                except StoreError as error:
                    errors.append(error)
            try:
                await ctx.turn()
            except StoreError as error:
                errors.append(error)
            said.set()

    bench.broker.send("a")
    bench.run()
    await asyncio.wait_for(reached.wait(), PATIENCE)
    await asyncio.wait_for(source.stop(), PATIENCE)
    await asyncio.wait_for(said.wait(), PATIENCE)
    assert len(errors) == 3
    assert bench.broker.outputs() == []


async def test_a_blocking_handler_may_leave_its_rest_to_a_job(bench: Bench) -> None:
    async def job(event: Named) -> str:
        return event.name.upper()

    source = bench.make(None)
    scheduler: Any = AsyncJobScheduler(source, job, finalize, config=FEW)
    source.register_event_type(Named, lambda ctx, event: scheduler.schedule(ctx, event), blocking=True)
    bench.broker.send("a", "b")
    bench.run()
    await ends(bench, 2)
    assert bench.broker.outputs() == ["A", "B"]


async def test_on_failure_takes_the_place_of_the_finalizer(bench: Bench) -> None:
    async def job(event: Named) -> str:
        if event.name == "bad":
            raise RuntimeError("no")
        return event.name

    def on_failure(ctx: EventContext[Any], event: Named, error: Exception) -> None:
        ctx.forward(OUT, Named(f"{event.name}: {error}"), key=event.name)

    measured = schedule(bench, job, on_failure=on_failure)
    bench.broker.send("a", "bad", "b")
    bench.run()
    await ends(bench, 3)
    assert bench.broker.outputs() == ["a", "bad: no", "b"]
    assert [(one.attempts, one.outcome) for one in measured if isinstance(one, JobEnded)] == [
        (1, "done"),
        (1, "failed"),
        (1, "done"),
    ]


async def test_a_store_that_cannot_undo_is_restored_and_known_failures_cost_no_second_job(bench: Bench) -> None:
    jobs: list[str] = []

    async def job(event: Named) -> str:
        jobs.append(event.name)
        return event.name

    def final(ctx: EventContext[Any], event: Named, result: str) -> None:
        count(ctx, event.name)
        if event.name == "bad":
            raise RuntimeError("no")
        ctx.forward(OUT, Named(result), key=event.name)

    schedule(bench, job, finalizer=final, made={"store": Unforgiving})
    bench.broker.send("a", "bad", "b")
    bench.run()
    await ends(bench, 3)
    assert bench.broker.outputs() == ["a", "b"]
    assert jobs.count("bad") == 1
    assert len(bench.broker.logs[bench.source.config.dead_letters, 0]) == 1
