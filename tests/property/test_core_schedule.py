"""A schedule does not drift, does not catch up, and never runs more often than it should; the timetable of several."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.router import Route
from streams.core.schedule import MissedRuns, Schedule
from streams.errors import ConfigError
from streams.outcomes import STOP
from streams.runtime.partition.interjections import Timetable
from tests.property.kit import seeded

every = st.floats(0.001, 3600.0)
start = st.floats(0.0, 1e6)


@seeded
@given(every, start, st.lists(st.floats(0.0, 0.9), max_size=30))
def test_no_drift(every: float, start: float, lateness: list[float]) -> None:
    """However late within a beat a run ends, the beats stay where they are."""
    schedule = Schedule(every)
    beat = schedule.first(start)
    for number, late in enumerate(lateness, start=1):
        assert beat == pytest.approx(start + number * every)
        beat = schedule.following(beat, beat + late * every)


@seeded
@given(every, start, st.floats(0.0, 1e4))
def test_missed_beats_are_skipped_and_the_rhythm_goes_on(every: float, start: float, missed: float) -> None:
    schedule = Schedule(every)
    beat = schedule.first(start)
    now = beat + missed * every
    following = schedule.following(beat, now)
    slack = 1e-6 * max(now, 1.0)
    assert following >= now - slack, "none of the missed beats is made up for"
    assert following <= now + every + slack, "and the next one is not skipped with them"
    beats = (following - beat) / every
    assert beats == pytest.approx(round(beats), abs=slack / every + 1e-6), "in the rhythm"
    assert round(beats) >= 1


@seeded
@given(every, st.floats(0.0, 1.0), start, st.integers())
def test_jitter_moves_a_run_and_not_the_rhythm(every: float, share: float, beat: float, number: int) -> None:
    schedule = Schedule(every, every * share)
    due = schedule.due(beat, random.Random(number))
    assert abs(due - beat) <= schedule.jitter * (1 + 1e-9) + 1e-6
    assert schedule.following(beat, beat) == beat + every
    assert Schedule(every).due(beat, random.Random(number)) == beat


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((0, 0), "every is 0"),
        ((-1, 0), "every is -1"),
        ((float("nan"), 0), "every is nan"),
        ((1, -0.1), "jitter is -0.1"),
        ((1, 1.1), "jitter is 1.1"),
        ((1, 0, "later"), "missed is 'later'; it must be one of"),
    ],
)
def test_settings_that_make_no_sense(settings: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Schedule(*settings)


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
