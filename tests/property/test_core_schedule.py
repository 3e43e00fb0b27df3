"""A schedule does not drift, does not catch up, and never runs more often than it should."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.schedule import Schedule
from streams.errors import ConfigError
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
    ("every", "jitter", "said"),
    [
        (0, 0, "every is 0"),
        (-1, 0, "every is -1"),
        (float("nan"), 0, "every is nan"),
        (1, -0.1, "jitter is -0.1"),
        (1, 1.1, "jitter is 1.1"),
    ],
)
def test_settings_that_make_no_sense(every: float, jitter: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Schedule(every, jitter)


def test_missed_runs_are_one_of_two() -> None:
    with pytest.raises(ConfigError, match="missed is 'later'; it must be one of"):
        Schedule(1.0, missed="later")  # type: ignore[arg-type]
