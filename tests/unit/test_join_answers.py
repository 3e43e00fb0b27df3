"""The table of a group's answers: each row that there is, and what a code without one means."""

from __future__ import annotations

from collections import Counter

import pytest

from streams.kafka.group.join_answers import Asked, Standing, Step, next_step, rows
from streams.kafka.wire.codes import Code, is_retriable

NEW, NAMED, MEMBER = Standing
FIND, JOIN, SYNC, BEAT = Asked
OF_A_MEMBER = (JOIN, SYNC, BEAT)
EVERYONE = tuple(Standing)


@pytest.mark.parametrize(
    ("standings", "requests", "code", "step"),
    [
        (EVERYONE, tuple(Asked), Code.NONE, Step.TAKE),
        ((NEW,), (JOIN,), Code.MEMBER_ID_REQUIRED, Step.TAKE_ID),
        ((NAMED, MEMBER), (JOIN,), Code.MEMBER_ID_REQUIRED, Step.JOIN_ANEW),
        (EVERYONE, OF_A_MEMBER, Code.REBALANCE_IN_PROGRESS, Step.JOIN_AGAIN),
        (EVERYONE, OF_A_MEMBER, Code.UNKNOWN_MEMBER_ID, Step.JOIN_ANEW),
        (EVERYONE, OF_A_MEMBER, Code.ILLEGAL_GENERATION, Step.LEAVE_AND_JOIN_ANEW),
        (EVERYONE, OF_A_MEMBER, Code.FENCED_INSTANCE_ID, Step.FENCED),
        (EVERYONE, (JOIN, SYNC), Code.INCONSISTENT_GROUP_PROTOCOL, Step.NO_STRATEGY),
        (EVERYONE, tuple(Asked), Code.NOT_COORDINATOR, Step.LOOK_FOR_COORDINATOR),
        (EVERYONE, tuple(Asked), Code.COORDINATOR_NOT_AVAILABLE, Step.LOOK_FOR_COORDINATOR),
        (EVERYONE, tuple(Asked), Code.COORDINATOR_LOAD_IN_PROGRESS, Step.WAIT),
        (EVERYONE, tuple(Asked), Code.THROTTLING_QUOTA_EXCEEDED, Step.WAIT),
        (EVERYONE, tuple(Asked), Code.GROUP_AUTHORIZATION_FAILED, Step.END),
        (EVERYONE, tuple(Asked), Code.INVALID_GROUP_ID, Step.END),
        (EVERYONE, (JOIN,), Code.INVALID_SESSION_TIMEOUT, Step.END),
        (EVERYONE, (JOIN,), Code.GROUP_MAX_SIZE_REACHED, Step.END),
        (EVERYONE, (FIND,), Code.ILLEGAL_GENERATION, Step.REPORT),
        (EVERYONE, tuple(Asked), Code.UNKNOWN_SERVER_ERROR, Step.REPORT),
        (EVERYONE, tuple(Asked), 12_345, Step.REPORT),
    ],
)
def test_row(standings: tuple[Standing, ...], requests: tuple[Asked, ...], code: int, step: Step) -> None:
    found = {(standing, asked): next_step(standing, asked, code) for standing in standings for asked in requests}
    assert found == dict.fromkeys(found, step)


def test_the_whole_table() -> None:
    """No answer but a good one is taken; what passes by itself is never the end, and never taken for a loss."""
    count: Counter[Step] = Counter()
    for standing, asked, code, step in rows():
        count[step] += 1
        assert (step is Step.TAKE) == (code == Code.NONE), (standing, asked, code)
        if is_retriable(code):
            assert step in (Step.WAIT, Step.LOOK_FOR_COORDINATOR), (standing, asked, code)
        if asked is FIND:
            assert step not in (Step.JOIN_ANEW, Step.LEAVE_AND_JOIN_ANEW, Step.JOIN_AGAIN), (standing, code)
    assert count[Step.TAKE_ID] == 1
    assert set(count) == set(Step)
