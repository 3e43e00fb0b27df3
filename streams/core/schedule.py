"""Compute the due times of a scheduled interjection.

The next run is counted from the previous *due* time, so a schedule does not drift. ``MissedRuns`` decides about runs
that were missed (the process was frozen, the partition was busy). Jitter moves a single run by up to ``jitter`` to
either side, so that the partitions of many members do not act in step.
"""

from __future__ import annotations

import enum
import math
import random

import msgspec

from streams.errors import ConfigError


class MissedRuns(enum.Enum):
    """The policy for late runs of a schedule: late by more than the interval, some were missed.

    ``SKIP``: one run at once, and then the rhythm goes on as before; the others are not made up for. ``DELAY``: one run
    at once, and the rhythm starts over with it, so that two runs are never closer than the interval. ``CATCH_UP``: all
    of them, one after another, with events in between. Counted from the moment a partition became active here: runs due
    while no member had it were not missed.
    """

    SKIP = "skip"
    DELAY = "delay"
    CATCH_UP = "catch_up"


class Schedule(msgspec.Struct, frozen=True):
    """Runs every ``every`` seconds, each moved by up to ``jitter`` seconds."""

    every: float
    jitter: float = 0.0
    missed: MissedRuns = MissedRuns.SKIP

    def __post_init__(self) -> None:
        if not 0 < self.every < math.inf:
            raise ConfigError(f"every is {self.every}; an interjection needs an interval of more than 0 seconds")
        if not 0 <= self.jitter <= self.every:
            raise ConfigError(f"jitter is {self.jitter}; it must be between 0 and every ({self.every} seconds)")
        missed: object = self.missed  # of any type
        if not isinstance(missed, MissedRuns):
            raise ConfigError(f"missed is {missed!r}; it must be one of {', '.join(map(str, MissedRuns))}")

    def first(self, now: float) -> float:
        """Return the rhythm's first beat after a partition became active at ``now``."""
        return now + self.every

    def following(self, beat: float, now: float) -> float:
        """Return the beat after ``beat``, whose run begins ``now``."""
        if self.missed is MissedRuns.DELAY:  # from the run on, so that the next one is a whole interval away
            return max(beat, now) + self.every
        following = beat + self.every
        if self.missed is MissedRuns.CATCH_UP:
            return following
        if following < now:  # the rhythm goes on with its next beat: those in between are passed over
            following += self.every * ((now - following) // self.every + 1)
        return following

    def due(self, beat: float, rng: random.Random) -> float:
        """Return the due time of this beat's run: the beat, moved by the jitter."""
        return beat + (rng.uniform(-self.jitter, self.jitter) if self.jitter else 0.0)
