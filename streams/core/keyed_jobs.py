"""Which job may run: one at a time per key, the oldest first, so many at once.

Keys belong to a *lane* (a partition while it is worked on here): the same key in two lanes is two keys. Slots are
shared by all lanes, which take turns. Within a lane the oldest job that can begin does: nothing of the lane is complete
before its first event is, so a slot for a later one would only make the first wait. A slot is held by a job that runs
and by nothing else, and a running job waits for nothing here, so whatever the settings, somebody can always go on. A
key may be held for longer than a slot (``left_slot``): by a job whose failure somebody has yet to hear of.

* ``has_room`` is asked before a job is added: full, its lane waits outside (admission control). A lane that had
  ``most_waiting`` jobs waiting is full until half of them have begun, so that whoever waits for room comes back for
  many at a time. (They will begin: what they wait for is never outside.)
* Jobs that come from a stage before are added without asking: there must have been room when that stage let them in.
  So they may be more than the bounds say by as many as that stage has room for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class _Key(Generic[T]):
    __slots__ = ("is_held", "name", "waiting")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.waiting: deque[tuple[int, T]] = deque()  # with their age
        self.is_held = False  # by a job that runs, or has left its slot only


class _Lane(Generic[T]):
    __slots__ = ("by_age", "is_full", "keys", "ready", "waiting")

    def __init__(self) -> None:
        self.keys: dict[Hashable, _Key[T]] = {}
        self.waiting = 0  # jobs
        self.is_full = False  # of those
        self.ready = 0  # keys that are not held, and have a job that waits
        self.by_age: list[tuple[int, _Key[T]]] = []  # these, with the age of that job; and what is out of date


class KeyedJobs(Generic[T]):
    """``concurrency`` jobs run at a time; behind the one that runs (or is next) ``queue_depth`` may wait per key;
    ``max_keys`` keys of a lane may have jobs, of which ``most_waiting`` may wait."""

    def __init__(self, concurrency: int, queue_depth: int, max_keys: int, most_waiting: int) -> None:
        self._concurrency = concurrency
        self._queue_depth = queue_depth
        self._max_keys = max_keys
        self._most_waiting = most_waiting
        self._lanes: dict[Hashable, _Lane[T]] = {}
        self._rotation: deque[_Lane[T]] = deque()  # lanes with keys that are ready, each once
        self._ages = itertools.count()
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
        if known.is_full:
            return False
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
        found.waiting.append((next(self._ages), job))
        self.waiting += 1
        known.waiting += 1
        if known.waiting >= self._most_waiting:
            known.is_full = True
        if len(found.waiting) == 1 and not found.is_held:
            self._is_ready(known, found)

    def take(self) -> T | None:
        """The next job to begin, if a slot is free: it holds the slot and its key until ``ended``."""
        if self.running >= self._concurrency or not self._rotation:
            return None
        lane = self._rotation.popleft()
        age, found = heappop(lane.by_age)
        while found.is_held or not found.waiting or found.waiting[0][0] != age:  # out of date
            age, found = heappop(lane.by_age)
        lane.ready -= 1
        if lane.ready:
            self._rotation.append(lane)
        found.is_held = True
        self.running += 1
        self._leaves(lane)
        return found.waiting.popleft()[1]

    def ended(self, lane: Hashable, key: Hashable) -> None:
        """The job of this key that was running has ended, however."""
        self.running -= 1
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

    def queued(self, lane: Hashable, key: Hashable) -> list[T]:
        """The jobs of this key that wait, in their order."""
        known = self._lanes.get(lane)
        found = None if known is None else known.keys.get(key)
        return [] if found is None else [job for _, job in found.waiting]

    def withdraw(self, lane: Hashable, key: Hashable, job: T) -> bool:
        """Take a job out that has not begun. ``False``: it is not waiting here."""
        known = self._lanes.get(lane)
        found = None if known is None else known.keys.get(key)
        if known is None or found is None:
            return False
        place = next((place for place, (_, waiting) in enumerate(found.waiting) if waiting == job), None)
        if place is None:
            return False
        del found.waiting[place]
        self._leaves(known)
        if found.is_held:
            return True
        if found.waiting:
            if place == 0:
                heappush(known.by_age, (found.waiting[0][0], found))
            return True
        known.ready -= 1
        if not known.ready:
            self._rotation.remove(known)
        del known.keys[key]
        if not known.keys:
            del self._lanes[lane]
        return True

    def _leaves(self, lane: _Lane[T]) -> None:
        """One of its jobs waits no more."""
        self.waiting -= 1
        lane.waiting -= 1
        if lane.is_full and lane.waiting <= self._most_waiting // 2:
            lane.is_full = False

    def _is_ready(self, lane: _Lane[T], key: _Key[T]) -> None:
        heappush(lane.by_age, (key.waiting[0][0], key))
        lane.ready += 1
        if lane.ready == 1:
            self._rotation.append(lane)
