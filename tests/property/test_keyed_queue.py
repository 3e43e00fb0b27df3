"""The keyed queue against a model that is slow and plain: lists, and the rules written once more."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streams.core.keyed_queue import KeyedItem, KeyedQueue, Overtaken, PartitionLimits
from tests.property.kit import seeded

PARTITIONS = 3
UNLIMITED = PartitionLimits()

few = st.one_of(st.just(sys.maxsize), st.integers(1, 6))
limits = st.builds(PartitionLimits, per_key=st.one_of(few, st.just(0)), keys=few, waiting=few, items=st.integers(1, 12))
shapes = st.tuples(st.integers(1, 4), limits, st.integers(1, 5), st.sampled_from([0.0, 1.0, 5.0]))
"""Permits, limits, size of a batch, delay."""
jobs = st.tuples(st.integers(1, 4), limits, st.just(1), st.just(0.0))
keys = st.lists(st.integers(0, 3), min_size=1, max_size=8)
actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["event", "push"]), st.integers(0, PARTITIONS - 1), keys, st.integers(0, 9)),
        st.tuples(st.just("tick"), st.sampled_from([0.5, 1.0, 3.0])),
        st.tuples(st.sampled_from(["end", "hold", "release"]), st.integers(0, 5)),
        st.tuples(st.just("withdraw"), st.integers(0, 30)),
        st.tuples(st.just("give up"), st.integers(0, PARTITIONS - 1)),
    ),
    max_size=80,
)


class Item(KeyedItem):
    def __init__(self, partition: int, key: Hashable, position: int, number: int) -> None:
        self.partition, self.key, self.position, self.number = partition, key, position, number
        self.at = 0.0

    def __repr__(self) -> str:
        return f"{self.partition}/{self.key}@{self.position}#{self.number}"

    @property
    def place(self) -> tuple[int, Hashable]:
        return self.partition, self.key


class Model:
    """Lists in the order in which items came, batches began and holders began to hold."""

    def __init__(self, permits: int, limits: PartitionLimits, size: int, delay: float) -> None:
        self.permits, self.limits, self.size, self.delay = permits, limits, size, delay
        self.queue: KeyedQueue[Item] = KeyedQueue(permits, limits, batch_size=size, max_delay=delay)
        self.waiting: list[Item] = []
        self.running: list[list[Item]] = []
        self.holding: list[Item] = []
        self.all: list[Item] = []
        self.done: list[Item] = []
        self.full: set[int] = set()
        self.now = 0.0

    @property
    def begun(self) -> list[Item]:
        return [item for batch in self.running for item in batch]

    @property
    def ready(self) -> list[Item]:
        held = {item.place for item in [*self.begun, *self.holding]}
        return [item for item in self.waiting if item.place not in held]

    def waits(self, partition: int) -> int:
        return sum(item.partition == partition for item in self.waiting)

    def has_room(self, partition: int, key: Hashable, count: int) -> bool:
        here = sum(item.partition == partition for item in [*self.waiting, *self.begun])
        known = {item.key for item in [*self.waiting, *self.begun, *self.holding] if item.partition == partition}
        of_key = sum(item.place == (partition, key) for item in self.waiting)
        is_held = any(item.place == (partition, key) for item in [*self.begun, *self.holding])
        if not known:
            return True
        if partition in self.full or (here and here + count > self.limits.items):
            return False
        return of_key + count <= self.limits.per_key + (not is_held) if key in known else len(known) < self.limits.keys

    def event(self, partition: int, keys: list[int], position: int, *, ask: bool) -> bool:
        room = self.queue.has_room(partition, keys[0], len(keys))
        assert room == self.has_room(partition, keys[0], len(keys))
        if ask and not room:
            return False
        for key in keys:
            self.all.append(Item(partition, key, position, len(self.all)))
            self.queue.add(partition, key, self.all[-1], self.now)
            self.add(self.all[-1])
        return True

    def add(self, item: Item) -> None:
        while any(item.place == holder.place and item.position < holder.position for holder in self.holding):
            item.key = Overtaken(item.key)
        item.at = self.now
        self.waiting.append(item)
        if self.waits(item.partition) >= self.limits.waiting:
            self.full.add(item.partition)

    def pump(self) -> None:
        """Take what can begin."""
        self.left()
        while True:
            ready = self.ready
            is_due = len(ready) >= self.size or any(item.at + self.delay <= self.now for item in ready)
            batch = self.queue.take(self.now)
            assert (batch is not None) == (len(self.running) < self.permits and bool(ready) and is_due)
            if batch is None:
                break
            self.check_batch(batch, ready)
            self.running.append(batch)
            self.waiting = [item for item in self.waiting if item not in batch]
            self.left()
        self.check()

    def check_batch(self, batch: list[Item], ready: list[Item]) -> None:
        assert len(batch) == min(self.size, len(ready)), "as full as can be"
        shares = {item.partition: sum(other.partition == item.partition for other in batch) for item in ready}
        for partition, share in shares.items():
            there = [item for item in ready if item.partition == partition]
            taken = [item for item in batch if item.partition == partition]
            assert taken == there[:share], "the oldest first, in order"
            assert share == len(there) or share >= max(shares.values()) - 1, "partitions take turns"

    def check(self) -> None:
        queue, begun = self.queue, self.begun
        assert (queue.waiting, queue.running, queue.batches) == (len(self.waiting), len(begun), len(self.running))
        assert queue.keys == len({item.place for item in [*self.waiting, *begun, *self.holding]})
        places = [{item.place for item in batch} for batch in self.running]
        assert sum(map(len, places)) == len(set().union(*places)), "a key is in one batch at a time"
        for partition in range(PARTITIONS):
            assert queue.has_room(partition, "new") == self.has_room(partition, "new", 1)
        may_begin = len(self.running) < self.permits
        assert queue.has_full_batch == (may_begin and len(self.ready) >= self.size)
        assert queue.due() == (min(item.at for item in self.ready) + self.delay if may_begin and self.ready else None)

    def left(self) -> None:
        """Some wait no longer."""
        self.full = {at for at in self.full if self.waits(at) > self.limits.waiting // 2}

    def end(self, which: int) -> None:
        if self.running:
            batch = self.running.pop(which % len(self.running))
            self.queue.end(batch)
            self.done.extend(batch)

    def hold(self, which: int) -> None:
        if running := [item for item in self.begun if item not in self.holding]:
            held = running[which % len(running)]
            self.holding.append(held)
            self.queue.hold(held, self.now)
            for item in list(self.waiting):
                if item.place == held.place and item.position < held.position:
                    self.waiting.remove(item)
                    self.left()
                    self.add(item)

    def release(self, which: int) -> None:
        if self.holding:
            self.queue.release(self.holding.pop(which % len(self.holding)))

    def withdraw(self, item: Item) -> None:
        assert self.queue.withdraw(item) == (item in self.waiting)
        self.waiting = [other for other in self.waiting if other is not item]
        assert not self.queue.withdraw(item)

    def do(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("event" | "push" as kind, partition, keys, position):
                self.event(partition, keys, position, ask=kind == "event")
            case ("tick", seconds):
                self.now += seconds
            case ("end", which):
                self.end(which)
            case ("hold", which):
                self.hold(which)
            case ("release", which):
                self.release(which)
            case ("withdraw", which):
                if self.all:
                    self.withdraw(self.all[which % len(self.all)])
            case ("give up", partition):
                for item in [item for item in self.waiting if item.partition == partition]:
                    self.withdraw(item)
        self.pump()


FIRST_AND_ONLY = [("event", 0, [0, 0, 1], 0), ("withdraw", 0), ("withdraw", 2)]


@pytest.mark.parametrize("shape", [jobs, shapes], ids=["jobs", "batches"])
def test_the_queue_does_as_the_model(shape: Any) -> None:
    @seeded
    @settings(max_examples=400, deadline=None)
    @given(shape, actions)
    @example((1, UNLIMITED, 5, 5.0), FIRST_AND_ONLY)
    def check(shape: tuple[int, PartitionLimits, int, float], actions: list[tuple[Any, ...]]) -> None:
        model = Model(*shape)
        for action in actions:
            model.do(action)
        for _ in range(10_000):  # and everything ends, whatever came before
            model.end(0)
            model.release(0)
            model.now += 5.0
            model.pump()
            if not (model.waiting or model.running or model.holding):
                break
        assert not model.waiting, "nothing waits for ever"
        assert model.queue.keys == 0
        assert not model.queue._partitions, "nothing stays behind"
        assert not model.queue._rotation

    check()


@seeded
@settings(max_examples=200, deadline=None)
@given(shapes, st.lists(st.tuples(st.integers(0, PARTITIONS - 1), keys), max_size=12))
def test_every_event_gets_in_and_each_key_keeps_its_order(
    shape: tuple[int, PartitionLimits, int, float], events: list[tuple[int, list[int]]]
) -> None:
    """At any limits under which an event has room alone."""
    permits, some, size, delay = shape
    model = Model(permits, PartitionLimits(keys=some.keys, waiting=some.waiting, items=some.items), size, delay)
    left = list(enumerate(events))
    for _ in range(10_000):
        blocked: set[int] = set()
        for event in list(left):
            position, (partition, keys) = event
            if partition not in blocked and model.event(partition, keys, position, ask=True):
                left.remove(event)
            else:
                blocked.add(partition)
        model.pump()
        if model.running:
            model.end(0)
        elif (due := model.queue.due()) is not None:
            model.now = max(model.now, due)
        elif not left:
            break
    assert not left
    assert len(model.done) == sum(len(keys) for _, keys in events)
    for place in {item.place for item in model.done}:
        numbers = [item.number for item in model.done if item.place == place]
        assert numbers == sorted(numbers)


@seeded
@given(st.integers(1, 3), st.integers(1, 4))
def test_partitions_take_turns(permits: int, partitions: int) -> None:
    """With everything full, no partition begins twice before each other one began once."""
    queue: KeyedQueue[Item] = KeyedQueue(permits, UNLIMITED)
    for partition in range(partitions):
        for number in range(6):
            queue.add(partition, number % 2, Item(partition, number % 2, 0, number))
    begun: list[Item] = []
    while (batch := queue.take()) is not None:
        begun += batch
        queue.end(batch)
    for at in range(0, len(begun), partitions):
        assert len({item.partition for item in begun[at : at + partitions]}) == partitions
    for partition in range(partitions):
        assert [item.key for item in begun if item.partition == partition] == [0, 1] * 3


def test_items_that_are_put_back_come_before_those_behind_them() -> None:
    """Once the item that failed before them has let go of the key."""
    queue: KeyedQueue[KeyedItem] = KeyedQueue(1, PartitionLimits(items=5), batch_size=3)
    items = [KeyedItem() for _ in range(5)]
    for position, item in enumerate(items):
        item.position = position
        queue.add("partition", "key", item)
    batch = queue.take()
    assert batch == items[:3]
    queue.hold(items[0])
    for item in reversed(items[1:3]):
        queue.put_back(item)
    queue.end(batch)
    assert (queue.take(), queue.waiting, queue.running) == (None, 4, 0)
    assert queue.has_room("partition", "key")
    queue.release(items[0])
    assert queue.take() == items[1:4]
    assert queue.withdraw(items[4])
    queue.end(items[1:4])
    assert (queue.waiting, queue.keys) == (0, 0)
