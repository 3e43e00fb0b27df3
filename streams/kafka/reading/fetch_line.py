"""The Fetch requests to one broker: one under way at a time, for all partitions that it leads.

A broker's answer is taken for lost when no byte of it has come for a while. What counts is the time that the loop has
waited for it: while records are decoded and received the loop does not run, and the kernel has what has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from streams.kafka.reading.reading_loop import ReadingLoop
from streams.kafka.wire.codec import MalformedAnswer, decode_answer, encode, is_flexible
from streams.kafka.wire.connection import BrokerConnection, LostConnection
from streams.kafka.wire.schemas.fetch import FetchRequest, FetchResponse

PARTITION_BYTES: Final = 1 << 20
"""Bytes of one partition in an answer, where there is more; a first batch that is larger comes as a whole."""
ANSWER_BYTES: Final = 8 << 20
"""Bytes of an answer, as ``PARTITION_BYTES``. Twice as much may be held: what is decoded, and what comes behind it."""
FIRST_PATIENCE_SECONDS: Final = 3.0
LONGEST_PATIENCE_SECONDS: Final = 24.0
"""Seconds without a byte of an answer until the connection is replaced, and the leaders are looked up: the first time,
and at most, each time twice as many as before. A frozen broker has no other sign; a slow disk must not be one."""
MOST_THROTTLE_SECONDS: Final = 10.0
"""Seconds, at most, for which a broker's throttle time is kept. It holds the connection back by itself (KIP-219), so a
request sent early does no harm; and a time that is nonsense must not end the reading."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 1.0
"""Seconds between two tries to reach a broker: the first pause, and the longest, each twice as long as the one
before."""
_COMMITTED: Final = 1
_BY_NAME: Final = 12  # the last version that names topics by their names
NO_ID: Final = UUID(int=0)
"""The id of all topics, where brokers have none."""

PartitionData = FetchResponse.FetchableTopicResponse.PartitionData


class LogPartition:
    """One partition that is read. ``position``: all below it was returned. ``next_offset``: the next fetch begins
    there; ``end``: no fetch begins there or behind. ``leader`` is -1 while it is looked up; ``leader_epoch`` is that of
    the metadata, ``fetched_epoch`` that of the last batch. ``stable`` and ``high`` are the last stable offset and the
    high watermark, as the last answer has them (-1: none yet)."""

    __slots__ = (
        "end",
        "fetched_epoch",
        "high",
        "is_at_end",
        "leader",
        "leader_epoch",
        "most_bytes",
        "next_offset",
        "number",
        "position",
        "retry_at",
        "stable",
    )

    def __init__(self, number: int, offset: int, end: int) -> None:
        self.number, self.end = number, end
        self.position = self.next_offset = offset
        self.leader = self.leader_epoch = self.fetched_epoch = -1
        self.high = self.stable = -1
        self.most_bytes = PARTITION_BYTES
        self.retry_at = 0.0
        self.is_at_end = False


class FetchOptions:
    """Values that all requests of a reading have in common. ``topic_id``: 0 where brokers have none."""

    def __init__(self, topic: str, *, wait_ms: int, committed_only: bool) -> None:
        self.topic, self.wait_ms, self.committed_only = topic, wait_ms, committed_only
        self.topic_id = NO_ID


class FetchAnswer:
    """The answer of a broker: of each partition, with the offset that was requested."""

    def __init__(self, code: int, partitions: list[tuple[LogPartition, int, PartitionData]]) -> None:
        self.code, self.partitions = code, partitions


class FetchLine:
    """The requests to one broker. On the loop of its ``ReadingLoop``."""

    def __init__(self, node: int, loop: ReadingLoop, options: FetchOptions) -> None:
        self.node, self._reading, self._options = node, loop, options
        self._clock = asyncio.get_running_loop()
        self._connection: BrokerConnection | None = None
        self._opening: asyncio.Task[BrokerConnection] | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._request = FetchRequest()
        self._version = 0
        self._fetched: dict[int, tuple[LogPartition, int]] = {}
        self._waited = self._pause = 0.0
        self._patience = FIRST_PATIENCE_SECONDS
        self._retry_at = 0.0
        self._received_at = 0.0

    @property
    def under_way(self) -> asyncio.Future[bytes] | asyncio.Task[BrokerConnection] | None:
        """Return what is waited for: an answer, or the connection."""
        return self._answer if self._answer is not None else self._opening

    def send(self, partitions: Iterable[LogPartition]) -> None:
        """Fetch those of the partitions that this broker leads, unless a request is under way. Connects if need be; the
        next call sends then."""
        now = self._clock.time()
        if self.under_way is not None or now < self._retry_at:
            return
        wanted = [
            one for one in partitions if one.leader == self.node and one.next_offset < one.end and now >= one.retry_at
        ]
        if not wanted:
            return
        connection = self._connection
        if connection is None or connection.lost is not None or now >= connection.expires_at:
            self._opening, self._waited = self._clock.create_task(self._reading.connection(self.node)), 0.0
            return
        self._request = self._fetch(wanted)
        try:
            most = _BY_NAME if not self._options.topic_id.int else FetchRequest.LAST_VERSION
            self._version = connection.version_of(FetchRequest, most)
        except LostConnection as failure:
            self._answer = self._clock.create_future()
            self._answer.set_exception(failure)
            return
        self._fetched = {one.number: (one, one.next_offset) for one in wanted}
        self._waited = 0.0
        self._answer = connection.call(
            FetchRequest.API_KEY,
            self._version,
            [encode(self._request, self._version)],
            flexible=is_flexible(FetchRequest, self._version),
        )

    def take(self) -> FetchAnswer | None:
        """Return the answer, if it is there. Raises ``LostConnection``: there is none, and none will come."""
        try:
            if self._opening is not None and self._opening.done():
                opened, self._opening = self._opening, None
                if opened.cancelled():
                    raise LostConnection(f"broker {self.node}: no connection within {self._patience / 2:g} seconds")
                self._connection = opened.result()
            if self._answer is None or not self._answer.done():
                return None
            answered, self._answer = self._answer, None
            found = decode_answer(self._request, self._version, answered.result())
            partitions = self._matched(found)
        except LostConnection:
            self._fail()
            raise
        except MalformedAnswer as error:
            reason = f"the answer to Fetch cannot be used: {error}"
            if self._connection is not None:
                self._connection.close(reason)
            self._fail()
            raise LostConnection(reason, "_BAD_MSG") from error
        self._pause, self._patience = 0.0, FIRST_PATIENCE_SECONDS
        if found.throttle_time_ms > 0:
            self._retry_at = self._clock.time() + min(found.throttle_time_ms / 1000, MOST_THROTTLE_SECONDS)
        return FetchAnswer(found.error_code, partitions)

    def waited(self, seconds: float) -> None:
        """Count the time that the loop has waited. A connection that is silent for too long is given up: then ``take``
        raises."""
        connection = self._connection
        if self._answer is not None and connection is not None and connection.received_at != self._received_at:
            self._received_at, self._waited = connection.received_at, 0.0
        self._waited += seconds
        if self.under_way is None or self._waited <= self._patience + self._options.wait_ms / 1000:
            return
        if self._opening is not None:
            self._opening.cancel()
        elif connection is not None:
            connection.close(f"no answer within {self._patience:g} seconds")
        self._waited, self._patience = 0.0, min(2 * self._patience, LONGEST_PATIENCE_SECONDS)

    def close(self) -> None:
        """Wait for nothing any more. An answer that comes is passed over."""
        if (under_way := self.under_way) is not None:
            under_way.cancel()

    def _fail(self) -> None:
        self._connection, self._answer = None, None
        self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        self._retry_at = self._clock.time() + self._pause

    def _fetch(self, wanted: list[LogPartition]) -> FetchRequest:
        of = FetchRequest.FetchTopic
        options = self._options
        partitions = [
            of.FetchPartition(
                partition=one.number,
                current_leader_epoch=one.leader_epoch,
                fetch_offset=one.next_offset,
                last_fetched_epoch=one.fetched_epoch,
                partition_max_bytes=one.most_bytes,
            )
            for one in wanted
        ]
        return FetchRequest(
            max_wait_ms=options.wait_ms,
            min_bytes=1,
            max_bytes=ANSWER_BYTES,
            isolation_level=_COMMITTED if options.committed_only else 0,
            topics=[of(topic=options.topic, topic_id=options.topic_id, partitions=partitions)],
        )

    def _matched(self, found: FetchResponse) -> list[tuple[LogPartition, int, PartitionData]]:
        """Match what the answer says with what was requested. Raises ``MalformedAnswer``."""
        options, left = self._options, dict(self._fetched)
        matched: list[tuple[LogPartition, int, PartitionData]] = []
        for topic in found.responses:
            named = topic.topic_id != options.topic_id if self._version > _BY_NAME else topic.topic != options.topic
            for data in topic.partitions:
                requested = None if named else left.pop(data.partition_index, None)
                if requested is None:
                    raise MalformedAnswer(f"it is about partition {data.partition_index}, which was not requested")
                matched.append((*requested, data))
        # A broker that throttles says how long, and nothing else.
        if left and not found.throttle_time_ms and not found.error_code:
            raise MalformedAnswer(f"it says nothing of {options.topic}[{next(iter(left))}]")
        return matched
