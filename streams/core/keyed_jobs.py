"""Which job may run: one at a time per key, keys in turn, so many at once.

Keys belong to a *lane* (a partition while it is worked on here): the same key in two lanes is two keys. Slots are
shared by all lanes, which take turns; within a lane its keys take turns. A slot is held by a job that runs and by
nothing else, and a running job waits for nothing here, so whatever the settings, somebody can always go on. A key may
be held for longer than a slot (``left_slot``): by a job whose failure somebody has yet to hear of.

* ``has_room`` is asked before a job is added: full, its lane waits outside (admission control).
* Jobs that come from a stage before (``add`` without asking) are bounded by that stage's own limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Key(Generic[T]):
    __slots__ = ("is_held", "name", "waiting")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.waiting: deque[T] = deque()
        self.is_held = False  # by a job that runs, or has left its slot only


class _Lane(Generic[T]):
    __slots__ = ("keys", "ready")

    def __init__(self) -> None:
        self.keys: dict[Hashable, _Key[T]] = {}
        self.ready: deque[_Key[T]] = deque()  # not held, and with a job that waits


class KeyedJobs(Generic[T]):
    """``concurrency`` jobs run at a time; behind the one that runs (or is next) ``queue_depth`` may wait per key;
    ``max_keys`` keys of a lane may have jobs."""

    def __init__(self, concurrency: int, queue_depth: int, max_keys: int) -> None:
        self._concurrency = concurrency
        self._queue_depth = queue_depth
        self._max_keys = max_keys
        self._lanes: dict[Hashable, _Lane[T]] = {}
        self._rotation: deque[_Lane[T]] = deque()  # lanes with keys that are ready, each once
        self.running = 0
        self.waiting = 0

    @property
    def keys(self) -> int:
        """Keys that have jobs, over all lanes."""
        return sum(len(lane.keys) for lane in self._lanes.values())

    def has_room(self, lane: Hashable, key: Hashable) -> bool:
        """Whether a job of this key may be added now."""
        known = self._lanes.get(lane)
        if known is None:
            return True
        found = known.keys.get(key)
        if found is None:
            return len(known.keys) < self._max_keys
        return len(found.waiting) < self._queue_depth + (not found.is_held)

    def add(self, lane: Hashable, key: Hashable, job: T) -> None:
        """Queue a job behind those of its key."""
        known = self._lanes.get(lane)
        if known is None:
            known = self._lanes[lane] = _Lane()
        found = known.keys.get(key)
        if found is None:
            found = known.keys[key] = _Key(key)
        found.waiting.append(job)
        self.waiting += 1
        if len(found.waiting) == 1 and not found.is_held:
            self._is_ready(known, found)

    def take(self) -> T | None:
        """The next job to begin, if a slot is free: it holds the slot and its key until ``ended``."""
        if self.running >= self._concurrency or not self._rotation:
            return None
        lane = self._rotation.popleft()
        found = lane.ready.popleft()
        if lane.ready:
            self._rotation.append(lane)
        found.is_held = True
        self.running += 1
        self.waiting -= 1
        return found.waiting.popleft()

    def ended(self, lane: Hashable, key: Hashable) -> None:
        """The job of this key that was running has ended, however."""
        self.left_slot()
        self.left_key(lane, key)

    def left_slot(self) -> None:
        """A running job needs its slot no more, but still its key: none of it begins until ``left_key``."""
        self.running -= 1

    def left_key(self, lane: Hashable, key: Hashable) -> None:
        """The next job of this key may begin."""
        known = self._lanes[lane]
        found = known.keys[key]
        found.is_held = False
        if found.waiting:
            self._is_ready(known, found)
        else:
            del known.keys[key]
            if not known.keys:
                del self._lanes[lane]

    def withdraw(self, lane: Hashable, key: Hashable, job: T) -> bool:
        """Take a job out that has not begun. ``False``: it is not waiting here."""
        known = self._lanes.get(lane)
        found = None if known is None else known.keys.get(key)
        if known is None or found is None or job not in found.waiting:
            return False
        found.waiting.remove(job)
        self.waiting -= 1
        if not found.waiting and not found.is_held:
            known.ready.remove(found)
            if not known.ready:
                self._rotation.remove(known)
            del known.keys[key]
            if not known.keys:
                del self._lanes[lane]
        return True

    def _is_ready(self, lane: _Lane[T], key: _Key[T]) -> None:
        lane.ready.append(key)
        if len(lane.ready) == 1:
            self._rotation.append(lane)
