"""Which strategy a group runs, how it changes while it runs, and who is refused. On a real broker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer

from streams.core.strategies import PlanSettings, assignor
from streams.errors import MembershipFatal
from streams.group import Assigned, Assignment, Assignor, Lost, MemberReport
from tests.broker.membership_kit import PARTITIONS, until
from tests.broker.moves_kit import QUICK, Engine, MovingTable, Wishes, moving_table

pytestmark = pytest.mark.broker


@pytest.fixture
def table(kafka_broker: Any, topic_prefix: str) -> Iterator[MovingTable]:
    with moving_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


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


def test_a_running_group_changes_its_strategy_by_rolling_restarts(table: MovingTable) -> None:
    """The ledger sees to it that nothing has two owners at any time; in the end everything has one."""
    used = Used()
    members = [table.engine(name, used("incremental")) for name in "abc"]
    table.even(*members)
    assert used.last == "incremental"
    for now, then in (
        (("cooperative-sticky", "incremental"), "cooperative-sticky"),
        (("range", "cooperative-sticky"), "range"),
        (("range",), "range"),
    ):
        for place in range(3):
            members[place] = table.restart(members[place], used(*now))
            table.even(*members)
        assert used.last == then
    assert [sorted(member.working) for member in members] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert not any(member.heard_of(Lost) for member in table.ledger.engines)


def test_a_member_that_stays_keeps_the_old_strategy_alive(table: MovingTable) -> None:
    used = Used()
    members = [table.engine(name, used("cooperative-sticky")) for name in "ab"]
    table.even(*members)
    members[0] = table.restart(members[0], used("range", "cooperative-sticky"))
    table.even(*members)
    assert used.last == "cooperative-sticky"


def test_a_move_that_is_under_way_outlives_a_change_of_the_strategy(table: MovingTable) -> None:
    wishes, used = Wishes(a=range(8), b=range(8, 10)), Used()
    both = {**used("cooperative-sticky"), "wishes": wishes}
    a = table.engine("a", both, gives=False)
    a.owning(PARTITIONS)
    c = table.engine("c", {"wishes": wishes}).seated()
    b = table.engine("b", both)
    b.wait(lambda event: isinstance(event, Assigned) and set(event.incoming) == {8, 9})
    since = len(b.events)
    c.dead = True
    c.membership.close(3.0)
    b.wait(lambda event: isinstance(event, Assigned) and len(event.assignment.members) == 2, since)
    until(lambda: used.last == "cooperative-sticky", "the strategy does not change")
    assert set(a.orders) == set(b.incoming) == {8, 9}
    a.give()
    until(lambda: b.working >= {8, 9}, "not taken")
    table.even(a, b)


def test_a_member_without_a_common_strategy_is_refused_and_told_how_to_change_it(table: MovingTable) -> None:
    used = Used()
    stays = table.engine("a", used("cooperative-sticky"))
    table.even(stays)
    error = table.engine("b", used("range", "roundrobin"), **QUICK).fatal()
    assert isinstance(error, MembershipFatal)
    for hint in ("(range, roundrobin)", "both strategies", "one by one", "without the old one"):
        assert hint in str(error)
    assert len(stays.events) == 1


def test_what_a_kill_left_of_another_strategy_is_waited_out(table: MovingTable) -> None:
    used = Used()
    before = table.engine("a", used("range"), **QUICK)
    table.even(before)
    start = time.monotonic()
    before.die()
    table.even(table.engine("a", used("cooperative-sticky")))
    assert time.monotonic() - start > 1.0, "it was not refused at all: this shows nothing"


def test_an_empty_group_is_taken_whatever_it_was(table: MovingTable) -> None:
    """Offsets of a plain consumer are no reason to refuse; its protocol ends with its last member."""
    consumer = Consumer({"bootstrap.servers": table.servers, "group.id": table.group, "auto.offset.reset": "earliest"})
    consumer.subscribe([table.topic])
    until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == PARTITIONS, "it does not join")
    consumer.close()
    table.even(table.engine("a", Used()("range")))


def test_a_group_that_the_broker_shares_out_is_not_joined(table: MovingTable) -> None:
    """KIP-848: the broker takes our JoinGroup, and answers by an assignment of its own."""
    consumer = Consumer({"bootstrap.servers": table.servers, "group.id": table.group, "group.protocol": "consumer"})
    try:
        consumer.subscribe([table.topic])
        until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == PARTITIONS, "it does not join")
        stranger: Engine = table.engine("a", Used()("range"), rebalance_timeout_ms=2000, **QUICK)
        error = stranger.fatal()
    finally:
        consumer.close()
    assert isinstance(error, MembershipFatal)
    assert "not understood" in str(error)
    assert not stranger.assigned()
