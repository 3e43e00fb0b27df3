"""Claims of one member, in the orders of events that the group can not prevent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streams.core.holdings import Holdings
from streams.group import THIS_GENERATION, Assignment, Copies, Order

NOW = THIS_GENERATION
Step = Callable[[Holdings], object]


def plan(generation: int, *own: int, release: Any = None, incoming: Any = None) -> Step:
    return lambda holdings: holdings.apply(generation, assigned(*own, release=release, incoming=incoming))


def assigned(*own: int, release: Any = None, incoming: Any = None) -> Assignment:
    return Assignment(own=frozenset(own), release=release or {}, incoming=incoming or {})


def given(number: int, to: str, generation: int) -> Step:
    return lambda holdings: holdings.handed_over(number, Order(to, generation))


def took(number: int) -> Step:
    return lambda holdings: holdings.took(number)


def reports(holdings: Holdings) -> object:
    return holdings.report()


def after(*steps: Step) -> tuple[Holdings, Any]:
    """The claims, and what the last step answered."""
    holdings, answer = Holdings("a"), None
    for step in steps:
        answer = step(holdings)
    return holdings, answer


@pytest.mark.parametrize(
    ("steps", "owned", "releasing", "incoming", "added"),
    [
        ([plan(1, 1), plan(2, 1, 4)], {1, 4}, {}, {}, {4}),  # what is added is new
        # An order keeps its generation as long as it names the same member.
        ([plan(1, 1), plan(2, release={1: "T"}), plan(3, release={1: "T"})], {1}, {1: Order("T", 2)}, {}, None),
        (
            [plan(1, 1), plan(2, release={1: "T"}), plan(3, release={1: "T"}), plan(4, release={1: "U"})],
            {1},
            {1: Order("U", 4)},
            {},
            None,
        ),
        # Only what is owned can be released: it was handed over after the claim was made.
        (
            [plan(1, 1), plan(2, release={1: "T"}), reports, given(1, "T", 2), plan(3, release={1: "T"})],
            set(),
            {},
            {},
            None,
        ),
        # An order to another member makes it ours again: the former receiver is gone. Whether it was handed over to
        # it, and when that was known here, does not matter.
        (
            [plan(1, 1), plan(2, release={1: "T"}), reports, given(1, "T", 2), plan(3, release={1: "U"})],
            {1},
            {1: Order("U", 3)},
            {},
            {1},
        ),
        ([plan(1, 1, 2), plan(2, release={1: "T", 2: "T"}), given(1, "T", 2)], {2}, {2: Order("T", 2)}, {}, None),
        # An order that was withdrawn has no effect, nor one of an earlier generation.
        ([plan(1, 1), plan(2, release={1: "T"}), plan(3, 1), given(1, "T", 2)], {1}, {}, {}, None),
        (
            [plan(1, 1), plan(2, release={1: "T"}), plan(3, 1), plan(4, release={1: "T"}), given(1, "T", 2)],
            {1},
            {1: Order("T", 4)},
            {},
            None,
        ),
        # What was handed over and comes back is new.
        ([plan(1, 1), plan(2, release={1: "T"}), given(1, "T", 2), plan(3, 1)], {1}, {}, {}, {1}),
        # What comes in is expected from the generation in which it was ordered.
        ([plan(5, incoming={1: NOW, 2: 3})], set(), {}, {1: 5, 2: 3}, None),
        ([plan(5, incoming={1: NOW, 2: NOW}), took(1)], {1}, {}, {2: 5}, None),
        ([plan(5, incoming={1: NOW}), took(1), plan(6, incoming={1: 5})], {1}, {}, {}, None),  # not once more
        ([plan(1), took(1)], set(), {}, {}, None),  # not expected any more
    ],
)
def test_claims_after(steps: list[Step], owned: set[int], releasing: Any, incoming: Any, added: Any) -> None:
    holdings, answer = after(*steps)
    assert (holdings.owned, dict(holdings.releasing), dict(holdings.incoming)) == (owned, releasing, incoming)
    assert added is None or answer == added


def test_before_the_first_assignment() -> None:
    report = Holdings("shop", sequence=7).report()
    assert (report.instance, report.owned, report.generation, report.sequence) == ("shop", frozenset(), -1, 8)


def test_each_report_differs_from_the_one_before() -> None:
    holdings, first = after(plan(1, 1), reports)
    assert holdings.reported is first
    assert holdings.report() != first
    assert holdings.reported.sequence == first.sequence + 1


def test_a_report_says_everything_and_a_lost_membership_keeps_its_copies_only() -> None:
    holdings, _ = after(plan(1, 1, 2), plan(4, 1, release={2: "T"}, incoming={5: NOW, 6: 3}))
    holdings.copies, holdings.leaving = Copies(ready=frozenset({5})), True
    report = holdings.report()
    assert (report.owned, report.releasing, report.incoming) == ({1, 2}, {2: Order("T", 4)}, {5, 6})
    assert (report.generation, report.copies, report.leaving) == (4, Copies(ready=frozenset({5})), True)
    holdings.void()
    report = holdings.report()
    assert (report.owned, report.releasing, report.incoming, report.generation) == (frozenset(), {}, frozenset(), -1)
    assert report.copies == Copies(ready=frozenset({5}))


def test_what_is_to_be_handed_over_is_not_revoked() -> None:
    holdings, _ = after(plan(1, 1, 2, 3))
    revoked = holdings.revoked_by(assigned(1, release={2: "T"}))
    assert revoked >= {3}
    assert not revoked & {1, 2}
    holdings.released([3])
    assert holdings.owned == {1, 2}


def test_a_plan_that_takes_away_what_was_claimed_is_followed_by_another_round() -> None:
    holdings, _ = after(plan(1, 1, 2), reports)
    assert not holdings.has_to_join_again(assigned(1, release={2: "T"}))
    holdings.released([2])
    assert holdings.has_to_join_again(assigned(1))


def test_what_was_taken_after_it_was_claimed_as_incoming_is_not_revoked_by_a_plan_that_repeats_the_move() -> None:
    holdings, _ = after(plan(1), plan(5, incoming={1: NOW}), reports, took(1))
    assert not holdings.revoked_by(assigned(incoming={1: 5}))
    plan(6, incoming={1: 5})(holdings)
    holdings.report()
    assert holdings.revoked_by(assigned(incoming={1: NOW})) == {1}
