"""Functions of jobs, batches and concurrent handlers that do not behave, in virtual time, and what is said about it."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from streams import (
    AsyncBatcher,
    AsyncJobScheduler,
    BatcherConfig,
    BatchItem,
    EventContext,
    ExecutionState,
    Record,
    SchedulerConfig,
)
from streams.errors import EventFailure, StoreError
from streams.metrics import JobEnded
from streams.outcomes import DEAD_LETTER, ErrorResponse, Retry
from streams.records import TYPE_HEADER
from streams.testing import TestDriver
from tests.unit.async_kit import STAGES, World, driven, names, new_source, reasons, send, watch
from tests.unit.runtime_kit import OUT
from tests.vocabulary import INTS, TOTALS, Named, Words, touch

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

Items = list[BatchItem[Any]]


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


@pytest.mark.parametrize(
    ("fault", "said", "attempts"),
    [
        (cancels_itself, "not its own", 1),
        (awaits_what_is_cancelled, "not its own", 1),
        (never_ends, "timeout_seconds=0.4", 3),
        (raises, "no", 3),
    ],
)
@pytest.mark.parametrize("kind", ["jobs", "batches"])
@pytest.mark.parametrize("late", [True, False], ids=["on_failure", "dead letter"])
def test_a_call_that_goes_wrong_is_tried_again_then_fails_its_event_and_no_other(
    kind: str, fault: Any, said: str, attempts: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "streams.runtime.async_work.invoke")
    measured: list[Any] = []
    stage: dict[str, Any] = {"max_batch_size": 1} if kind == "batches" else {}
    stage["retry"] = Retry(attempts=3, backoff_seconds=0.001, jitter=0)
    stage["timeout_seconds"] = 0.4 if fault is never_ends else None
    world = World(kind, stage, late=late, fault=fault, metrics_handler=measured.append)
    with driven(world) as driver:
        send(driver, "a", "bad", "c")
        watch(driver, world, 3)
        assert names(driver) == ["A", "C"]
        assert world.trace.split().count("bad") == attempts
        assert said in (world.trace if late else reasons(driver)[0])
        assert len(driver.dead_letters()) == (not late)
        ended = [(one.outcome, one.attempts) for one in measured if isinstance(one, JobEnded)]
        outcome = "cancelled" if fault is cancels_itself else "failed"
        assert sorted(ended) == (sorted([(outcome, attempts), ("done", 1), ("done", 1)]) if kind == "jobs" else [])
    retried = [line.getMessage() for line in caplog.records if "the next one in" in line.msg]
    what = r"the job \S+ of" if kind == "jobs" else r"the batch \S+ of 1 items, the first of"
    place = rf"{what} \w+\[\d\]@\d+, key 'b': attempt (\d) of 3 failed"
    assert [re.match(place, text)[1] for text in retried] == [str(n) for n in range(1, attempts)]  # type: ignore[index]
    assert all(said in text and "in 0.00 s" in text for text in retried)
    assert "stamina" not in {line.name for line in caplog.records}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, ""),
        ([1], "writer answered 1 results for 3 items"),
        ([1, 2, 3, 4], "writer answered 4 results"),
        ("abc", "writer answered 'str'"),
        ([asyncio.CancelledError()] * 3, "a cancellation that is not its own"),
        (RuntimeError("no"), "no"),
    ],
)
def test_the_outcome_of_a_call_is_that_of_all_of_its_items(answer: Any, said: str) -> None:
    """Once its attempts are over, each of which has a list of its own."""
    tries, found, source = list[int](), list[Any](), new_source()

    async def execute(items: Items) -> Any:
        tries.append(len(items))
        items.clear()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(ctx: EventContext[Any], items: Items) -> None:
        found.extend((item.result, str(item.error or "")) for item in items)

    config = BatcherConfig(retry=Retry(attempts=3, backoff_seconds=0.001, jitter=0))
    batcher: Any = AsyncBatcher(source, execute, end, on_failure=end, config=config, name="writer")
    batcher.register_event_type(Named, lambda record, event: [(word, word) for word in event.name.split()])
    with TestDriver(source) as driver:
        send(driver, "a1 b1", "c1")
        driver.settle()
        assert [result for result, _ in found] == [None] * 3
        assert all(said in error and bool(error) == bool(said) for _, error in found), found
        assert tries == ([3] * 3 if isinstance(answer, Exception) else [3])


PLANS: list[Any] = [
    ("jobs", "ab", "g's job answered str; it has to answer a tuple (key, item), or None"),
    ("jobs", ("k",), "answered tuple"),
    ("jobs", ([], "item"), "answered a key that is a list, which cannot be hashed"),
    ("jobs", ValueError("no plan"), "no plan"),
    ("jobs", asyncio.CancelledError(), "not its own"),
    *[("batches", planned, "writer") for planned in (5, "ab", [1], [("k",)], (("k", 1) for _ in range(2)))],
    ("batches", [([], 1)], "whose key cannot be hashed"),
    ("batches", ValueError("no plan"), "no plan"),
]


@pytest.mark.parametrize(("kind", "planned", "said"), PLANS)
def test_what_a_planner_does_wrong_is_its_events_failure(kind: str, planned: Any, said: str) -> None:
    world = World(kind, ahead=False)

    def plan(record: Any, event: Named) -> Any:
        if event.name != "bad":
            return event.name, event if kind == "jobs" else event.name
        if isinstance(planned, BaseException):
            raise planned
        return planned

    world.stage.register_event_type(Named, plan)
    with driven(world) as driver:
        send(driver, "a", "bad", "b")
        driver.settle()
        [reason] = reasons(driver)
        assert said.replace("g's job", "").replace("writer", "") in reason
        if not isinstance(planned, BaseException):
            assert "Named" in reason
            assert world.stage.name in reason
        assert names(driver) == ["A", "B"]


class Exit(BaseException):
    """As ``SystemExit``, which would end the test, too."""


async def exits() -> None:
    raise Exit("enough")


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("kind", STAGES)
def test_what_is_no_exception_ends_the_source_and_no_event(kind: str, late: bool) -> None:
    world = World(kind, late=late, fault=exits)
    with driven(world) as driver:
        send(driver, "bad")
        with pytest.raises(Exit, match="enough"):
            driver.settle()
        assert driver.dead_letters() == driver.outputs(OUT) == []
        assert world.trace == "0 bad"


@pytest.mark.parametrize("stops", ["by FATAL", "by Exit", "in a thread", "in a call"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_handler_that_answers_fatal_or_exits_stops_the_source(stops: str, ahead: bool) -> None:
    source = new_source()

    async def exit_call(_: Any) -> None:
        await exits()

    def exit_thread(_: Any) -> None:
        raise Exit("enough")

    batcher: AsyncBatcher[Any, Named] = AsyncBatcher(source, exit_thread if stops == "in a thread" else exit_call)

    @source.register_event_type(Named, concurrency=2)
    async def handler(ctx: EventContext[Any], event: Named) -> ExecutionState:
        if not ahead or "in a" in stops:
            await ctx.turn()
        if event.name == "b" and "in a" in stops:
            await batcher.submit(ctx, [("k", event)])
        if event.name == "b" and stops == "by Exit":
            await exits()
        return ExecutionState.FATAL if event.name == "b" else ExecutionState.COMPLETE

    with TestDriver(source) as driver:
        send(driver, "a", "b", "c")
        with pytest.raises((EventFailure, Exit), match=r"in\[0\]@1" if stops == "by FATAL" else "enough"):
            driver.settle()
        assert driver.dead_letters() == []
        assert stops != "by FATAL" or driver.committed_offsets() == {0: 1}


def test_a_job_that_swallows_its_cancellation_is_not_passed_on() -> None:
    source = new_source()
    second: list[str] = []

    async def first(event: Named) -> str:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            return "all the same"
        return event.name

    async def then(text: str) -> None:
        second.append(text)

    following: AsyncJobScheduler[Any, str, None] = AsyncJobScheduler(source, then)
    AsyncJobScheduler(source, first, then=following).register_event_type(Named, key=lambda event: "k")
    with TestDriver(source) as driver:
        send(driver, "a")
        driver.advance(1)
        driver.evict()
        driver.settle()
        assert second == ["a"]


def test_bytes_that_nobody_can_read_wait_behind_jobs() -> None:
    world = World("jobs", decode_policy=DEAD_LETTER)
    world.source.register_default_handler(lambda ctx, value: world.note(repr(value)))
    with driven(world) as driver:
        send(driver, "a:3")
        for value, kind in ((b"{not json", b"Named"), (b"raw", b"Unknown")):
            driver.send_record(Record("in", value, b"k", [(TYPE_HEADER, kind)], 0), wait=False)
        send(driver, "b:1")
        driver.advance(2)
        assert driver.dead_letters() == []
        assert watch(driver, world, 3) == "0 a b; 3 A b'raw' B @4"
        assert [letter.value for letter in driver.dead_letters()] == [b"{not json"]


def test_finalizers_may_fail_wait_and_schedule_again() -> None:
    tries: list[str] = []
    policy = Retry(attempts=3, backoff_seconds=0.001, then=ErrorResponse.DEAD_LETTER)
    source = new_source(error_policy=policy)

    async def shout(event: Named) -> str:
        return event.name.upper()

    def finalize(ctx: EventContext[Any], event: Named, result: str) -> None:
        ctx.forward(OUT, Named(f"{result} {touch(ctx, 'all')}"))

    again: Any = AsyncJobScheduler(source, shout, finalize, config=SchedulerConfig(concurrency=1))

    async def final(ctx: EventContext[Any], event: Named, result: str) -> Any:
        tries.append(event.name)
        match event.name:
            case "raise":
                touch(ctx, "all")
                raise RuntimeError("no")
            case "fail":
                touch(ctx, "all")
                return ctx.fail(RuntimeError("no"))
            case "twice" if ctx.attempt == 1:
                raise RuntimeError("not yet")
            case "again":
                with pytest.warns(DeprecationWarning, match="start a durable job"):
                    rest = again.schedule(ctx, Named("more"))
                return await rest
        return finalize(ctx, event, result)

    scheduler: Any = AsyncJobScheduler(source, shout, final, config=SchedulerConfig(concurrency=1))
    scheduler.register_event_type(Named, key=lambda event: event.name)
    with TestDriver(source) as driver:
        send(driver, "raise", "fail", "twice", "again", "z")
        driver.settle()
        assert names(driver) == ["TWICE 1", "MORE 2", "Z 3"]
        assert tries == ["raise"] * 3 + ["fail"] * 3 + ["twice"] * 2 + ["again", "z"]
        assert len(driver.dead_letters()) == 2


@pytest.mark.parametrize(("store", "state"), [(TOTALS, INTS.encode(2)), (Words, b"xx")], ids=["table", "words"])
@pytest.mark.parametrize("kind", STAGES)
def test_a_finalizer_that_fails_leaves_nothing_and_costs_no_second_call(kind: str, store: Any, state: bytes) -> None:
    """Also where the store cannot undo, and is restored."""
    world = World(kind, {"max_batch_size": 1} if kind == "batches" else {}, store=store)
    with driven(world) as driver:
        send(driver, "a", "b?", "c")
        driver.settle()
        assert (names(driver), reasons(driver)) == (["A", "C"], ["the finalizer fails"])
        assert list(driver.changelog(0).values()) == [state]
        assert world.trace.split().count("b?") == 1


def test_a_handler_that_goes_on_after_it_was_given_up_touches_nothing() -> None:
    source = new_source(drain_timeout_seconds=0.1)
    errors: list[BaseException] = []

    @source.register_event_type(Named, concurrency=1)
    async def handler(ctx: EventContext[Any], event: Named) -> None:
        await ctx.turn()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for use in (lambda: ctx.store.put("a", 1), lambda: ctx.forward(OUT, event)):
                try:
                    use()
                except StoreError as error:
                    errors.append(error)
            try:
                await ctx.turn()
            except StoreError as error:
                errors.append(error)

    with TestDriver(source) as driver:
        send(driver, "a")
        driver.advance(1)
        driver.leave()
        assert len(errors) == 3
        assert driver.outputs(OUT) == []
