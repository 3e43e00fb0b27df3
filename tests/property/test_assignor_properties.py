"""The assignor against a model of a group: members join, leave, crash and miss rounds, in any order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import given, note, seed, settings
from hypothesis import strategies as st

from streams.core.assignor import sticky_plan
from streams.group import Assignment, Copies, MemberReport

SEED = int(os.environ.get("SEED", "0")) or None


def seeded(test):
    """``SEED=`` repeats a run; hypothesis prints the example itself when one fails."""
    return seed(SEED)(test) if SEED is not None else test


@dataclass
class Member:
    instance: str
    owned: frozenset[int] = frozenset()
    generation: int = -1
    leaving: bool = False

    def report(self, sequence: int) -> MemberReport:
        return MemberReport(
            instance=self.instance,
            owned=self.owned,
            generation=self.generation,
            leaving=self.leaving,
            sequence=sequence,
        )


@dataclass
class Group:
    """What the broker and the members do around the assignor: give up first, join again, then take."""

    partitions: int
    members: dict[str, Member] = field(default_factory=dict)
    generation: int = 0
    made: int = 0

    def join(self) -> None:
        self.made += 1
        self.members[f"id-{self.made}"] = Member(instance=f"name{self.made % 7}-{self.made}")

    def round(self) -> dict[str, Assignment]:
        """One rebalance. Every member applies its assignment: what is not in ``own`` is gone before the next round."""
        self.generation += 1
        reports = {member_id: member.report(self.generation) for member_id, member in self.members.items()}
        plan = sticky_plan(self.partitions, reports)
        assert plan.keys() == reports.keys()
        owned_before = {number for member in self.members.values() for number in member.owned}
        for member_id, assignment in plan.items():
            member = self.members[member_id]
            taken = assignment.own - member.owned
            assert not taken & owned_before, "a partition is assigned before its owner gave it up"
            member.owned, member.generation = assignment.own, self.generation
        self.never_two_owners()
        return plan

    def never_two_owners(self) -> None:
        owned = [number for member in self.members.values() for number in member.owned]
        assert len(owned) == len(set(owned))

    def settle(self) -> int:
        """Rounds until nothing is revoked any more (the last one, which changes nothing by revoking, included)."""
        for rounds in range(1, 10):
            before = {member_id: member.owned for member_id, member in self.members.items()}
            plan = self.round()
            if not any(before[member_id] - assignment.own for member_id, assignment in plan.items()):
                return rounds
        raise AssertionError("the group does not settle")

    def settled(self) -> None:
        active = [member for member in self.members.values() if not member.leaving]
        counts = [len(member.owned) for member in active]
        if active:
            assert sum(counts) == self.partitions, "a partition is nobody's"
            assert max(counts) - min(counts) <= 1
        assert not any(member.owned for member in self.members.values() if member.leaving)


@seeded
@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(["join", "leave", "crash", "round"]), st.integers(0, 30)), max_size=25),
)
def test_any_history_of_a_group_ends_in_balance(partitions: int, history: list[tuple[str, int]]) -> None:
    group = Group(partitions)
    for act, which in history:
        ids = sorted(group.members)
        if act == "join":
            group.join()
        elif act == "round":
            group.round()
        elif ids and act == "leave":
            group.members[ids[which % len(ids)]].leaving = True
        elif ids:
            del group.members[ids[which % len(ids)]]
    assert group.settle() <= 3  # what is under way, and the last change
    group.settled()
    steady = {member_id: member.owned for member_id, member in group.members.items()}
    group.round()
    assert steady == {member_id: member.owned for member_id, member in group.members.items()}, (
        "it moves without a reason"
    )


@seeded
@settings(max_examples=300, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.sampled_from(["join", "leave", "crash"]), st.integers(0, 11))
def test_one_change_takes_two_rounds_and_moves_no_more_than_it_must(
    partitions: int, size: int, change: str, which: int
) -> None:
    group = Group(partitions)
    for _ in range(size):
        group.join()
    group.settle()
    ids = sorted(group.members)
    before = {member_id: member.owned for member_id, member in group.members.items()}
    if change == "join":
        group.join()
    elif change == "leave":
        group.members[ids[which % size]].leaving = True
    else:
        del group.members[ids[which % size]]
    changing = 0
    for _ in range(2):
        changing += 1
        group.round()
    group.settled()
    moved = sum(
        len(owned - group.members[member_id].owned) for member_id, owned in before.items() if member_id in group.members
    )
    if change == "join":
        assert moved == partitions // (size + 1)  # the newcomer's smaller share, and nothing else
    elif change == "leave":
        assert moved == len(before[ids[which % size]])
    else:
        assert moved == 0
    note(f"{changing=} {moved=}")


reports = st.builds(
    MemberReport,
    instance=st.sampled_from(["a", "b", "c", "d"]),
    owned=st.frozensets(st.integers(-2, 12)),
    generation=st.integers(-1, 5),
    copies=st.builds(Copies, ready=st.frozensets(st.integers(-2, 12))),
    leaving=st.booleans(),
    sequence=st.integers(0, 9),
)


@seeded
@settings(max_examples=500, deadline=None)
@given(st.integers(0, 10), st.dictionaries(st.text("xyz", min_size=1, max_size=3), reports, max_size=6))
def test_whatever_is_reported_the_plan_is_sound(partitions: int, said: dict[str, MemberReport]) -> None:
    """Lies included: claims of others' partitions, numbers that do not exist, names that are taken."""
    plan = sticky_plan(partitions, said)
    assert plan.keys() == said.keys()
    given_out = [number for assignment in plan.values() for number in assignment.own]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(range(partitions))
    owned = {number for report in said.values() for number in report.owned}
    working = [member_id for member_id, assignment in plan.items() if assignment.own]
    for member_id, assignment in plan.items():
        assert assignment.sequence == said[member_id].sequence
        assert sorted(assignment.members) == sorted(report.instance for report in said.values())
        assert not (assignment.own - said[member_id].owned) & owned, "a claimed partition goes to somebody else"
        assert not (said[member_id].leaving and assignment.own)
    assert len({said[member_id].instance for member_id in working}) == len(working), "two members work under one name"
    assert plan == sticky_plan(partitions, dict(reversed(said.items()))), "the order of the reports decides"
