"""Members of our own membership on a real broker: what ``test_membership_contract.py`` does not ask of every kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer

from streams.clients import group_wire
from streams.errors import MembershipFatal
from streams.group import Assigned, Lost, Revoked
from tests.broker.membership_kit import PARTITIONS, Table, Transactor, laid_table, settled, until

pytestmark = pytest.mark.broker


@pytest.fixture
def table(kafka_broker: Any, topic_prefix: str) -> Iterator[Table]:
    with laid_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


def test_when_all_leave_nobody_is_left_to_hand_over_to(table: Table) -> None:
    only = table.seat("a")
    only.owning(PARTITIONS)
    only.membership.leave()
    assert only.owning(0).assignment.quit


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
    busy.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)
    busy.wait(
        lambda event: isinstance(event, Assigned) and event.assignment.members == ("a", "b") and len(event.owned) == 5
    )


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
            "other" if foreign == "topic" else table.topic, stranger.membership._state.holdings.reported
        )
        wrong = real.replace(b"instance", b"\xff" * 8)
        return [("kes-cooperative-sticky-2", b"\xff\xff" if foreign == "subscription" else wrong)]

    monkeypatch.setattr(stranger.membership, "subscriptions", subscriptions)
    stranger.membership.leave()  # makes it join again, with the foreign bytes
    leader.owning(PARTITIONS, since)


def test_a_member_that_gives_itself_up_leaves_when_it_is_void(table: Table) -> None:
    """Another one has its partitions from then on: nothing of it may be valid any more."""
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


@pytest.mark.slow
@pytest.mark.nightly
def test_an_orderly_restart_of_the_broker_costs_no_generation(own_broker: Any, topic_prefix: str) -> None:
    broker = own_broker()
    with laid_table(broker.bootstrap_servers, topic_prefix) as table:
        members = [table.seat("a"), table.seat("b")]
        settled(*members)
        before = [(seat.membership.snapshot, len(seat.events)) for seat in members]
        broker.restart()
        transactor = Transactor(table.servers, f"{table.group}.tester.0", table.topic)
        assert transactor.commit(members[0].membership.snapshot.metadata) == "ok"
        third = table.seat("c")  # heartbeats arrive: the members hear of it
        settled(*members, third, patience=60)
        for seat, (snapshot, since) in zip(members, before, strict=True):
            assert seat.membership.snapshot.incarnation == snapshot.incarnation == 0
            assert not any(isinstance(event, Lost) for event in seat.events[since:])


@pytest.mark.slow
@pytest.mark.nightly
def test_a_broker_that_comes_late_is_joined(own_broker: Any, topic_prefix: str) -> None:
    broker = own_broker()
    with laid_table(broker.bootstrap_servers, topic_prefix) as table:
        broker.kill()
        seat = table.seat("a")
        time.sleep(3.0)
        assert seat.events == []
        broker.restart()
        seat.owning(PARTITIONS, patience=60)
