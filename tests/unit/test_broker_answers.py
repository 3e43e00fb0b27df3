"""The table of answers of a group that the broker shares out: each row, and what a code without one means."""

from __future__ import annotations

from itertools import product

import pytest

from streams.errors import ConfigError
from streams.kafka.group.broker_answers import next_step
from streams.kafka.group.broker_group import broker_assignor
from streams.kafka.group.join_answers import JoinStep, MemberStanding
from streams.kafka.wire.codes import Code, is_retriable

NEW, NAMED, MEMBER = EVERYONE = tuple(MemberStanding)


@pytest.mark.parametrize(
    ("standings", "code", "step"),
    [
        (EVERYONE, Code.NONE, JoinStep.TAKE),
        (EVERYONE, Code.UNKNOWN_MEMBER_ID, JoinStep.JOIN_ANEW),
        ((MEMBER,), Code.GROUP_ID_NOT_FOUND, JoinStep.JOIN_ANEW),
        ((NEW, NAMED), Code.GROUP_ID_NOT_FOUND, JoinStep.NO_STRATEGY),
        ((NEW, NAMED), Code.INCONSISTENT_GROUP_PROTOCOL, JoinStep.NO_STRATEGY),
        (EVERYONE, Code.FENCED_MEMBER_EPOCH, JoinStep.LEAVE_AND_JOIN_ANEW),
        (EVERYONE, Code.STALE_MEMBER_EPOCH, JoinStep.LEAVE_AND_JOIN_ANEW),
        (EVERYONE, Code.FENCED_INSTANCE_ID, JoinStep.FENCED),
        (EVERYONE, Code.UNRELEASED_INSTANCE_ID, JoinStep.NAME_HELD),
        (EVERYONE, Code.UNSUPPORTED_ASSIGNOR, JoinStep.END),
        (EVERYONE, Code.GROUP_MAX_SIZE_REACHED, JoinStep.END),
        (EVERYONE, Code.GROUP_AUTHORIZATION_FAILED, JoinStep.END),
        (EVERYONE, Code.INVALID_REQUEST, JoinStep.END),
        (EVERYONE, Code.UNSUPPORTED_VERSION, JoinStep.END),
        (EVERYONE, Code.NOT_COORDINATOR, JoinStep.LOOK_FOR_COORDINATOR),
        (EVERYONE, Code.COORDINATOR_LOAD_IN_PROGRESS, JoinStep.WAIT),
        (EVERYONE, Code.UNKNOWN_TOPIC_OR_PARTITION, JoinStep.WAIT),
        (EVERYONE, Code.UNKNOWN_SERVER_ERROR, JoinStep.REPORT),
        (EVERYONE, 12_345, JoinStep.REPORT),
    ],
)
def test_row(standings: tuple[MemberStanding, ...], code: int, step: JoinStep) -> None:
    found = {standing: next_step(standing, code) for standing in standings}
    assert found == dict.fromkeys(found, step)


def test_the_whole_table() -> None:
    """No answer but a good one is taken; what passes by itself is never the end, and never taken for a loss."""
    for standing, code in product(MemberStanding, Code):
        step = next_step(standing, code)
        assert (step is JoinStep.TAKE) == (code == Code.NONE), (standing, code)
        if is_retriable(code):
            assert step in (JoinStep.WAIT, JoinStep.LOOK_FOR_COORDINATOR), (standing, code)


def test_strategies_of_the_broker() -> None:
    assert broker_assignor(("cooperative-sticky",)) == "uniform"
    assert broker_assignor(("range",)) == "range"


@pytest.mark.parametrize(
    ("strategies", "what"),
    [
        (("roundrobin",), "cannot run the strategy 'roundrobin'"),
        (("incremental",), "membership 'streams'"),
        (("range", "cooperative-sticky"), "takes one strategy"),
    ],
)
def test_strategies_that_the_broker_cannot_run(strategies: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        broker_assignor(strategies)
