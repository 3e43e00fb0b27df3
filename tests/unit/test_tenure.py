"""Tenures over a scripted group: what begins, what ends, and when the group learns that a partition is given up."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from streams.errors import BrokerUnavailable, MembershipFatal
from streams.model.group import Assigned, Assignment, Fatal, GroupEvent, GroupMetadata, Lost, Revoked
from streams.runtime.ownership.tenure import GroupTenures, Tenure


class ScriptedGroup:
    """A membership and its questions: ``tell`` is what the group says, ``given_up`` what it was told."""

    def __init__(self) -> None:
        self.group_metadata = GroupMetadata(0, 1, "me")
        self.given_up: list[tuple[frozenset[int], int, int]] = []
        self.answer: bool | Exception = True
        self.asked: list[tuple[str, int]] = []
        self.tell: Callable[[GroupEvent], None]

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        self.tell = deliver

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        self.given_up.append((frozenset(partitions), incarnation, generation))

    def is_member(self, member_id: str, generation: int, deadline: float) -> bool:
        self.asked.append((member_id, generation))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self, timeout_seconds: float) -> None:
        self.tell(Lost(9, "closed"))

    def assign(self, *owned: int, incarnation: int = 0) -> None:
        everything = frozenset(owned)
        self.tell(Assigned(incarnation, 1, everything, everything, Assignment(own=everything)))


class Diary:
    """An owner that notes what it is told."""

    def __init__(self) -> None:
        self.begun: list[Tenure] = []
        self.ended: list[tuple[int, str]] = []
        self.failures: list[Exception] = []

    def begin(self, tenure: Tenure) -> None:
        self.begun.append(tenure)

    def end(self, tenure: Tenure) -> None:
        self.ended.append((tenure.partition, tenure.reason))

    def failed(self, error: Exception) -> None:
        self.failures.append(error)

    @property
    def at_work(self) -> list[int]:
        return [tenure.partition for tenure in self.begun if not tenure.is_over]


@pytest.fixture
def group() -> ScriptedGroup:
    return ScriptedGroup()


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def tenures(group: ScriptedGroup, diary: Diary) -> GroupTenures:
    double: Any = group
    tenures = GroupTenures(double, double, diary)
    tenures.start()
    return tenures


def test_each_assigned_partition_begins_once(tenures: GroupTenures, group: ScriptedGroup, diary: Diary) -> None:
    group.assign(0, 2)
    group.assign(0, 1, 2)
    assert [tenure.partition for tenure in diary.begun] == [0, 2, 1]
    assert diary.ended == []


def test_a_revoked_partition_is_given_up_when_its_work_is_done_and_not_before(
    tenures: GroupTenures, group: ScriptedGroup, diary: Diary
) -> None:
    group.assign(0, 1)
    group.tell(Revoked(0, 2, frozenset({1, 5})))
    assert group.given_up == [(frozenset({5}), 0, 2)]  # nothing worked on that one
    assert diary.ended == [(1, "another process gets the partition")]
    assert diary.at_work == [0]
    diary.begun[1].done()
    diary.begun[1].done()
    assert group.given_up[1:] == [(frozenset({1}), 0, 2)]


def test_a_partition_that_comes_back_waits_for_the_tenure_before(
    tenures: GroupTenures, group: ScriptedGroup, diary: Diary
) -> None:
    group.assign(0)
    group.tell(Lost(1, "the session has expired"))
    assert diary.ended == [(0, "the group lost this process: the session has expired")]
    group.assign(0, incarnation=1)
    assert len(diary.begun) == 1  # the thread of the first one may still write
    diary.begun[0].done()
    assert [(tenure.incarnation, tenure.is_over) for tenure in diary.begun] == [(0, True), (1, False)]
    assert group.given_up == []


def test_a_tenure_is_confirmed_by_an_answer_of_the_group_and_nothing_else(
    tenures: GroupTenures, group: ScriptedGroup, diary: Diary
) -> None:
    group.assign(0)
    (tenure,) = diary.begun
    assert tenure.is_confirmed()
    assert group.asked == [("me", 1)]
    for answer in (False, BrokerUnavailable("nobody")):
        group.answer = answer
        assert not tenure.is_confirmed()
    group.answer = True
    group.group_metadata = GroupMetadata(1, -1, "")
    assert not tenure.is_confirmed()
    group.group_metadata = GroupMetadata(1, 7, "me")  # joined again since: it is another tenure's answer
    assert not tenure.is_confirmed()
    assert len(group.asked) == 3


def test_an_end_that_comes_during_the_question_counts(
    tenures: GroupTenures, group: ScriptedGroup, diary: Diary
) -> None:
    group.assign(0)

    def is_member(member_id: str, generation: int, deadline: float) -> bool:
        group.tell(Lost(1, "meanwhile"))
        return True

    group.is_member = is_member  # type: ignore[method-assign]
    assert not diary.begun[0].is_confirmed()


def test_nothing_begins_once_it_stops(tenures: GroupTenures, group: ScriptedGroup, diary: Diary) -> None:
    group.assign(0)
    tenures.stop()
    assert diary.ended == [(0, "stopped")]
    group.assign(0, 1)
    diary.begun[0].done()
    tenures.close(1.0)
    assert len(diary.begun) == 1
    assert diary.ended == [(0, "stopped")]


def test_a_group_that_refuses_the_process_ends_all(tenures: GroupTenures, group: ScriptedGroup, diary: Diary) -> None:
    group.assign(0)
    error = MembershipFatal("no")
    group.tell(Fatal(error))
    assert (diary.ended, diary.failures) == ([(0, "no")], [error])
