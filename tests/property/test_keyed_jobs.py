"""Which job may run, against a model that is slow and plain: lists, and the rules told once more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.core.keyed_jobs import KeyedJobs
from tests.property.kit import seeded

Name = tuple[int, int, int]  # lane, key, number
limits = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), st.integers(1, 6))
actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "push"]), st.integers(0, 2), st.integers(0, 4)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["end", "leave slot", "leave key"]), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("withdraw"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("forget"), st.integers(0, 2), st.just(0)),
    ),
    max_size=80,
)


class Model:
    """``waiting`` in the order in which they came, ``running`` and ``holding`` in the order in which they began to."""

    def __init__(self, concurrency: int, depth: int, keys: int, waiting: int) -> None:
        self.concurrency, self.depth, self.keys, self.most_waiting = concurrency, depth, keys, waiting
        self.machine: KeyedJobs[Name] = KeyedJobs(concurrency, depth, keys, waiting)
        self.full: set[int] = set()  # lanes in which too many wait
        self.waiting: list[Name] = []
        self.running: list[Name] = []
        self.holding: list[Name] = []  # their keys, without a slot
        self.number = 0

    @property
    def all(self) -> list[Name]:
        return [*self.waiting, *self.running, *self.holding]

    def has_room(self, lane: int, key: object) -> bool:
        if lane in self.full:
            return False
        here = {name[:2] for name in self.all if name[0] == lane}
        if (lane, key) not in here:
            return len(here) < self.keys
        of_key = sum(name[:2] == (lane, key) for name in self.all)
        return of_key < self.depth + 1

    def add(self, lane: int, key: int, *, ask: bool) -> None:
        room = self.machine.has_room(lane, key)
        assert room == self.has_room(lane, key)
        if ask and not room:
            return
        self.number += 1
        self.waiting.append((lane, key, self.number))
        self.machine.add(lane, key, self.waiting[-1])
        if self.waits(lane) >= self.most_waiting:
            self.full.add(lane)

    def waits(self, lane: int) -> int:
        return sum(name[0] == lane for name in self.waiting)

    def take(self) -> None:
        busy = {name[:2] for name in [*self.running, *self.holding]}
        heads: dict[tuple[int, int], Name] = {}
        for name in self.waiting:
            heads.setdefault(name[:2], name)
        ready = {name for key, name in heads.items() if key not in busy}
        taken = self.machine.take()
        if len(self.running) >= self.concurrency or not ready:
            assert taken is None
            return
        assert taken is not None, "somebody could go on"
        assert taken == next(name for name in self.waiting if name in ready and name[0] == taken[0]), "the oldest"
        self.waiting.remove(taken)
        self.running.append(taken)

    def end(self, number: int) -> None:
        if self.running:
            lane, key, _ = self.running.pop(number % len(self.running))
            self.machine.ended(lane, key)

    def leave_slot(self, number: int) -> None:
        if self.running:
            self.holding.append(self.running.pop(number % len(self.running)))
            self.machine.left_slot()

    def leave_key(self, number: int) -> None:
        if self.holding:
            lane, key, _ = self.holding.pop(number % len(self.holding))
            self.machine.left_key(lane, key)

    def withdraw(self, number: int) -> None:
        for name in self.running:
            assert not self.machine.withdraw(*name[:2], name)
        if self.waiting:
            name = self.waiting.pop(number % len(self.waiting))
            assert self.machine.withdraw(*name[:2], name)
            assert not self.machine.withdraw(*name[:2], name)

    def forget(self, lane: int) -> None:
        """A partition is given up: what waits is withdrawn, what runs ends some time."""
        for name in [name for name in self.waiting if name[0] == lane]:
            self.waiting.remove(name)
            assert self.machine.withdraw(*name[:2], name)

    def check(self) -> None:
        self.full = {lane for lane in self.full if self.waits(lane) > self.most_waiting // 2}
        for lane in range(3):
            assert self.machine.has_room(lane, "new") == self.has_room(lane, "new")
        assert (self.machine.running, self.machine.waiting) == (len(self.running), len(self.waiting))
        assert self.machine.keys == len({name[:2] for name in self.all})


@seeded
@given(limits, actions)
def test_it_does_what_the_model_does(limits: tuple[int, int, int, int], actions: list[tuple[str, int, int]]) -> None:
    model = Model(*limits)
    for action, first, second in actions:
        match action:
            case "add":
                model.add(first, second, ask=True)
            case "push":
                model.add(first, second, ask=False)
            case "take":
                model.take()
            case "end":
                model.end(first)
            case "leave slot":
                model.leave_slot(first)
            case "leave key":
                model.leave_key(first)
            case "withdraw":
                model.withdraw(first)
            case "forget":
                model.forget(first)
        model.check()
    for _ in range(10_000):  # and everything ends, whatever came before
        model.take()
        model.end(0)
        model.leave_key(0)
        if not model.all:
            break
    model.check()
    assert not model.machine.keys


@seeded
@given(st.integers(1, 3), st.integers(1, 4))
def test_lanes_take_turns(concurrency: int, lanes: int) -> None:
    """With everything full, no lane begins twice before each other one began once."""
    machine: KeyedJobs[Name] = KeyedJobs(concurrency, 100, 100, 100)
    for lane in range(lanes):
        for number in range(6):
            machine.add(lane, number % 2, (lane, number % 2, number))
    begun: list[Name] = []
    while (job := machine.take()) is not None:
        begun.append(job)
        machine.ended(*job[:2])
    for at in range(0, len(begun), lanes):
        assert len({name[0] for name in begun[at : at + lanes]}) == lanes
    for lane in range(lanes):
        assert [name[1] for name in begun if name[0] == lane] == [0, 1] * 3


def test_who_was_withdrawn_is_passed_over() -> None:
    machine: KeyedJobs[str] = KeyedJobs(1, 10, 10, 10)
    for job in ("a1", "b1", "a2", "a3"):
        machine.add(0, job[0], job)
    assert machine.withdraw(0, "a", "a1"), "now a2 is the first of its key, and b1 is older"
    assert machine.withdraw(0, "a", "a3"), "behind the first"
    assert not machine.withdraw(0, "a", "a3")
    assert not machine.withdraw(0, "c", "c1")
    assert machine.take() == "b1"
    assert machine.take() is None, "the slot is taken"
    machine.ended(0, "b")
    assert machine.take() == "a2"
    machine.ended(0, "a")
    assert (machine.running, machine.waiting, machine.keys) == (0, 0, 0)


def test_a_lane_in_which_too_many_wait_is_full_until_half_of_them_have_begun() -> None:
    machine: KeyedJobs[str] = KeyedJobs(1, 10, 10, 4)
    for job in "abcd":
        assert machine.has_room(0, job)
        machine.add(0, job, job)
    assert not machine.has_room(0, "e")
    assert not machine.has_room(0, "a"), "whatever the key"
    assert machine.has_room(1, "e"), "another lane is not"
    assert machine.take() == "a"
    machine.ended(0, "a")
    assert not machine.has_room(0, "e"), "three wait"
    assert machine.withdraw(0, "b", "b")
    assert machine.has_room(0, "e"), "two wait"


def test_jobs_behind_a_held_key_are_known_and_may_be_withdrawn() -> None:
    machine: KeyedJobs[str] = KeyedJobs(1, 10, 10, 10)
    for job in ("a1", "a2", "a3"):
        machine.add(0, "a", job)
    assert machine.take() == "a1"
    assert machine.queued(0, "a") == ["a2", "a3"]
    assert machine.queued(0, "b") == machine.queued(1, "a") == []
    assert machine.withdraw(0, "a", "a2")
    assert machine.queued(0, "a") == ["a3"]
    machine.ended(0, "a")
    assert machine.take() == "a3"
