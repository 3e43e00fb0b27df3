"""Single rules of the incremental plan, each with the smallest group in which it decides."""

from __future__ import annotations

import msgspec

from streams.core.assignor import sticky_plan
from streams.core.strategies import PlanSettings, assignor
from streams.group import Assignment, Copies, MemberReport


def has(*owned: int, ready: str = "", restoring: str = "", late: str = "", leaving: bool = False) -> MemberReport:
    """``restoring``: numbers, each with 10 times as many records left."""
    left = {int(number): 10 * int(number) for number in (restoring + late)}
    copies = Copies(ready=frozenset(map(int, ready)), preparing=left, late=frozenset(map(int, late)))
    return MemberReport(instance="?", owned=frozenset(owned), generation=1, copies=copies, leaving=leaving)


def planned(partitions: int, **members: MemberReport) -> dict[str, Assignment]:
    """Names are member ids and instances."""
    reports = {name: msgspec.structs.replace(report, instance=name) for name, report in members.items()}
    return assignor("incremental", PlanSettings())(partitions, reports)


def test_what_one_that_leaves_gives_away_is_given_once() -> None:
    plan = planned(2, a=has(ready="0"), b=has(0, 1, leaving=True), c=has(ready="0"))
    assert plan["b"].release == {0: "a"}
    assert (plan["a"].incoming, plan["c"].incoming) == ({0: 0}, {})


def test_nobodys_partition_goes_to_one_with_room_though_another_has_less_left() -> None:
    plan = planned(4, a=has(0, 1, restoring="3"), b=has(2, restoring="3"))
    assert plan["b"].own == {2, 3}


def test_a_late_copy_is_no_move_and_is_not_begun_again() -> None:
    """b is late with 0, so its share is 3. What it is late with is neither one of these, nor left out."""
    assert planned(8, a=has(0, 1, 2, 3, 4, 5, 6, 7), b=has(restoring="12", late="0"))["b"].preparing == {0, 1, 2, 3}
    assert planned(8, a=has(0, 1, 2, 3, 4, 5, 6, 7), b=has(late="0"))["b"].preparing == {0, 1, 2, 3}


def test_who_has_partitions_that_are_asked_for_has_the_smaller_share() -> None:
    plan = planned(10, a=has(0, 1, 2, 3, 4), b=has(5, 6, 7, 8, 9), c=has(ready="016"))
    assert (plan["a"].release, plan["b"].release) == ({0: "c", 1: "c"}, {6: "c"})
    assert not plan["c"].preparing


def test_what_one_that_leaves_has_does_not_go_to_one_that_is_late() -> None:
    plan = planned(6, a=has(0, 1, leaving=True), b=has(2, 3, ready="01", late="4"), c=has(4, 5, ready="01"))
    assert plan["a"].release == {0: "c", 1: "c"}


def test_larger_shares_are_not_given_twice_when_a_member_leaves() -> None:
    plan = planned(
        10, a=has(0, 1, 2, 3, 4, leaving=True), b=has(5, 6, ready="01"), c=has(7, 8, ready="23"), d=has(9, ready="4")
    )
    assert sorted(plan["a"].release.values()) == ["b", "b", "c", "d"]
    assert plan["d"].preparing == {3}
    plan = planned(10, a=has(0, 1, 2, 3, 4, leaving=True), b=has(5, 6, 7, 8), c=has(9, ready="012"), d=has())
    assert sorted(plan["a"].release.values()) == ["c", "c"]
    assert len(plan["d"].preparing) == 3


def test_a_late_copy_of_what_becomes_ones_own_is_not_told() -> None:
    plan = planned(3, a=has(1, 2), b=has(late="0"))
    assert (plan["b"].own, plan["b"].preparing) == ({0}, set())


def test_more_than_the_larger_share_is_no_better_than_the_larger_share() -> None:
    """One of them has to give two: the one that has more, though it owns most."""
    reports = {
        name: MemberReport(instance=name, owned=frozenset(owned), generation=1)
        for name, owned in {"a": range(4), "b": range(4, 9), "c": [9]}.items()
    }
    plan = sticky_plan(10, reports)
    assert [len(plan[name].own) for name in "abc"] == [4, 3, 1]
