"""Timers of one partition: events for a certain time of day, by name, and in the order in which they are due.

A heap of (due, name) beside a dict by name: setting, replacing, removing and taking the first one cost O(log n). A
replaced or removed timer stays in the heap until it comes to its top, or until half of the heap is of that kind.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import ClassVar, Final

import msgspec

from streams.core.origin import Origin, timer_origin
from streams.model.tracing import Carrier
from streams.outcomes import WorkOrigin

_SLACK: Final = 64
"""Outdated entries of the heap that are not worth building it anew, however few timers there are."""


class Timer(msgspec.Struct, frozen=True):
    """One durable timer of a partition: at ``due_ms`` (milliseconds since the epoch) the event in ``value`` is given to
    the handler of its ``type``. ``key`` is what an input record's key would be; ``version`` is the event type's.
    ``trace``: of the event that has set it; ``by``: that event's origin (0: not known)."""

    kind: ClassVar[WorkOrigin] = "timer"

    name: str
    due_ms: int
    type: str
    value: bytes
    version: int = 1
    key: bytes | None = None
    trace: Carrier = ()
    by: Origin = 0

    @property
    def due(self) -> datetime:
        """Return the due time, in UTC."""
        return datetime.fromtimestamp(self.due_ms / 1000, UTC)

    @property
    def origin(self) -> Origin:
        """Return the origin of the effects of the timer's event."""
        return timer_origin(self.due_ms, self.name, self.by)

    @property
    def title(self) -> str:
        """Name it in messages."""
        return f"timer {self.name!r}"

    @property
    def kept(self) -> bytes:
        """Return the value that its record in the changelog has."""
        return self.value

    @property
    def following(self) -> Timer | None:
        """Return the timer that is set in its place when its event is complete; ``None``: it is removed."""
        return None

    @property
    def facts(self) -> dict[str, str]:
        """Return what its dead letter names."""
        return {"timer": self.name, "due_ms": str(self.due_ms)}


class Timers:
    """The timers of one partition."""

    def __init__(self, timers: Iterable[Timer] = ()) -> None:
        self._by_name = {timer.name: timer for timer in timers}
        self._aside: set[str] = set()
        self._heap: list[tuple[int, str]] = []
        self._rebuild()

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Timer]:
        return iter(self._by_name.values())

    def apply(self, changes: Mapping[str, Timer | None]) -> None:
        """Set these timers, by name; ``None`` removes one, if it is there."""
        self._aside.difference_update(changes)
        for name, timer in changes.items():
            if timer is None:
                self._by_name.pop(name, None)
            else:
                self._by_name[name] = timer
                heapq.heappush(self._heap, (timer.due_ms, name))
        if len(self._heap) > 2 * len(self._by_name) + _SLACK:
            self._rebuild()

    def get(self, name: str) -> Timer | None:
        """Return the timer of this name."""
        return self._by_name.get(name)

    def set_aside(self, name: str) -> None:
        """Keep a timer from being the first one, until it is set again or called back."""
        if name in self._by_name:
            self._aside.add(name)

    def is_aside(self, name: str) -> bool:
        """Check for a timer that is set aside."""
        return name in self._aside

    def call_back(self, name: str) -> None:
        """Take back ``set_aside``."""
        if name in self._aside:
            self._aside.remove(name)
            heapq.heappush(self._heap, (self._by_name[name].due_ms, name))

    def first(self) -> Timer | None:
        """Return the timer that is due first; of several at one time, the one with the lowest name."""
        heap = self._heap
        while heap:
            due_ms, name = heap[0]
            timer = self._by_name.get(name)
            # Otherwise the timer was removed, set aside, or is set for another time: its entry is outdated.
            if timer is not None and timer.due_ms == due_ms and name not in self._aside:
                return timer
            heapq.heappop(heap)
        return None

    def _rebuild(self) -> None:
        self._heap = [(timer.due_ms, timer.name) for timer in self._by_name.values() if timer.name not in self._aside]
        heapq.heapify(self._heap)
