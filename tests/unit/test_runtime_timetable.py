"""When interjections are due."""

from __future__ import annotations

import random

import pytest

from streams.core.router import Route
from streams.core.schedule import MissedRuns, Schedule
from streams.outcomes import STOP
from streams.runtime.partition.interjections import Timetable


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


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        (MissedRuns.SKIP, [10.5, 11.0, 12.0, 13.0]),
        (MissedRuns.DELAY, [10.5, 11.5, 12.5, 13.5]),
        (MissedRuns.CATCH_UP, [*[10.5] * 10, 11.0, 12.0, 13.0]),
    ],
)
def test_what_follows_missed_runs(missed: MissedRuns, expected: list[float]) -> None:
    """The loop stands still from 0 to 10.5; looked at every half second, and again as long as something is due."""
    table = Timetable([(Schedule(1.0, missed=missed), route("tick"))], random.Random(1))
    table.start(0.0)
    ran = []
    for now in (10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 13.5):
        while table.due(now) is not None:
            ran.append(now)
    assert [run for run in ran if run <= expected[-1]] == expected
    assert Schedule(1.0).missed is MissedRuns.SKIP, "by default what was missed is not made up for"


@pytest.mark.parametrize("missed", list(MissedRuns))
def test_whatever_the_times_runs_go_on(missed: MissedRuns) -> None:
    """The next run is never before now, nor further away than interval and jitter."""
    rng = random.Random(7)
    schedule = Schedule(1.0, 0.5, missed)
    table = Timetable([(schedule, route("tick"))], rng)
    table.start(0.0)
    now, runs = 0.0, 0
    for _ in range(500):
        now += rng.choice((0.01, 0.3, 1.0, 5.0))
        runs += table.due(now) is not None
        left = table.seconds_to_next(now)
        assert left is not None
        assert 0.0 <= left <= 1.5 + 0.5
    assert runs > 100
    empty = Timetable([], rng)
    empty.start(0.0)
    assert (empty.due(1e9), empty.seconds_to_next(0.0)) == (None, None)
