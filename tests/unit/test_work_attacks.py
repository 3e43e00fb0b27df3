"""What functions of jobs, batches, timers and interjections do that nobody expects, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from streams import (
    DEAD_LETTER,
    AsyncBatcher,
    AsyncJobScheduler,
    BatcherConfig,
    BatchItem,
    BatchProducer,
    EventContext,
    EventSource,
    EventSourceConfig,
    JobRetry,
    MissedRuns,
    SchedulerConfig,
    Table,
)
from streams.errors import ConfigError, RegistrationError
from streams.testing import TestDriver
from tests.unit.runtime_kit import Named
from tests.vocabulary import Ring

Items = list[BatchItem[Any]]
OUT = "out"


class Exit(BaseException):
    """As ``SystemExit``, which would end the test, too."""


def made(partitions: int = 1) -> EventSource[Table[str, int]]:
    config = EventSourceConfig(group_id="attacked", topic="in", num_partitions=partitions, error_policy=DEAD_LETTER)
    return EventSource(config, Table.factory(key=str, value=int))


def by_name(event: Named) -> str:
    return event.name


def send_names(ctx: EventContext[Any], items: Items) -> None:
    ctx.forward(OUT, Named("+".join(f"{item.value.name}:{item.result}" for item in items)))


def names(driver: TestDriver[Any]) -> list[str]:
    return [event.name for event in driver.outputs(OUT, Named)]


def reasons(driver: TestDriver[Any]) -> list[str]:
    return [(letter.header("__kes_dlq_message") or b"").decode() for letter in driver.dead_letters()]


def send(driver: TestDriver[Any], *names: str) -> None:
    """All of them, before any is handled."""
    for name in names:
        driver.send(Named(name), wait=False)
    driver.settle()


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_call_may_use_up_its_list_and_each_attempt_has_its_own() -> None:
    source, attempts = made(), []

    async def execute(items: Items) -> None:
        attempts.append(len(items))
        items.clear()
        if len(attempts) == 1:
            raise ConnectionError

    settings = BatcherConfig(retry=JobRetry(attempts=2))
    AsyncBatcher(source, execute, send_names, config=settings).register_event_type(Named, key=by_name)
    with TestDriver(source) as driver:
        send(driver, "a", "b")
        assert names(driver) == ["a:None", "b:None"]
        assert attempts == [2, 2]


def test_a_key_that_cannot_be_hashed_is_its_events_failure() -> None:
    source = made()
    batcher: AsyncBatcher[Any, Any] = AsyncBatcher(source, lambda items: None, send_names)
    batcher.register_event_type(Named, key=lambda event: [event.name] if event.name == "bad" else event.name)  # type: ignore[arg-type,return-value]
    with TestDriver(source) as driver:
        send(driver, "bad", "good")
        assert names(driver) == ["good:None"]
        assert "whose key cannot be hashed" in reasons(driver)[0]


@pytest.mark.parametrize("ahead", [True, False])
def test_what_ends_a_process_ends_the_source_and_no_event(ahead: bool) -> None:
    source = made()

    async def execute(items: Items) -> None:
        raise Exit("enough")

    async def ask(ctx: EventContext[Any], event: Named) -> None:
        await batcher.submit(ctx, [(event.name, event)])

    batcher = AsyncBatcher(source, execute, send_names, on_failure=send_names)
    if ahead:
        batcher.register_event_type(Named, key=by_name)
    else:
        source.register_event_type(Named, ask)
    with TestDriver(source) as driver:
        with pytest.raises(Exit, match="enough"):
            driver.send(Named("a"))
        assert driver.dead_letters() == driver.outputs(OUT) == []


def test_a_call_that_cancels_itself_fails_its_events_and_the_next_one_runs() -> None:
    source = made()

    async def execute(items: Items) -> None:
        task = asyncio.current_task()
        assert task is not None
        if items[0].value.name == "bad":
            task.cancel()
        await asyncio.sleep(0)

    AsyncBatcher(source, execute, send_names).register_event_type(Named, key=lambda event: "one key")
    with TestDriver(source) as driver:
        driver.send(Named("bad"))
        driver.send(Named("good"))
        assert names(driver) == ["good:None"]
        assert "a cancellation that is not its own" in reasons(driver)[0]


def test_an_item_has_the_outcome_of_its_last_call_whatever_was_left_on_it() -> None:
    source, calls = made(), []

    async def execute(items: Items) -> list[int]:
        calls.append(len(items))
        if len(calls) == 1:
            raise ConnectionError
        for item in items:
            item.error = ValueError("nobody looks at that")
        return [7] * len(items)

    async def ask(ctx: EventContext[Any], event: Named) -> None:
        items = [BatchItem(event.name, event)]
        with pytest.raises(ConnectionError):
            await batcher.submit(ctx, items)
        await batcher.submit(ctx, items)
        send_names(ctx, items)

    batcher: AsyncBatcher[Any, Any] = AsyncBatcher(source, execute)
    source.register_event_type(Named, ask)
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert (names(driver), reasons(driver)) == (["a:7"], [])


def test_an_object_that_is_the_item_of_many_events_has_a_result_for_each() -> None:
    source, calls = made(), []

    async def execute(items: Items) -> list[int]:
        calls.append(len(items))
        return list(range(len(items)))

    def results(ctx: EventContext[Any], items: Items) -> None:
        ctx.forward(OUT, Named(str([item.result for item in items])))

    shared = BatchItem("k", "always the same")
    AsyncBatcher(source, execute, results).register_event_type(Named, lambda record, event: [shared, shared])
    with TestDriver(source) as driver:
        send(driver, "a", "b")
        assert calls == [4]
        assert names(driver) == ["[0, 1]", "[2, 3]"]


# -- chains, retries, threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["jobs", "batches"])
def test_the_bounds_of_a_later_stage_hold_back_the_first(last: str) -> None:
    source = made()

    async def quick(event: Named) -> Named:
        return event

    async def slow(_: Any) -> None:
        await asyncio.sleep(5)

    then: Any
    if last == "jobs":
        then = AsyncJobScheduler(source, slow, config=SchedulerConfig(concurrency=1, max_concurrent_keys=3), name=last)
    else:
        then = AsyncBatcher(source, slow, config=BatcherConfig(max_batch_size=2, max_queued_items=3), name=last)
    first = AsyncJobScheduler(source, quick, then=then, config=SchedulerConfig(concurrency=4), name="first")
    first.register_event_type(Named, key=by_name)
    with TestDriver(source, patience=10_000) as driver:
        for number in range(200):
            driver.send(Named(str(number)), wait=False)
        for _ in range(20):
            driver.advance(1)
            there = sum(stage.running + stage.waiting for stage in driver.statistics().stages)
            assert 3 <= there < 100, "what is there, and what was on the way: never all"
        driver.settle()
        assert driver.committed_offsets() == {0: 200}


@pytest.mark.parametrize("early", ["before", "after"])
@pytest.mark.parametrize("last", ["jobs", "batches"])
def test_a_failure_holds_up_nothing_that_comes_before_it(last: str, early: str) -> None:
    """The last stage takes events from two ways, so the later event of a key may be the first one there. It fails, and
    holds the key until its turn, for which it needs the earlier ones: they may be there by then, or not."""
    source, order = made(), []

    async def far(event: Named) -> Named:
        await asyncio.sleep(1 if early == "before" else 5)
        return event

    async def near(event: Named | Ring) -> None:
        order.append(event.name)
        await asyncio.sleep(3)
        if event.name.startswith("bad"):
            raise ValueError(event.name)

    async def all_near(items: Items) -> list[Any]:
        return await asyncio.gather(*(near(item.value) for item in items), return_exceptions=True)

    then: Any
    if last == "jobs":
        then = AsyncJobScheduler(source, near, config=SchedulerConfig(concurrency=4))
    else:
        then = AsyncBatcher(source, all_near, config=BatcherConfig(max_batch_size=1))
    then.register_event_type(Ring, key=lambda event: "k")
    AsyncJobScheduler(source, far, then=then, config=SchedulerConfig(concurrency=4)).register_event_type(
        Named, key=lambda event: "k"
    )
    with TestDriver(source) as driver:
        for event in (Named("1"), Named("bad 2"), Named("3"), Ring("bad 4"), Ring("5")):
            driver.send(event, wait=False)
        driver.settle()
        assert order == ["bad 4", "1", "bad 2", "3", "5"], "one at a time, and a failure holds back what is behind it"
        assert reasons(driver) == ["bad 2", "bad 4"]


def test_retries_go_by_the_time_of_the_loop() -> None:
    source, times = made(), []

    async def job(event: Named) -> None:
        times.append(asyncio.get_running_loop().time())
        raise ConnectionError

    retry = JobRetry(attempts=50, wait_initial_seconds=5, wait_max_seconds=5, wait_jitter_seconds=0, timeout_seconds=12)
    jobs = AsyncJobScheduler(source, job, config=SchedulerConfig(concurrency=1, retry=retry))
    jobs.register_event_type(Named, key=by_name)
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert [round(time - times[0]) for time in times] == [0, 5, 10, 15], "what failed after 12 s is the last"
        assert driver.dead_letters()[0].header("__kes_dlq_attempts") == b"4"


@pytest.mark.parametrize("batched", [True, False])
def test_a_plain_function_around_an_async_one_is_awaited(batched: bool) -> None:
    source, done = made(), []

    async def work(given: Any) -> None:
        await asyncio.sleep(1)
        done.append(given)

    settings: Any = {"key": by_name}
    if batched:
        AsyncBatcher(source, lambda items: work(items)).register_event_type(Named, **settings)
    else:
        AsyncJobScheduler(source, lambda event: work(event)).register_event_type(Named, **settings)
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert len(done) == 1


def test_a_reason_that_is_no_exception_is_told() -> None:
    source = made()
    source.register_event_type(Named, lambda ctx, event: ctx.fail(event.name))  # type: ignore[arg-type]
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert reasons(driver) == ["ctx.fail was given 'a'; it takes an exception"]


# -- interjections, timers ---------------------------------------------------------------------------------------------


def test_an_interjection_that_raises_stop_iteration_is_undone_and_the_source_goes_on() -> None:
    source = made()
    source.register_event_type(Named, lambda ctx, event: ctx.forward(OUT, event))

    def ask(ctx: EventContext[Any]) -> Any:
        ctx.store.put("a", 1)
        return next(iter([]))

    with TestDriver(source) as driver:
        with pytest.raises(RuntimeError, match="the function raised StopIteration"):
            driver.interject(0, ask)
        driver.send(Named("a"))
        assert names(driver) == ["a"]
        assert list(driver.store(0).items()) == []


def test_timers_without_name_that_a_timer_sets_again_are_different_ones() -> None:
    """It was set anew, by name, for the very time for which it had been set before."""
    source = made()
    source.register_event_type(Named, lambda ctx, event: ctx.schedule_at(1000, Ring(event.name), name="n") and None)

    @source.register_event_type(Ring)
    def _(ctx: EventContext[Any], event: Ring) -> None:
        if event.name.startswith("again "):
            ctx.forward(OUT, Named(event.name))
        else:
            for _ in range(2):
                ctx.schedule_in(10, Ring(f"again {event.name}"))

    with TestDriver(source) as driver:
        for name in "ab":
            driver.send(Named(name))
            driver.advance(1)
        assert driver.statistics().partitions[0].timers == 4
        driver.advance(30)
        assert names(driver) == ["again a"] * 2 + ["again b"] * 2


# -- settings ----------------------------------------------------------------------------------------------------------

EVERYTHING: Any = made()


async def nothing(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: AsyncJobScheduler(EVERYTHING, nothing, config=8), ConfigError, "must be a SchedulerConfig"),
        (lambda: AsyncBatcher(EVERYTHING, nothing, config=8), ConfigError, "must be a BatcherConfig"),
        (lambda: AsyncJobScheduler(EVERYTHING, None), RegistrationError, "None, which cannot be called"),
        (lambda: AsyncJobScheduler(EVERYTHING, nothing, "f"), RegistrationError, "finalizer of the jobs nothing"),
        (lambda: AsyncBatcher(EVERYTHING, nothing, on_failure="f"), RegistrationError, "on_failure of the batcher"),
        (lambda: AsyncBatcher(EVERYTHING, 5), RegistrationError, "cannot be called"),
        (lambda: AsyncJobScheduler(EVERYTHING, nothing).register_event_type(Named, key="n"), RegistrationError, "key"),
        (lambda: AsyncBatcher(EVERYTHING, nothing).register_event_type(Named, key="n"), RegistrationError, "key"),
        (lambda: AsyncBatcher(EVERYTHING, nothing).register_event_type(Named, nothing), RegistrationError, "is async"),
        (lambda: BatchProducer(EVERYTHING).register_event_type(Named, nothing), RegistrationError, "is async"),
        (lambda: BatchProducer(EVERYTHING, 5), RegistrationError, "finalizer of the producer"),
        (
            lambda: BatchProducer(EVERYTHING, delivery_timeout_seconds="9"),
            ConfigError,
            "delivery_timeout_seconds is '9'",
        ),
        (lambda: EVERYTHING.register_event_type(Named, 5), RegistrationError, "the handler of Named is 5"),
        (lambda: EVERYTHING.schedule_interjection(5, every=1), RegistrationError, "cannot be called"),
        (lambda: EVERYTHING.register_event_type(Named, nothing, concurrency="4"), ConfigError, "the concurrency of"),
        (lambda: EVERYTHING.schedule_interjection(nothing, every=None), ConfigError, "every is None"),
        (lambda: EVERYTHING.schedule_interjection(nothing, every="10"), ConfigError, "every is '10'"),
        (lambda: EVERYTHING.schedule_interjection(nothing, every=float("inf")), ConfigError, "every is inf"),
        (lambda: EVERYTHING.schedule_interjection(nothing, every=1, missed="skip"), ConfigError, str(MissedRuns.SKIP)),
        (lambda: JobRetry(attempts=2.5), ConfigError, r"JobRetry\.attempts"),  # type: ignore[arg-type]
        (lambda: JobRetry(wait_max_seconds=float("nan")), ConfigError, r"JobRetry\.wait_max_seconds"),
        (lambda: JobRetry(timeout_seconds=float("nan")), ConfigError, r"JobRetry\.timeout_seconds"),
        (lambda: JobRetry(on=ValueError), ConfigError, r"JobRetry\.on .* a tuple"),  # type: ignore[arg-type]
        (lambda: SchedulerConfig(concurrency=1, timeout_seconds="5"), ConfigError, r"SchedulerConfig\.timeout_seconds"),  # type: ignore[arg-type]
        (lambda: SchedulerConfig(concurrency=1, retry=3), ConfigError, r"SchedulerConfig\.retry"),  # type: ignore[arg-type]
        (lambda: BatcherConfig(max_delay_seconds="1"), ConfigError, r"BatcherConfig\.max_delay_seconds"),  # type: ignore[arg-type]
        (lambda: BatcherConfig(retry=3), ConfigError, r"BatcherConfig\.retry"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    make: Callable[[], Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        make()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_time_does_not_go_on_for_ever(seconds: float) -> None:
    source = made()
    source.register_event_type(Named, lambda ctx, event: None)
    with TestDriver(source) as driver, pytest.raises(ConfigError, match="time cannot go on by"):
        driver.advance(seconds)
