"""Claims of one member, in the orders of events that the group can not prevent."""

from __future__ import annotations

from streams.core.holdings import Holdings
from streams.group import THIS_GENERATION, Assignment, Copies, Order


def holding(*owned: int, generation: int = 1) -> Holdings:
    holdings = Holdings("a")
    holdings.apply(generation, Assignment(own=frozenset(owned)))
    return holdings


def test_before_the_first_assignment() -> None:
    report = Holdings("shop", sequence=7).report()
    assert (report.instance, report.owned, report.generation, report.sequence) == ("shop", frozenset(), -1, 8)


def test_each_report_differs_from_the_one_before() -> None:
    holdings = holding(1)
    first = holdings.report()
    assert holdings.told is first
    assert holdings.report() != first
    assert holdings.told.sequence == first.sequence + 1


def test_a_report_says_everything() -> None:
    holdings = holding(1, 2)
    holdings.apply(4, Assignment(own=frozenset({1}), release={2: "T"}, incoming={5: THIS_GENERATION, 6: 3}))
    holdings.copies, holdings.leaving = Copies(ready=frozenset({5})), True
    report = holdings.report()
    assert report.owned == {1, 2}
    assert report.releasing == {2: Order("T", 4)}
    assert report.incoming == {5, 6}
    assert report.generation == 4
    assert report.copies == Copies(ready=frozenset({5}))
    assert report.leaving


def test_what_is_to_be_handed_over_is_not_revoked() -> None:
    holdings = holding(1, 2, 3)
    assert holdings.revoked_by(Assignment(own=frozenset({1}), release={2: "T"})) >= {3}
    assert not holdings.revoked_by(Assignment(own=frozenset({1}), release={2: "T"})) & {1, 2}
    holdings.released([3])
    assert holdings.owned == {1, 2}


def test_what_is_added_is_new() -> None:
    holdings = holding(1)
    assert holdings.apply(2, Assignment(own=frozenset({1, 4}))) == {4}
    assert (holdings.owned, holdings.generation) == ({1, 4}, 2)


def test_an_order_keeps_its_generation_as_long_as_it_names_the_same_member() -> None:
    holdings = holding(1)
    holdings.apply(2, Assignment(release={1: "T"}))
    holdings.apply(3, Assignment(release={1: "T"}))
    assert holdings.releasing == {1: Order("T", 2)}
    holdings.apply(4, Assignment(release={1: "U"}))
    assert holdings.releasing == {1: Order("U", 4)}


def test_only_what_is_owned_can_be_released() -> None:
    """It was handed over after the claim was made."""
    holdings = holding(1)
    holdings.apply(2, Assignment(release={1: "T"}))
    holdings.report()
    holdings.handed_over(1, Order("T", 2))
    holdings.apply(3, Assignment(release={1: "T"}))
    assert (holdings.owned, dict(holdings.releasing)) == (frozenset(), {})


def test_an_order_to_somebody_else_makes_it_ours_again() -> None:
    """The former receiver is gone. Whether it was handed over to it, and when that was heard, does not matter."""
    holdings = holding(1)
    holdings.apply(2, Assignment(release={1: "T"}))
    holdings.report()
    holdings.handed_over(1, Order("T", 2))
    assert holdings.apply(3, Assignment(release={1: "U"})) == {1}
    assert (holdings.owned, holdings.releasing) == ({1}, {1: Order("U", 3)})


def test_a_plan_that_takes_away_what_was_claimed_is_followed_by_another_round() -> None:
    holdings = holding(1, 2)
    holdings.report()
    assert not holdings.has_to_join_again(Assignment(own=frozenset({1}), release={2: "T"}))
    holdings.released([2])
    assert holdings.has_to_join_again(Assignment(own=frozenset({1})))


def test_what_was_taken_after_it_was_claimed_as_incoming_is_not_revoked_by_a_plan_that_repeats_the_move() -> None:
    holdings = holding()
    holdings.apply(5, Assignment(incoming={1: THIS_GENERATION}))
    holdings.report()
    holdings.took(1)
    assert not holdings.revoked_by(Assignment(incoming={1: 5}))
    holdings.apply(6, Assignment(incoming={1: 5}))
    holdings.report()
    assert holdings.revoked_by(Assignment(incoming={1: THIS_GENERATION})) == {1}


def test_handed_over() -> None:
    holdings = holding(1, 2)
    holdings.apply(2, Assignment(own=frozenset(), release={1: "T", 2: "T"}))
    holdings.handed_over(1, Order("T", 2))
    assert holdings.owned == {2}
    assert holdings.releasing == {2: Order("T", 2)}


def test_an_order_that_was_withdrawn_has_no_effect() -> None:
    holdings = holding(1)
    holdings.apply(2, Assignment(release={1: "T"}))
    holdings.apply(3, Assignment(own=frozenset({1})))
    holdings.handed_over(1, Order("T", 2))
    assert holdings.owned == {1}
    holdings.apply(4, Assignment(release={1: "T"}))
    holdings.handed_over(1, Order("T", 2))
    assert holdings.owned == {1}


def test_what_was_handed_over_and_comes_back_is_new() -> None:
    holdings = holding(1)
    holdings.apply(2, Assignment(release={1: "T"}))
    holdings.handed_over(1, Order("T", 2))
    assert holdings.apply(3, Assignment(own=frozenset({1}))) == {1}


def test_incoming_is_expected_from_the_generation_in_which_it_was_ordered() -> None:
    holdings = holding()
    holdings.apply(5, Assignment(incoming={1: THIS_GENERATION, 2: 3}))
    assert holdings.incoming == {1: 5, 2: 3}


def test_took() -> None:
    holdings = holding()
    holdings.apply(5, Assignment(incoming={1: THIS_GENERATION, 2: THIS_GENERATION}))
    holdings.took(1)
    assert holdings.owned == {1}
    assert holdings.incoming == {2: 5}


def test_what_was_taken_after_the_claim_was_made_is_not_expected_again() -> None:
    holdings = holding()
    holdings.apply(5, Assignment(incoming={1: THIS_GENERATION}))
    holdings.took(1)
    holdings.apply(6, Assignment(incoming={1: 5}))
    assert (holdings.owned, dict(holdings.incoming)) == ({1}, {})


def test_taking_what_is_not_expected_any_more_has_no_effect() -> None:
    holdings = holding()
    holdings.took(1)
    assert holdings.owned == frozenset()


def test_a_lost_membership_owns_and_expects_nothing_and_keeps_its_copies() -> None:
    holdings = holding(1)
    holdings.apply(2, Assignment(release={1: "T"}, incoming={2: THIS_GENERATION}))
    holdings.copies = Copies(ready=frozenset({3}))
    holdings.void()
    report = holdings.report()
    assert (report.owned, report.releasing, report.incoming, report.generation) == (frozenset(), {}, frozenset(), -1)
    assert report.copies == Copies(ready=frozenset({3}))
