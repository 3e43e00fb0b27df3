"""Members of one group on a real broker: who works on what, and when it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer

from streams.clients import group_wire
from streams.errors import ConfigError, MembershipFatal
from streams.group import Assigned, Lost, Revoked
from tests.broker.membership_kit import PARTITIONS, STEADY_MS, Table, in_time, laid_table, seats, settled, until

pytestmark = pytest.mark.broker


@pytest.fixture
def table(kafka_broker: Any, topic_prefix: str) -> Iterator[Table]:
    with laid_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


def test_a_member_alone_owns_everything(table: Table) -> None:
    event = table.seat("a").owning(PARTITIONS)
    assert event.added == event.owned == frozenset(range(PARTITIONS))
    assert event.incarnation == 0
    assert event.assignment.members == ("a",)


def test_a_second_member_gets_half_and_the_first_keeps_the_rest(table: Table) -> None:
    first = table.seat("a")
    first.owning(PARTITIONS)
    second = table.seat("b")
    gained = second.owning(PARTITIONS // 2)
    settled(first, second)
    kept = first.assigned()[-1]
    assert [event.partitions for event in first.heard_of(Revoked) if isinstance(event, Revoked)] == [gained.owned]
    assert not kept.added
    assert not first.heard_of(Lost)
    assert first.membership.snapshot.incarnation == 0
    assert first.membership.snapshot.generation == second.membership.snapshot.generation


def test_three_members_share_within_one(table: Table) -> None:
    members = [table.seat(name) for name in "abc"]
    settled(*members)
    assert members[0].assigned()[-1].assignment.members == ("a", "b", "c")


def test_what_is_revoked_is_assigned_only_after_its_release(table: Table) -> None:
    first = table.seat("a", release=False)
    first.owning(PARTITIONS)
    second = table.seat("b")
    revoked = first.wait(lambda event: isinstance(event, Revoked))
    assert isinstance(revoked, Revoked)
    time.sleep(1.0)  # a time in which a wrong assignment could come
    assert not any(event.owned for event in second.assigned())
    some = frozenset(list(revoked.partitions)[:2])
    first.membership.released(some, first.membership.snapshot.incarnation, first.membership.snapshot.generation)
    time.sleep(0.5)
    assert not any(event.owned for event in second.assigned())
    first.membership.released(
        revoked.partitions - some, first.membership.snapshot.incarnation, first.membership.snapshot.generation
    )
    assert second.owning(PARTITIONS // 2).owned == revoked.partitions


def test_leaving_is_a_barrier_and_then_nothing(table: Table) -> None:
    stays, leaves = table.seat("a"), table.seat("b")
    settled(stays, leaves)
    since = len(leaves.events)
    leaves.membership.leave()
    leaves.owning(0, since)
    assert isinstance(leaves.events[since], Revoked)
    leaves.membership.close(5.0)
    assert stays.owning(PARTITIONS, since=1).owned == frozenset(range(PARTITIONS))
    assert not leaves.heard_of(Lost)


def test_when_all_leave_nobody_is_left_to_hand_over_to(table: Table) -> None:
    only = table.seat("a")
    only.owning(PARTITIONS)
    only.membership.leave()
    assert only.owning(0).assignment.quit


def test_closing_without_leaving_is_known_to_the_others_at_once(table: Table) -> None:
    stays, goes = table.seat("a"), table.seat("b")
    settled(stays, goes)
    before, since = time.monotonic(), len(stays.events)
    goes.membership.close(5.0)
    stays.owning(PARTITIONS, since)
    assert time.monotonic() - before < STEADY_MS / 2000  # well below the session timeout


def test_a_member_that_closes_while_it_joins_holds_up_nobody(table: Table) -> None:
    """Its JoinGroup waits at the broker for a member that is busy with its barrier."""
    busy = table.seat("a", release=False)
    busy.owning(PARTITIONS)
    table.seat("b")
    revoked = busy.wait(lambda event: isinstance(event, Revoked))
    assert isinstance(revoked, Revoked)
    third = table.seat("c")
    until(lambda: third.membership._coordinator is not None and third.membership._coordinator.member_id != "", "no id")
    third.membership.close(5.0)
    busy.membership.released(
        revoked.partitions, busy.membership.snapshot.incarnation, busy.membership.snapshot.generation
    )
    busy.wait(
        lambda event: isinstance(event, Assigned) and event.assignment.members == ("a", "b") and len(event.owned) == 5
    )


def test_nothing_is_left_of_a_closed_member(table: Table) -> None:
    before = set(threading.enumerate())
    seat = table.seat("a")
    seat.owning(PARTITIONS)
    seat.membership.close(5.0)
    seat.membership.close(5.0)
    until(lambda: set(threading.enumerate()) <= before, "a thread is left behind")
    assert seat.membership.snapshot.metadata is None
    heard = len(seat.events)
    seat.membership.leave()
    seat.membership.released([1], seat.membership.snapshot.incarnation, seat.membership.snapshot.generation)
    assert len(seat.events) == heard


def test_a_second_process_under_the_same_name_has_to_go(table: Table) -> None:
    first = table.seat("shop")
    first.owning(PARTITIONS)
    error = table.seat("shop", session_timeout_ms=1500, rebalance_timeout_ms=1500).fatal()
    assert isinstance(error, MembershipFatal)
    assert "'shop'" in str(error)
    first.wait(lambda event: isinstance(event, Assigned) and event.assignment.members == ("shop",), since=1)
    time.sleep(0.7)  # two heartbeats
    assert not first.heard_of(Revoked)
    assert not first.heard_of(Lost)


def test_a_killed_predecessor_of_the_same_name_is_waited_out(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while its JoinGroup is under way leaves a member in the group until its session expires."""
    first = table.seat("shop", session_timeout_ms=1500, heartbeat_interval_ms=300)
    first.owning(PARTITIONS)

    async def nothing(*_: object) -> None:
        """A killed process says no goodbye."""

    monkeypatch.setattr("streams.clients.membership.leave_group", nothing)
    first.membership.close(3.0)
    table.seat("shop", session_timeout_ms=1500, heartbeat_interval_ms=300).owning(PARTITIONS)


def test_a_static_name_that_is_taken_over_is_fatal_for_the_one_before(table: Table) -> None:
    first = table.seat("shop", static=True)
    first.owning(PARTITIONS)
    second = table.seat("shop", static=True)
    error = first.fatal()
    assert isinstance(error, MembershipFatal)
    assert "another process" in str(error)
    assert isinstance(first.events[-2], Lost)  # what it owned is void before it is told why
    assert first.membership.snapshot.metadata is None
    second.owning(PARTITIONS)


def test_a_static_member_that_restarts_gets_its_partitions_back(table: Table) -> None:
    other, restarts = table.seat("a", static=True), table.seat("b", static=True)
    settled(other, restarts)
    mine = restarts.assigned()[-1].owned
    restarts.membership.close(5.0)  # without `leave`: it stays a member for the session timeout
    since = len(other.events)
    successor = table.seat("b", static=True)
    event = successor.owning(len(mine))
    assert event.owned == mine
    assert event.assignment.sequence == successor.membership._holdings.told.sequence, (
        "an assignment made for its predecessor"
    )
    assert not any(isinstance(event, Revoked | Lost) for event in other.events[since:])


def test_a_refused_session_timeout_is_fatal_and_names_the_settings(table: Table) -> None:
    error = table.seat("a", session_timeout_ms=100, heartbeat_interval_ms=30).fatal()
    assert isinstance(error, ConfigError)
    assert "group.min.session.timeout.ms" in str(error)
    assert "group.max.session.timeout.ms" in str(error)


def test_a_group_of_another_protocol_is_fatal(table: Table) -> None:
    consumer = Consumer({"bootstrap.servers": table.servers, "group.id": table.group, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([table.topic])
        until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == PARTITIONS, "it does not join")
        error = table.seat("a", session_timeout_ms=2000).fatal()  # for so long it may be what a kill left
    finally:
        consumer.close()
    assert isinstance(error, MembershipFatal)
    assert "protocol" in str(error)


@pytest.mark.parametrize("foreign", ["user data", "subscription", "topic"])
def test_a_member_that_nobody_understands_gets_nothing(table: Table, foreign: str, monkeypatch: Any) -> None:
    leader = table.seat("a")
    leader.owning(PARTITIONS)
    stranger = table.make(table.servers, table.group, table.topic, "b")
    stranger.owning(PARTITIONS // 2)
    since = len(leader.events)

    def subscriptions() -> list[tuple[str, bytes]]:
        real = group_wire.encode_report(
            "other" if foreign == "topic" else table.topic, stranger.membership._holdings.told
        )
        wrong = real.replace(b"instance", b"\xff" * 8)
        return [("kes-cooperative-sticky-2", b"\xff\xff" if foreign == "subscription" else wrong)]

    monkeypatch.setattr(stranger.membership, "subscriptions", subscriptions)
    stranger.membership.leave()  # makes it join again, with the foreign bytes
    leader.owning(PARTITIONS, since)


def test_an_engine_that_stands_still_gives_itself_up_and_comes_back_when_it_moves(table: Table) -> None:
    alive = threading.Event()
    alive.set()
    seat = table.seat("a", alive=alive.is_set, rebalance_timeout_ms=1500)
    seat.owning(PARTITIONS)
    coordinator, left_with = seat.membership._coordinator, []
    assert coordinator is not None
    coordinator._handle_leave_group_response = lambda _: left_with.append(seat.membership.snapshot.generation)
    alive.clear()
    assert seat.lost().incarnation == 1
    until(lambda: left_with == [-1], "it leaves before it is void, or not at all")
    heard = len(seat.events)
    time.sleep(1.0)
    assert len(seat.events) == heard, "it joined for an engine that stands still"
    alive.set()
    assert seat.owning(PARTITIONS, heard).incarnation == 1


def test_a_barrier_that_never_ends_costs_the_membership(table: Table) -> None:
    seat = table.seat("a", release=False, rebalance_timeout_ms=1500)
    seat.owning(PARTITIONS)
    other = table.seat("b", rebalance_timeout_ms=1500)
    seat.wait(lambda event: isinstance(event, Revoked))
    seat.lost()
    other.owning(PARTITIONS // 2)


def test_no_broker_is_waited_for_and_said_once(topic_prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    with seats() as make, caplog.at_level("INFO"):
        seat = make("127.0.0.1:1", f"{topic_prefix}group", "t", "a")
        until(lambda: bool(caplog.records), "nothing is said")
        time.sleep(1.0)
        assert len(caplog.records) == 1
        assert "127.0.0.1:1" in caplog.text
        assert seat.events == []
        others = [make("127.0.0.1:1", f"{topic_prefix}group", "t", name) for name in "bc"]
        assert in_time(2.5, *(partial(one.membership.close, 2.0) for one in (seat, *others)))
