"""The next step of a member after each answer of its group, as a table: by standing, request and error code.

Pure. The codes are Kafka's (``GroupCoordinatorService``, ``ClassicGroup``); a code that has no row is one that no
coordinator of today gives: it is tried on, and named in the log.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from streams.kafka.wire.codes import Code, is_retriable


class GroupRequest(enum.Enum):
    """A request of a member."""

    FIND = "FindCoordinator"
    JOIN = "JoinGroup"
    SYNC = "SyncGroup"
    HEARTBEAT = "Heartbeat"


class MemberStanding(enum.Enum):
    """The standing of a member at the time of its request."""

    NEW = "has no id"
    NAMED = "has an id, and no generation"
    MEMBER = "is in a generation"


class JoinStep(enum.Enum):
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
    NAME_HELD = "a member has the static name already: wait for as long as a killed one is in the group"
    END = "end: trying again does not cure it"
    REPORT = "name the trouble, and try on"


EVERYWHERE: Final[Mapping[int, JoinStep]] = {
    Code.NONE: JoinStep.TAKE,
    Code.COORDINATOR_NOT_AVAILABLE: JoinStep.LOOK_FOR_COORDINATOR,
    Code.NOT_COORDINATOR: JoinStep.LOOK_FOR_COORDINATOR,
    Code.COORDINATOR_LOAD_IN_PROGRESS: JoinStep.WAIT,
    Code.GROUP_AUTHORIZATION_FAILED: JoinStep.END,
    Code.TOPIC_AUTHORIZATION_FAILED: JoinStep.END,
    Code.CLUSTER_AUTHORIZATION_FAILED: JoinStep.END,
    Code.SASL_AUTHENTICATION_FAILED: JoinStep.END,
    Code.UNSUPPORTED_SASL_MECHANISM: JoinStep.END,
    Code.UNSUPPORTED_VERSION: JoinStep.END,
    Code.INVALID_GROUP_ID: JoinStep.END,
}
"""Rows of all requests to a coordinator."""
_OF_A_MEMBER: Final[Mapping[int, JoinStep]] = {
    # It is alive: the group waits for its JoinGroup.
    Code.REBALANCE_IN_PROGRESS: JoinStep.JOIN_AGAIN,
    Code.UNKNOWN_MEMBER_ID: JoinStep.JOIN_ANEW,
    # The coordinator knows the id, and would take it again. Orders and markers name members by their ids. A coordinator
    # that lost its memory counts generations from the beginning, so old ones would fit again. The id is given back, and
    # never used again.
    Code.ILLEGAL_GENERATION: JoinStep.LEAVE_AND_JOIN_ANEW,
    Code.FENCED_INSTANCE_ID: JoinStep.FENCED,
}
_JOIN: Final[Mapping[int, JoinStep]] = {
    Code.INCONSISTENT_GROUP_PROTOCOL: JoinStep.NO_STRATEGY,
    Code.INVALID_SESSION_TIMEOUT: JoinStep.END,
    Code.GROUP_MAX_SIZE_REACHED: JoinStep.END,
    # Given to one that has an id, it is another coordinator's word: the id is not known there.
    Code.MEMBER_ID_REQUIRED: JoinStep.JOIN_ANEW,
}
_ROWS: Final[Mapping[GroupRequest, Mapping[int, JoinStep]]] = {
    GroupRequest.FIND: EVERYWHERE,
    GroupRequest.JOIN: {**EVERYWHERE, **_OF_A_MEMBER, **_JOIN},
    GroupRequest.SYNC: {**EVERYWHERE, **_OF_A_MEMBER, Code.INCONSISTENT_GROUP_PROTOCOL: JoinStep.NO_STRATEGY},
    GroupRequest.HEARTBEAT: {**EVERYWHERE, **_OF_A_MEMBER},
}
_BY_STANDING: Final[Mapping[tuple[MemberStanding, GroupRequest, int], JoinStep]] = {
    (MemberStanding.NEW, GroupRequest.JOIN, Code.MEMBER_ID_REQUIRED): JoinStep.TAKE_ID,
}


def next_step(standing: MemberStanding, request: GroupRequest, code: int) -> JoinStep:
    """Return the next step after an answer with this error code (0: none)."""
    return _BY_STANDING.get((standing, request, code)) or _ROWS[request].get(code) or step_without_row(code)


def step_without_row(code: int) -> JoinStep:
    """Return the next step after a code that no coordinator of today gives."""
    return JoinStep.WAIT if is_retriable(code) else JoinStep.REPORT
