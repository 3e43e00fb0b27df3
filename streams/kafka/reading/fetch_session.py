"""Fetch requests, as one broker gets them one after the other: whole ones, or what has changed (KIP-227).

A broker that keeps a session remembers what was requested: then a request has the partitions that are new or go on
elsewhere, and an answer those that have something new. Of many partitions that wait for a record, that is almost none.
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple
from uuid import UUID

from streams.kafka.wire.codes import Code
from streams.kafka.wire.schemas.fetch import FetchRequest, FetchResponse

NO_ID: Final = UUID(int=0)
"""The id of all topics, where brokers have none."""
LOG_START: Final = -1
"""The offset that stands for "whatever the log begins with"."""
NO_END: Final = sys.maxsize
"""The end of a reading that has none."""
FAR_OFFSETS: Final = 10_000
"""Offsets before the end of a log from which on fetches are as large as may be."""
_COMMITTED: Final = 1
_LAST_EPOCH: Final = 2**31 - 1
_NO_SESSION, _NEW_SESSION = -1, 0
_LOST: Final = (Code.FETCH_SESSION_ID_NOT_FOUND, Code.INVALID_FETCH_SESSION_EPOCH, Code.FETCH_SESSION_TOPIC_ID_ERROR)


class FetchKind(NamedTuple):
    """A use of fetches. ``wait_ms``: the time that a broker may hold a fetch that brings nothing; it doubles with each
    such answer, up to ``longest_wait_ms``. ``near_bytes`` and ``far_bytes``: of one partition in an answer, near to the
    end of its log and far from it (a first batch that is larger comes as a whole); up to an end that is known what it
    takes, but not less than the first and not more than the second. ``answer_bytes``: of an answer;
    twice as much may be held, what is decoded and what comes behind it. ``keeps_session``: the broker is to keep
    one."""

    role: str
    wait_ms: int
    longest_wait_ms: int
    near_bytes: int
    far_bytes: int
    answer_bytes: int
    keeps_session: bool


LOOKING_UP: Final = FetchKind("reader", 20, 20, 1 << 20, 1 << 20, 8 << 20, keeps_session=False)
"""To an end that is known: every answer brings much, and a session would change with each."""
# A fetch that is held for long costs nothing: a record ends it. News of one partition wait behind the backlog of the
# others in the same answer, so it is small.
FOLLOWING: Final = FetchKind("tail", 20, 500, 128 << 10, 1 << 20, 2 << 20, keeps_session=True)


class LogPartition:
    """One partition that is read. ``position``: all below it was returned (``LOG_START``: it is not known yet).
    ``next_offset``: the next fetch begins there; ``end``: no fetch begins there or behind. ``leader`` is -1 while it is
    looked up; ``leader_epoch`` is that of the metadata, ``fetched_epoch`` that of the last batch. ``stable`` and
    ``high`` are the last stable offset and the high watermark, as the last answer has them (-1: none yet).
    ``least_bytes``: a fetch that is smaller brings no whole batch."""

    __slots__ = (
        "bytes_an_offset",
        "end",
        "fetched_epoch",
        "high",
        "is_at_end",
        "is_guessed",
        "leader",
        "leader_epoch",
        "least_bytes",
        "next_offset",
        "number",
        "position",
        "retry_at",
        "stable",
    )

    def __init__(self, number: int, offset: int, end: int) -> None:
        self.number, self.end, self.position = number, end, offset
        # Most logs begin with offset 0: compaction leaves the start where it is. The question where one begins is
        # needed for the others only.
        self.is_guessed = offset == LOG_START
        self.next_offset = max(offset, 0)
        self.leader = self.leader_epoch = self.fetched_epoch = -1
        self.high = self.stable = -1
        self.bytes_an_offset = 0.0
        self.least_bytes = 0
        self.retry_at = 0.0
        self.is_at_end = False

    @property
    def is_far(self) -> bool:
        """Check whether much of the log is left, as far as is known."""
        return self.high - self.next_offset > FAR_OFFSETS


class FetchOptions:
    """Values that all requests of a reading have in common. ``topic_id`` is that of the last metadata. ``by_name``: a
    broker was too old for it (before Kafka 3.1), so its answers are of whatever has the name."""

    def __init__(self, topic: str, kind: FetchKind, *, committed_only: bool) -> None:
        self.topic, self.kind, self.committed_only = topic, kind, committed_only
        self.topic_id = NO_ID
        self.by_name = False


class FetchSession:
    """The requests to one broker."""

    def __init__(self, options: FetchOptions) -> None:
        self._options = options
        self._id = 0
        self._epoch = _NEW_SESSION if options.kind.keeps_session else _NO_SESSION
        self._known: dict[int, tuple[int, int, int, int]] = {}

    @property
    def is_partial(self) -> bool:
        """Check whether an answer leaves out what has nothing new."""
        return self._epoch > _NEW_SESSION

    def request(self, wanted: list[LogPartition], wait_ms: int) -> FetchRequest:
        """Make the next request, for exactly these partitions."""
        of, options = FetchRequest.FetchTopic, self._options
        new: dict[int, tuple[int, int, int, int]] = {
            one.number: (one.next_offset, one.leader_epoch, one.fetched_epoch, self._bytes_of(one)) for one in wanted
        }
        known = self._known if self.is_partial else {}
        partitions = [
            of.FetchPartition(
                partition=number,
                fetch_offset=offset,
                current_leader_epoch=leader_epoch,
                last_fetched_epoch=fetched_epoch,
                partition_max_bytes=most,
            )
            for number, (offset, leader_epoch, fetched_epoch, most) in new.items()
            if known.get(number) != new[number]
        ]
        gone = [number for number in known if number not in new]
        forgotten = FetchRequest.ForgottenTopic(topic=options.topic, topic_id=options.topic_id, partitions=gone)
        topic = of(topic=options.topic, topic_id=options.topic_id, partitions=partitions)
        # The answer may still be lost. The session then begins anew, so these positions are not used.
        self._known = new
        return FetchRequest(
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=options.kind.answer_bytes,
            isolation_level=_COMMITTED if options.committed_only else 0,
            session_id=self._id,
            session_epoch=self._epoch,
            topics=[topic] if partitions else [],
            forgotten_topics_data=[forgotten] if gone else [],
        )

    def goes_on(self, answer: FetchResponse) -> bool:
        """Note the answer. ``False``: the broker does not know the session (any more); the next request is whole."""
        if answer.error_code in _LOST:
            self.reset()
            return False
        if self._epoch != _NO_SESSION:
            self._id = answer.session_id
            # Behind the last epoch comes 1: with 0 the broker would end this session and begin another one.
            self._epoch = self._epoch % _LAST_EPOCH + 1 if self._id else _NEW_SESSION  # 0: it has no room for one
        return True

    def reset(self) -> None:
        """Make the next request whole; it ends the session of before."""
        if self._epoch != _NO_SESSION:
            self._epoch = _NEW_SESSION

    def _bytes_of(self, partition: LogPartition) -> int:
        kind = self._options.kind
        most = kind.far_bytes if partition.is_far else kind.near_bytes
        if partition.end < NO_END:
            left = int((partition.end - partition.next_offset) * partition.bytes_an_offset)
            most = min(max(left, kind.near_bytes), kind.far_bytes)
        return max(most, partition.least_bytes)
