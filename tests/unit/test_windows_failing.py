"""Windows that cannot be reported: each is a failure of its own, with a policy and a place in the order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest
from anyio.lowlevel import checkpoint

from streams import DEAD_LETTER, SKIP, EventContext, EventSource, EventSourceConfig, Retry
from streams.codecs import int_codec
from streams.errors import ConfigError, EventFailure
from streams.looks.letter_choice import problems_of
from streams.looks.letters import Letter
from streams.metrics import EventFailed, Measurement
from streams.records import IncomingRecord
from streams.runtime.partition.timekeeping import WindowFailed
from streams.stores import NamedTable, Stores, Window, Windows
from streams.testing import TestDriver
from streams.testing.fault_points import Point
from tests.unit.windows_kit import OUT, Seen, Told, count, outputs, seen, source_of, told


def poisoned(times: int = 99) -> Callable[..., None]:
    """An ``on_close`` that fails for one key, so often."""
    left = iter(range(times))

    def on_close(ctx: EventContext[Any], key: str, window: Window, number: int) -> None:
        told(ctx, key, window, number)
        ctx.store.carts.put(f"closed {key}", 1)
        if key == "b" and next(left, None) is not None:
            raise ValueError("cannot report this one")

    return on_close


def on_seen(source: EventSource[Any], kind: str = "plain") -> None:
    def handle(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)
        ctx.forward(OUT, Told("handled", event.key, ctx.attempt), key=event.key, partition=0)

    async def waiting(ctx: EventContext[Any], event: Seen) -> None:
        await checkpoint()
        handle(ctx, event)

    async def concurrent(ctx: EventContext[Any], event: Seen) -> None:
        await ctx.turn()
        handle(ctx, event)

    def batch(ctx: Any, events: list[Seen]) -> None:
        for event, record in zip(events, ctx.records, strict=True):
            ctx.store.win.add(event.key, event, at_ms=record.timestamp_ms)
            ctx.forward(OUT, Told("handled", event.key, ctx.attempt), key=event.key, partition=0)

    if kind == "batch":
        source.register_event_type(Seen, batch, batch=True)
    elif kind == "concurrent":
        source.register_event_type(Seen, concurrent, concurrency=4)
    elif kind == "blocking":
        source.register_event_type(Seen, handle, blocking=True)
    else:
        source.register_event_type(Seen, waiting if kind == "async" else handle)


def minute_of(driver: TestDriver[Any], before_it_ends: Callable[[], object] = lambda: None) -> None:
    """Windows of a, b and c, which an event of z closes."""
    for key in "abc":
        driver.send_record(seen(key, 1_000), wait=False)
    driver.settle()
    before_it_ends()
    driver.send_record(seen("z", 200_000), wait=False)
    driver.settle()


def fact(letter: IncomingRecord, name: str) -> str:
    return (letter.header(f"__kes_dlq_{name}") or b"").decode()


POINTS: Final[tuple[Point, ...]] = (
    "handler.after", "flush.before", "flush.after", "send_offsets.after", "commit.before", "commit.after",
)  # fmt: skip
KINDS = ["plain", "async", "blocking", "concurrent", "batch"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_that_fails_is_no_events_failure(kind: str) -> None:
    """It is dead-lettered in its place among the others, in the event's transaction; all events go on."""
    measured: list[Measurement] = []
    source = source_of(on_close=poisoned(), error_policy=DEAD_LETTER, metrics_handler=measured.append)
    on_seen(source, kind)
    with TestDriver(source, topics={OUT: 1}) as driver:
        minute_of(driver, lambda: driver.at("commit.before", driver.crash))
        driver.restart()
        driver.settle()
        driver.send_record(seen("y", 400_000))
        assert [one.key for one in outputs(driver, "handled")] == ["a", "b", "c", "z", "y"]
        assert {one.number for one in outputs(driver, "handled")} == {1}, "that is no attempt at them"
        assert outputs(driver, "closed") == [Told("closed", key, 1) for key in ("a", "c", "z")]
        order = [f"{one.what} {one.key}" for one in driver.outputs(OUT, Told)]
        assert order.index("closed a") < order.index("closed c") < order.index("handled z")
        (letter,) = driver.dead_letters()
        assert (letter.key, letter.value) == (b"b", int_codec.encode(1))
        names = ("kind", "window", "start_ms", "end_ms", "error", "message", "attempts", "offset")
        assert [fact(letter, name) for name in names] == [
            "window", "Shop.win", "0", "60000", "ValueError", "cannot report this one", "1", "-1",
        ]  # fmt: skip
        assert {(one.offset, one.response) for one in measured if isinstance(one, EventFailed)} == {(-1, "dead_letter")}
        assert "closed b" not in driver.store(0).carts, "it left nothing else"
        box: Any = SimpleNamespace(partitions=lambda topic: 1)
        (problem,) = problems_of(box, [Letter(letter, 0, False)], {}, None)
        assert "it is the window Shop.win" in problem, "and is not sent again as an event"
        assert [key for key, *_ in driver.store(0).win.items()] == ["y"], "it is closed, as the others"
        driver.check()


@pytest.mark.parametrize(
    ("on_error", "times", "letters"),
    [
        (Retry(attempts=3, backoff_seconds=0.01), 2, None),
        (Retry(attempts=3, backoff_seconds=0.01, then=DEAD_LETTER.then), 99, "3"),
        (SKIP, 99, None),
    ],
    ids=["tried again", "in vain", "skipped"],
)
def test_a_window_has_a_policy_of_its_own(
    on_error: Retry, times: int, letters: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(on_close=poisoned(times), on_error=on_error)
    on_seen(source)
    with TestDriver(source, topics={OUT: 1}) as driver:
        minute_of(driver)
        reported = [one.key for one in outputs(driver, "closed")]
        assert reported == (["a", "b", "c"] if times == 2 else ["a", "c"])
        assert [fact(letter, "attempts") for letter in driver.dead_letters()] == ([letters] if letters else [])
        failed = [line for line in caplog.messages if "the window Shop.win from 1970-01-01T00:00:00" in line]
        assert len(failed) == (times != 2), "one line, which names window, key and partition"
        assert all("of the key b'b' of in[0] (on_close) failed after" in line for line in failed)
        driver.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancellation_that_a_window_raises_is_its_own_failure(kind: str) -> None:
    def on_close(ctx: EventContext[Any], key: str, window: Window, number: int) -> None:
        told(ctx, key, window, number)
        if key == "b":
            raise asyncio.CancelledError  # as the result of a future that was cancelled

    source = source_of(on_close=on_close, error_policy=DEAD_LETTER)
    on_seen(source, kind)
    with TestDriver(source, topics={OUT: 1}) as driver:
        minute_of(driver)
        assert [one.key for one in outputs(driver, "handled")] == ["a", "b", "c", "z"]
        assert [one.key for one in outputs(driver, "closed")] == ["a", "c"]
        (letter,) = driver.dead_letters()
        assert (letter.key, fact(letter, "window"), fact(letter, "error")) == (b"b", "Shop.win", "RuntimeError")
        assert "a cancellation that is not its own" in fact(letter, "message")
        driver.check()


def test_the_source_stops_at_a_window_and_goes_on_with_it_when_that_is_repaired() -> None:
    source = source_of(on_close=poisoned(1))
    on_seen(source)
    with TestDriver(source, topics={OUT: 1}) as driver:
        with pytest.raises(EventFailure, match=r"the window Shop.win .*b'b'.*on_close.*on_error=DEAD_LETTER"):
            minute_of(driver)
        assert outputs(driver, "closed") == []
        driver.restart()
        driver.settle()
        assert [one.key for one in outputs(driver, "closed")] == ["a", "b", "c"]
        driver.check()


@pytest.mark.parametrize("what", ["a record", "a change"])
def test_what_a_window_sends_or_keeps_is_refused(what: str) -> None:
    """By the broker, after the fact: the window is to blame, not the event in front of which it closes."""

    def on_close(ctx: EventContext[Any], key: str, window: Window, number: int) -> None:
        told(ctx, key, window, number)
        if key == "b" and what == "a change":
            ctx.store.texts.put(key, "x" * 2_000_000)

    class Shop(Stores):
        win = Windows.tumbling(str, int, size=60, add=count, on_close=on_close)
        texts = NamedTable.of(str, str)

    config = EventSourceConfig(group_id="g", topic="in", num_partitions=1, error_policy=DEAD_LETTER)
    source: EventSource[Any] = EventSource(config, store=Shop.factory())
    on_seen(source)
    with TestDriver(source, topics={OUT: 1}) as driver:
        if what == "a record":
            driver._world.broker.refuses = lambda topic, entry: b'"closed","key":"b"' in (entry.value or b"")
        minute_of(driver)
        driver.send_record(seen("y", 400_000))
        assert [one.key for one in outputs(driver, "handled")] == ["a", "b", "c", "z", "y"]
        assert [one.key for one in outputs(driver, "closed")] == ["a", "c", "z"]
        (letter,) = driver.dead_letters()
        assert (fact(letter, "window"), letter.key) == ("Shop.win", b"b")
        driver.check()


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_it_is_reported_once(point: Point) -> None:
    """Before the transaction of the event in front of which it closes, within it, and behind."""
    source = source_of(on_close=poisoned(), error_policy=DEAD_LETTER)
    on_seen(source)
    with TestDriver(source, topics={OUT: 1}) as driver:
        minute_of(driver, lambda: driver.at(point, driver.crash))
        assert not driver.members, "it was killed"
        driver.restart()
        driver.settle()
        assert [one.key for one in outputs(driver, "closed")] == ["a", "c"]
        assert [letter.key for letter in driver.dead_letters()] == [b"b"]
        driver.check()


def test_in_an_interjection_too() -> None:
    source = source_of(on_close=poisoned(), error_policy=DEAD_LETTER)
    on_seen(source)

    def advance(ctx: EventContext[Any]) -> str:
        ctx.store.advance(200_000)
        return "done"

    with TestDriver(source, topics={OUT: 1}) as driver:
        for key in "abc":
            driver.send_record(seen(key, 1_000))
        assert driver.interject(0, advance) == "done"
        assert [one.key for one in outputs(driver, "closed")] == ["a", "c"]
        assert len(driver.dead_letters()) == 1
        driver.check()


def test_a_handler_that_goes_on_leaves_nothing_of_a_window_that_failed() -> None:
    """The next event meets the window, and reports it once."""
    fails = poisoned(1)

    def on_close(ctx: EventContext[Any], key: str, window: Window, number: int) -> None:
        if key == "b":
            ctx.schedule_in(0.1, Seen("timer"), name="of b")
        fails(ctx, key, window, number)

    source = source_of(on_close=on_close, error_policy=DEAD_LETTER)
    on_seen(source)

    def advance(ctx: EventContext[Any]) -> str:
        with pytest.raises(WindowFailed):
            ctx.store.advance(200_000)
        return "done"

    with TestDriver(source, topics={OUT: 1}) as driver:
        for key in "abc":
            driver.send_record(seen(key, 1_000))
        assert driver.interject(0, advance) == "done"
        driver.advance(1)
        assert not driver.dead_letters(), "no timer either, which fails here: it has no time"
        assert [one.key for one in outputs(driver, "closed")] == ["a"]
        assert [key for key, _ in driver.store(0).carts.items()] == ["closed a"]
        driver.send_record(seen("z", 200_000))
        assert [one.key for one in outputs(driver, "closed")] == ["a", "b", "c"]
        driver.check()


def test_an_event_that_fails_for_good_behind_it_leaves_the_window_to_the_next() -> None:
    """What was decided of it stands, and is in the transaction of the event in front of which it closes after all."""
    source = source_of(on_close=poisoned(), error_policy=DEAD_LETTER)

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)
        if event.key == "z":
            raise RuntimeError("not this one")

    with TestDriver(source, topics={OUT: 1}) as driver:
        minute_of(driver)
        assert [fact(letter, "message") for letter in driver.dead_letters()] == ["not this one"]
        assert outputs(driver, "closed") == []
        driver.send_record(seen("y", 200_000))
        assert [fact(letter, "message") for letter in driver.dead_letters()] == [
            "not this one", "cannot report this one",
        ]  # fmt: skip
        assert [one.key for one in outputs(driver, "closed")] == ["a", "c"]
        driver.check()


def test_the_attempt_that_did_not_get_its_turn_keeps_nothing() -> None:
    """A handler that has a lock while it waits for its turn: the next attempt needs it, too."""
    source, lock = source_of(on_close=poisoned(2), on_error=Retry(attempts=3, backoff_seconds=0.01)), asyncio.Lock()

    @source.register_event_type(Seen, concurrency=4)
    async def handle(ctx: EventContext[Any], event: Seen) -> None:
        async with lock:
            await ctx.turn()
            ctx.store.win.add(event.key, event)

    with TestDriver(source, topics={OUT: 1}) as driver:
        for key in ("a", "b", "c"):
            driver.send_record(seen(key, 1_000))
        driver.send_record(seen("z", 200_000), wait=False)
        driver.advance(5)
        assert [one.key for one in outputs(driver, "closed")] == ["a", "b", "c"]
        driver.check()


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_ends_the_process_is_named(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def on_close(ctx: EventContext[Any], key: str, window: Window, number: int) -> None:
        raise SystemExit(0)

    source = source_of(on_close=on_close, error_policy=DEAD_LETTER)
    on_seen(source, kind)
    driver = TestDriver(source, topics={OUT: 1})
    try:
        with pytest.raises(SystemExit):
            minute_of(driver)
    finally:
        with contextlib.suppress(BaseException):
            driver.close()
    (said,) = [line.getMessage() for line in caplog.records if line.levelname == "CRITICAL"]
    assert said.startswith("in[0]@3: the handler raised SystemExit: 0")


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_error is 'skip'"):
        source_of(on_error="skip")  # type: ignore[arg-type]
