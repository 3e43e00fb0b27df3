"""When interjections are due, and a signal that is never missed."""

from __future__ import annotations

import asyncio
import random

import pytest

from streams.core.router import Route
from streams.core.schedule import Schedule
from streams.outcomes import STOP
from streams.runtime.interjections import Interjection, Timetable
from streams.runtime.signal import Signal


def route(name: str) -> Route:
    return Route(name, None, lambda ctx: None, blocking=False, policy=STOP)


def test_the_one_that_is_due_longest_comes_first() -> None:
    table = Timetable([(Schedule(2.0), route("slow")), (Schedule(0.5), route("quick"))], random.Random(1))
    table.start(100.0)
    ran = []
    for now in (100.4, 100.5, 101.0, 101.5, 102.0, 102.0, 102.4):
        due = table.due(now)
        ran.append(due.route.name if due is not None else "")
    assert ran == ["", "quick", "quick", "quick", "slow", "quick", ""]
    assert table.seconds_to_next(102.4) == pytest.approx(0.1)
    assert table.seconds_to_next(103.0) == 0.0


def test_what_was_missed_is_not_made_up_for() -> None:
    table = Timetable([(Schedule(1.0), route("tick"))], random.Random(1))
    table.start(0.0)
    assert table.due(10.5) is not None
    assert table.due(10.5) is None
    assert table.due(11.0) is not None


def test_without_schedules_nothing_is_ever_due() -> None:
    table = Timetable([], random.Random(1))
    table.start(0.0)
    assert table.due(1e9) is None
    assert table.seconds_to_next(0.0) is None


def test_an_interjection_without_a_waiter_is_done_quietly() -> None:
    told: list[BaseException | None] = []
    Interjection(route("a")).done(None)
    Interjection(route("a"), told.append).done(None)
    assert told == [None]


@pytest.mark.asyncio
async def test_a_signal_that_came_before_is_not_missed() -> None:
    signal = Signal()
    signal.notify()
    signal.notify()
    assert await signal.wait(10.0)
    assert not await signal.wait(0.0), "said once"


@pytest.mark.asyncio
async def test_a_signal_wakes_everybody() -> None:
    signal = Signal()
    begun = []

    async def wait(number: int) -> bool:
        begun.append(number)
        return await signal.wait()

    waiting = [asyncio.create_task(wait(number)) for number in range(3)]
    while len(begun) < 3:
        await asyncio.sleep(0)
    signal.notify()
    assert await asyncio.gather(*waiting) == [True, True, True]
