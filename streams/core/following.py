"""Decide what a muted source takes in, and which timers it fires, by the changelog of the source that it follows.

NEW reads the changelog of OLD, committed records only, one partition of it for each of its own. Nothing is taken from
it before all is read that was there at the first look: before a reset, say, OLD may have been further than it is now.

Rules of this file
* An input record is taken only when OLD's committed position is behind it. So NEW is never beyond OLD.
* A timer is fired only when a record comes whose time has reached it, and OLD has it no more. OLD's is the timer of the
  same name that is due at the same time, or that the same event has set: their clocks differ.
* A position that goes back is an error, and so is one that NEW is beyond of: NEW has taken what OLD may speak yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from streams.core.origin import Origin
from streams.errors import OffsetError


class TimerMark(NamedTuple):
    """A timer as far as it is compared: when it is due, and the event that has set it (0: not known)."""

    due_ms: int
    by: Origin


class News(NamedTuple):
    """Content of some records of OLD's changelog. ``positions``: its last ones, by input; ``None``: none is named.
    ``timers``: set, or gone, by name. ``is_whole``: all is read that was there at the first look."""

    positions: Mapping[str, int] | None
    timers: Mapping[str, TimerMark | None]
    is_whole: bool


class Followed:
    """OLD's partition as NEW knows it. ``own``: NEW's position when it began to follow, by input."""

    def __init__(self, own: Mapping[str, int]) -> None:
        self.own = own
        self.is_whole = False
        self.positions: dict[str, int] = {}
        self._timers: dict[str, TimerMark] = {}

    def learn(self, news: News) -> None:
        """Take news in. Raises ``OffsetError`` when OLD has gone back, or NEW is beyond it."""
        for name, mark in news.timers.items():
            if mark is None:
                self._timers.pop(name, None)
            else:
                self._timers[name] = mark
        if news.positions is not None:
            before = self.positions if self.is_whole else {}
            for topic, offset in news.positions.items():
                if offset < before.get(topic, 0):
                    raise OffsetError(f"its position in {topic} went back from {before[topic]} to {offset}")
            self.positions = dict(news.positions)
        if news.is_whole and not self.is_whole:
            self.is_whole = True
            for topic, offset in self.own.items():
                if topic in self.positions and self.positions[topic] < offset:
                    raise OffsetError(
                        f"its position in {topic} is {self.positions[topic]}, and the muted source is at {offset} "
                        "already: it went back"
                    )

    def cap(self, topic: str) -> int:
        """Return the first offset in an input that may not be taken yet."""
        return self.positions.get(topic, 0) if self.is_whole else 0

    def has(self, name: str, mark: TimerMark) -> bool:
        """Check whether OLD has this timer, too."""
        known = self._timers.get(name)
        if known is None:
            return False
        return known.due_ms == mark.due_ms or (known.by == mark.by and mark.by != 0)
