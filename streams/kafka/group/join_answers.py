"""What a member does about each answer of its group, as a table: standing, request and error code to the next step.

Pure. The codes are Kafka's (``GroupCoordinatorService``, ``ClassicGroup``); a code that has no row is one that no
coordinator of today gives: it is tried on, and named in the log.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

from streams.kafka.wire.codes import Code, is_retriable


class Asked(enum.Enum):
    """A request of a member."""

    FIND = "FindCoordinator"
    JOIN = "JoinGroup"
    SYNC = "SyncGroup"
    HEARTBEAT = "Heartbeat"


class Standing(enum.Enum):
    """A member as it was when it asked."""

    NEW = "has no id"
    NAMED = "has an id, and no generation"
    MEMBER = "is in a generation"


class Step(enum.Enum):
    """The next step."""

    TAKE = "take the answer"
    TAKE_ID = "join at once under the id of the answer"
    JOIN_AGAIN = "join again, under the same id"
    JOIN_ANEW = "everything is void; join as a new member"
    LEAVE_AND_JOIN_ANEW = "everything is void; leave under the id, and join as a new member"
    LOOK_FOR_COORDINATOR = "look for the coordinator, then ask again"
    WAIT = "ask again, after a pause"
    NO_STRATEGY = "no strategy is common: wait for a session at most, the others may be what a kill left"
    FENCED = "another process has the static name: end, unless it was a late request of our own"
    END = "end: trying again does not cure it"
    REPORT = "name the trouble, and try on"


_EVERYWHERE: Final[Mapping[int, Step]] = {
    Code.NONE: Step.TAKE,
    Code.COORDINATOR_NOT_AVAILABLE: Step.LOOK_FOR_COORDINATOR,
    Code.NOT_COORDINATOR: Step.LOOK_FOR_COORDINATOR,
    Code.COORDINATOR_LOAD_IN_PROGRESS: Step.WAIT,
    Code.GROUP_AUTHORIZATION_FAILED: Step.END,
    Code.TOPIC_AUTHORIZATION_FAILED: Step.END,
    Code.CLUSTER_AUTHORIZATION_FAILED: Step.END,
    Code.SASL_AUTHENTICATION_FAILED: Step.END,
    Code.UNSUPPORTED_SASL_MECHANISM: Step.END,
    Code.UNSUPPORTED_VERSION: Step.END,
    Code.INVALID_GROUP_ID: Step.END,
}
_OF_A_MEMBER: Final[Mapping[int, Step]] = {
    # It is alive: the group waits for its JoinGroup.
    Code.REBALANCE_IN_PROGRESS: Step.JOIN_AGAIN,
    Code.UNKNOWN_MEMBER_ID: Step.JOIN_ANEW,
    # The coordinator knows the id, and would take it again. Orders and markers name members by their ids, and one that
    # lost its memory counts generations anew: old ones would fit again. So it is given back, and never used again.
    Code.ILLEGAL_GENERATION: Step.LEAVE_AND_JOIN_ANEW,
    Code.FENCED_INSTANCE_ID: Step.FENCED,
}
_JOIN: Final[Mapping[int, Step]] = {
    Code.INCONSISTENT_GROUP_PROTOCOL: Step.NO_STRATEGY,
    Code.INVALID_SESSION_TIMEOUT: Step.END,
    Code.GROUP_MAX_SIZE_REACHED: Step.END,
    # Given to one that has an id, it is another coordinator's word: the id is not known there.
    Code.MEMBER_ID_REQUIRED: Step.JOIN_ANEW,
}
_ROWS: Final[Mapping[Asked, Mapping[int, Step]]] = {
    Asked.FIND: _EVERYWHERE,
    Asked.JOIN: {**_EVERYWHERE, **_OF_A_MEMBER, **_JOIN},
    Asked.SYNC: {**_EVERYWHERE, **_OF_A_MEMBER, Code.INCONSISTENT_GROUP_PROTOCOL: Step.NO_STRATEGY},
    Asked.HEARTBEAT: {**_EVERYWHERE, **_OF_A_MEMBER},
}
_BY_STANDING: Final[Mapping[tuple[Standing, Asked, int], Step]] = {
    (Standing.NEW, Asked.JOIN, Code.MEMBER_ID_REQUIRED): Step.TAKE_ID,
}


def next_step(standing: Standing, asked: Asked, code: int) -> Step:
    """Return the next step after an answer with this error code (0: none)."""
    step = _BY_STANDING.get((standing, asked, code), _ROWS[asked].get(code))
    if step is not None:
        return step
    return Step.WAIT if is_retriable(code) else Step.REPORT


def rows() -> Iterable[tuple[Standing, Asked, int, Step]]:
    """List the whole table, as it is read."""
    for standing in Standing:
        for asked in Asked:
            for code in Code:
                yield standing, asked, code, next_step(standing, asked, code)
