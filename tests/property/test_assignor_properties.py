"""The strategies against a model of a group: members join, leave, crash, are lost and miss plans, in any order.

Their claims are the real ones (``Holdings``), made at any moment of a hand-over. ``SEED=`` repeats a run;
hypothesis prints the history itself when one fails.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec import UNSET

from streams.core.assignor import NEAR
from streams.core.claims import read_claims
from streams.core.strategies import PlanSettings, assignor
from streams.model.group import Assignment, Copies, MemberReport, Order, Shelf
from streams.settings.groups import STRATEGIES
from tests.property.kit import seeded
from tests.unit.group_kit import RECORDS, Group, Member

EXAMPLES = int(os.environ.get("EXAMPLES", "1"))
FAULTS = ["crash", "leave", "lose", "forget", "late"]
JOINS = ["join", "join with a disk", "join with a disk", "join with copies"]
CALM = [*JOINS, "round", "engines", "settle", "brink", "brink", "brink", "brink"]
STEPS = ["join group", "all join", "sync", "all sync", "notice", "hand over", "markers", "restore", "restore all"]
ACTS = FAULTS + 2 * CALM + 7 * STEPS + 7 * ["all join", "all sync", "hand over", "markers"]


class Watched(Group):
    """Looks at every plan."""

    def __init__(self, partitions: int, strategy: str, bounds: PlanSettings) -> None:
        super().__init__(partitions, assignor(strategy, bounds))
        self.strategy, self.bounds = strategy, bounds

    def planned(self, said: dict[str, MemberReport]) -> None:
        plan = self.plan
        assert plan.keys() == said.keys()
        sound(self.partitions, said, plan)
        assert plan == self.assignor(self.partitions, dict(reversed(said.items()))), "the order of the reports decides"
        if self.strategy != "incremental":
            assert not any(told.standby or told.preparing for told in plan.values())
            return
        kept = {(p, order.to) for report in said.values() for p, order in report.releasing.items()}
        moved = [(p, to) for told in plan.values() for p, to in told.release.items() if (p, to) not in kept]
        for partition, to in moved:
            assert partition in said[to].copies.ready, "a cold partition moves"
        self.within_bounds(said)
        self.folders_come_first(said)
        self.nothing_moves_without_a_reason(said, moved)

    def within_bounds(self, said: dict[str, MemberReport]) -> None:
        begun = [p for member, told in self.plan.items() for p in told.preparing - said[member].copies.late]
        assert len(begun) == len(set(begun)), "two prepare the same"
        assert len(begun) <= self.bounds.max_moves
        known = {p for report in said.values() for p in report.owned}
        assert len(begun) <= 1 or len(set(begun) & known) <= self.bounds.max_move_bytes  # a byte for each partition

    def folders_come_first(self, said: dict[str, MemberReport]) -> None:
        """A partition without an owner goes where the farthest folder is, unless it is in some member's memory."""
        claims = read_claims(self.partitions, said)
        known = {partition for member in claims.active for partition in memory(said[member].copies)}
        for partition in set(claims.free) - known:
            offsets = {}
            for member in claims.active:
                shelf = said[member].copies.shelf
                if shelf and partition in shelf.offsets:
                    offsets[member] = shelf.offsets[partition]
            if offsets:
                (owner,) = [member for member, told in self.plan.items() if partition in told.own]
                assert max(offsets.values()) - offsets.get(owner, -NEAR - 1) <= NEAR, f"{partition} is read anew"

    def nothing_moves_without_a_reason(self, said: dict[str, MemberReport], moved: list[tuple[int, str]]) -> None:
        """Who is asked to give something away has more than the smaller share, and keeps that."""
        going = {p for p, _ in moved}
        for member, told in self.plan.items():
            going |= told.preparing - said[member].copies.late
        active = [member for member in said if not said[member].leaving and not self.plan[member].quit]
        for member in active:
            told = self.plan[member]
            away = going - told.preparing  # what comes back to it is not given away
            before = len(told.own) + len(told.incoming) + len([p for p in told.release if p in away])
            given = len((told.own | told.release.keys()) & away)
            assert not given or before - given >= self.partitions // len(active)

    def settled(self) -> None:
        active = [member for member in self.members.values() if not member.holdings.leaving]
        if not active:
            return
        working = [p for member in self.members.values() for p in member.working]
        assert sorted(working) == list(range(self.partitions)), f"forgotten: {self.working()}"
        for member in self.members.values():
            assert member.working == member.holdings.owned
            assert not member.holdings.incoming
            assert not member.holdings.releasing
        counts = [len(member.working) for member in active if not member.late]
        assert not counts or max(counts) - min(counts) <= 1, self.working()
        if self.strategy == "incremental":
            self.standbys_complete(active)

    def standbys_complete(self, active: list[Member]) -> None:
        ready = Counter(p for member in active for p, left in member.copies.items() if not left or member.slow)
        for partition in range(self.partitions):
            assert ready[partition] >= min(self.bounds.num_standbys, len(active) - 1), f"no copies of {partition}"

    def unchanged(self) -> None:
        """Whoever wants it: another round changes nothing."""
        for _ in range(3):  # copies that were kept for safety go in the first, and are replaced by none
            self.round()
            self.engines()
        plan = self.plan
        for _ in range(5):
            self.round()
            self.engines()
            for member, told in self.plan.items():
                assert (told.own, told.standby, told.preparing) == (
                    plan[member].own, plan[member].standby, plan[member].preparing,
                ), "the plan changes without a reason"  # fmt: skip
                assert not told.release
                assert not told.incoming

    def act(self, name: str, which: int) -> None:
        members = sorted(self.members.values(), key=lambda member: member.id)
        has_room = len(members) < 9
        alone: dict[str, Callable[[], Any]] = {
            "join with copies": lambda: has_room and self.join(f"m{which % 5}", copies=self.some(which)),
            "join with a disk": lambda: has_room and self.join(f"d{which % 5}", shelf=f"machine {which % 3}"),
            "join": lambda: has_room and self.join(f"n{len(members)}-{which}"),
            "forget": self.forget,
            "all join": lambda: self.all_join(members),
            "all sync": lambda: [self.sync(member) for member in members if member.id in self.members],
            "restore all": lambda: [member.restore() for member in members],
            "round": self.round,
            "engines": self.engines,
            "settle": lambda: self.settle(60),
            "brink": self.to_the_brink,
        }
        of_one: dict[str, tuple[Callable[[Member], bool], Callable[[Member], Any]]] = {
            "crash": (anybody, self.remove),
            "leave": (anybody, self.leave),
            "lose": (anybody, self.lose),
            "late": (anybody, lambda member: self.is_late(member, which)),
            "join group": (lambda member: member.id not in self.reports, self.join_group),
            "sync": (lambda member: member.id in self.unsynced, self.sync),
            "notice": (lambda member: bool(member.notices), lambda member: member.hear_notice()),
            "hand over": (lambda m: bool(m.holdings.releasing), lambda member: member.hand_over(self, 1 + which)),
            "markers": (lambda m: bool(m.holdings.incoming), lambda member: member.look_for_markers(self)),
            "restore": (anybody, lambda member: member.restore(RECORDS if which % 2 else RECORDS // 3)),
        }
        if name in alone:
            alone[name]()
        else:
            is_able, does = of_one[name]
            if able := [member for member in members if is_able(member)]:
                does(able[which % len(able)])
        self.check()

    def some(self, which: int) -> list[int]:
        return [p for p in range(self.partitions) if (p + which) % 3]

    def all_join(self, members: list[Member]) -> None:
        for member in members:
            if member.id in self.members and member.id not in self.reports:
                self.join_group(member)
                if not self.reports:
                    break

    def is_late(self, member: Member, which: int) -> None:
        member.late |= {p for p, left in member.copies.items() if left}
        member.slow = which % 3 == 0


def memory(copies: Copies) -> frozenset[int]:
    return copies.ready.union(copies.preparing, copies.late)


def anybody(_: Member) -> bool:
    return True


def sound(partitions: int, said: dict[str, MemberReport], plan: dict[str, Assignment]) -> None:
    """What holds for every plan, whatever was reported."""
    own = Counter(p for told in plan.values() for p in told.own)
    to = [(p, target) for told in plan.values() for p, target in told.release.items()]
    at = [(p, member) for member, told in plan.items() for p in told.incoming]
    assert sorted(to) == sorted(at), "one side of a move does not know of it"
    assert len({p for p, _ in to}) == len(to), "a partition goes two ways"
    assert all(count == 1 for count in own.values())
    assert not own.keys() & {p for p, _ in to}
    assert own.keys() | {p for p, _ in to} <= set(range(partitions))
    claimed = {p for report in said.values() for p in report.owned}
    for member, told in plan.items():
        report = said[member]
        assert told.sequence == report.sequence
        assert sorted(told.members) == sorted(other.instance for other in said.values())
        assert told.release.keys() <= report.owned, "an order that could not be kept"
        assert not (told.own - report.owned - report.incoming) & claimed, "a claimed partition goes to somebody else"
        assert not told.own & (told.standby | told.preparing)
        assert not told.standby & told.preparing
        assert not told.incoming.keys() & (told.own | told.standby | told.preparing)
        if report.leaving or told.quit:
            assert told.own <= report.owned | report.incoming
            assert not told.standby
            assert not told.preparing
            assert all(p in report.owned for p in told.release)


histories = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 30)), min_size=5, max_size=90)


def bounds() -> st.SearchStrategy[PlanSettings]:
    return st.builds(
        PlanSettings,
        num_standbys=st.integers(0, 2),
        max_moves=st.sampled_from([1, 2, 5, 64]),
        max_move_bytes=st.sampled_from([1, 3, 1 << 30]),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@seeded
@settings(max_examples=100 * EXAMPLES, deadline=None)
@given(st.integers(1, 16), st.integers(0, 4), bounds(), histories)
def test_any_history_of_a_group_ends_well(
    strategy: str, partitions: int, members: int, limits: PlanSettings, history: list[tuple[str, int]]
) -> None:
    group = Watched(partitions, strategy, limits)
    for number in range(members):
        group.join(f"m{number}")
    group.settle(20)
    for name, which in history:
        group.act(name, which)
    group.wanted = True  # whoever missed something joins again
    rounds = group.settle(20 + 2 * partitions)
    note(f"{rounds=}")
    if not group.members:
        return
    group.round()  # names that were doubled are free again, members that waited for a marker say so
    group.settle(20 + 2 * partitions)
    group.settled()
    group.unchanged()
    group.settled()


def numbers() -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(-2, 12), max_size=8)


def lies() -> st.SearchStrategy[dict[str, MemberReport]]:
    """Claims of others' partitions, numbers that do not exist, names that are taken, orders and folders of anybody."""
    ids = ["x", "y", "z", "xx", "yy"]
    orders = st.builds(Order, st.sampled_from([*ids, "gone"]), st.integers(0, 5))
    copies = st.builds(
        Copies,
        ready=numbers(),
        preparing=st.dictionaries(st.integers(-2, 12), st.integers(0, 99), max_size=6),
        late=numbers(),
        sizes=st.dictionaries(st.integers(-2, 12), st.integers(0, 99), max_size=6),
        shelf=st.just(UNSET)
        | st.builds(Shelf, st.sampled_from(["m", "n"]), st.dictionaries(st.integers(-2, 12), st.integers(0, 1 << 20))),
    )
    report = st.builds(
        MemberReport,
        instance=st.sampled_from(["a", "b", "c", "d"]),
        owned=numbers(),
        generation=st.integers(-1, 5),
        releasing=st.dictionaries(st.integers(-2, 12), orders, max_size=6),
        incoming=numbers(),
        copies=copies,
        leaving=st.booleans(),
        sequence=st.integers(0, 9),
    )
    return st.dictionaries(st.sampled_from(ids), report, max_size=5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@seeded
@settings(max_examples=150 * EXAMPLES, deadline=None)
@given(st.integers(0, 10), bounds(), lies())
def test_whatever_is_reported_the_plan_is_sound(
    strategy: str, partitions: int, limits: PlanSettings, said: dict[str, MemberReport]
) -> None:
    plan = assignor(strategy, limits)(partitions, said)
    assert plan.keys() == said.keys()
    sound(partitions, said, plan)
    assert plan == assignor(strategy, limits)(partitions, dict(reversed(said.items())))
