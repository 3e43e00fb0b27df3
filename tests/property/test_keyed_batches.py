"""Batches against a model that is slow and plain: random items, clocks, endings and withdrawals, at any settings."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from streams.core.keyed_batches import KeyedBatches, Queued
from tests.property.kit import seeded

Name = tuple[int, int, int]  # lane, key, number

limits = st.tuples(st.integers(1, 5), st.sampled_from([0.0, 1.0, 5.0]), st.integers(1, 3), st.integers(1, 12))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("event"), st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=8)),
        st.tuples(st.just("tick"), st.floats(0.0, 3.0), st.just([])),
        st.tuples(st.just("end"), st.integers(0, 5), st.just([])),
        st.tuples(st.just("withdraw"), st.integers(0, 30), st.just([])),
        st.tuples(st.just("hold"), st.integers(0, 5), st.just([])),
        st.tuples(st.just("release"), st.integers(0, 5), st.just([])),
    ),
    max_size=80,
)


class Model:
    """Lists of what waits and what runs, and the rules told of them once more."""

    def __init__(self, size: int, delay: float, running: int, items: int) -> None:
        self.size, self.delay, self.most, self.items = size, delay, running, items
        self.machine: KeyedBatches[Name] = KeyedBatches(size, delay, running, items)
        self.waiting: list[tuple[Name, float]] = []  # in the order in which they came
        self.queued: dict[Name, Queued[Name]] = {}
        self.running: list[list[Queued[Name]]] = []
        self.held: list[Queued[Name]] = []
        self.now = 0.0
        self.number = 0
        self.done: list[Name] = []

    def in_lane(self, lane: int) -> int:
        return sum(name[0] == lane for name, _ in self.waiting) + sum(
            one.item[0] == lane for batch in self.running for one in batch
        )

    def ready(self) -> list[tuple[Name, float]]:
        held = {one.item[:2] for batch in [*self.running, self.held] for one in batch}
        return [(name, at) for name, at in self.waiting if name[:2] not in held]

    def event(self, lane: int, keys: list[int]) -> None:
        here = self.in_lane(lane)
        room = self.machine.has_room(lane, len(keys))
        assert room == (here == 0 or here + len(keys) <= self.items)
        if room:
            for key in keys:
                self.number += 1
                name = (lane, key, self.number)
                self.queued[name] = self.machine.add(lane, key, name, self.now)
                self.waiting.append((name, self.now))

    def may_begin(self) -> bool:
        ready = self.ready()
        if len(self.running) >= self.most or not ready:
            return False
        return len(ready) >= self.size or min(at for _, at in ready) + self.delay <= self.now

    def pump(self) -> None:
        while True:
            expected, ready = self.may_begin(), self.ready()
            batch = self.machine.take(self.now)
            assert (batch is not None) == expected
            if batch is None:
                break
            self.check_batch([one.item for one in batch], ready)
            self.running.append(batch)
            taken = {one.item for one in batch}
            self.waiting = [(name, at) for name, at in self.waiting if name not in taken]
        due, ready = self.machine.due(), self.ready()
        if len(self.running) >= self.most or not ready:
            assert due is None
        else:
            assert due == min(at for _, at in ready) + self.delay
            assert due > self.now
        self.check_counts()

    def check_batch(self, batch: list[Name], ready: list[tuple[Name, float]]) -> None:
        names = [name for name, _ in ready]
        assert len(batch) == min(self.size, len(names)), "as full as can be"
        for lane in {name[0] for name in names}:
            taken = [name for name in batch if name[0] == lane]
            assert taken == [name for name in names if name[0] == lane][: len(taken)], "the oldest first, in order"
        shares = {lane: sum(name[0] == lane for name in batch) for lane in {name[0] for name in names}}
        for lane, share in shares.items():
            there = sum(name[0] == lane for name in names)
            assert share == there or share >= max(shares.values()) - 1, "lanes take turns"

    def check_counts(self) -> None:
        machine = self.machine
        assert machine.waiting == len(self.waiting)
        assert machine.running == sum(len(batch) for batch in self.running)
        assert machine.batches == len(self.running)
        here = {name[:2] for name, _ in self.waiting} | {
            one.item[:2] for batch in [*self.running, self.held] for one in batch
        }
        assert machine.keys == len(here)
        held = [one.item[:2] for batch in self.running for one in {one.item[:2]: one for one in batch}.values()]
        assert len(held) == len(set(held)), "a key is in one batch at a time"

    def end(self, which: int) -> None:
        if self.running:
            batch = self.running.pop(which % len(self.running))
            self.machine.ended(batch)
            self.done.extend(one.item for one in batch)

    def hold(self, which: int) -> None:
        running = [one for batch in self.running for one in batch if one not in self.held]
        if running:
            self.held.append(running[which % len(running)])
            self.machine.hold(self.held[-1])

    def release(self, which: int) -> None:
        if self.held:
            self.machine.release(self.held.pop(which % len(self.held)))

    def withdraw(self, which: int) -> None:
        names = list(self.queued)
        if names:
            name = names[which % len(names)]
            waits = name in [waiting for waiting, _ in self.waiting]
            assert self.machine.withdraw(self.queued[name]) == waits
            self.waiting = [(other, at) for other, at in self.waiting if other != name]


@seeded
@settings(max_examples=400, deadline=None)
@given(limits, actions)
@example(
    (5, 5.0, 1, 12), [("event", 0, [0, 0, 1]), ("withdraw", 0, []), ("withdraw", 2, [])]
)  # a first, and an only one
def test_the_machine_does_as_the_model(limits: tuple[int, float, int, int], actions: list[Any]) -> None:
    model = Model(*limits)
    for action, number, keys in actions:
        if action == "event":
            model.event(number, keys)
        elif action == "tick":
            model.now += number
        elif action == "end":
            model.end(number)
        elif action == "hold":
            model.hold(number)
        elif action == "release":
            model.release(number)
        else:
            model.withdraw(number)
        model.pump()


@seeded
@settings(max_examples=200, deadline=None)
@given(
    limits, st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=30)), max_size=12)
)
def test_everything_gets_done_at_any_settings(
    limits: tuple[int, float, int, int], events: list[tuple[int, list[int]]]
) -> None:
    """Each lane's events go in one after the other, when there is room; batches end, time passes: all items are done,
    each key in order, and nothing is left behind."""
    model = Model(*limits)
    left = list(events)
    for _ in range(10_000):
        blocked: set[int] = set()
        for event in list(left):
            lane, keys = event
            if lane not in blocked and model.machine.has_room(lane, len(keys)):
                model.event(lane, keys)
                left.remove(event)
            else:
                blocked.add(lane)
        model.pump()
        if model.running:
            model.end(0)
        elif (due := model.machine.due()) is not None:
            model.now = max(model.now, due)
        elif not left:
            break
    assert not left
    assert not model.waiting
    assert len(model.done) == sum(len(keys) for _, keys in events)
    for key in {name[:2] for name in model.done}:
        numbers = [name[2] for name in model.done if name[:2] == key]
        assert numbers == sorted(numbers)
    assert model.machine._lanes == {}
    assert model.machine.keys == 0


def test_a_lane_of_which_a_key_is_held_and_nothing_else_takes_an_event_however_large() -> None:
    machine: KeyedBatches[str] = KeyedBatches(1, 0.0, 1, 1)
    machine.add(0, "k", "first", 0.0)
    batch = machine.take(0.0)
    assert batch is not None
    machine.hold(batch[0])
    assert not machine.has_room(0, 2)
    machine.ended(batch)
    assert machine.has_room(0, 2)


def test_who_holds_a_key_and_who_waits_for_it() -> None:
    machine: KeyedBatches[str] = KeyedBatches(1, 0.0, 1, 10)
    first = machine.add(0, "k", "first", 0.0)
    for name in ("second", "third"):
        machine.add(0, "k", name, 0.0)
    batch = machine.take(0.0)
    assert batch == [first]
    machine.hold(first)
    assert machine.holders(0, "k") == ["first"]
    assert machine.behind(first) == ["second", "third"]
    assert machine.holders(0, "other") == machine.holders(1, "k") == []
    machine.ended(batch)
    assert not machine.has_full_batch, "the key is held"
    machine.release(first)
    assert machine.holders(0, "k") == []
    assert machine.has_full_batch
