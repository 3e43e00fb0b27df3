"""Warm moves on a real broker: what members claim while partitions are under way, whatever dies or comes late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from streams.group import Assigned, Copies, Lost, Order, Revoked
from tests.broker.membership_kit import PARTITIONS, PATIENCE, until
from tests.broker.moves_kit import MORTAL, Engine, MovingTable, Wishes, moving_table

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


def generation(engine: Engine) -> int:
    return engine.membership.snapshot.generation


def test_a_join_moves_half_in_two_generations_without_a_barrier(table: MovingTable) -> None:
    _, a, b = donor_and_target(table)
    table.settled(a=LOW, b=HIGH)
    first = a.assigned()[0].generation
    time.sleep(1.0)  # five heartbeats: a time in which more rebalances would come
    assert generation(a) == generation(b) == first + 2
    assert not a.heard_of(Revoked)
    last = a.assigned()[-1]
    assert last.releasing == dict.fromkeys(HIGH, Order(b.membership.snapshot.member_id, first + 2))
    assert b.assigned()[-1].incoming == dict.fromkeys(HIGH, first + 2)
    assert not b.assigned()[-1].added


def test_after_the_move_the_next_plan_knows_the_new_owner(table: MovingTable) -> None:
    wishes, _, _ = donor_and_target(table)
    table.settled(a=LOW, b=HIGH)
    table.engine("c", wishes).seated()
    table.settled(a=LOW, b=HIGH, c=())
    told = wishes.reports[-1]
    assert (told["a"].owned, told["b"].owned) == (frozenset(LOW), frozenset(HIGH))
    assert not any(report.releasing or report.incoming for report in told.values())
    assert told["b"].copies.ready == frozenset(HIGH)


def test_a_join_while_a_move_is_under_way_leaves_it_as_it_is(table: MovingTable) -> None:
    wishes, a, b = donor_and_target(table, {"gives": False})
    since, order = len(a.events), a.orders[7]
    table.engine("c", wishes)
    a.wait(lambda event: isinstance(event, Assigned) and len(event.assignment.members) == 3, since)
    b.wait(lambda event: isinstance(event, Assigned) and len(event.assignment.members) == 3)
    assert a.orders == dict.fromkeys(HIGH, order)
    assert b.incoming == dict.fromkeys(HIGH, order.generation)
    a.give()
    table.settled(a=LOW, b=HIGH, c=())
    assert not any(isinstance(event, Revoked) for engine in (a, b) for event in engine.events)


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
    table.settled(a=LOW, b=HIGH, c=())
    b.wait(lambda event: isinstance(event, Assigned) and len(event.assignment.members) == 3)
    table.settled(a=LOW, b=HIGH, c=())
    assert not any(isinstance(event, Revoked) for engine in (a, b) for event in engine.events)


@pytest.mark.parametrize("late", ["handed_over", "took", "both"])
def test_news_that_come_late_change_nothing(table: MovingTable, late: str) -> None:
    donor, target = {"tells": late == "took"}, {"tells": late == "handed_over"}
    wishes, a, b = donor_and_target(table, donor, target)
    until(lambda: b.working == set(HIGH), "not taken")
    table.engine("c", wishes)
    for engine in (a, b):
        engine.wait(lambda event: isinstance(event, Assigned) and len(event.assignment.members) == 3)
    a.tell()
    b.tell()
    table.settled(a=LOW, b=HIGH, c=())
    assert not b.heard_of(Revoked)


def test_the_donor_dies_before_it_handed_over(table: MovingTable) -> None:
    _, a, b = donor_and_target(table, {"gives": False, **MORTAL})
    a.die()
    table.settled(b=ALL)
    assert b.owning(PARTITIONS).added == frozenset(ALL)
    assert not b.heard_of(Lost)


def test_the_donor_dies_after_the_marker_that_nobody_heard_yet(table: MovingTable) -> None:
    _, a, b = donor_and_target(table, {"gives": False, **MORTAL}, {"hears": False})
    a.give(5, 6)
    a.die()
    table.settled(b=ALL)
    b.listen()
    table.settled(b=ALL)


def test_the_target_dies_before_the_donor_gave(table: MovingTable) -> None:
    _, a, b = donor_and_target(table, {"gives": False}, MORTAL)
    order, since = a.orders[5], len(a.events)
    b.die()
    event = a.wait(lambda event: isinstance(event, Assigned) and not event.releasing, since)
    assert isinstance(event, Assigned)
    assert (event.owned, event.added) == (frozenset(ALL), frozenset())
    a.membership.handed_over(5, order)  # an order that does not stand any more
    table.settled(a=ALL)
    assert not a.heard_of(Revoked)


@pytest.mark.parametrize("told", [True, False])
def test_the_target_dies_after_the_marker(table: MovingTable, told: bool) -> None:
    _, a, b = donor_and_target(table, {"gives": False, "tells": told}, {"hears": False, **MORTAL})
    a.give(5, 6)
    b.die()
    table.settled(a=ALL)
    a.tell()
    table.settled(a=ALL)
    gained = [number for event in a.assigned() for number in event.added if number in HIGH]
    assert sorted(gained) == sorted([*HIGH, 5, 6] if told else HIGH)


def test_a_donor_that_is_lost_claims_nothing(table: MovingTable) -> None:
    wishes, a, b = donor_and_target(table, {"gives": False, **MORTAL})
    count = len(wishes.reports)
    thaw = a.freeze()
    b.owning(PARTITIONS)
    thaw()
    a.lost()
    until(lambda: any(set(reports) == {"a", "b"} for reports in wishes.reports[count:]), "it does not come back")
    again = next(reports["a"] for reports in wishes.reports[count:] if "a" in reports)
    assert (again.owned, again.releasing, again.incoming, again.generation) == (frozenset(), {}, frozenset(), -1)


def test_a_leaving_member_is_taken_away_from_by_moves(table: MovingTable) -> None:
    wishes, a, b = donor_and_target(table)
    table.settled(a=LOW, b=HIGH)
    wishes.want = dict.fromkeys(ALL, "a")
    b.membership.leave()
    table.settled(a=ALL, b=())
    assert not b.heard_of(Revoked)
    assert wishes.reports[-1]["b"].leaving
    assert not a.heard_of(Lost)


# ---------------------------------------------------------------------- telling while a join is under way


def held_up(table: MovingTable) -> tuple[Wishes, Engine, Engine]:
    """Two members whose leader is held up in the middle of a rebalance: the reports are made, the plan is not."""
    wishes = Wishes(a=ALL)
    a = table.engine("a", wishes)
    a.owning(PARTITIONS)
    b = table.engine("b", wishes).seated()
    table.settled(a=ALL, b=())
    count = len(wishes.reports)
    wishes.gate.clear()
    b.membership.report(Copies(ready=frozenset({1})), announce=True)
    until(lambda: len(wishes.reports) > count, "nobody leads")
    return wishes, a, b


def test_what_is_announced_while_a_join_is_under_way_is_told_after_it(table: MovingTable) -> None:
    wishes, _, b = held_up(table)
    count = len(wishes.reports)
    copies = Copies(ready=frozenset({1, 2}))
    b.membership.report(copies, announce=True)
    until(lambda: b.membership._state.holdings.copies == copies, "not noted")
    wishes.gate.set()
    until(lambda: len(wishes.reports) > count, "it is not told")
    assert wishes.reports[count]["b"].copies == copies
    time.sleep(1.0)
    assert len(wishes.reports) == count + 1, "it joins again and again"


def test_what_was_told_already_is_not_told_again(table: MovingTable) -> None:
    wishes, _, b = held_up(table)
    count = len(wishes.reports)
    b.membership.report(Copies(ready=frozenset({1})), announce=True)
    since = len(b.events)
    wishes.gate.set()
    b.wait(lambda event: isinstance(event, Assigned), since)
    b.membership.report(Copies(ready=frozenset({1})), announce=True)
    b.membership.report(Copies(ready=frozenset({3})), announce=False)
    time.sleep(1.0)
    assert len(wishes.reports) == count


def test_leaving_while_a_join_is_under_way_is_told_after_it(table: MovingTable) -> None:
    wishes, _, b = held_up(table)
    count = len(wishes.reports)
    b.membership.leave()
    b.membership.leave()
    until(lambda: b.membership._state.holdings.leaving, "not noted")
    wishes.gate.set()
    until(lambda: len(wishes.reports) > count, "it is not told")
    assert wishes.reports[count]["b"].leaving
    time.sleep(1.0)
    assert len(wishes.reports) == count + 1, "it joins again and again"


def test_a_member_that_somebody_else_took_out_hears_it_and_joins_again(table: MovingTable) -> None:
    wishes = Wishes(a=ALL)
    a = table.engine("a", wishes, static=True)
    b = table.engine("b", wishes, static=True).seated()
    table.settled(a=ALL, b=())
    assert b.take_over.remove_member(a.membership.snapshot.member_id, "a", time.monotonic() + PATIENCE)
    assert a.lost().incarnation == 1
    table.settled(a=ALL, b=())
