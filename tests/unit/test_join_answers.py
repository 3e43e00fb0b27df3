"""The table of a group's answers: each row that there is, and what a code without one means."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from streams.kafka.group.join_answers import GroupRequest, JoinStep, MemberStanding, next_step
from streams.kafka.wire.codes import Code, is_retriable

NEW, NAMED, MEMBER = MemberStanding
FIND, JOIN, SYNC, BEAT = GroupRequest
OF_A_MEMBER = (JOIN, SYNC, BEAT)
EVERYONE = tuple(MemberStanding)


@pytest.mark.parametrize(
    ("standings", "requests", "code", "step"),
    [
        (EVERYONE, tuple(GroupRequest), Code.NONE, JoinStep.TAKE),
        ((NEW,), (JOIN,), Code.MEMBER_ID_REQUIRED, JoinStep.TAKE_ID),
        ((NAMED, MEMBER), (JOIN,), Code.MEMBER_ID_REQUIRED, JoinStep.JOIN_ANEW),
        (EVERYONE, OF_A_MEMBER, Code.REBALANCE_IN_PROGRESS, JoinStep.JOIN_AGAIN),
        (EVERYONE, OF_A_MEMBER, Code.UNKNOWN_MEMBER_ID, JoinStep.JOIN_ANEW),
        (EVERYONE, OF_A_MEMBER, Code.ILLEGAL_GENERATION, JoinStep.LEAVE_AND_JOIN_ANEW),
        (EVERYONE, OF_A_MEMBER, Code.FENCED_INSTANCE_ID, JoinStep.FENCED),
        (EVERYONE, (JOIN, SYNC), Code.INCONSISTENT_GROUP_PROTOCOL, JoinStep.NO_STRATEGY),
        (EVERYONE, tuple(GroupRequest), Code.NOT_COORDINATOR, JoinStep.LOOK_FOR_COORDINATOR),
        (EVERYONE, tuple(GroupRequest), Code.COORDINATOR_NOT_AVAILABLE, JoinStep.LOOK_FOR_COORDINATOR),
        (EVERYONE, tuple(GroupRequest), Code.COORDINATOR_LOAD_IN_PROGRESS, JoinStep.WAIT),
        (EVERYONE, tuple(GroupRequest), Code.THROTTLING_QUOTA_EXCEEDED, JoinStep.WAIT),
        (EVERYONE, tuple(GroupRequest), Code.GROUP_AUTHORIZATION_FAILED, JoinStep.END),
        (EVERYONE, tuple(GroupRequest), Code.INVALID_GROUP_ID, JoinStep.END),
        (EVERYONE, (JOIN,), Code.INVALID_SESSION_TIMEOUT, JoinStep.END),
        (EVERYONE, (JOIN,), Code.GROUP_MAX_SIZE_REACHED, JoinStep.END),
        (EVERYONE, (FIND,), Code.ILLEGAL_GENERATION, JoinStep.REPORT),
        (EVERYONE, tuple(GroupRequest), Code.UNKNOWN_SERVER_ERROR, JoinStep.REPORT),
        (EVERYONE, tuple(GroupRequest), 12_345, JoinStep.REPORT),
    ],
)
def test_row(
    standings: tuple[MemberStanding, ...], requests: tuple[GroupRequest, ...], code: int, step: JoinStep
) -> None:
    found = {(standing, request): next_step(standing, request, code) for standing in standings for request in requests}
    assert found == dict.fromkeys(found, step)


def test_the_whole_table() -> None:
    """No answer but a good one is taken; what passes by itself is never the end, and never taken for a loss."""
    count: Counter[JoinStep] = Counter()
    for standing, request, code in product(MemberStanding, GroupRequest, Code):
        step = next_step(standing, request, code)
        count[step] += 1
        assert (step is JoinStep.TAKE) == (code == Code.NONE), (standing, request, code)
        if is_retriable(code):
            assert step in (JoinStep.WAIT, JoinStep.LOOK_FOR_COORDINATOR), (standing, request, code)
        if request is FIND:
            assert step not in (JoinStep.JOIN_ANEW, JoinStep.LEAVE_AND_JOIN_ANEW, JoinStep.JOIN_AGAIN), (standing, code)
    assert count[JoinStep.TAKE_ID] == 1
    assert set(count) == set(JoinStep) - {JoinStep.NAME_HELD}  # of the broker's own protocol (test_broker_answers)
