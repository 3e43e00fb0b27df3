"""Functions about partitions (``on_assigned`` and the others): when they are called, and what they cannot do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from streams import EventContext, EventSource
from streams.errors import RegistrationError
from streams.metrics import CallbackFailed, Measurement
from streams.records import PartitionChange
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse
from tests.unit.driver_kit import Slow, build, config, totals
from tests.vocabulary import TOTALS, Added, Totals

MOMENTS = ("on_assigned", "on_activated", "on_will_revoke", "on_revoked")
Notes = list[tuple[str, int, str]]


def noting(kind: str = "plain", **settings: Any) -> tuple[Callable[[], EventSource[Totals]], list[Notes]]:
    """A source whose functions note (moment, partition, reason); the notes of each start of a member, from 1 on (the
    driver makes a source of its own first)."""
    notes: list[Notes] = []

    def make() -> EventSource[Totals]:
        made, own = build(2, num_standbys=1, **settings), Notes()
        notes.append(own)
        for moment in MOMENTS:

            def note(source: EventSource[Any], change: PartitionChange, moment: str = moment) -> None:
                assert source is made
                own.append((moment, change.partition, change.reason))

            async def later(source: EventSource[Any], change: PartitionChange, moment: str = moment) -> None:
                await elapse(0.01)
                note(source, change, moment)

            getattr(made, moment)(later if kind == "async" else note)
        return made

    return make, notes


def of(notes: Notes, partition: int) -> list[tuple[str, str]]:
    return [(moment.removeprefix("on_"), reason) for moment, number, reason in notes if number == partition]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_each_partition_has_its_life_in_order(kind: str) -> None:
    make, notes = noting(kind)
    with TestDriver(make) as driver:
        for partition in (0, 1):
            driver.send(Added("a"), partition=partition)
            assert of(notes[1], partition) == [("assigned", "assigned"), ("activated", "assigned")]
        driver.join()
        driver.advance(5)
        [moved] = [partition for partition in (0, 1) if driver.owner(partition) == 1]
        assert of(notes[1], moved)[2:] == [("will_revoke", "moved"), ("revoked", "moved")]
        assert of(notes[2], moved) == [("assigned", "moved"), ("activated", "moved")]
        driver.leave(1)
        driver.advance(5)
        assert of(notes[2], moved)[2:] == [("will_revoke", "moved"), ("revoked", "moved")]
        driver.leave(0)
        for partition in (0, 1):
            assert of(notes[1], partition)[-2:] == [("will_revoke", "stopped"), ("revoked", "stopped")]


def test_a_loss_is_reported_afterwards_only() -> None:
    make, notes = noting()
    with TestDriver(make) as driver:
        driver.evict()
        driver.advance(5)
        for partition in (0, 1):
            assert of(notes[1], partition) == [
                ("assigned", "assigned"),
                ("activated", "assigned"),
                ("revoked", "lost"),
                ("assigned", "assigned"),
                ("activated", "assigned"),
            ]


def test_a_restart_within_the_member_is_another_activation() -> None:
    epochs: list[tuple[str, int]] = []
    source = build(1)
    for moment in MOMENTS:
        getattr(source, moment)(
            lambda _, change, moment=moment: epochs.append((f"{moment} {change.reason}", change.epoch))
        )
    with TestDriver(source) as driver:
        engine = driver._world.members[0].engine

        async def restart() -> None:
            assert engine is not None
            engine.partitions.dropped()

        driver._run(restart())
        driver.advance(1)
    assert epochs[:3] == [("on_assigned assigned", 1), ("on_activated assigned", 1), ("on_activated restarted", 2)]


def test_a_last_interjection_is_committed_before_the_partition_goes() -> None:
    def last(ctx: EventContext[Totals]) -> None:
        ctx.store.put("goodbye", 1)

    def make() -> EventSource[Totals]:
        source = build(2)

        @source.on_will_revoke
        async def say_goodbye(source: EventSource[Totals], change: PartitionChange) -> None:
            await source.interject(change.partition, last)

        return source

    with TestDriver(make) as driver:
        driver.send(Added("a"), partition=0)
        driver.join()
        driver.advance(5)
        [moved] = [partition for partition in (0, 1) if driver.owner(partition) == 1]
        assert b"goodbye" in driver.changelog(moved)
        assert b"goodbye" not in driver.changelog(1 - moved)
        driver.check()


def test_no_event_follows_the_last_interjection() -> None:
    """In a move, and in a stop: what it writes from a cache, say, lacks nothing. What runs has its turn before."""
    lives = {0: "", 1: ""}

    def note(what: str) -> Callable[..., None]:
        def told(_: object, at: Any) -> None:
            lives[at.partition] += what

        return told

    def make() -> EventSource[Totals]:
        source = EventSource(config(2), TOTALS)

        @source.register_event_type(Slow)
        async def on_slow(ctx: EventContext[Totals], event: Slow) -> None:
            await elapse(event.seconds)
            note("e")(None, ctx.topic_partition)

        @source.on_will_revoke
        async def flush(source: EventSource[Totals], change: PartitionChange) -> None:
            await source.interject(change.partition, lambda ctx: note("F")(None, ctx.topic_partition))
            await elapse(1.0)

        source.on_activated(note("A"))
        return source

    with TestDriver(make) as driver:
        for number in range(200):
            driver.send(Slow("a", 0.1), partition=number % 2, wait=False)
        driver.join()
        driver.advance(3)
        driver.leave(1)
        driver.advance(1)
        driver.leave(0)
        driver.check()
    for life in lives.values():
        assert re.fullmatch("(Ae*F)+", life), lives
    assert sorted(life.count("F") for life in lives.values()) == [1, 3]


async def for_hours(source: object, change: PartitionChange) -> None:
    await elapse(3_600)


async def interjects_without_end(source: EventSource[Totals], change: PartitionChange) -> None:
    while True:
        await source.interject(change.partition, lambda ctx: None)


def raises(source: object, change: PartitionChange) -> None:
    raise KeyError("no such thing")


def raises_a_cancellation(source: object, change: PartitionChange) -> None:
    raise asyncio.CancelledError


async def awaits_what_was_cancelled(source: object, change: PartitionChange) -> None:
    task = asyncio.ensure_future(elapse(1))
    task.cancel()
    await task


def lies(source: object, change: PartitionChange) -> Any:
    return for_hours(source, change)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "function",
    [for_hours, interjects_without_end, raises, raises_a_cancellation, awaits_what_was_cancelled, lies],
    ids=lambda one: one.__name__,
)
def test_none_of_them_holds_up_a_partition(
    function: Callable[..., Any], moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cancelled after half of the drain timeout, is named in the log, and counted."""
    measured: list[Measurement] = []

    def make() -> EventSource[Totals]:
        source = build(2, metrics_handler=measured.append, drain_timeout_seconds=8.0)
        getattr(source, moment)(function)
        return source

    with TestDriver(make) as driver:
        driver.advance(30)
        driver.send(Added("a"), partition=0)
        driver.send(Added("b"), partition=1)
        driver.join()
        driver.advance(30)
        assert sorted(driver.owner(partition) or 0 for partition in (0, 1)) == [0, 1]
        driver.leave(1)
        driver.advance(30)
        driver.send(Added("a"), partition=0)
        driver.send(Added("b"), partition=1)
        assert sorted(totals(driver)) == [1, 1, 2, 2]
        driver.leave(0)
        driver.check()
    failed = [one for one in measured if isinstance(one, CallbackFailed)]
    assert {one.callback for one in failed} == {moment}
    is_gone = function is interjects_without_end and moment == "on_revoked"
    is_cancelled = function in (raises_a_cancellation, awaits_what_was_cancelled)
    expected = "KeyError" if function is raises else "NotOwned" if is_gone else "TimeoutError"
    expected = "RuntimeError" if is_cancelled else expected
    assert expected in {one.error.partition("(")[0] for one in failed}
    name = "lies" if function is lies else function.__name__
    assert f": {moment}: {name} " in caplog.text


def test_function_and_running_event_share_the_time_of_a_drain() -> None:
    source = build(1, drain_timeout_seconds=8.0)

    @source.on_will_revoke
    async def slowly(_: object, change: PartitionChange) -> None:
        await elapse(3.0)

    with TestDriver(source) as driver:
        driver.send(Slow("a", 100.0), wait=False)
        driver.advance(1.0)
        before = driver.now
        driver.leave()
        assert 8.0 <= driver.now - before < 9.0


async def test_a_stop_waits_for_the_last_of_them() -> None:
    """Also for async ones, which have begun when the partitions are gone."""
    ended: list[int] = []
    source = build(1)

    @source.on_revoked
    async def slowly(_: object, change: PartitionChange) -> None:
        await elapse(1.0)
        ended.append(change.partition)

    with TestDriver(source) as driver:
        driver.leave()
    assert ended == [0]


def test_what_cannot_be_a_function_of_a_partition_is_refused() -> None:
    source = build(1)
    with pytest.raises(RegistrationError, match="the function of on_assigned is 7, which cannot be called"):
        source.on_assigned(7)  # type: ignore[type-var]
    with pytest.raises(RegistrationError, match=r"on_revoked is .*; it is called with \(source, change\)"):
        source.on_revoked(lambda change: None)  # type: ignore[type-var]
    source._declared.router.freeze()
    with pytest.raises(RegistrationError, match="the function of on_activated comes too late"):
        source.on_activated(for_hours)
