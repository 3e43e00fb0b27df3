"""What is closed while somebody still uses it: who asks is told so, nothing fails because of it, no thread is left."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace
from typing import Any

import anyio.lowlevel
import pytest

from streams import DEAD_LETTER, AsyncJobScheduler, EventContext
from streams.core.assignor import sticky_plan
from streams.errors import BrokerUnavailable, ConfigError, Stopped, TopicError
from streams.kafka.group import membership
from streams.kafka.group.connect import connect_group
from streams.kafka.questions.takeover import WireTakeOver
from streams.kafka.wire.client import WireClient
from streams.runtime import engine as lifecycle
from streams.runtime import system
from streams.runtime.bridge import Worker
from streams.runtime.ownership.range_reader import RangeReader
from tests.unit.runtime_kit import Bench, Connections, nothing
from tests.unit.waiting import PATIENCE, wait_until
from tests.vocabulary import Named

LONG = 60.0
"""More than a test may take: who waits for its deadline fails by ``no answer in time``, or by the test's own limit."""

pytestmark = pytest.mark.timeout(90)


# ------------------------------------------------------------------------------------------------ the client itself


class Desk:
    """A client without a broker, and somebody who asks it on a thread of its own."""

    def __init__(self) -> None:
        self.client = WireClient("127.0.0.1:1", "test")
        self._threads = ThreadPoolExecutor()

    def ask(self, work: Callable[[], Awaitable[Any]], question: Callable[[float], Any] | None = None) -> Future[Any]:
        call = question or (lambda deadline: self.client.call(work, deadline))
        return self._threads.submit(call, time.monotonic() + LONG)

    def end(self) -> None:
        self.client.close(1.0)
        self._threads.shutdown()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.end()


@pytest.mark.parametrize("moment", ["it waits", "a take-over asks", "too late", "its thread is stuck"])
def test_a_question_is_told_that_the_client_was_closed(
    desk: Desk, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes between the look whether it is closed and the question, and one whose thread does not end."""
    client, stuck, take_over = desk.client, threading.Event(), WireTakeOver(desk.client, "group", "topic")
    posted = threading.Event()
    post = client.post

    def close_before_it_is_posted(_: Any) -> bool:
        monkeypatch.undo()
        client.close(1.0)
        return True

    def note(work: Any) -> bool:
        post(work)
        posted.set()
        return True

    client.start()
    monkeypatch.setattr(client, "post", close_before_it_is_posted if moment == "too late" else note)
    if moment == "its thread is stuck":
        post(lambda: stuck.wait(LONG))
    if moment == "a take-over asks":
        asked = desk.ask(client.connected, lambda deadline: take_over.log_range("topic", [0], deadline))
    else:
        asked = desk.ask(client.connected)
    try:
        if moment != "too late":
            assert posted.wait(PATIENCE)
            if moment != "its thread is stuck":
                wait_until(lambda: client._tasks)
            client.close(0.1 if moment == "its thread is stuck" else 1.0)
        with pytest.raises(BrokerUnavailable, match="was closed"):
            asked.result(PATIENCE)
    finally:
        stuck.set()


def test_a_client_that_is_closed_or_not_started_refuses_questions(desk: Desk) -> None:
    for end in (lambda: None, lambda: desk.client.close(1.0)):
        end()
        with pytest.raises(BrokerUnavailable, match="is closed"):
            desk.ask(desk.client.connected).result(PATIENCE)


# -------------------------------------------------------------------------------------------------- memberships


@pytest.mark.parametrize("closing", [True, False], ids=["while it is closed", "at work"])
def test_what_meets_a_client_that_is_closed_is_no_failure_of_the_membership(
    closing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {"cooperative-sticky": sticky_plan})
    steps = []

    async def connected() -> None: ...

    async def step() -> None:
        steps.append(1)
        member._stopped = closing or len(steps) == 2
        raise RuntimeError("NetworkSelector closed!")

    monkeypatch.setattr(member, "_step", step)
    monkeypatch.setattr(member._client, "connected", connected)
    monkeypatch.setattr(membership, "_LONGEST_PAUSE", 0.0)
    asyncio.run(member._run())
    member.close(1.0)
    assert len(steps) == (1 if closing else 2)
    assert ("unexpected failure" in caplog.text) is not closing


# ------------------------------------------------------------------------------------------------ the event source


def ignore(ctx: EventContext[Any], event: Named) -> None: ...


def begin(bench: Bench, settings: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Connections:
    """Run a source with these settings, whose connections have these attributes."""
    bench.make(ignore, **settings)
    bench.run()
    for name, value in changes.items():
        setattr(bench.connections, name, value)
    return bench.connections


def rounds(loop: asyncio.AbstractEventLoop) -> None:
    """On another thread: wait until the loop has done what it has heard so far, and what follows from it."""

    async def turn() -> None:
        for _ in range(100):
            await anyio.lowlevel.checkpoint()

    asyncio.run_coroutine_threadsafe(turn(), loop).result(PATIENCE)


@pytest.mark.parametrize("end", ["stop", "stop_now", "cancel"])
@pytest.mark.parametrize("question", ["fence_departed", "stable_offsets", "log_range", "identity"])
async def test_a_take_over_whose_client_is_closed_is_no_failure(
    bench: Bench, question: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the question raises then, and however long the closing takes after it."""
    begin(bench)
    group, loop, asked, met = bench.connections.membership, asyncio.get_running_loop(), threading.Event(), []

    def ask(*_: Any) -> Any:
        asked.set()
        assert group.closed.wait(PATIENCE)
        met.append(question)
        raise RuntimeError("NetworkSelector closed!")

    def close(_: float) -> None:
        group.closed.set()
        wait_until(lambda: met)
        rounds(loop)

    group.close = close  # type: ignore[method-assign]
    setattr(group, question, ask)
    await bench.until(asked.is_set, "the take-over asks")
    if end == "cancel":
        await bench.cancel()
    else:
        bench.source._run.ask_to_stop(drain=end == "stop")
        await asyncio.wait_for(bench.tasks[-1], PATIENCE)
    failures = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record for record in failures if record.name != system.__name__] == []  # the watchdog, of a busy machine
    await bench.until_all_threads_ended()


async def test_what_failed_before_the_stop_is_raised(bench: Bench) -> None:
    begin(bench)
    group, closing, stopped = bench.connections.membership, threading.Event(), threading.Event()

    def ask(*_: Any) -> Any:
        raise TopicError("it is gone")

    def close(_: float) -> None:
        closing.set()
        assert stopped.wait(PATIENCE)

    group.log_range, group.close = ask, close  # type: ignore[method-assign]
    await bench.until(closing.is_set, "the failure closes the engine")
    bench.source._run.ask_to_stop(drain=False)
    stopped.set()
    with pytest.raises(TopicError, match="it is gone"):
        await asyncio.wait_for(bench.tasks[-1], PATIENCE)


class Board:
    """A status board whose making takes its time."""

    def __init__(self) -> None:
        self.begun, self.go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def make(self) -> Board:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        return self

    def publish(self, *_: Any) -> None:
        if self.closed.is_set():
            raise RuntimeError("NetworkSelector closed!")

    def remove(self, *_: Any) -> None: ...

    def close(self) -> None:
        self.closed.set()


async def test_a_status_board_that_is_being_made_at_the_stop_is_closed(bench: Bench) -> None:
    board = Board()
    begin(bench, status_board=board.make)
    await bench.until(board.begun.is_set, "it is being made")
    bench.source._run.ask_to_stop(drain=False)
    await bench.until(bench.connections.membership.closed.is_set, "it leaves")
    board.go.set()
    await asyncio.wait_for(bench.tasks[-1], PATIENCE)
    await asyncio.to_thread(board.closed.wait, PATIENCE)
    assert board.closed.is_set()
    await bench.until_all_threads_ended()


async def test_no_status_board_is_made_after_the_end(bench: Bench) -> None:
    """The worker comes to it late."""
    board, running = Board(), asyncio.get_running_loop()
    board.go.set()
    begin(bench, status_board=board.make)
    await bench.until(lambda: bench.source._run.engine, "it runs")
    engine = bench.engine
    await bench.until(board.begun.is_set, "there is one")
    engine.status._board = None
    board.begun.clear()
    bench.source._run.ask_to_stop(drain=False)
    await asyncio.wait_for(bench.tasks[-1], PATIENCE)
    await running.run_in_executor(None, engine.status._publish, {})
    assert not board.begun.is_set()


@pytest.mark.parametrize("impatience", ["cancelled again", "too late"])
async def test_everything_is_closed_in_the_end_when_leaving_takes_too_long(
    bench: Bench, impatience: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if impatience == "too late":
        monkeypatch.setattr(lifecycle, "CLOSE_SECONDS", -0.99)
    board, elsewhere, left = Board(), Board(), threading.Event()
    board.go.set()
    connections = begin(bench, {"source_bootstrap_servers": "elsewhere:1"}, status_board=board.make)
    group = connections.membership
    log = SimpleNamespace(log_range=group.log_range, identity=group.identity, close=elsewhere.close)
    connections.source_topics = connections.topics  # type: ignore[attr-defined]
    connections.source_log = lambda: log  # type: ignore[attr-defined]

    def close(_: float) -> None:
        group.closed.set()
        assert left.wait(PATIENCE)

    group.close = close  # type: ignore[method-assign]
    await bench.until_active()
    await bench.until(board.begun.is_set, "something is told")
    task = bench.tasks[-1]
    if impatience == "too late":
        bench.source._run.ask_to_stop(drain=False)
    else:
        task.cancel()
        await bench.until(group.closed.is_set, "it leaves")
        task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.done()
    left.set()
    for what in (board, elsewhere):
        assert await asyncio.to_thread(what.closed.wait, PATIENCE)
    await bench.until_all_threads_ended()


async def test_who_is_cancelled_again_while_its_jobs_end_lets_everything_go(bench: Bench) -> None:
    begun, ending, end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def job(event: Named) -> None:
        begun.set()
        try:
            await end.wait()
        finally:
            ending.set()
            await end.wait()

    AsyncJobScheduler(bench.make(None), job).register_event_type(Named, key=lambda event: event.name)
    bench.begin("a")
    await bench.until(begun.is_set, "it is at work")
    engine = bench.engine
    task = bench.tasks[-1]
    task.cancel()
    await asyncio.wait_for(ending.wait(), PATIENCE)
    await bench.until(lambda: not engine.stages._open, "it waits for its jobs")
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.done()
    await bench.until_all_threads_ended()
    end.set()


@pytest.mark.parametrize("work", ["idle", "async", "concurrent", "callback"])
def test_the_end_of_the_event_loop_is_a_cancellation_and_no_error(work: str, caplog: pytest.LogCaptureFixture) -> None:
    """It cancels all tasks, each for itself."""
    tasks = list[asyncio.Task[None]]()

    async def run_and_leave() -> Bench:
        bench, begun = Bench(), asyncio.Event()

        async def wait(ctx: EventContext[Any], event: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        async def activated(source: object, change: object) -> None:
            if work == "callback":
                begun.set()
                await asyncio.Event().wait()

        source = bench.make(error_policy=DEAD_LETTER)
        source.on_activated(activated)
        options: Any = {"concurrency": 2} if work == "concurrent" else {}
        handlers: dict[str, Any] = {"async": wait, "concurrent": wait}
        source.register_event_type(Named, handlers.get(work, nothing), **options)
        tasks.append(await bench.start("a"))
        if work != "idle":
            await begun.wait()
        return bench

    bench = asyncio.run(run_and_leave())
    assert tasks[0].cancelled()
    assert not bench.broker.logs["g.in.dead-letters", 0]
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


async def test_what_can_not_be_connected_leaves_no_thread(bench: Bench) -> None:
    def group(_: Any) -> Any:
        raise ConfigError("a strategy that it cannot run")

    begin(bench, group=group)
    with pytest.raises(ConfigError):
        await bench.tasks[-1]
    await bench.until_all_threads_ended()


async def test_a_look_up_that_nobody_waits_for_any_more_ends() -> None:
    """It would read on for as long as something comes."""
    reading, closed = threading.Event(), threading.Event()

    def read(*_: Any, cancelled: Callable[[], bool], **__: Any) -> None:
        reading.set()
        wait_until(cancelled)
        raise Stopped("cancelled")

    reader = SimpleNamespace(read=read, close=closed.set)
    connections: Any = SimpleNamespace(worker=Worker, reader=lambda: reader)
    hung_calls: Any = SimpleNamespace(abandon=lambda *_: None)
    reader_of_ranges = RangeReader(connections, hung_calls)
    look_up = asyncio.create_task(reader_of_ranges.read("log", {0: (0, 1)}, lambda *_: None, lambda: False))
    await asyncio.to_thread(reading.wait, PATIENCE)
    look_up.cancel()
    await asyncio.wait([look_up])
    assert await asyncio.to_thread(closed.wait, PATIENCE / 2)
