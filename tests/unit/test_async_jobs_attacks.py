"""Jobs and handlers ahead of their turn that do not behave, and what is said about it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from streams import EventContext, ExecutionState
from streams.async_jobs import AsyncJobScheduler
from streams.errors import EventFailure, PlanError, StoreError
from streams.job_settings import JobRetry, SchedulerConfig
from streams.metrics import JobEnded
from streams.outcomes import DEAD_LETTER, ErrorPolicy, ErrorResponse
from streams.records import TYPE_HEADER
from tests.unit.jobs_kit import FEW, World, failures, finalize, schedule, shout
from tests.unit.runtime_kit import OUT, TOPIC, Bench, Named, Unforgiving, count
from tests.unit.waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

QUICKLY = {"wait_initial_seconds": 0.001, "wait_jitter_seconds": 0}


# -- what jobs and planners may do -------------------------------------------------------------------------------------


async def cancels_itself() -> str:
    """As another task would."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.Event().wait()
    return ""


async def awaits_what_is_cancelled() -> str:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.cancel()
    return await future


async def never_ends() -> str:
    await asyncio.Event().wait()
    return ""


async def raises() -> str:
    raise RuntimeError("no")


def raises_stop_iteration() -> str:
    return next(iter([]))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (cancels_itself, "not its own"),
        (awaits_what_is_cancelled, "not its own"),
        (never_ends, "timeout_seconds=0.01"),
        (raises, "RuntimeError: no"),
        (raises_stop_iteration, "StopIteration"),  # on a thread, whose future would never be done
    ],
)
async def test_a_job_that_goes_wrong_is_tried_again_then_fails_its_event_and_no_other(
    bench: Bench, fault: Any, said: str
) -> None:
    tries: list[str] = []

    async def job(event: Named) -> str:
        tries.append(event.name)
        return await fault() if event.name == "bad" else event.name

    def thread(event: Named) -> str:
        tries.append(event.name)
        return fault() if event.name == "bad" else event.name

    retry = JobRetry(attempts=3, **QUICKLY)  # type: ignore[arg-type]
    config = SchedulerConfig(concurrency=4, timeout_seconds=0.01 if fault is never_ends else None, retry=retry)
    measured = schedule(bench, thread if fault is raises_stop_iteration else job, config=config)
    await bench.over("a", "bad", "b")
    assert bench.broker.outputs() == ["a", "b"]
    assert said in failures(measured)[0]
    assert len(bench.letters) == 1
    assert tries.count("bad") == (1 if said == "not its own" else 3)


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ("ab", "answered str; it has to answer a tuple (key, item), or None"),
        (("k",), "answered tuple"),
        (([], "item"), "answered a key that is a list, which cannot be hashed"),
        (ValueError("no plan"), "ValueError: no plan"),
        (asyncio.CancelledError(), "not its own"),
    ],
)
async def test_what_a_planner_does_wrong_is_its_events_failure(bench: Bench, planned: Any, said: str) -> None:
    def plan(record: Any, event: Named) -> Any:
        if event.name != "bad":
            return event.name, event
        if isinstance(planned, BaseException):
            raise planned
        return planned

    measured = schedule(bench, shout, plan, name="job", finalizer=lambda ctx, item, result: None)
    await bench.over("a", "bad", "b")
    assert said in failures(measured)[0]
    if not isinstance(planned, BaseException):
        assert f"{TOPIC}[0]@1" in failures(measured)[0]
        assert issubclass(PlanError, Exception)
    assert len(bench.letters) == 1


class Exit(BaseException):
    """As ``SystemExit``, which would end the test, too."""


@pytest.mark.parametrize("where", ["job", "thread", "handler", "handler at its turn"])
async def test_what_is_no_exception_ends_the_source(bench: Bench, where: str) -> None:
    async def job(event: Named) -> str:
        raise Exit

    def thread(event: Named) -> str:
        raise Exit

    async def handler(ctx: EventContext[Any], event: Named) -> None:
        if where == "handler at its turn":
            await ctx.turn()
        raise Exit

    if where in ("job", "thread"):
        schedule(bench, job if where == "job" else thread)
    else:
        bench.make(None).register_event_type(Named, handler, concurrency=2)
    with pytest.raises(Exit):
        await asyncio.wait_for(bench.begin("a"), PATIENCE)


async def test_a_job_that_takes_too_long_fails_and_is_tried_again(bench: Bench) -> None:
    """On a thread, which cannot be cancelled; of tasks the table above says so."""
    tries: list[int] = []
    release = threading.Event()

    def slow(event: Named) -> str:
        tries.append(1)
        if len(tries) == 1:
            release.wait(PATIENCE)
        return event.name

    retry = JobRetry(attempts=2, **QUICKLY)  # type: ignore[arg-type]
    config = SchedulerConfig(concurrency=1, timeout_seconds=0.2, retry=retry)
    schedule(bench, slow, config=config)
    await bench.over("a")
    release.set()
    assert bench.broker.outputs() == ["a"]
    assert len(tries) == 2


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
    task = bench.begin("a")
    await asyncio.wait_for(begun.wait(), PATIENCE)
    source.stop_now()
    await asyncio.wait_for(task, PATIENCE)
    assert second == []
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kes-job")]


async def test_jobs_do_not_inherit_from_each_other(bench: Bench) -> None:
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="")
    seen: list[str] = []

    async def handler(ctx: EventContext[Any], event: Named) -> None:
        seen.append(mark.get())
        mark.set(event.name)
        await ctx.turn()

    bench.make(None).register_event_type(Named, handler, concurrency=1)
    await bench.over("a", "b", "c")
    assert seen == ["", "", ""]


async def test_bytes_that_nobody_can_read_wait_behind_jobs(bench: Bench) -> None:
    world = World()
    seen: list[bytes | None] = []
    measured = schedule(bench, world.call, made={"decode_policy": DEAD_LETTER})
    bench.source.register_default_handler(lambda ctx, value: seen.append(value))
    bench.broker.send("a")
    bench.broker.append(TOPIC, 0, b"k", b"{not json", [(TYPE_HEADER, b"Named")])
    bench.broker.append(TOPIC, 0, b"k", b"raw", [(TYPE_HEADER, b"Unknown")])
    bench.begin("b")
    await bench.in_line(4)
    assert (seen, failures(measured)) == ([], [])
    world.open("a", "b")
    await bench.committed()
    assert bench.broker.outputs() == ["A", "B"]
    assert seen == [b"raw"]
    assert len(failures(measured)) == 1


# -- finalizers and handlers -------------------------------------------------------------------------------------------


async def test_finalizers_may_fail_wait_and_schedule_again(bench: Bench) -> None:
    tries: list[str] = []
    policy = ErrorPolicy(retries=2, backoff_seconds=0.001, then=ErrorResponse.DEAD_LETTER)
    source = bench.make(None, error_policy=policy)
    again: Any = AsyncJobScheduler(source, shout, finalize, config=SchedulerConfig(concurrency=1))

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

    scheduler: Any = AsyncJobScheduler(source, shout, final, config=SchedulerConfig(concurrency=1))
    scheduler.register_event_type(Named, key=lambda event: event.name)
    await bench.over("raise", "fail", "twice", "again", "z")
    assert bench.broker.outputs() == ["TWICE", "MORE", "Z"]
    assert tries == ["raise"] * 3 + ["fail"] * 3 + ["twice"] * 2 + ["again", "z"]
    assert len(bench.letters) == 2


@pytest.mark.parametrize("ahead", [True, False])
async def test_a_handler_that_answers_fatal_stops_the_source(bench: Bench, ahead: bool) -> None:
    async def handler(ctx: EventContext[Any], event: Named) -> ExecutionState:
        if not ahead:
            await ctx.turn()
        return ExecutionState.FATAL if event.name == "b" else ExecutionState.COMPLETE

    bench.make(None, error_policy=DEAD_LETTER).register_event_type(Named, handler, concurrency=2)
    with pytest.raises(EventFailure, match=r"in\[0\]@1"):
        await asyncio.wait_for(bench.begin("a", "b", "c"), PATIENCE)
    assert bench.broker.offsets == {0: 1}


async def test_a_handler_that_goes_on_after_it_was_given_up_touches_nothing(bench: Bench) -> None:
    reached, said = asyncio.Event(), asyncio.Event()
    errors: list[BaseException] = []

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

    bench.make(None, drain_timeout_seconds=0.1).register_event_type(Named, handler, concurrency=1)
    bench.begin("a")
    await asyncio.wait_for(reached.wait(), PATIENCE)
    await bench.stop()
    await asyncio.wait_for(said.wait(), PATIENCE)
    assert len(errors) == 3
    assert bench.broker.outputs() == []


async def test_on_failure_takes_the_place_of_the_finalizer(bench: Bench) -> None:
    async def job(event: Named) -> str:
        return await raises() if event.name == "bad" else event.name

    def on_failure(ctx: EventContext[Any], event: Named, error: Exception) -> None:
        ctx.forward(OUT, Named(f"{event.name}: {error}"), key=event.name)

    measured = schedule(bench, job, on_failure=on_failure)
    await bench.over("a", "bad", "b")
    assert bench.broker.outputs() == ["a", "bad: no", "b"]
    ended = [(one.attempts, one.outcome) for one in measured if isinstance(one, JobEnded)]
    assert ended == [(1, "done"), (1, "failed"), (1, "done")]


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
    await bench.over("a", "bad", "b")
    assert bench.broker.outputs() == ["a", "b"]
    assert jobs.count("bad") == 1
    assert len(bench.letters) == 1
