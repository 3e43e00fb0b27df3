"""Our own membership on a real broker, beyond ``test_membership_contract.py``: who joins, and by which strategy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer

from streams.clients import group_wire
from streams.core.strategies import PlanSettings, assignor
from streams.errors import MembershipFatal
from streams.group import Assigned, Assignment, Assignor, Lost, MemberReport, Revoked
from streams.testing.fixtures import OwnBroker
from tests.broker.membership_kit import PARTITIONS, Table, Transactor, laid_table, settled, until
from tests.broker.moves_kit import MORTAL, QUICK, MovingTable, Wishes, moving_table
from tests.unit.waiting import stays

pytestmark = pytest.mark.broker


@pytest.fixture
def table(kafka_broker: Any, topic_prefix: str) -> Iterator[Table]:
    with laid_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


@pytest.fixture
def engines(kafka_broker: Any, topic_prefix: str) -> Iterator[MovingTable]:
    """Its ledger sees to it that nothing has two owners at any time."""
    with moving_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


@contextlib.contextmanager
def plain_consumer(table: Table, protocol: str) -> Iterator[None]:
    """A consumer of librdkafka has all partitions of the group."""
    consumer = Consumer({"bootstrap.servers": table.servers, "group.id": table.group, "group.protocol": protocol})
    try:
        consumer.subscribe([table.topic])
        until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == PARTITIONS, "it does not join")
        yield
    finally:
        consumer.close()


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
    revoked = busy.first(Revoked)
    third = table.seat("c")
    until(lambda: third.membership._coordinator is not None and third.membership._coordinator.member_id != "", "no id")
    third.membership.close(5.0)
    busy.membership.released(revoked.partitions, revoked.incarnation, revoked.generation)
    busy.wait(
        lambda event: isinstance(event, Assigned) and event.assignment.members == ("a", "b") and len(event.owned) == 5
    )


@pytest.mark.parametrize(
    ("protocol", "told"), [("classic", "something else than this toolkit"), ("consumer", "not understood")]
)
def test_a_group_of_others_is_fatal_while_it_has_members(table: Table, protocol: str, told: str) -> None:
    """KIP-848 (``consumer``): the broker takes our JoinGroup, and answers by an assignment of its own."""
    with plain_consumer(table, protocol):
        stranger = table.seat("a", rebalance_timeout_ms=2000, **QUICK)  # for so long it may be what a kill left
        error = stranger.fatal()
    assert isinstance(error, MembershipFatal)
    assert told in str(error)
    assert not stranger.assigned()


def test_an_empty_group_is_taken_whatever_it_was(engines: MovingTable) -> None:
    """Offsets of a plain consumer are no reason to refuse; its protocol ends with its last member."""
    settings = {"bootstrap.servers": engines.servers, "group.id": engines.group, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings)
    consumer.subscribe([engines.topic])
    until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == PARTITIONS, "it does not join")
    consumer.close()
    engines.even(engines.engine("a", Used()("range")))


@pytest.mark.parametrize("foreign", ["user data", "subscription", "topic"])
def test_a_member_that_nobody_understands_gets_nothing(table: Table, foreign: str, monkeypatch: Any) -> None:
    leader = table.seat("a")
    leader.owning(PARTITIONS)
    stranger = table.seat("b")
    settled(leader, stranger)
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
def test_a_broker_that_comes_late_is_joined_and_its_restart_costs_no_generation(
    own_broker: OwnBroker, topic_prefix: str
) -> None:
    broker = own_broker()
    with laid_table(broker.bootstrap_servers, topic_prefix) as table:
        broker.kill()
        members = [table.seat("a")]
        stays(lambda: not members[0].events, 3.0, "there is nobody to hear from")
        broker.restart()
        members[0].owning(PARTITIONS, patience=60)
        members.append(table.seat("b"))
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


# ---------------------------------------------------------------------------------------------------- strategies


class Used:
    """Strategies by name that say which of them leaders used last."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, *names: str) -> dict[str, Assignor]:
        return {name: self._recorded(name, assignor(name, PlanSettings())) for name in names}

    def _recorded(self, name: str, real: Assignor) -> Assignor:
        def plan(partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
            self.last = name
            return real(partitions, reports)

        return plan


def test_a_running_group_changes_its_strategy_by_rolling_restarts(engines: MovingTable) -> None:
    used = Used()
    members = [engines.engine(name, used("incremental")) for name in "abc"]
    engines.even(*members)
    before = "incremental"
    for now, then in (
        (("cooperative-sticky", "incremental"), "cooperative-sticky"),
        (("range", "cooperative-sticky"), "range"),
        (("range",), "range"),
    ):
        for place in range(3):
            assert used.last == before, "a member that stays keeps the old strategy alive"
            members[place] = engines.restart(members[place], used(*now))
            engines.even(*members)
        assert used.last == then
        before = then
    assert [sorted(member.working) for member in members] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert not any(member.heard_of(Lost) for member in engines.ledger.engines)


def test_a_move_that_is_under_way_outlives_a_change_of_the_strategy(engines: MovingTable) -> None:
    wishes, used = Wishes(a=range(8), b=range(8, 10)), Used()
    both = {**used("cooperative-sticky"), "wishes": wishes}
    a = engines.engine("a", both, gives=False)
    a.owning(PARTITIONS)
    c = engines.engine("c", {"wishes": wishes}).seated()
    b = engines.engine("b", both)
    b.wait(lambda event: isinstance(event, Assigned) and set(event.incoming) == {8, 9})
    since = len(b.events)
    c.go()
    b.wait(lambda event: isinstance(event, Assigned) and len(event.assignment.members) == 2, since)
    until(lambda: used.last == "cooperative-sticky", "the strategy does not change")
    assert set(a.orders) == set(b.incoming) == {8, 9}
    a.give()
    until(lambda: b.working >= {8, 9}, "not taken")
    engines.even(a, b)


def test_a_member_without_a_common_strategy_is_refused_and_what_a_kill_left_is_waited_out(
    engines: MovingTable,
) -> None:
    used = Used()
    before = engines.engine("a", used("range"), **MORTAL)
    engines.even(before)
    error = engines.engine("b", used("cooperative-sticky", "roundrobin"), **QUICK).fatal()
    assert isinstance(error, MembershipFatal)
    for hint in ("(cooperative-sticky, roundrobin)", "both strategies", "one by one", "without the old one"):
        assert hint in str(error)
    assert len(before.events) == 1
    start = time.monotonic()
    before.die()
    engines.even(engines.engine("c", used("cooperative-sticky")))
    assert time.monotonic() - start > 1.0, "it was not refused at all: this shows nothing"
