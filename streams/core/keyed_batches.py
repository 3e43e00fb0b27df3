"""Which items make the next batch, and when: no key in two batches at a time, partitions in turn, the oldest first.

Keys belong to a *lane* (a partition): the same key in two lanes is two keys. An item whose key is in no running batch
is *ready*. A batch is made of ready items when there is a slot for it, and either as many are ready as fit into one or
the oldest of them has waited for ``max_delay``. Lanes take turns, an item each; within a lane the oldest is taken
first, because that is the event which its partition waits for. Several items of a key may be in one batch, in order.

A key can be held beyond its batch (``hold``): what comes next for it must not begin before something is settled.

A slot is held by a batch that runs and by nothing else, and a running batch waits for nothing here, so whatever the
settings, somebody can always go on. ``has_room`` is asked before the items of an event are added (admission control):
a lane without any item takes an event however many it has.

Costs: ``add`` and ``withdraw`` O(log keys of the lane), ``take`` that for each item taken, ``due`` O(lanes).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Queued(Generic[T]):
    """An item here, from ``add`` until its batch has ended or it is withdrawn."""

    __slots__ = ("at", "is_waiting", "item", "key", "lane", "number")

    def __init__(self, lane: _Lane[T], key: _Key[T], item: T, number: int, at: float) -> None:
        self.lane = lane
        self.key = key
        self.item = item
        self.number = number
        self.at = at
        self.is_waiting = True


class _Key(Generic[T]):
    __slots__ = ("holders", "is_running", "name", "waiting")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.waiting: OrderedDict[int, Queued[T]] = OrderedDict()
        self.is_running = False  # in a batch
        self.holders: list[Queued[T]] = []

    @property
    def is_held(self) -> bool:
        return self.is_running or bool(self.holders)

    def first(self) -> Queued[T]:
        return self.waiting[next(iter(self.waiting))]


class _Lane(Generic[T]):
    __slots__ = ("heap", "in_turn", "items", "keys", "name")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.keys: dict[Hashable, _Key[T]] = {}
        self.items = 0  # that wait or run
        self.in_turn = False  # whether it is in the rotation
        self.heap: list[tuple[int, _Key[T]]] = []  # (number of its first item, key that is ready); stale ones stay in

    def oldest(self) -> _Key[T] | None:
        """The ready key whose first item is the oldest."""
        while self.heap:
            number, key = self.heap[0]
            if not key.is_held and number in key.waiting and key.first().number == number:
                return key
            heapq.heappop(self.heap)
        return None


class KeyedBatches(Generic[T]):
    """Up to ``max_running`` batches at a time, of up to ``max_size`` items each; ``max_items`` of a lane are let in."""

    def __init__(self, max_size: int, max_delay: float, max_running: int, max_items: int) -> None:
        self._max_size = max_size
        self._max_delay = max_delay
        self._max_running = max_running
        self._max_items = max_items
        self._lanes: dict[Hashable, _Lane[T]] = {}
        self._rotation: deque[_Lane[T]] = deque()
        self._numbers = 0
        self._ready = 0
        self.waiting = 0
        self.running = 0
        """Items in running batches."""
        self.batches = 0
        """Batches that run."""
        self.made = 0
        """Batches so far."""
        self.taken = 0
        """Items so far."""

    @property
    def keys(self) -> int:
        """Keys that have items, over all lanes."""
        return sum(len(lane.keys) for lane in self._lanes.values())

    @property
    def has_full_batch(self) -> bool:
        """Whether a batch can begin now, without waiting for more."""
        return self.batches < self._max_running and self._ready >= self._max_size

    def has_room(self, lane: Hashable, count: int) -> bool:
        """Whether so many items may be added to this lane now."""
        known = self._lanes.get(lane)
        return known is None or not known.items or known.items + count <= self._max_items

    def add(self, lane: Hashable, key: Hashable, item: T, now: float) -> Queued[T]:
        """Queue an item behind those of its key."""
        known = self._lanes.get(lane)
        if known is None:
            known = self._lanes[lane] = _Lane(lane)
        found = known.keys.get(key)
        if found is None:
            found = known.keys[key] = _Key(key)
        self._numbers += 1
        queued = Queued(known, found, item, self._numbers, now)
        found.waiting[queued.number] = queued
        known.items += 1
        self.waiting += 1
        if not found.is_held:
            self._ready += 1
            if len(found.waiting) == 1:
                self._enter(known, found)
        return queued

    def due(self) -> float | None:
        """When a batch begins even if it does not get full; ``None``: nothing can begin."""
        if self.batches >= self._max_running or not self._ready:
            return None
        oldest = (lane.oldest() for lane in self._rotation)
        return min(key.first().at for key in oldest if key is not None) + self._max_delay

    def take(self, now: float) -> list[Queued[T]] | None:
        """The items of a batch that begins now: it holds a slot and its keys until ``ended``."""
        if self._ready < self._max_size or self.batches >= self._max_running:
            due = self.due()
            if due is None or due > now:
                return None
        batch: list[Queued[T]] = []
        while len(batch) < self._max_size and self._rotation:
            lane = self._rotation.popleft()
            key = lane.oldest()
            if key is None:
                lane.in_turn = False
                continue
            heapq.heappop(lane.heap)
            queued = key.waiting.popitem(last=False)[1]
            queued.is_waiting = False
            batch.append(queued)
            if key.waiting:
                heapq.heappush(lane.heap, (key.first().number, key))
            self._rotation.append(lane)
        self._hold(batch)
        return batch

    def ended(self, batch: list[Queued[T]]) -> None:
        """A batch has ended, however."""
        self.batches -= 1
        self.running -= len(batch)
        for queued in batch:
            lane, key = queued.lane, queued.key
            lane.items -= 1
            if key.is_running:  # else another item of it was first
                key.is_running = False
                self._freed(lane, key)

    def hold(self, queued: Queued[T]) -> None:
        """While its batch runs: its key is in no other batch, also after this one, until ``release`` (once for each
        ``hold``). It holds no slot."""
        queued.key.holders.append(queued)

    def release(self, queued: Queued[T]) -> None:
        """The end of ``hold``."""
        queued.key.holders.remove(queued)
        self._freed(queued.lane, queued.key)

    def holders(self, lane: Hashable, key: Hashable) -> list[T]:
        """The items that hold this key (``hold``)."""
        known = self._lanes.get(lane)
        found = None if known is None else known.keys.get(key)
        return [] if found is None else [queued.item for queued in found.holders]

    def behind(self, queued: Queued[T]) -> list[T]:
        """The items of its key that wait, in their order."""
        return [waiting.item for waiting in queued.key.waiting.values()]

    def withdraw(self, queued: Queued[T]) -> bool:
        """Take an item out that is in no batch yet. ``False``: it is."""
        if not queued.is_waiting:
            return False
        lane, key = queued.lane, queued.key
        was_first = key.first() is queued
        queued.is_waiting = False
        del key.waiting[queued.number]
        lane.items -= 1
        self.waiting -= 1
        if not key.is_held:
            self._ready -= 1
            if not key.waiting:
                self._forget(lane, key)
            elif was_first:
                self._enter(lane, key)
        return True

    def _hold(self, batch: list[Queued[T]]) -> None:
        self.batches += 1
        self.made += 1
        self.taken += len(batch)
        self.running += len(batch)
        self.waiting -= len(batch)
        self._ready -= len(batch)
        for queued in batch:
            if not queued.key.is_running:
                queued.key.is_running = True
                self._ready -= len(queued.key.waiting)

    def _freed(self, lane: _Lane[T], key: _Key[T]) -> None:
        if key.is_held:
            return
        if key.waiting:
            self._ready += len(key.waiting)
            self._enter(lane, key)
        else:
            self._forget(lane, key)

    def _enter(self, lane: _Lane[T], key: _Key[T]) -> None:
        """The key is ready, by its first item."""
        heapq.heappush(lane.heap, (key.first().number, key))
        if not lane.in_turn:
            lane.in_turn = True
            self._rotation.append(lane)

    def _forget(self, lane: _Lane[T], key: _Key[T]) -> None:
        del lane.keys[key.name]
        if not lane.keys:
            del self._lanes[lane.name]
            if lane.in_turn:
                lane.in_turn = False
                self._rotation.remove(lane)
