"""The state of one group member: its claims, in the orders of events that the group cannot prevent, and what each call
changes. The memberships that drive it are tested with their clients; the whole, with losses at any moment, by the
simulation."""

from __future__ import annotations

import re

import pytest

from streams.core.group_member import GracePeriod, GroupMember, Holdings
from streams.model.group import THIS_GENERATION, Assignment, Copies, Lost, Order


def plan(text: str) -> Assignment:
    """``1`` is to be owned, ``1>T`` released to T, ``<1`` comes in by this generation, ``<1@5`` by the fifth."""
    words = text.split()
    return Assignment(
        own=frozenset(int(word) for word in words if word.isdigit()),
        release={int(number): to for number, to in re.findall(r"(\d+)>(\w+)", text)},
        incoming={int(number): int(since or THIS_GENERATION) for number, since in re.findall(r"<(\d+)@?(\d*)", text)},
    )


def after(history: str) -> tuple[Holdings, object]:
    """The claims, and the last step's answer. Steps: ``2: PLAN`` of the second generation, ``report``, ``took 1``,
    ``gave 1>T@2`` by the order of the second generation."""
    holdings, answer = Holdings("a"), None
    for step in history.split(" | "):
        name, _, rest = step.partition(" ")
        if name == "report":
            answer = holdings.report()
        elif name == "took":
            holdings.took(int(rest))
        elif name == "gave":
            number, to, generation = re.split("[>@]", rest)
            holdings.handed_over(int(number), Order(to, int(generation)))
        else:
            answer = holdings.apply(int(name.removesuffix(":")), plan(rest))
    return holdings, answer


@pytest.mark.parametrize(
    ("history", "owned", "releasing", "incoming", "added"),
    [
        ("1: 1 | 2: 1 4", {1, 4}, {}, {}, {4}),  # what is added is new
        # An order keeps its generation as long as it names the same member.
        ("1: 1 | 2: 1>T | 3: 1>T", {1}, {1: Order("T", 2)}, {}, set()),
        ("1: 1 | 2: 1>T | 3: 1>T | 4: 1>U", {1}, {1: Order("U", 4)}, {}, None),
        # Only what is owned can be released: it was handed over after the claim was made.
        ("1: 1 | 2: 1>T | report | gave 1>T@2 | 3: 1>T", set(), {}, {}, set()),
        # An order to another member makes it ours again: the former receiver is gone. Whether it was handed over to
        # it, and when that was known here, does not matter.
        ("1: 1 | 2: 1>T | report | gave 1>T@2 | 3: 1>U", {1}, {1: Order("U", 3)}, {}, {1}),
        ("1: 1 2 | 2: 1>T 2>T | gave 1>T@2", {2}, {2: Order("T", 2)}, {}, None),
        # An order that was withdrawn has no effect, nor one of an earlier generation.
        ("1: 1 | 2: 1>T | 3: 1 | gave 1>T@2", {1}, {}, {}, None),
        ("1: 1 | 2: 1>T | 3: 1 | 4: 1>T | gave 1>T@2", {1}, {1: Order("T", 4)}, {}, None),
        ("1: 1 | 2: 1>T | gave 1>T@2 | 3: 1", {1}, {}, {}, {1}),  # what was handed over and comes back is new
        # What comes in is expected from the generation in which it was ordered.
        ("5: <1 <2@3", set(), {}, {1: 5, 2: 3}, None),
        ("5: <1 <2 | took 1", {1}, {}, {2: 5}, None),
        ("5: <1 | took 1 | 6: <1@5", {1}, {}, {}, None),  # not once more
        ("1: | took 1", set(), {}, {}, None),  # not expected any more
    ],
)
def test_claims_after(
    history: str, owned: set[int], releasing: object, incoming: object, added: set[int] | None
) -> None:
    holdings, answer = after(history)
    assert (holdings.owned, holdings.releasing, holdings.incoming) == (owned, releasing, incoming)
    assert added is None or answer == added


def test_a_report_says_everything_and_a_lost_membership_keeps_its_copies_only() -> None:
    report = Holdings("shop", sequence=7).report()
    assert (report.instance, report.owned, report.generation, report.sequence) == ("shop", frozenset(), -1, 8)
    holdings, _ = after("1: 1 2 | 4: 1 2>T <5 <6@3")
    copies = holdings.copies = Copies(ready=frozenset({5}))
    holdings.leaving = True
    first = holdings.report()
    assert (first.owned, first.releasing, first.incoming) == ({1, 2}, {2: Order("T", 4)}, {5, 6})
    assert (first.generation, first.copies, first.leaving) == (4, copies, True)
    assert holdings.reported is first
    holdings.void()
    report = holdings.report()
    assert (report.owned, report.releasing, report.incoming, report.generation) == (frozenset(), {}, frozenset(), -1)
    assert (report.copies, report.sequence) == (copies, first.sequence + 1)


def test_what_is_to_be_handed_over_is_not_revoked() -> None:
    holdings, _ = after("1: 1 2 3")
    assert holdings.revoked_by(plan("1 2>T")) == {3}
    holdings.released([3])
    assert holdings.owned == {1, 2}


def test_a_plan_that_takes_away_what_was_claimed_is_followed_by_another_round() -> None:
    holdings, _ = after("1: 1 2 | report")
    assert not holdings.has_to_join_again(plan("1 2>T"))
    holdings.released([2])
    assert holdings.has_to_join_again(plan("1"))


def test_what_was_taken_after_it_was_claimed_as_incoming_is_not_revoked_by_a_plan_that_repeats_the_move() -> None:
    holdings, _ = after("1: | 5: <1 | report | took 1")
    assert not holdings.revoked_by(plan("<1@5"))
    holdings.apply(6, plan("<1@5"))
    holdings.report()
    assert holdings.revoked_by(plan("<1")) == {1}


def member_of(*owned: int) -> GroupMember:
    """A member that got these partitions in its first generation."""
    member = GroupMember("a", session_seconds=6.0, rebalance_seconds=30.0)
    assert (member.group_metadata.incarnation, member.group_metadata.generation) == (0, -1)
    member.report()
    member.joined(1, "m-1")
    member.assign(1, Assignment(own=frozenset(owned), sequence=member.holdings.reported.sequence))
    return member


def test_a_barrier_opens_when_all_is_released() -> None:
    member = member_of(1, 2)
    member.released([1], 0, 1)
    assert member.holdings.owned == {1, 2}, "only what was revoked can be released"
    event = member.begin_barrier(member.holdings.revoked_by(Assignment()))
    assert (event.incarnation, event.generation) == (0, 1)
    member.released([1, 7], 0, 1)
    assert not member.is_barrier_open
    member.joined(2, "m-1")  # a newer generation during the barrier, as librdkafka may publish one
    member.released([2], 0, 1)
    assert member.is_barrier_open
    assert member.holdings.owned == frozenset()
    assert event.partitions == {1, 2}, "the engine's event has what was revoked"


@pytest.mark.parametrize(("incarnation", "generation"), [(1, 1), (0, 2), (0, 0)])
def test_an_answer_to_another_barrier_releases_nothing(incarnation: int, generation: int) -> None:
    """No world of the simulation misses this check any more: settlements are too quick for such late answers."""
    member = member_of(1)
    member.begin_barrier(frozenset({1}))
    member.released([1], incarnation, generation)
    assert not member.is_barrier_open
    member.end_barrier()
    member.released([1], 0, 1)
    assert member.holdings.owned == {1}, "too late"


def test_a_partition_that_is_handed_over_meanwhile_opens_the_barrier() -> None:
    member = member_of(1)
    order = Order("m-2", 2)
    member.assign(2, Assignment(release={1: "m-2"}, sequence=member.holdings.reported.sequence))
    member.begin_barrier(frozenset({1}))
    assert not member.handed_over(1, Order("m-3", 2)), "another order does not stand"
    assert not member.is_barrier_open
    assert member.handed_over(1, order)
    assert member.is_barrier_open


def test_a_loss_is_another_incarnation_and_only_one() -> None:
    member = member_of(1)
    member.begin_barrier(frozenset({1}))
    assert member.lost("evicted") == Lost(1, "evicted")
    assert (member.group_metadata.generation, member.group_metadata.member_id) == (-1, "")
    assert member.holdings.owned == frozenset()
    assert member.is_barrier_open
    assert member.lost("again") is None
    assert member.group_metadata.incarnation == 1
    assert not member.took(3, 0), "of the incarnation before"


def test_what_is_news_for_the_group() -> None:
    member = member_of(1)
    copies = Copies(ready=frozenset({2}))
    member.copies_changed(copies, announce=False)
    assert not member.has_news
    member.copies_changed(copies, announce=True)
    assert member.has_news
    assert member.report().copies == copies
    member.copies_changed(Copies(ready=frozenset({2})), announce=True)
    assert member.took(2, 0)
    assert not member.has_news, "reported already"
    member.assign(2, Assignment(own=frozenset({1}), incoming={3: 0}))
    member.copies_changed(copies, announce=True)
    assert member.has_news, "its marker does not come: the engine wants a plan that knows that it waits"
    member.report()
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
    assert not member_of(1).is_refused_for_rival(refused), "first it gives up what it has"
    newcomer.leave()
    assert not newcomer.is_refused_for_rival(refused)
    assert newcomer.is_dismissed(refused)


def test_another_round_follows_when_partitions_are_taken_away() -> None:
    member = member_of(1)
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
