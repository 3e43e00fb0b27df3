"""Choose the items that run next: in order per key, never one key in two batches, partitions in turn, the oldest first.

Keys belong to a partition: the same key in two partitions is two keys. An item is *ready* when its key is neither in a
running batch nor held. A batch begins when a permit is free and either ``batch_size`` items are ready or the oldest of
them has waited for ``max_delay``; a job is a batch of one. Partitions take turns, an item each. Within a partition the
oldest ready item goes first: nothing of the partition completes before its first event does. Several items of a key may
be in one batch, in their order.

A key stays *held* behind a failed item (``hold``) until that item's event has had its turn. Items of earlier events
wait for ``Overtaken`` keys instead. (Events come out of their order to a stage that events enter by two ways, directly
and behind another stage.)

No deadlock, whatever the limits: a permit is taken by a running batch only, and a running batch waits for nothing here.

``has_room`` is the admission control, called before the items of an event are added. Items that come from an earlier
stage are added without it: that stage called it when it let their event in. So there may be more items than the limits
allow, by as many as that stage has room for.

Costs: ``add`` and ``take`` O(log keys) per item, ``withdraw`` the same for the first item of its key and O(items of the
key) for a later one, ``due`` O(partitions).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar


class KeyedItem:
    """An item of a queue. It sets ``position``, that of its event in the partition; items without an event share one
    position. An item is in one queue at a time."""

    __slots__ = ("_added_at", "_key", "_number", "position")

    position: int
    _key: _KeyQueue[Any]
    _number: int  # in the order of ``add``; 0: it does not wait
    _added_at: float


ItemT = TypeVar("ItemT", bound=KeyedItem)


@dataclass(frozen=True)
class Overtaken:
    """The key that an item waits for in place of ``key``, which the failure of a later event holds."""

    key: Hashable


@dataclass(frozen=True, kw_only=True)
class PartitionLimits:
    """Bounds of what one partition may have in a queue.

    ``per_key``: items of a key that wait behind the one that runs or is next. ``keys``: keys with items. ``waiting``:
    items that wait; when they are so many there is no room until half of them have begun, so that a partition that
    waits for room comes back for many items. ``items``: items that wait or run; beyond, an event is let in only when
    there are none.
    """

    per_key: int = sys.maxsize
    keys: int = sys.maxsize
    waiting: int = sys.maxsize
    items: int = sys.maxsize


class _KeyQueue(Generic[ItemT]):
    __slots__ = ("entered", "held", "holders", "name", "partition", "waiting")

    def __init__(self, partition: _PartitionQueue[ItemT], name: Hashable) -> None:
        self.partition = partition
        self.name = name
        self.waiting: deque[ItemT] = deque()
        self.entered = 0  # its entry in ``by_age``, by the number of its first item; 0: it is not ready
        self.held = 0  # by so many items: those in a running batch, and the holders
        self.holders: list[ItemT] = []


class _PartitionQueue(Generic[ItemT]):
    __slots__ = ("by_age", "in_rotation", "is_full", "items", "keys", "name", "waiting")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.keys: dict[Hashable, _KeyQueue[ItemT]] = {}
        self.waiting = 0  # items
        self.items = 0  # that wait or run
        self.is_full = False  # of waiting ones
        self.by_age: list[tuple[int, _KeyQueue[ItemT]]] = []  # ready keys by their first item; stale entries stay in
        self.in_rotation = False

    def oldest(self) -> _KeyQueue[ItemT] | None:
        """Return the ready key whose first item is the oldest."""
        while self.by_age:
            number, key = self.by_age[0]
            if key.entered == number:
                return key
            heappop(self.by_age)
        return None


class KeyedQueue(Generic[ItemT]):
    """A queue of items with keys, from which up to ``permits`` batches run at a time."""

    def __init__(self, permits: int, limits: PartitionLimits, *, batch_size: int = 1, max_delay: float = 0.0) -> None:
        self._permits = permits
        self._most_per_key = limits.per_key
        self._most_keys = limits.keys
        self._most_waiting = limits.waiting
        self._most_items = limits.items
        self._batch_size = batch_size
        self._max_delay = max_delay
        self._partitions: dict[Hashable, _PartitionQueue[ItemT]] = {}
        self._rotation: deque[_PartitionQueue[ItemT]] = deque()  # all that have ready items, and some that had
        self._numbers = 0
        self._ready = 0  # items
        self.batches = 0
        """Running batches."""

    @property
    def waiting(self) -> int:
        return sum(partition.waiting for partition in self._partitions.values())

    @property
    def running(self) -> int:
        return sum(partition.items - partition.waiting for partition in self._partitions.values())

    @property
    def keys(self) -> int:
        """Return the number of keys that have items or are held, over all partitions."""
        return sum(len(partition.keys) for partition in self._partitions.values())

    @property
    def has_full_batch(self) -> bool:
        """Check that a batch can begin now without waiting for more items."""
        return self.batches < self._permits and self._ready >= self._batch_size

    def has_room(self, partition: Hashable, key: Hashable, count: int = 1) -> bool:
        """Check whether ``count`` items of an event may be added now; ``key``: of its first one."""
        known = self._partitions.get(partition)
        if known is None:
            return True
        # An event with more items than the limit is let in when there are no others, or it would never have room.
        if known.is_full or (known.items + count > self._most_items and known.items):
            return False
        found = known.keys.get(key)
        if found is None:
            return len(known.keys) < self._most_keys
        return len(found.waiting) + count <= self._most_per_key + (not found.held)  # a free key: one is next

    def add(self, partition: Hashable, key: Hashable, item: ItemT, now: float = 0.0) -> None:
        """Queue an item behind those of its key."""
        known = self._partitions.get(partition)
        if known is None:
            known = self._partitions[partition] = _PartitionQueue(partition)
        found = known.keys.get(key)
        if found is not None and found.holders:
            # The turn of a later event that holds the key waits for this item's event, so the item must not wait for
            # the key: a deadlock. The other key may be held by a later event in turn.
            while found is not None and any(item.position < holder.position for holder in found.holders):
                key = Overtaken(key)
                found = known.keys.get(key)
        if found is None:
            found = known.keys[key] = _KeyQueue(known, key)
        self._numbers += 1
        item._number = self._numbers
        item._key = found
        item._added_at = now
        found.waiting.append(item)
        known.items += 1
        known.waiting += 1
        if known.waiting >= self._most_waiting:
            known.is_full = True
        if not found.held:
            self._ready += 1
            if not found.entered:
                self._enter(found)

    def due(self) -> float | None:
        """Return the time when the next batch begins even if it does not get full; ``None``: none can begin."""
        if self.batches >= self._permits or not self._ready:
            return None
        oldest = (partition.oldest() for partition in self._rotation)
        return min(key.waiting[0]._added_at for key in oldest if key is not None) + self._max_delay

    def take(self, now: float = 0.0) -> list[ItemT] | None:
        """Take the items of a batch that begins now, if one does. The batch has a permit and its keys until ``end``."""
        count = self._ready
        if not count or self.batches >= self._permits:
            return None
        if count >= self._batch_size:
            count = self._batch_size
        elif (due := self.due()) is None or due > now:
            return None
        batch: list[ItemT] = []
        rotation = self._rotation
        while count:
            # One item each: a partition with many items does not keep the others from their permits.
            partition = rotation.popleft()
            by_age = partition.by_age
            while by_age:
                number, key = heappop(by_age)
                if key.entered != number:
                    continue  # out of date
                if not key.held:
                    self._ready -= len(key.waiting)
                key.held += 1
                item = key.waiting.popleft()
                item._number = key.entered = 0
                batch.append(item)
                count -= 1
                partition.waiting -= 1
                if partition.is_full and partition.waiting <= self._most_waiting // 2:
                    partition.is_full = False
                if count and key.waiting:  # its next item may come into the same batch
                    self._enter(key)
                break
            if by_age:
                rotation.append(partition)
            else:
                partition.in_rotation = False
        if self._batch_size > 1:
            for item in batch:
                item._key.entered = 0  # also of keys with further items, which wait for the end of the batch
        self.batches += 1
        return batch

    def end(self, batch: Sequence[ItemT]) -> None:
        """Give back the permit of a batch, and its keys but for those that are held."""
        self.batches -= 1
        for item in batch:
            item._key.partition.items -= 1
            self._let_go(item._key)

    def put_back(self, item: ItemT) -> None:
        """Have an item of a running batch wait once more, before those of its key. Of several the last one first."""
        key, partition = item._key, item._key.partition
        self._numbers += 1
        item._number = self._numbers
        key.waiting.appendleft(item)
        partition.items += 1  # ``end`` of its batch counts it as done, although it waits again
        partition.waiting += 1

    def hold(self, item: ItemT, now: float = 0.0) -> None:
        """Keep the key of an item of a running batch beyond the batch, until ``release`` (one for each ``hold``).
        Waiting items of earlier events get another key, ``Overtaken``."""
        key = item._key
        key.held += 1
        key.holders.append(item)
        # The turn of the failed item waits for these, so they must not wait for its key.
        for waiting in [one for one in key.waiting if one.position < item.position]:
            self.withdraw(waiting)
            self.add(key.partition.name, key.name, waiting, now)

    def release(self, item: ItemT) -> None:
        """Let the next items of a held key begin."""
        item._key.holders.remove(item)
        self._let_go(item._key)

    def withdraw(self, item: ItemT) -> bool:
        """Remove an item that has not begun. ``False``: it does not wait here."""
        if not item._number:
            return False
        key, partition = item._key, item._key.partition
        key.waiting.remove(item)
        partition.items -= 1
        partition.waiting -= 1
        if partition.is_full and partition.waiting <= self._most_waiting // 2:
            partition.is_full = False
        if not key.held:
            self._ready -= 1
            if key.entered == item._number:
                key.entered = 0
                if key.waiting:
                    self._enter(key)
                else:
                    self._forget(key)
        item._number = 0
        return True

    def _let_go(self, key: _KeyQueue[ItemT]) -> None:
        key.held -= 1
        if key.held:
            return
        if key.waiting:
            self._ready += len(key.waiting)
            self._enter(key)
        else:
            self._forget(key)

    def _enter(self, key: _KeyQueue[ItemT]) -> None:
        """Put a ready key into its partition's order, by the key's first item."""
        partition, number = key.partition, key.waiting[0]._number
        key.entered = number
        heappush(partition.by_age, (number, key))
        if not partition.in_rotation:
            partition.in_rotation = True
            self._rotation.append(partition)

    def _forget(self, key: _KeyQueue[ItemT]) -> None:
        partition = key.partition
        del partition.keys[key.name]  # new keys may come without an end: only those in use are kept
        if not partition.keys:
            del self._partitions[partition.name]
            if partition.in_rotation:
                partition.in_rotation = False
                self._rotation.remove(partition)
