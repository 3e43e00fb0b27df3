"""Our own membership on a real broker, beyond ``test_membership_contract.py``: who joins, and by which strategy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer

from streams.core.strategies import PlanSettings, assignor
from streams.errors import MembershipFatal
from streams.model.group import Lost
from streams.testing.fixtures import OwnBroker
from tests.broker.membership_kit import PARTITIONS, SESSION_MS, Desk, Transactor, laid_desk, settled, until
from tests.unit.waiting import stays

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]


@contextlib.contextmanager
def plain_consumer(desk: Desk, protocol: str) -> Iterator[None]:
    """A consumer of librdkafka has all partitions of the group."""
    consumer = Consumer({"bootstrap.servers": desk.servers, "group.id": desk.group, "group.protocol": protocol})
    try:
        consumer.subscribe([desk.topic])
        until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == PARTITIONS, "it does not join")
        yield
    finally:
        consumer.close()


@pytest.mark.parametrize(
    ("protocol", "told"), [("classic", "something else than this toolkit"), ("consumer", "not understood")]
)
def test_a_group_of_others_is_fatal_while_it_has_members(desk: Desk, protocol: str, told: str) -> None:
    """KIP-848 (``consumer``): the broker takes our JoinGroup, and answers by an assignment of its own."""
    with plain_consumer(desk, protocol):
        stranger = desk.seat("a", rebalance_timeout_ms=2000, session_timeout_ms=SESSION_MS)  # what a kill left stays so
        error = stranger.fatal()
    assert isinstance(error, MembershipFatal)
    assert told in str(error)
    assert not stranger.assigned()
    # Empty it is taken whatever it was: a protocol ends with its last member, and offsets are no reason to refuse.
    desk.seat("b").owning(PARTITIONS)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_broker_that_comes_late_is_joined_and_its_restart_costs_no_generation(
    own_broker: OwnBroker, topic_prefix: str
) -> None:
    broker = own_broker()
    with laid_desk("streams", broker.bootstrap_servers, topic_prefix, 30_000) as desk:
        broker.kill()
        members = [desk.seat("a")]
        stays(lambda: not members[0].events, 3.0, "there is nobody to hear from")
        broker.restart()
        members[0].owning(PARTITIONS, patience=60)
        members.append(desk.seat("b"))
        settled(*members)
        before = [(seat.membership.group_metadata, len(seat.events)) for seat in members]
        broker.restart()
        transactor = Transactor(desk.servers, f"{desk.group}.tester.0", desk.topic)
        assert transactor.commit(members[0].metadata) == "ok"
        third = desk.seat("c")  # heartbeats arrive: the members hear of it
        settled(*members, third, patience=60)
        for seat, (metadata, since) in zip(members, before, strict=True):
            assert seat.membership.group_metadata.incarnation == metadata.incarnation == 0
            assert not any(isinstance(event, Lost) for event in seat.events[since:])


# ---------------------------------------------------------------------------------------------------- strategies


def strategies(*names: str) -> dict[str, Any]:
    return {"assignors": {name: assignor(name, PlanSettings()) for name in names}}


def test_a_running_group_changes_its_strategy_by_rolling_restarts(desk: Desk) -> None:
    """Members that know both, one by one; then members that know the new one only."""
    members = [desk.seat("a", **strategies("cooperative-sticky"))]
    members[0].owning(PARTITIONS)
    for place, names in enumerate([("cooperative-sticky",), *[("range", "cooperative-sticky")] * 2, *[("range",)] * 2]):
        if len(members) == 2:
            members.pop(0).close()
        members.append(desk.seat(f"m{place}", **strategies(*names)))
        settled(*members)
    assert [member.assigned()[-1].owned for member in members] == [frozenset(range(5)), frozenset(range(5, 10))]
    assert not any(member.heard_of(Lost) for member in members)


@pytest.mark.parametrize("session_ms", [6000])
def test_a_member_without_a_common_strategy_is_refused_and_what_a_kill_left_is_waited_out(desk: Desk) -> None:
    before = desk.seat("a")
    before.owning(PARTITIONS)
    refused = desk.seat("b", session_timeout_ms=SESSION_MS, **strategies("range", "roundrobin"))
    error = refused.fatal()
    assert isinstance(error, MembershipFatal)
    for hint in ("(range, roundrobin)", "both strategies", "one by one", "without the old one"):
        assert hint in str(error)
    assert len(before.events) == 1
    start = time.monotonic()
    before.die()
    desk.seat("c", **strategies("range")).owning(PARTITIONS)
    assert time.monotonic() - start > 1.0, "it was not refused at all: this shows nothing"
