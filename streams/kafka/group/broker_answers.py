"""The next step of a member after each answer of a group that the broker shares out (KIP-848), as a table: by standing
and error code of ConsumerGroupHeartbeat.

Pure. The codes are Kafka's (``GroupMetadataManager``); the steps are those of ``join_answers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from streams.kafka.group.join_answers import EVERYWHERE, JoinStep, MemberStanding, step_without_row
from streams.kafka.wire.codes import Code

_ROWS: Final[Mapping[int, JoinStep]] = {
    **EVERYWHERE,
    Code.UNKNOWN_MEMBER_ID: JoinStep.JOIN_ANEW,
    # The coordinator lost its memory, and the group with it.
    Code.GROUP_ID_NOT_FOUND: JoinStep.JOIN_ANEW,
    # The coordinator knows the id, and keeps its partitions for it until its session ends: so it is given back.
    Code.FENCED_MEMBER_EPOCH: JoinStep.LEAVE_AND_JOIN_ANEW,
    Code.STALE_MEMBER_EPOCH: JoinStep.LEAVE_AND_JOIN_ANEW,
    Code.FENCED_INSTANCE_ID: JoinStep.FENCED,
    Code.UNRELEASED_INSTANCE_ID: JoinStep.NAME_HELD,
    Code.UNSUPPORTED_ASSIGNOR: JoinStep.END,
    Code.GROUP_MAX_SIZE_REACHED: JoinStep.END,
    Code.INVALID_REQUEST: JoinStep.END,
}
_JOINING: Final[Mapping[int, JoinStep]] = {
    # Members by the classic protocol are in the group, and the broker may not convert it.
    Code.GROUP_ID_NOT_FOUND: JoinStep.NO_STRATEGY,
    Code.INCONSISTENT_GROUP_PROTOCOL: JoinStep.NO_STRATEGY,
}


def next_step(standing: MemberStanding, code: int) -> JoinStep:
    """Return the next step after an answer with this error code (0: none)."""
    joining = _JOINING if standing is not MemberStanding.MEMBER else {}
    return joining.get(code) or _ROWS.get(code) or step_without_row(code)
