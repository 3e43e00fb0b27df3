"""Warm moves on a real broker: what members claim while partitions are under way, whatever dies or comes late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from streams.group import Assigned, Copies, Lost, Order, Revoked
from tests.broker.membership_kit import PARTITIONS, PATIENCE, until
from tests.broker.moves_kit import Engine, MovingTable, Wishes, moving_table
from tests.unit.waiting import stays

pytestmark = pytest.mark.broker

LOW, HIGH, ALL = range(5), range(5, 10), range(PARTITIONS)


@pytest.fixture
def table(kafka_broker: Any, topic_prefix: str) -> Iterator[MovingTable]:
    with moving_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        yield table


def donor_and_target(table: MovingTable, donor: Any = None, target: Any = None) -> tuple[Wishes, Engine, Engine]:
    """A has everything, B is wanted for 5 to 9 and has them ready: A was told to hand them over."""
    wishes = Wishes(a=LOW, b=HIGH)
    a = table.engine("a", wishes, **(donor or {}))
    a.owning(PARTITIONS)
    b = table.engine("b", wishes, **(target or {}))
    a.wait(lambda event: isinstance(event, Assigned) and set(event.releasing) == set(HIGH))
    b.wait(lambda event: isinstance(event, Assigned) and set(event.incoming) == set(HIGH))
    return wishes, a, b


def third_has_joined(*engines: Engine) -> None:
    for engine in engines:
        engine.wait(lambda event: isinstance(event, Assigned) and len(event.assignment.members) == 3)


def test_a_join_moves_half_in_two_generations_without_a_barrier(table: MovingTable) -> None:
    wishes, a, b = donor_and_target(table)
    table.settled(a=LOW, b=HIGH)
    due = a.assigned()[0].generation + 2
    # Five heartbeats: a time in which more rebalances would come.
    stays(lambda: {each.membership.snapshot.generation for each in (a, b)} == {due}, 1.0, "another generation")
    assert not a.heard_of(Revoked)
    assert a.assigned()[-1].releasing == dict.fromkeys(HIGH, Order(b.membership.snapshot.member_id, due))
    assert b.assigned()[-1].incoming == dict.fromkeys(HIGH, due)
    assert not b.assigned()[-1].added
    table.engine("c", wishes).seated()
    table.settled(a=LOW, b=HIGH, c=())
    told = wishes.reports[-1]
    assert (told["a"].owned, told["b"].owned) == (frozenset(LOW), frozenset(HIGH))
    assert not any(report.releasing or report.incoming for report in told.values())
    assert told["b"].copies.ready == frozenset(HIGH)


def test_a_join_while_a_move_is_under_way_leaves_it_as_it_is(table: MovingTable) -> None:
    wishes, a, b = donor_and_target(table, {"gives": False})
    order = a.orders[7]
    table.engine("c", wishes)
    third_has_joined(a, b)
    assert a.orders == dict.fromkeys(HIGH, order)
    assert b.incoming == dict.fromkeys(HIGH, order.generation)
    a.give()
    table.settled(a=LOW, b=HIGH, c=())
    assert not a.heard_of(Revoked) + b.heard_of(Revoked)


def test_markers_committed_while_the_others_join_are_heard(table: MovingTable) -> None:
    """The plan is made from claims that are out of date when it arrives."""
    wishes, a, b = donor_and_target(table, {"gives": False})
    wishes.gate.clear()
    count = len(wishes.reports)
    table.engine("c", wishes)
    until(lambda: len(wishes.reports) > count, "nobody leads")
    a.give()
    until(lambda: b.working == set(HIGH), "not taken")
    wishes.gate.set()
    third_has_joined(b)
    table.settled(a=LOW, b=HIGH, c=())
    assert not a.heard_of(Revoked) + b.heard_of(Revoked)


@pytest.mark.parametrize("late", ["handed_over", "took", "both"])
def test_news_that_come_late_change_nothing(table: MovingTable, late: str) -> None:
    donor, target = {"tells": late == "took"}, {"tells": late == "handed_over"}
    wishes, a, b = donor_and_target(table, donor, target)
    until(lambda: b.working == set(HIGH), "not taken")
    table.engine("c", wishes)
    third_has_joined(a, b)
    a.tell()
    b.tell()
    table.settled(a=LOW, b=HIGH, c=())
    assert not b.heard_of(Revoked)


def test_a_leaving_member_is_taken_away_from_by_moves(table: MovingTable) -> None:
    wishes, a, b = donor_and_target(table)
    table.settled(a=LOW, b=HIGH)
    wishes.want = dict.fromkeys(ALL, "a")
    b.membership.leave()
    table.settled(a=ALL, b=())
    assert not b.heard_of(Revoked)
    assert wishes.reports[-1]["b"].leaving
    assert not a.heard_of(Lost)


def test_what_is_said_while_a_join_is_under_way_is_told_once_after_it(table: MovingTable) -> None:
    """The leader is held up in the middle of a rebalance: the reports are made, the plan is not."""
    wishes = Wishes(a=ALL)
    table.engine("a", wishes).owning(PARTITIONS)
    b = table.engine("b", wishes).seated()
    table.settled(a=ALL, b=())

    def during_a_join(copies: Copies, *news: Any) -> int:
        count = len(wishes.reports)
        wishes.gate.clear()
        b.membership.report(copies, announce=True)
        until(lambda: len(wishes.reports) > count, "nobody leads")
        for tell in news:
            tell()
        b.is_heard()
        wishes.gate.set()
        return count + 1

    one, two = Copies(ready=frozenset({1})), Copies(ready=frozenset({1, 2}))
    count = during_a_join(one, lambda: b.membership.report(one, announce=True))
    stays(lambda: len(wishes.reports) == count, 1.0, "what was told already is told again")
    count = during_a_join(two, lambda: b.membership.report(one, announce=True), *[b.membership.leave] * 2)
    until(lambda: len(wishes.reports) > count, "it is not told")
    assert (wishes.reports[count]["b"].copies, wishes.reports[count]["b"].leaving) == (one, True)
    b.membership.report(Copies(ready=frozenset({3})), announce=False)
    stays(lambda: len(wishes.reports) == count + 1, 1.0, "it joins again and again")


def test_a_member_that_somebody_else_took_out_hears_it_and_joins_again(table: MovingTable) -> None:
    wishes = Wishes(a=ALL)
    a = table.engine("a", wishes, static=True)
    b = table.engine("b", wishes, static=True).seated()
    table.settled(a=ALL, b=())
    assert b.take_over.remove_member(a.membership.snapshot.member_id, "a", time.monotonic() + PATIENCE)
    assert a.lost().incarnation == 1
    table.settled(a=ALL, b=())
