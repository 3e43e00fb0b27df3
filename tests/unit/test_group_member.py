"""The state of one group member: what each call changes, and what has no effect. The memberships that drive it are
tested with their clients; the whole, with losses at any moment, by the simulation."""

from __future__ import annotations

import pytest

from streams.core.group_member import GracePeriod, GroupMember
from streams.group import Assignment, Copies, Lost, Order


def member_of(owned: frozenset[int] = frozenset(), generation: int = 1) -> GroupMember:
    """A member that got these partitions in its first generation."""
    member = GroupMember("a", session_seconds=6.0, rebalance_seconds=30.0)
    member.report()
    member.joined(generation, "m-1", b"1")
    member.assign(generation, Assignment(own=owned, sequence=member.holdings.reported.sequence))
    return member


def test_a_barrier_opens_when_all_is_released() -> None:
    member = member_of(frozenset({1, 2}))
    event = member.begin_barrier(member.holdings.revoked_by(Assignment()))
    assert (event.incarnation, event.generation) == (0, 1)
    member.released([1, 7], 0, 1)
    assert not member.is_barrier_open
    member.joined(2, "m-1", b"2")  # a newer generation during the barrier, as librdkafka may publish one
    member.released([2], 0, 1)
    assert member.is_barrier_open
    assert member.holdings.owned == frozenset()
    assert event.partitions == {1, 2}, "the engine's event has what was revoked"


@pytest.mark.parametrize(("incarnation", "generation"), [(1, 1), (0, 2), (0, 0)])
def test_an_answer_to_another_barrier_releases_nothing(incarnation: int, generation: int) -> None:
    member = member_of(frozenset({1}))
    member.begin_barrier(frozenset({1}))
    member.released([1], incarnation, generation)
    assert not member.is_barrier_open
    member.end_barrier()
    member.released([1], 0, 1)
    assert member.holdings.owned == {1}, "too late"


def test_a_partition_that_is_handed_over_meanwhile_opens_the_barrier() -> None:
    member = member_of(frozenset({1}))
    order = Order("m-2", 2)
    member.assign(2, Assignment(release={1: "m-2"}, sequence=member.holdings.reported.sequence))
    member.begin_barrier(frozenset({1}))
    assert not member.handed_over(1, Order("m-3", 2)), "another order does not stand"
    assert not member.is_barrier_open
    assert member.handed_over(1, order)
    assert member.is_barrier_open


def test_a_loss_is_another_incarnation_and_only_one() -> None:
    member = member_of(frozenset({1}))
    member.begin_barrier(frozenset({1}))
    assert member.lost("evicted") == Lost(1, "evicted")
    assert (member.snapshot.generation, member.snapshot.metadata) == (-1, None)
    assert member.holdings.owned == frozenset()
    assert member.is_barrier_open
    assert member.lost("again") is None
    assert member.snapshot.incarnation == 1
    assert not member.took(3, 0), "of the incarnation before"


def test_what_is_news_for_the_group() -> None:
    member = member_of(frozenset({1}))
    copies = Copies(ready=frozenset({2}))
    member.copies_changed(copies, announce=False)
    assert not member.has_news
    member.copies_changed(copies, announce=True)
    assert member.has_news
    assert member.report().copies == copies
    member.copies_changed(copies, announce=True)
    assert member.took(2, 0)
    assert not member.has_news, "reported already"
    member.leave()
    assert member.has_news
    assert member.report().leaving
    member.leave()
    assert not member.has_news
    assert member.took(3, 0)
    assert member.has_news, "another member has to have it"


def test_a_member_of_the_same_name() -> None:
    refused = Assignment(quit=True)
    newcomer = member_of()
    assert newcomer.is_refused_for_rival(refused)
    assert newcomer.rival.begins(0.0)
    assert newcomer.is_refused_for_rival(refused)
    assert not newcomer.is_refused_for_rival(Assignment(own=frozenset({1})))
    assert not newcomer.rival.is_over(99.0), "it is gone"
    assert not member_of(frozenset({1})).is_refused_for_rival(refused), "first it gives up what it has"
    newcomer.leave()
    assert not newcomer.is_refused_for_rival(refused)
    assert newcomer.is_dismissed(refused)


def test_another_round_follows_when_partitions_are_taken_away() -> None:
    member = member_of(frozenset({1}))
    member.report()
    assert member.has_to_join_again(Assignment())
    assert not member.has_to_join_again(Assignment(own=frozenset({1, 2})))
    assert not member.is_answer_to_report(Assignment(sequence=1))


def test_a_grace_begins_once_and_ends() -> None:
    grace = GracePeriod(5.0)
    assert not grace.is_over(1e9)
    assert (grace.begins(100.0), grace.begins(104.0)) == (True, False)
    assert (grace.is_over(105.0), grace.is_over(105.5)) == (False, True)
    grace.passed()
    assert (grace.is_over(200.0), grace.begins(200.0)) == (False, True)
