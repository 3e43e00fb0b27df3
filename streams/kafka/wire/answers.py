"""The meaning of each error that a broker answers to a request of a transaction, as data.

Each row has its test: this answer, that meaning. A code that stands in no row means that the transaction must be
aborted, or that its outcome is unknown where its end was requested. Sources: Kafka's ``Errors.java``, KIP-98, KIP-360,
KIP-890, and what Kafka 4.1.1 answered in measurements.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

from streams.errors import TransactionFailed
from streams.kafka import permissions
from streams.kafka.permissions import Right, denied, is_denial
from streams.kafka.wire.codes import NO_SUCH_TOPIC, Code, name_of, words_of
from streams.records import Output, RefusedRecord

WHY_FENCED: Final = (
    "; a producer with the same transactional id was started since (a process with the same instance_id? each needs "
    "one of its own), or the broker timed the transaction out"
)


class Meaning(enum.Enum):
    """The meaning of an answer for the request that got it."""

    AGAIN = "again"
    """The request had no effect, and may have one later: send the same bytes again."""
    AGAIN_LEADER = "again, at the leader"
    """The request had no effect: fetch the metadata, and send it again, to the partition's leader."""
    AGAIN_COORDINATOR = "again, at the coordinator"
    """The request had no effect: look for the coordinator, and send it again, to that one."""
    DONE = "done"
    """The batch is in the log already."""
    REFUSED = "refused"
    """A record is at fault, or the size of the batch."""
    BLOCKED = "blocked"
    """A topic, a right or a clock is at fault: an operator can help."""
    STALE = "stale"
    LOST = "lost"
    FENCED = "fenced"
    ABORTABLE = "abortable"
    UNKNOWN = "unknown"


_KINDS: Final = (Meaning.BLOCKED, Meaning.STALE, Meaning.LOST, Meaning.FENCED, Meaning.UNKNOWN)
_M = Meaning
_MOVED: Final = dict.fromkeys((14, 15, 16), _M.AGAIN_COORDINATOR)  # the coordinator loads, is not there, has moved
_FENCED: Final = dict.fromkeys((47, 90), _M.FENCED)  # INVALID_PRODUCER_EPOCH, PRODUCER_FENCED
GROUP: Final[Mapping[int, Meaning]] = {
    Code.ILLEGAL_GENERATION: _M.STALE,
    Code.REBALANCE_IN_PROGRESS: _M.STALE,  # never seen on the transactional path; it would mean the same
    Code.STALE_MEMBER_EPOCH: _M.STALE,  # the broker-side protocol's word for it (KIP-848)
    Code.UNKNOWN_MEMBER_ID: _M.LOST,
    Code.FENCED_INSTANCE_ID: _M.LOST,
    Code.FENCED_MEMBER_EPOCH: _M.LOST,
}
"""The coordinator's answers to offsets whose metadata is not the group's. None of these is fatal: the transaction can
be aborted."""
_RIGHTS: Final = dict.fromkeys((29, 30, 53), _M.BLOCKED)  # on a topic, a group, a transactional id

ADVICE: Final[Mapping[int, str]] = {
    **dict.fromkeys(NO_SUCH_TOPIC, "create the topic"),
    Code.TOPIC_AUTHORIZATION_FAILED: "grant the principal the right to write to the topic",
    Code.POLICY_VIOLATION: "change the cluster's policy, or the settings of the topic",
    Code.INVALID_TIMESTAMP: "the clocks of this machine and the broker's are further apart than the topic takes: set "
    "the wrong one (NTP), or raise message.timestamp.after.max.ms of the topic (an hour, by default), or "
    "message.timestamp.before.max.ms",
}
"""What an operator can do where a topic, a right or a clock is at fault; then the same record will be taken."""

PRODUCE: Final[Mapping[int, Meaning]] = {
    # Certainly not in the log. 51: the markers of the slot's last transaction are not written yet.
    **dict.fromkeys((14, 15, 16, 19, 51), _M.AGAIN),
    # 56: a broker whose disk failed answers so for good, also when the partition has another leader.
    **dict.fromkeys((3, 5, 6, 9, 56, 74, 75), _M.AGAIN_LEADER),
    # In the log by an earlier try: to send it again under other sequences would write it twice.
    Code.DUPLICATE_SEQUENCE_NUMBER: _M.DONE,
    # The record itself, or the name of its topic: sending it again would fail again.
    Code.INVALID_FETCH_SIZE: _M.REFUSED,  # of a batch: its size
    Code.MESSAGE_TOO_LARGE: _M.REFUSED,
    Code.RECORD_LIST_TOO_LARGE: _M.REFUSED,
    Code.INVALID_RECORD: _M.REFUSED,
    Code.INVALID_TOPIC_EXCEPTION: _M.REFUSED,
    **dict.fromkeys(ADVICE.keys() - NO_SUCH_TOPIC, _M.BLOCKED),
    **_FENCED,
    # 7 (timed out), 13 and 20 (too few replicas after the append) stand in no row: the records may be in the log, and
    # are not sent twice under one epoch.
}
# 3: the topic was just made, and the coordinator does not know it yet. 7: unlike a Produce it may be done twice.
ENLIST: Final[Mapping[int, Meaning]] = {51: _M.AGAIN, 7: _M.AGAIN, 3: _M.AGAIN, **_MOVED, **_RIGHTS, **_FENCED}
OFFSETS: Final[Mapping[int, Meaning]] = {
    51: _M.AGAIN,
    7: _M.AGAIN,
    3: _M.AGAIN,
    **_MOVED,
    **GROUP,
    **_RIGHTS,
    **_FENCED,
}
# 48 (the transaction is ended otherwise, by its time) stands in no row: the outcome is unknown, and is looked up.
END: Final[Mapping[int, Meaning]] = {51: _M.AGAIN, 7: _M.AGAIN, **_MOVED, **_FENCED}
# 88: a transaction that holds the offset is being decided.
FETCH: Final[Mapping[int, Meaning]] = {88: _M.AGAIN, 7: _M.AGAIN, **_MOVED, **_RIGHTS}
INIT: Final[Mapping[int, Meaning]] = {51: _M.AGAIN, 7: _M.AGAIN, **_MOVED}


def described(code: int, where: str = "", message: str = "") -> str:
    """Describe an error for a message. ``where``: the partition or the group that got it. ``message``: the broker's
    own."""
    return ": ".join(filter(None, (where, words_of(code), message)))


def no_answer(error: Exception, seconds: float, last: str, needed: Sequence[Right]) -> tuple[str, str]:
    """Return code and words of a call that failed, or took longer than so many seconds; ``last``: its last refusal."""
    code = "_TIMED_OUT" if isinstance(error, TimeoutError) else getattr(error, "code", "_BAD_MSG")
    if is_denial(code):
        return code, denied(code, needed)
    refused = f"no success within {seconds:g} seconds: {last}" if last else ""
    silence = f"no answer within {seconds:g} seconds" if seconds > 0 else "its time was over before"
    return code, str(error) or refused or silence


def failure(
    transactional_id: str, call: str, code: int, meaning: Meaning, where: str = "", needed: Sequence[Right] = ()
) -> TransactionFailed:
    """Make the failure of a call that got this answer. ``needed``: the rights that the call takes."""
    kind = meaning.value if meaning in _KINDS else "abortable"
    name = name_of(code)
    why = WHY_FENCED if meaning is Meaning.FENCED else f"; {denied(name, needed)}" if is_denial(name) else ""
    return TransactionFailed(call, name, kind, f"{transactional_id}: {described(code, where)}{why}")


def refused_record(topic: str, partition: int, code: int, reason: str, output: Output | None) -> RefusedRecord:
    """Make the report of a refused record; ``output`` is ``None`` where a batch is refused and no record is named."""
    # A time that the handler chose is the record's own, any other the clock's.
    is_own = PRODUCE.get(code) is Meaning.REFUSED or (
        code == Code.INVALID_TIMESTAMP and (output is None or bool(output.timestamp_ms))
    )
    where = topic if partition < 0 else f"{topic}[{partition}]"
    right = [permissions.on_topic("Write", topic)]
    # A topic may be unusable by any code of its metadata.
    advice = denied(name_of(code), right) if code in _RIGHTS else ADVICE.get(code, "")
    text = f"{where}: {reason or described(code)}" + (f": {advice}" if advice and not is_own else "")
    return RefusedRecord(topic, name_of(code), text, is_own, output)
