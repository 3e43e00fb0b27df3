"""The membership without a broker: what it says of itself, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from streams.clients import group_wire
from streams.clients.membership import KafkaPythonMembership, connect_group
from streams.core.assignor import sticky_plan
from streams.errors import ConfigError
from streams.group import (
    Assigned,
    Assignment,
    Assignor,
    Copies,
    GroupEvent,
    Lost,
    MemberReport,
    Membership,
    Order,
    Revoked,
    TakeOver,
)


@pytest.fixture
def membership() -> Iterator[KafkaPythonMembership]:
    membership, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {"cooperative-sticky": sticky_plan})
    yield membership
    membership._deliver = None  # most of them never started: there is nobody to leave the group
    membership.close(1.0)


def test_it_is_what_the_runtime_expects() -> None:
    parts: tuple[Membership, TakeOver] = connect_group(
        "127.0.0.1:1", "g", "t", 4, "a", {"cooperative-sticky": sticky_plan}
    )
    parts[0].close(1.0)


def test_each_report_differs_from_the_one_before(membership: KafkaPythonMembership) -> None:
    """A follower that sends the same bytes again starts no rebalance."""
    first, second = report(membership), report(membership)
    assert first != second
    reports = [group_wire.decode_report("t", "id", data)[0] for data in (first, second)]
    assert reports[1].sequence == reports[0].sequence + 1


def report(membership: KafkaPythonMembership) -> bytes:
    """The bytes of the next JoinGroup."""
    ((protocol, data),) = membership.subscriptions()
    assert protocol == "kes-cooperative-sticky-2"
    return data


def test_before_it_joined_there_is_no_metadata(membership: KafkaPythonMembership) -> None:
    snapshot = membership.snapshot
    assert (snapshot.incarnation, snapshot.generation, snapshot.metadata) == (0, -1, None)


def test_another_member_id_is_another_incarnation(membership: KafkaPythonMembership) -> None:
    heard: list[GroupEvent] = []
    membership._deliver = heard.append
    membership.published(3, "m-1")
    before = membership.snapshot
    membership.published(4, "m-1")
    assert (membership.snapshot.incarnation, membership.snapshot.generation) == (before.incarnation, 4)
    membership.published(5, "m-2")
    assert membership.snapshot.incarnation == before.incarnation + 1
    assert membership.snapshot.metadata == group_wire.group_metadata("g", 5, "m-2", None)
    assert [type(event) for event in heard] == [Lost]


def run(steps: Any) -> None:
    """A coroutine that does not have to wait."""
    with pytest.raises(StopIteration):
        steps.send(None)


def test_an_assignment_that_comes_after_the_loss_is_not_applied(membership: KafkaPythonMembership) -> None:
    """Lost between the answers to JoinGroup and SyncGroup."""
    heard: list[GroupEvent] = []
    membership._deliver = heard.append
    report(membership)
    membership.published(3, "m-1")
    membership.voided("session expired")
    data = group_wire.encode_assignment(
        "t", Assignment(own=frozenset({1}), sequence=membership._state.holdings.reported.sequence)
    )
    run(membership.joined(3, data))
    run(membership.joined(-1, data))
    assert [type(event) for event in heard] == [Lost]
    report(membership)
    assert membership._state.holdings.reported.owned == frozenset()


def test_only_what_was_revoked_can_be_released(membership: KafkaPythonMembership) -> None:
    heard: list[GroupEvent] = []
    membership._deliver = heard.append
    report(membership)
    membership.published(3, "m-1")
    own = Assignment(own=frozenset({1, 2}), sequence=membership._state.holdings.reported.sequence)
    run(membership.joined(3, group_wire.encode_assignment("t", own)))
    (event,) = heard
    assert event == Assigned(0, 3, frozenset({1, 2}), frozenset({1, 2}), own)
    membership.released([1], membership.snapshot.incarnation, membership.snapshot.generation)
    membership._client.net.drain()
    assert membership._state.holdings.owned == frozenset({1, 2})
    assert not any(isinstance(event, Revoked) for event in heard)


class Member:
    """A membership that is driven by hand: reports, plans, and what the engine says in between."""

    def __init__(self, membership: KafkaPythonMembership) -> None:
        self.membership, self.generation = membership, 0
        self.heard: list[GroupEvent] = []
        membership._deliver = self.heard.append

    def plan(self, assignment: Assignment, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """A rebalance: report, what comes ``meanwhile``, and the coroutine that applies the assignment."""
        self.generation += 1
        report(self.membership)
        self.membership.published(self.generation, "me")
        meanwhile()
        self.drain()
        told = msgspec.structs.replace(assignment, sequence=self.membership._state.holdings.reported.sequence)
        return self.membership.joined(self.generation, group_wire.encode_assignment("t", told))

    def drain(self) -> None:
        self.membership._client.net.drain()

    @property
    def last(self) -> GroupEvent:
        return self.heard[-1]


@pytest.fixture
def member(membership: KafkaPythonMembership) -> Member:
    return Member(membership)


def test_a_move_from_the_order_to_the_hand_over(member: Member) -> None:
    run(member.plan(Assignment(own=frozenset({1, 2}))))
    run(member.plan(Assignment(own=frozenset({1}), release={2: "other"})))
    order = Order("other", 2)
    assert isinstance(member.last, Assigned)
    assert (member.last.owned, member.last.releasing) == (frozenset({1, 2}), {2: order})
    member.membership.handed_over(2, Order("another", 2))
    member.drain()
    assert member.membership._state.holdings.owned == frozenset({1, 2})
    member.membership.handed_over(2, order)
    member.drain()
    assert member.membership._state.holdings.owned == frozenset({1})


def test_what_was_taken_after_the_report_is_not_revoked(member: Member) -> None:
    run(member.plan(Assignment(incoming={3: 0})))
    run(
        member.plan(
            Assignment(incoming={3: 1}), lambda: member.membership.took(3, member.membership.snapshot.incarnation)
        )
    )
    assert member.last == Assigned(0, 2, frozenset({3}), frozenset(), member.last.assignment)  # type: ignore[union-attr]


def test_what_was_handed_over_after_the_report_and_came_back_is_new(member: Member) -> None:
    run(member.plan(Assignment(own=frozenset({2}))))
    run(member.plan(Assignment(release={2: "other"})))
    run(member.plan(Assignment(own=frozenset({2})), lambda: member.membership.handed_over(2, Order("other", 2))))
    assert isinstance(member.last, Assigned)
    assert member.last.added == frozenset({2})


def wait(steps: Any) -> None:
    """A coroutine that has to wait."""
    steps.send(None)


@pytest.mark.parametrize("how", ["handed over", "released"])
def test_a_barrier_ends_when_what_was_revoked_is_gone(member: Member, how: str) -> None:
    """The receiver says that it has the partition; our own engine has not said so yet."""
    run(member.plan(Assignment(own=frozenset({1, 2}))))
    run(member.plan(Assignment(own=frozenset({1}), release={2: "other"})))
    barrier = member.plan(Assignment(own=frozenset({1})))
    wait(barrier)
    assert member.last == Revoked(0, 3, frozenset({2}))
    if how == "released":
        member.membership.released([2], member.membership.snapshot.incarnation, member.membership.snapshot.generation)
    else:
        member.membership.handed_over(2, Order("other", 2))
    member.drain()
    run(barrier)
    assert isinstance(member.last, Assigned)
    assert member.last.owned == frozenset({1})


def test_what_is_awaited_and_not_ours_any_more_is_revoked_too(member: Member) -> None:
    """The marker may be there before the engine hears that somebody else gets it."""
    run(member.plan(Assignment(own=frozenset({1}), incoming={3: 0})))
    barrier = member.plan(Assignment())
    wait(barrier)
    assert member.last == Revoked(0, 2, frozenset({1, 3}))
    member.membership.took(3, 0)
    member.membership.released([1], 0, member.membership.snapshot.generation)
    member.drain()
    wait(barrier)
    member.membership.released([3], member.membership.snapshot.incarnation, member.membership.snapshot.generation)
    member.drain()
    run(barrier)
    assert isinstance(member.last, Assigned)
    assert member.last.owned == frozenset()


def test_a_lost_membership_forgets_moves_and_keeps_copies(member: Member) -> None:
    run(member.plan(Assignment(own=frozenset({1}), release={2: "other"}, incoming={3: 0})))
    copies = Copies(ready=frozenset({0}))
    member.membership.report(copies, announce=False)
    member.membership.voided("session expired")
    member.membership.took(3, 0)
    member.drain()
    report(member.membership)
    told = member.membership._state.holdings.reported
    assert (told.owned, told.releasing, told.incoming, told.copies) == (frozenset(), {}, frozenset(), copies)


def test_what_was_said_of_an_earlier_incarnation_has_no_effect(member: Member) -> None:
    run(member.plan(Assignment(own=frozenset({1}), incoming={3: 0})))
    member.membership.voided("session expired")
    run(member.plan(Assignment(own=frozenset({1}), incoming={3: 0})))
    barrier = member.plan(Assignment(incoming={3: 1}))
    wait(barrier)
    member.membership.took(3, 0)
    member.membership.released([1], 0, member.membership.snapshot.generation)
    member.drain()
    wait(barrier)
    assert member.membership._state.holdings.owned == frozenset({1})
    member.membership.released([1], 1, member.membership.snapshot.generation)
    member.drain()
    run(barrier)
    assert member.membership._state.holdings.owned == frozenset()


class Joins:
    """In place of the coordinator client: counts requests to join again."""

    count = 0

    def request_rejoin(self) -> None:
        self.count += 1


def test_an_announcement_joins_again_once_it_has_something_new(member: Member) -> None:
    run(member.plan(Assignment()))
    member.membership._coordinator = joins = Joins()  # type: ignore[assignment]
    copies = Copies(ready=frozenset({1}))
    member.membership.report(copies, announce=False)
    member.drain()
    assert joins.count == 0
    member.membership.report(copies, announce=True)
    member.drain()
    assert joins.count == 1
    run(member.plan(Assignment()))
    member.membership.report(Copies(ready=frozenset({1})), announce=True)
    member.drain()
    assert joins.count == 1, "told already"
    run(member.plan(Assignment(), lambda: member.membership.report(Copies(), announce=True)))
    assert joins.count == 3, "once at the time, which kafka-python forgets, and once when the join is complete"
    run(member.plan(Assignment()))
    assert joins.count == 3
    member.membership._coordinator = None


def test_an_announcement_without_new_copies_tells_of_moves(member: Member) -> None:
    """The marker of an incoming partition does not come: the engine wants a plan that knows that it waits."""
    run(member.plan(Assignment(incoming={3: 0})))
    member.membership._coordinator = joins = Joins()  # type: ignore[assignment]
    for count in (1, 1):
        member.membership.report(Copies(), announce=True)
        member.drain()
        assert joins.count == count
        run(member.plan(Assignment(incoming={3: 1})))


def test_what_comes_while_it_is_leaving_is_told_at_once(member: Member) -> None:
    run(member.plan(Assignment(incoming={3: 0})))
    member.membership.leave()
    run(member.plan(Assignment(incoming={3: 1})))
    member.membership._coordinator = joins = Joins()  # type: ignore[assignment]
    member.membership.took(3, member.membership.snapshot.incarnation)
    member.drain()
    assert joins.count == 1


def test_leaving_is_told_once(member: Member) -> None:
    run(member.plan(Assignment()))
    member.membership._coordinator = joins = Joins()  # type: ignore[assignment]
    run(member.plan(Assignment(), member.membership.leave))
    assert joins.count == 2, "it came while the join was under way"
    run(member.plan(Assignment()))
    assert member.membership._state.holdings.reported.leaving
    member.membership.leave()
    member.drain()
    assert joins.count == 2


def test_the_leader_decides_by_the_strategy_that_the_broker_chose() -> None:
    chosen: list[tuple[str, int, dict[str, MemberReport]]] = []

    def strategy(name: str) -> Assignor:
        def plan(partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
            chosen.append((name, partitions, dict(reports)))
            return {member: Assignment() for member in reports}

        return plan

    membership, _ = connect_group("127.0.0.1:1", "g", "t", 4, "a", {name: strategy(name) for name in ("new", "old")})
    offered = membership.subscriptions()
    assert [protocol for protocol, _ in offered] == ["kes-new-2", "kes-old-2"]
    assert offered[0][1] == offered[1][1], "one report, not two: the assignment echoes its counter"
    other = group_wire.encode_report("t", MemberReport(instance="b", owned=frozenset({1, 4})))
    plan = membership.lead("kes-old-2", {"m-a": offered[1][1], "m-b": other})
    assert plan.keys() == {"m-a", "m-b"}
    assert all(group_wire.decode_assignment(data, 4, member) == Assignment() for member, data in plan.items())
    ((name, partitions, reports),) = chosen
    assert (name, partitions) == ("old", 4)
    assert reports["m-b"].owned == frozenset({1}), "a partition that the topic does not have"
    membership.close(1.0)


def test_started_once(membership: KafkaPythonMembership) -> None:
    membership.start(lambda event: None)
    with pytest.raises(RuntimeError, match="once"):
        membership.start(lambda event: None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group_id": "gruppe-ä"}, r"group\.id"),
        ({"instance": "host.example"}, "dot"),
        ({"instance": ""}, "instance"),
        ({"partitions": 0}, "0 partitions"),
        ({"heartbeat_interval_ms": 6000}, "heartbeat"),
        ({"heartbeat_interval_ms": 0}, "heartbeat"),
        ({"rebalance_timeout_ms": 0}, "rebalance timeout"),
        ({"assignors": {}}, "strategy"),
        ({"assignors": {"gerecht ü": sticky_plan}}, "strategy"),
        ({"bootstrap_servers": "nowhere"}, "bootstrap"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    settings: dict[str, Any] = {
        "bootstrap_servers": "127.0.0.1:1",
        "group_id": "g",
        "topic": "t",
        "partitions": 4,
        "instance": "a",
        "assignors": {"cooperative-sticky": sticky_plan},
    }
    with pytest.raises(ConfigError, match=named):
        connect_group(**{**settings, **changes})
