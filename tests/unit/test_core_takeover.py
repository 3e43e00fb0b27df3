"""The next step of a take-over: the order of section 7, and the table of a round."""

from __future__ import annotations

from typing import Any

import pytest

from streams.core.takeover import BARRIER, ENDS, PartitionStand, Stand, Step, next_step

STALLED = 5.0
KNOWN: dict[str, Any] = {"is_complete": True, "has_lookups": True}


def behind_the_barrier(*partitions: int) -> Stand:
    stand = Stand(partitions)
    for _ in BARRIER:
        stand.answer()
    return stand


def test_the_barrier_is_the_protocols_order() -> None:
    stand, asked = Stand([1, 2]), list[Step]()
    while stand.at_hand is None:
        asked.append(next_step(stand, STALLED))
        stand.answer()
    assert asked == [
        Step.SETTLE,
        Step.FENCE,
        Step.SETTLE_LOOKUPS,
        Step.GROUP_OFFSETS,
        Step.CHANGELOG_RANGES,
        Step.INPUT_RANGES,
    ]
    assert stand.at_hand == PartitionStand(1)


@pytest.mark.parametrize(
    ("known", "searched", "is_current", "step"),
    [
        ({}, False, True, Step.CHECK),
        ({"is_complete": False}, False, True, Step.PASS_ON),
        ({"is_complete": True}, False, True, Step.AWAIT_LOOKUPS),
        ({"is_complete": True, "looks_lost": True}, False, True, Step.CHECK_END),
        ({"is_complete": True, "looks_lost": True}, True, True, Step.CHECK_END),
        ({"is_complete": True, "looks_lost": True, "is_alone": True}, False, True, Step.AWAIT_LOOKUPS),
        ({"is_complete": True, "looks_lost": True, "is_alone": False}, False, True, Step.AWAIT_LOOKUPS),
        (KNOWN, False, True, Step.FIND_MISSED),
        (KNOWN, True, True, Step.BRING_UP),
        (KNOWN | {"looks_lost": True, "is_alone": True}, True, True, Step.BRING_UP),
        (KNOWN | {"looks_lost": True, "is_alone": False}, True, True, Step.GIVE_WAY),
        (KNOWN, True, False, Step.GIVE_WAY),
        ({"is_complete": False}, True, False, Step.PASS_ON),
        # Taken away: whatever else is known of it.
        ({"is_restoring": False}, False, True, Step.LEAVE),
        (KNOWN | {"is_restoring": False}, True, True, Step.LEAVE),
        (KNOWN | {"is_restoring": False, "looks_lost": True, "is_alone": False}, True, False, Step.LEAVE),
    ],
)
def test_a_partition_at_hand(known: dict[str, Any], searched: bool, is_current: bool, step: Step) -> None:
    stand = behind_the_barrier(7)
    stand.at_hand = PartitionStand(7, **known)
    stand.searched = {7} if searched else set()
    stand.is_current = is_current
    assert next_step(stand, STALLED) is step


@pytest.mark.parametrize(
    ("waiting", "is_unanswered", "unmoved", "step"),
    [
        ([7], False, 0.0, Step.WAIT),
        ([7], False, STALLED, Step.WAIT),  # a wait that ends by its time-out alone is not longer than that
        ([7], False, STALLED + 0.1, Step.CHECK_STALL),
        ([7], True, 0.0, Step.GIVE_UP),
        ([7], True, STALLED + 0.1, Step.GIVE_UP),
        ([], True, 0.0, Step.GIVE_UP),
        ([], False, STALLED + 0.1, Step.DONE),
    ],
)
def test_the_end_of_a_round(waiting: list[int], is_unanswered: bool, unmoved: float, step: Step) -> None:
    stand = behind_the_barrier(*waiting)
    stand.at_hand = None
    stand.is_unanswered, stand.unmoved_seconds = is_unanswered, unmoved
    assert next_step(stand, STALLED) is step
    assert (step in ENDS) == (step is not Step.WAIT)


def test_a_round_looks_once_at_each_partition_that_waits() -> None:
    stand, seen = behind_the_barrier(1, 2, 3), list[int]()
    for leaves in (False, True, False):
        assert stand.at_hand is not None
        seen.append(stand.at_hand.number)
        stand.leave() if leaves else stand.pass_on()
    assert (seen, stand.at_hand, stand.waiting) == ([1, 2, 3], None, [1, 3])
    stand.begin_round()
    assert stand.at_hand == PartitionStand(1), "nothing is known of it from the last round"
