"""When the next run of a scheduled interjection is due.

The next run is counted from the previous *due* time, so a schedule does not drift; runs that were missed altogether
(the process was frozen, the partition was busy) are not made up for: one run follows at once, and then the rhythm
goes on. Jitter moves a single run by up to ``jitter`` to either side, so that the partitions of many members do not
act in step.
"""

from __future__ import annotations

import random

import msgspec

from streams.errors import ConfigError


class Schedule(msgspec.Struct, frozen=True):
    """Runs every ``every`` seconds, each moved by up to ``jitter`` seconds."""

    every: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not self.every > 0:
            raise ConfigError(f"every is {self.every}; an interjection needs an interval of more than 0 seconds")
        if not 0 <= self.jitter <= self.every:
            raise ConfigError(f"jitter is {self.jitter}; it must be between 0 and every ({self.every} seconds)")

    def first(self, now: float) -> float:
        """The rhythm's first beat after a partition became active at ``now``."""
        return now + self.every

    def following(self, beat: float, now: float) -> float:
        """The beat after ``beat``, not earlier than ``now``; beats that lie behind are skipped, not made up for."""
        following = beat + self.every
        if following < now:
            following += self.every * ((now - following) // self.every + 1)
        return following

    def due(self, beat: float, rng: random.Random) -> float:
        """When the run of this beat is due: the beat, moved by the jitter."""
        return beat + (rng.uniform(-self.jitter, self.jitter) if self.jitter else 0.0)
