"""Events that stop the loop: found on it, counted over their owners, and then met as their own failure. What the real
loop and group do: ``tests/broker/test_blocked_handlers.py``."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, STOP, AsyncJobScheduler, EventContext, EventSource, Retry
from streams.core.origin import batch_origin
from streams.errors import EventFailure
from streams.runtime.ownership import blocked
from streams.runtime.ownership.blocked import MOST_OWNERS, BlockNote
from streams.runtime.system import Watchdog
from streams.stores import Window
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config, letters, send, totals
from tests.unit.windows_kit import Seen, Told, outputs, seen, source_of, told
from tests.vocabulary import TOTALS, Added, Totals, tell_total

KINDS = ("async", "concurrent", "job", "timer")


class Blocking:
    """A source whose event "bad" stops the loop, as far as the watchdog can tell; as it is one loop that all simulated
    members share, it waits instead."""

    def __init__(self, kind: str, policy: Retry = DEAD_LETTER) -> None:
        self.named: list[str] = []
        self.driver: TestDriver[Any]
        source = self.source = EventSource(config(error_policy=policy), TOTALS)

        async def handle(ctx: EventContext[Totals], event: Added) -> None:
            if kind == "concurrent":
                await ctx.turn()
            if event.deed and kind == "timer" and ctx.timer is None:
                ctx.schedule_in(1.0, Added(event.name, 1, event.deed), name="late")
                return
            if event.deed and kind != "job":
                await self.stand_still()
            tell_total(ctx, event, OUT)

        async def job(event: Added) -> None:
            if event.deed:
                await self.stand_still()

        def finish(ctx: EventContext[Totals], event: Added, _: None) -> None:
            tell_total(ctx, event, OUT)

        if kind == "job":
            scheduler: AsyncJobScheduler[Any, Added, None] = AsyncJobScheduler(source, job, finish)
            scheduler.register_event_type(Added, key=lambda event: event.name)
        else:
            source.register_event_type(Added, handle, concurrency=2 if kind == "concurrent" else None)

    async def stand_still(self) -> None:
        engine: Any = self.driver._world.members[0].engine
        events, frame = engine.takeovers.blocked, sys._getframe()
        self.named.append(events.name(frame))
        events.give_up(frame, 15.0)
        await asyncio.Event().wait()


PLACES = {"async": "in[0]@1", "concurrent": "in[0]@1", "job": "in[0]@1", "timer": "timer 'late' of in[0]"}


@pytest.mark.parametrize("policy", [DEAD_LETTER, STOP], ids=["dead letter", "stop"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_event_that_stops_one_owner_after_the_other_is_its_own_failure(kind: str, policy: Retry) -> None:
    """Its neighbours are handled once; a stop is tried again at the next start, which may have another handler."""
    world = Blocking(kind, policy)
    with TestDriver(world.source, topics={OUT: 1}) as driver:
        world.driver = driver
        send(driver, "a")
        send(driver, "bad", deed="block", wait=False)
        send(driver, "b", wait=False)
        driver.advance(10)
        for owner in range(1, MOST_OWNERS + 1):
            assert world.named == [f", at {PLACES[kind]}"] * owner
            driver.evict()
            if owner == MOST_OWNERS and policy is STOP:
                with pytest.raises(
                    EventFailure, match=re.escape(PLACES[kind]) + r".* 3 attempt.*register it with blocking=True"
                ):
                    driver.advance(30)
                world.named.clear()
                driver._world.start(0)
                driver.advance(30)
                assert world.named == [f", at {PLACES[kind]}"]
                assert driver._world.broker.notes[0] == msgspec.json.encode(note_of(world, owners=1)).decode()
                driver.crash()
                return
            driver.advance(30)
        assert len(world.named) == MOST_OWNERS
        assert totals(driver) == [("a", 1), ("b", 1)]
        assert letters(driver, "error", "attempts") == [("HandlerBlocked", "3")]
        driver.check()


def note_of(world: Blocking, **changes: Any) -> BlockNote:
    """The note that is there, with these changes."""
    return msgspec.structs.replace(msgspec.json.decode(world.driver._world.broker.notes[0], type=BlockNote), **changes)


@pytest.mark.parametrize("case", ["passed", "another topic", "another release", "too few", "a batch", "blocking"])
def test_notes_that_blame_no_event(case: str) -> None:
    """``passed``: it was committed after all."""
    source = EventSource(config(error_policy=STOP), TOTALS)
    lists: list[int] = []

    def batch(ctx: Any, events: list[Added]) -> None:
        lists.append(len(events))
        for event in events:
            tell_total(ctx, event, OUT)

    if case == "a batch":
        source.register_event_type(Added, batch, batch=True)
    else:
        source.register_event_type(Added, lambda ctx, event: tell_total(ctx, event, OUT), blocking=case == "blocking")
    notes = {
        "passed": BlockNote("in", 0, MOST_OWNERS),
        "another topic": BlockNote("former", 1, MOST_OWNERS),
        "too few": BlockNote("in", 1, MOST_OWNERS - 1),
        "a batch": BlockNote("in", batch_origin(2), MOST_OWNERS),
        "blocking": BlockNote("in", 1, MOST_OWNERS),
    }
    with TestDriver(source, topics={OUT: 1}) as driver:
        send(driver, "a")
        driver.crash()
        text = msgspec.json.encode(notes[case]).decode() if case in notes else "{}"
        driver._world.broker.notes[0] = text
        send(driver, "b", "c", "d", wait=False)
        driver.restart()
        driver.settle()
        assert totals(driver) == [(name, 1) for name in "abcd"]
        assert case != "a batch" or lists == [1, 1, 1, 1]
        driver.check()


def test_a_window_that_stops_the_loop_is_its_own_failure() -> None:
    """And not that of all events in front of which it would close, one after the other."""
    named: list[str] = []

    def on_close(ctx: EventContext[Any], key: str, window: Window, number: int) -> None:
        if key == "b":
            events = driver._world.members[0].engine.takeovers.blocked
            named.append(events.name(sys._getframe()))
            events.give_up(sys._getframe(), 15.0)
        told(ctx, key, window, number)

    source = source_of(on_close=on_close, error_policy=DEAD_LETTER)

    @source.on
    def on(ctx: EventContext[Any], event: Seen) -> None:
        ctx.store.win.add(event.key, event)
        ctx.forward(OUT, Told("handled", event.key), key=event.key, partition=0)

    driver: Any
    with TestDriver(source, topics={OUT: 1}) as driver:
        for key in "abc":
            driver.send_record(seen(key, 1_000), wait=False)
        driver.settle()
        driver.at("commit.before", driver.crash)
        driver.send_record(seen("z", 200_000), wait=False)
        driver.settle()
        notes = driver._world.broker.notes
        note = msgspec.json.decode(notes[0], type=BlockNote)
        notes[0] = msgspec.json.encode(msgspec.structs.replace(note, owners=MOST_OWNERS)).decode()
        driver.restart()
        driver.settle()
        assert len(named) == 1
        assert re.match(r", at the window Shop\.win .* of the key b'b' of in\[0\]$", named[0])
        assert [one.key for one in outputs(driver, "closed")] == ["a", "c"]
        assert [one.key for one in outputs(driver, "handled")] == ["a", "b", "c", "z"]
        assert letters(driver, "error", "kind") == [("HandlerBlocked", "window")]
        driver.check()


def test_what_runs_no_event_is_said_and_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with TestDriver(EventSource(config(), TOTALS)) as driver:
        engine: Any = driver._world.members[0].engine
        events = engine.takeovers.blocked
        assert events.name(None) == ""
        events.give_up(None, 15.0)
        assert driver._world.broker.notes == {}
    assert "something has stopped the event loop for 15 s" in caplog.text


def test_a_lock_over_a_turn_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later event has it and waits for its turn; the earlier one waits for the lock, and both wait for ever."""
    monkeypatch.setattr("streams.testing.world.Watched", Watchdog)  # a real one, which looks as virtual time goes by
    lock, is_taken, begun = asyncio.Lock(), asyncio.Event(), 0
    source = EventSource(config(), TOTALS)

    @source.register_event_type(Added, concurrency=4)
    async def handler(ctx: EventContext[Totals], event: Added) -> None:
        nonlocal begun
        begun += 1
        if event.name == "a":
            await is_taken.wait()
        async with lock:
            is_taken.set()
            await ctx.turn()
            tell_total(ctx, event, OUT)

    with TestDriver(source, topics={OUT: 1}) as driver:
        send(driver, "a", "b", "c", wait=False)
        driver.advance(blocked.TURN_SECONDS - 5)
        assert begun == 3
        assert "ctx.turn()" not in caplog.text
        driver.advance(300)
        said = [line.getMessage() for line in caplog.records if "ctx.turn()" in line.getMessage()]
        driver.crash()
    assert len(said) == 1, "once for each event"
    assert said[0].startswith("in[0]@0 has not come to its turn for 30 s: it waits in ")
    assert "(Lock.acquire), and 1 later events" in said[0]
