"""Functions of jobs and batches: what is passed to them, on which threads and in which processes they run, and which
settings are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest

from streams import (
    AsyncBatcher,
    AsyncJobScheduler,
    BatcherConfig,
    BatchItem,
    EventContext,
    Retry,
    SchedulerConfig,
)
from streams.errors import ProcessJobError
from streams.metrics import EventFailed
from streams.outcomes import DEAD_LETTER
from streams.records import IncomingRecord
from streams.runtime.async_work.batch_stage import BatchDefinition, BatchStage
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from streams.testing import TestDriver
from tests.unit.async_kit import names, new_source, reasons, send
from tests.unit.runtime_kit import OUT, Bench
from tests.unit.waiting import PATIENCE
from tests.vocabulary import Named, Ring

pytestmark = pytest.mark.usefixtures("quiet")

Items = list[BatchItem[Any]]


def by_name(event: Named) -> str:
    return event.name


# -- what is passed in and out -----------------------------------------------------------------------------------------


def test_an_item_has_the_outcome_of_its_last_call_whatever_was_left_on_it() -> None:
    source, calls = new_source(), []

    async def execute(items: Items) -> list[int]:
        calls.append(len(items))
        if len(calls) == 1:
            raise ConnectionError
        for item in items:
            item.error = ValueError("nobody looks at that")
        return [7] * len(items)

    @source.register_event_type(Named)
    async def ask(ctx: EventContext[Any], event: Named) -> None:
        items = [BatchItem(event.name, event)]
        with pytest.raises(ConnectionError):
            await batcher.submit(ctx, items)
        await batcher.submit(ctx, items)
        ctx.forward(OUT, Named(str([item.result for item in items])))

    batcher: AsyncBatcher[Any, Any] = AsyncBatcher(source, execute)
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert (names(driver), reasons(driver)) == (["[7]"], [])


def test_an_object_that_is_the_item_of_many_events_has_a_result_for_each() -> None:
    """Plain functions, on a thread, get the items too; ``user_data`` is for the finalizer."""
    source, calls = new_source(), []

    def execute(items: Items) -> list[int]:
        calls.append(len(items))
        return list(range(len(items)))

    def results(ctx: EventContext[Any], items: Items) -> None:
        ctx.forward(OUT, Named(str([f"{item.user_data}{item.result}" for item in items])))

    shared = BatchItem("k", "always the same", user_data="no. ")
    AsyncBatcher(source, execute, results).register_event_type(Named, lambda record, event: [shared, shared])
    with TestDriver(source) as driver:
        send(driver, "a", "b")
        driver.settle()
        assert calls == [4]
        assert names(driver) == ["['no. 0', 'no. 1']", "['no. 2', 'no. 3']"]


@pytest.mark.parametrize("batched", [True, False])
def test_a_plain_function_around_an_async_one_is_awaited(batched: bool) -> None:
    source, done = new_source(), []

    async def work(given: Any) -> None:
        await asyncio.sleep(1)
        done.append(given)

    stage: Any = (AsyncBatcher if batched else AsyncJobScheduler)(source, lambda given: work(given))
    stage.register_event_type(Named, key=by_name)
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert len(done) == 1


def test_a_thread_that_raises_stop_iteration_fails_its_event() -> None:
    """Whose future would never be done."""
    source = new_source()
    jobs: Any = AsyncJobScheduler(source, lambda event: next(iter([])))
    jobs.register_event_type(Named, key=by_name)
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert "StopIteration" in reasons(driver)[0]


def test_retries_go_by_the_time_of_the_loop() -> None:
    source, times = new_source(), []

    async def job(event: Named) -> None:
        times.append(asyncio.get_running_loop().time())
        raise ConnectionError

    retry = Retry(attempts=50, backoff_seconds=5, max_backoff_seconds=5, jitter=0, timeout_seconds=12)
    jobs = AsyncJobScheduler(source, job, config=SchedulerConfig(concurrency=1, retry=retry))
    jobs.register_event_type(Named, key=by_name)
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert [round(time - times[0]) for time in times] == [0, 5, 10, 15], "what failed after 12 s is the last"
        assert driver.dead_letters()[0].header("__kes_dlq_attempts") == b"4"


# -- threads and processes ---------------------------------------------------------------------------------------------


async def test_threads_and_chains(bench: Bench) -> None:
    source, threads = bench.make(None), set[str]()

    async def second(text: str) -> str:
        return text + "2"

    def final(ctx: EventContext[Any], item: str, result: str) -> None:
        ctx.forward(OUT, Named(result), key=item)

    def first(event: Named) -> str:
        threads.add(threading.current_thread().name)
        return event.name + "1"

    following = AsyncJobScheduler(source, second, final, config=SchedulerConfig(concurrency=1))
    scheduler = AsyncJobScheduler(source, first, config=SchedulerConfig(concurrency=3), then=following)
    scheduler.register_event_type(Named, key=by_name)
    await bench.over("a", "b", "c")
    assert bench.broker.outputs() == ["a12", "b12", "c12"], "both stages"
    assert all(name.startswith("kes-job") for name in threads)


async def test_a_job_that_takes_too_long_fails_and_is_tried_again(bench: Bench) -> None:
    """On a thread, which cannot be cancelled; of tasks ``test_async_failures`` says so."""
    tries: list[int] = []
    release = threading.Event()

    def slow(event: Named) -> None:
        tries.append(1)
        if len(tries) == 1:
            release.wait(PATIENCE)

    retry = Retry(attempts=2, backoff_seconds=0.001, jitter=0)
    config = SchedulerConfig(concurrency=1, timeout_seconds=0.2, retry=retry)
    AsyncJobScheduler(bench.make(None), slow, config=config).register_event_type(Named, key=by_name)
    await bench.over("a")
    release.set()
    assert len(tries) == 2


class Stubborn(Exception):
    """Cannot be put together again by pickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def in_process(event: Named) -> str:
    """What the event's name says, in a process."""
    match event.name:
        case "raise":
            raise ValueError("raised there")
        case "stubborn":
            raise Stubborn("a", "b")
        case "exit":
            raise SystemExit(3)
        case "die":
            os._exit(1)
        case "interrupt":  # as Ctrl-C does, which is for all processes of a terminal
            os.kill(os.getpid(), signal.SIGINT)
        case "lambda":
            return lambda: None  # type: ignore[return-value]
    return f"{event.name}{os.getpid()}"


@pytest.mark.timeout(120)
async def test_processes(bench: Bench) -> None:
    measured: list[Any] = []
    source = bench.make(None, metrics_handler=measured.append, error_policy=DEAD_LETTER)

    def final(ctx: EventContext[Any], event: Named, result: str) -> None:
        ctx.forward(OUT, Named(result))

    jobs = AsyncJobScheduler(source, in_process, final, config=SchedulerConfig(concurrency=2), kind="process")
    jobs.register_event_type(Named, key=by_name)
    bench.begin("a", "raise", "stubborn", "exit", "die", "lambda", "interrupt")
    deadline = time.monotonic() + 90.0  # a busy machine takes seconds to start each process
    while bench.broker.offsets.get(0) != 7:
        assert time.monotonic() < deadline, measured
        await asyncio.sleep(0.01)
    first, last = bench.broker.outputs()
    assert (first[:1], last[:9]) == ("a", "interrupt")
    assert str(os.getpid()) not in (first[1:], last[9:])
    told = [one.error for one in measured if isinstance(one, EventFailed)]
    assert told[0] == "ValueError: raised there"
    for text, said in zip(
        told[1:],
        [
            "cannot be sent between processes",
            "in_process raised SystemExit: 3",
            "the process of in_process died",
            "cannot be sent between processes",
        ],
        strict=True,
    ):
        assert said in text
        assert ProcessJobError.__name__ in text


async def test_room_for_items_comes_free_also_by_withdrawing() -> None:
    never: Any = lambda items: asyncio.Event().wait()  # noqa: E731
    config = BatcherConfig(max_batch_size=1, max_concurrent_batches=1, max_queued_items=2)
    definition = BatchDefinition(name="b", kind="async", execute=never, finalizer=None, on_failure=None, config=config)
    host: Any = None
    stage, woken = BatchStage(definition, host), list[int]()
    entries = []
    for offset, key in enumerate("abc"):
        record, buffer = IncomingRecord("in", 0, offset, None, b"", None), ReorderBuffer(lambda: woken.append(1))
        entries.append(Entry(0, record, None, None, buffer))
        entries[-1].plan = [BatchItem(key, key)]
    assert [stage.begin(entry) for entry in entries] == [True, True, False]
    entries[1].drop()
    assert woken == [1]
    assert stage.begin(entries[2])
    stage.close()


# -- interjections, timers ---------------------------------------------------------------------------------------------


def test_a_reason_that_is_no_exception_is_told() -> None:
    source = new_source()
    source.register_event_type(Named, lambda ctx, event: ctx.fail(event.name))  # type: ignore[arg-type]
    with TestDriver(source) as driver:
        driver.send(Named("a"))
        assert reasons(driver) == ["ctx.fail was given 'a'; it takes an exception"]


def test_an_interjection_that_raises_stop_iteration_is_undone_and_the_source_goes_on() -> None:
    source = new_source()
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
    source = new_source()
    source.register_event_type(Named, lambda ctx, event: ctx.schedule_at(1000, Ring(event.name), name="n") and None)  # type: ignore[arg-type,return-value]

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
