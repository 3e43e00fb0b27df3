"""Facts about a broker that shares a group out (KIP-848), and what only such members can do."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Consumer

from streams.errors import MembershipFatal
from streams.kafka.group.broker_group import Roster
from streams.model.group import Lost
from tests.broker.membership_kit import PARTITIONS, SESSION_MS, Desk, Seat, Transactor, settled, until
from tests.unit.waiting import stays

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(240)]

ALL = frozenset(range(PARTITIONS))


@pytest.fixture
def kind() -> str:
    return "broker"


def soon() -> float:
    return time.monotonic() + 30.0


def transactor(desk: Desk, instance: str = "tester") -> Transactor:
    return Transactor(desk.servers, f"{desk.group}.{instance}.kes~0", desk.topic)


def roster(seat: Seat) -> Roster:
    found: Any = seat.take_over._client.call(lambda: seat.take_over.roster(soon()), soon())
    assert isinstance(found, Roster)
    return found


def test_an_older_epoch_is_good_for_what_was_never_given_up_only(desk: Desk) -> None:
    """KIP-1251 (Kafka 4.3); older brokers refuse both."""
    first = desk.seat("a")
    first.owning(PARTITIONS)
    commits, old = transactor(desk), first.metadata
    second = desk.seat("b")
    gone = min(second.owning(PARTITIONS // 2).owned)
    settled(first, second)
    kept = min(first.assigned()[-1].owned)
    assert commits.commit(old, gone) == "ILLEGAL_GENERATION"
    assert commits.commit(old, kept) in ("ok", "ILLEGAL_GENERATION")
    since = len(first.events)
    second.membership.close(3.0)
    first.owning(PARTITIONS, since)
    assert commits.commit(old, gone) == "ILLEGAL_GENERATION", "it came back, but that is another ownership"


def test_open_transactions_of_the_departed_are_ended_and_nobody_elses(desk: Desk) -> None:
    survivor, other = desk.seat("a"), desk.seat("b")
    settled(survivor, other)
    theirs = transactor(desk, "b")
    until(lambda: theirs.commit(other.metadata) == "ok", "its metadata are refused")
    theirs.open(other.metadata)
    assert survivor.take_over.fence_departed((), soon()) == [], "a live member was fenced"
    since = len(survivor.events)
    other.close()  # its transaction stays open
    survivor.owning(PARTITIONS, since)
    assert survivor.take_over.fence_departed(("b",), soon()) == [f"{desk.group}.b.kes~0"]
    offsets = survivor.take_over.stable_offsets(range(PARTITIONS), soon())
    assert len(offsets) == PARTITIONS


def test_the_brokers_range(desk: Desk) -> None:
    members = [desk.seat(name, strategies=("range",)) for name in "ab"]
    settled(*members)
    assert sorted(map(sorted, (member.assigned()[-1].owned for member in members))) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    until(lambda: roster(members[0]).protocol == "range", "another assignor is used")


@pytest.mark.parametrize("session_ms", [SESSION_MS])
@pytest.mark.parametrize("settings", [{"partition.assignment.strategy": "range"}, {"group.protocol": "consumer"}])
def test_a_running_group_of_another_program_is_refused_by_name(desk: Desk, settings: dict[str, str]) -> None:
    """Kafka would convert the group (group.consumer.migration.policy)."""
    place = {"bootstrap.servers": desk.servers, "group.id": desk.group, "client.id": "stranger", "log_level": 0}
    there = Consumer({**place, **settings})
    there.subscribe([desk.topic])
    until(lambda: there.poll(0.05) is None and len(there.assignment()) == PARTITIONS, "it is not assigned")
    error = desk.seat("a").fatal()
    assert isinstance(error, MembershipFatal)
    assert "(stranger at /127.0.0.1)" in str(error)
    there.close()
    comes = desk.seat("b")
    comes.owning(PARTITIONS)
    until(lambda: transactor(desk).commit(comes.metadata) == "ok", "its metadata are refused")


def test_members_that_do_not_understand_each_other(desk: Desk) -> None:
    first = desk.seat("a", kind="streams")
    first.owning(PARTITIONS)
    error = desk.seat("b").fatal()
    assert isinstance(error, MembershipFatal)
    assert "stop all of them" in str(error)
    stays(lambda: first.assigned()[-1].owned == ALL, 0.5, "the ones that are there are disturbed")
    assert not first.heard_of(Lost)
