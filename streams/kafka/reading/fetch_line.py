"""The Fetch requests to one broker: one under way at a time, for all partitions that it leads.

A broker's answer is taken for lost when no byte of it has come for a while. What counts is the time that the loop has
waited for it: while records are decoded and received the loop does not run, and the kernel has what has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from streams.kafka.reading.fetch_session import LOG_START, FetchOptions, FetchSession, LogPartition
from streams.kafka.reading.reading_loop import ReadingLoop
from streams.kafka.wire.codec import MalformedAnswer, decode_answer, encode
from streams.kafka.wire.connection import BrokerConnection, LostConnection
from streams.kafka.wire.lines import next_pause
from streams.kafka.wire.message import Request, api_name, is_flexible
from streams.kafka.wire.schemas.fetch import FetchRequest, FetchResponse
from streams.kafka.wire.schemas.list_offsets import ListOffsetsRequest, ListOffsetsResponse
from streams.kafka.wire.topic_questions import BY_NAME, EARLIEST, PartitionData

FIRST_PATIENCE_SECONDS: Final = 3.0
LONGEST_PATIENCE_SECONDS: Final = 24.0
"""Seconds without a byte of an answer until the connection is replaced, and the leaders are looked up: the first time,
and at most, each time twice as many as before. A frozen broker has no other sign; a slow disk must not be one."""
MOST_THROTTLE_SECONDS: Final = 10.0
"""Seconds, at most, for which a broker's throttle time is kept. It holds the connection back by itself (KIP-219), so a
request sent early does no harm; and a time that is nonsense must not end the reading."""
_OFFSETS: Final = 8  # the version of ListOffsets, at most
_LONG_MS: Final = 50
"""Milliseconds: a request that the broker may hold for longer is given up for partitions that are added."""


class FetchAnswer(NamedTuple):
    """The answer of a broker: of each partition, with the offset that was requested. ``code``: an error of all."""

    code: int
    partitions: list[tuple[LogPartition, int, PartitionData]]


class FetchLine:
    """The requests to one broker. On the loop of its ``ReadingLoop``."""

    def __init__(self, node: int, loop: ReadingLoop, options: FetchOptions) -> None:
        self.node, self._reading, self._options = node, loop, options
        self._clock = asyncio.get_running_loop()
        self._session = FetchSession(options)
        self._connection: BrokerConnection | None = None
        self._opening: asyncio.Task[BrokerConnection] | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._request: Request[Any] = FetchRequest()
        self._version = 0
        self._requested: dict[int, tuple[LogPartition, int]] = {}
        self._wait_ms = options.kind.wait_ms
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
        wanted = [
            one for one in partitions if one.leader == self.node and one.next_offset < one.end and now >= one.retry_at
        ]
        if self._answer is not None and self._wait_ms > _LONG_MS and any(map(self._is_new, wanted)):
            self._give_up()
        if not wanted or self.under_way is not None or now < self._retry_at:
            return
        connection = self._connection
        if connection is None or connection.lost is not None or now >= connection.expires_at:
            self._opening, self._waited = self._clock.create_task(self._reading.connection(self.node)), 0.0
            return
        # First those, alone: a Fetch names an offset of each of its partitions.
        beginning = [one for one in wanted if one.next_offset == LOG_START]
        wanted = beginning or wanted
        self._requested = {one.number: (one, one.next_offset) for one in wanted}
        if beginning:
            self._request, most = self._beginnings(beginning), _OFFSETS
        else:
            self._request = self._session.request(wanted, self._wait_ms)
            most = FetchRequest.LAST_VERSION if self._options.topic_id.int else BY_NAME
        kind, self._waited = type(self._request), 0.0
        try:
            self._version = connection.version_of(kind, most)
        except LostConnection as failure:
            # For `take`, which has the pause and the new session; the caller of this one sends to the others, too.
            self._answer = self._clock.create_future()
            self._answer.set_exception(failure)
            return
        if not beginning and self._version <= BY_NAME:
            self._options.by_name = True
        self._answer = connection.call(
            kind.API_KEY,
            self._version,
            [encode(self._request, self._version)],
            flexible=is_flexible(kind, self._version),
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
            found = self._read(answered.result())
        except LostConnection:
            self._fail()
            raise
        except MalformedAnswer as error:
            reason = f"the answer to {api_name(self._request)} cannot be used: {error}"
            if self._connection is not None:
                self._connection.close(reason)
            self._fail()
            raise LostConnection(reason, "_BAD_MSG") from error
        self._pause, self._patience = 0.0, FIRST_PATIENCE_SECONDS
        return found

    def waited(self, seconds: float) -> None:
        """Count the time that the loop has waited. A connection that is silent for too long is given up: then ``take``
        raises."""
        connection = self._connection
        if self._answer is not None and connection is not None and connection.received_at != self._received_at:
            self._received_at, self._waited = connection.received_at, 0.0
        self._waited += seconds
        if self.under_way is None or self._waited <= self._patience + self._wait_ms / 1000:
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

    def _is_new(self, partition: LogPartition) -> bool:
        """Check for a partition that the request under way does not have."""
        requested = self._requested.get(partition.number)
        return requested is None or requested[0] is not partition

    def _give_up(self) -> None:
        """Leave the request that the broker holds: another connection is there sooner than its answer."""
        if self._answer is not None:
            self._answer.cancel()
        if self._connection is not None:
            self._connection.close()
        self._connection, self._answer, self._wait_ms = None, None, self._options.kind.wait_ms
        # The broker may have taken the request, or not: only a new session is sure to agree with it.
        self._session.reset()

    def _fail(self) -> None:
        self._connection, self._answer = None, None
        self._session.reset()
        self._pause = next_pause(self._pause)
        self._retry_at = self._clock.time() + self._pause

    def _read(self, frame: bytes) -> FetchAnswer:
        """Decode an answer. Raises ``MalformedAnswer``."""
        if isinstance(self._request, ListOffsetsRequest):
            offsets = decode_answer(self._request, self._version, frame)
            self._keep_to(offsets.throttle_time_ms)
            return FetchAnswer(0, self._begin(offsets))
        is_partial = self._session.is_partial
        found: FetchResponse = decode_answer(self._request, self._version, frame)
        self._keep_to(found.throttle_time_ms)
        if not self._session.goes_on(found):
            return FetchAnswer(0, [])
        # A broker that throttles says how long, and nothing else.
        may_lack = is_partial or found.throttle_time_ms > 0 or found.error_code != 0
        partitions = self._matched(found, may_lack)
        kind, is_empty = self._options.kind, not any(data.records or data.error_code for _, _, data in partitions)
        self._wait_ms = min(2 * self._wait_ms, kind.longest_wait_ms) if is_empty else kind.wait_ms
        return FetchAnswer(found.error_code, partitions)

    def _keep_to(self, throttle_ms: int) -> None:
        if throttle_ms > 0:
            self._retry_at = self._clock.time() + min(throttle_ms / 1000, MOST_THROTTLE_SECONDS)

    def _beginnings(self, partitions: list[LogPartition]) -> ListOffsetsRequest:
        of = ListOffsetsRequest.ListOffsetsTopic
        wanted = [
            of.ListOffsetsPartition(
                partition_index=one.number, current_leader_epoch=one.leader_epoch, timestamp=EARLIEST
            )
            for one in partitions
        ]
        return ListOffsetsRequest(topics=[of(name=self._options.topic, partitions=wanted)])

    def _begin(self, found: ListOffsetsResponse) -> list[tuple[LogPartition, int, PartitionData]]:
        """Let partitions begin where their logs do; return those that were refused."""
        left, refused = dict(self._requested), []
        for topic in found.topics:
            for entry in topic.partitions:
                partition, offset = left.pop(entry.partition_index, (None, 0))
                if partition is None or (not entry.error_code and entry.offset < 0):
                    raise MalformedAnswer(f"it has {entry.offset} as the offset of partition {entry.partition_index}")
                if entry.error_code:
                    refused.append((partition, offset, PartitionData(error_code=entry.error_code)))
                else:
                    partition.next_offset = entry.offset
        if left:
            raise MalformedAnswer(f"it says nothing of {self._options.topic}[{next(iter(left))}]")
        return refused

    def _matched(self, found: FetchResponse, may_lack: bool) -> list[tuple[LogPartition, int, PartitionData]]:
        """Match what the answer says with what was requested. Raises ``MalformedAnswer``."""
        options, left = self._options, dict(self._requested)
        matched: list[tuple[LogPartition, int, PartitionData]] = []
        for topic in found.responses:
            named = topic.topic_id != options.topic_id if self._version > BY_NAME else topic.topic != options.topic
            for data in topic.partitions:
                requested = None if named else left.pop(data.partition_index, None)
                if requested is None:
                    raise MalformedAnswer(f"it is about partition {data.partition_index}, which was not requested")
                matched.append((*requested, data))
        if left and not may_lack:
            raise MalformedAnswer(f"it says nothing of {options.topic}[{next(iter(left))}]")
        return matched
