"""Logs in bytes, and brokers on loopback that serve them by Fetch, as a script says."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import UUID

import google_crc32c

from streams.kafka.wire.codec import decode, encode
from streams.kafka.wire.compression import compression_of
from streams.kafka.wire.message import Message, is_flexible
from streams.kafka.wire.schemas.api_versions import ApiVersionsRequest, ApiVersionsResponse
from streams.kafka.wire.schemas.fetch import FetchRequest, FetchResponse
from streams.kafka.wire.schemas.list_offsets import ListOffsetsRequest, ListOffsetsResponse
from streams.kafka.wire.schemas.metadata import MetadataRequest, MetadataResponse
from streams.kafka.writing.record_batch import encode_headers
from streams.kafka.writing.rows import Rows, row, varint

START_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
TRANSACTIONAL, CONTROL, APPEND_TIME = 0x10, 0x20, 0x08
HEAD_BYTES = 61
NO_ANSWER, GONE, GARBAGE = "no answer", "gone", "garbage"
"""In place of an answer: none comes; the connection is cut; one without sense."""


class Row(NamedTuple):
    """A record of a log."""

    key: bytes | None = b"k"
    value: bytes | None = b"v"
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp_ms: int = START_MS


class Stored(NamedTuple):
    """A batch of a log. ``producer`` is -1 without a transaction."""

    base: int
    following: int
    producer: int
    is_marker: bool
    content: bytes


def framed(
    base: int,
    records: bytes,
    count: int,
    *,
    following: int | None = None,
    attributes: int = 0,
    first_ms: int = START_MS,
    latest_ms: int = START_MS,
    producer: int = -1,
    magic: int = 2,
    epoch: int = 0,
) -> bytes:
    """Put the head of a batch in front of encoded records."""
    delta = (base + count if following is None else following) - base - 1
    tail = struct.pack(">hiqqqhii", attributes, delta, first_ms, latest_ms, producer, 0, 0, count) + records
    return struct.pack(">qiibI", base, len(tail) + 9, epoch, magic, google_crc32c.value(tail)) + tail


def encoded(rows: Sequence[Row]) -> tuple[bytes, int, int]:
    """Encode records by the producer's encoder: bytes, first time, latest time."""
    made = Rows()
    for one in rows:
        made.add(one.timestamp_ms, one.key, one.value, encode_headers(one.headers), 1 << 40)
    (batch,) = made.batches()
    return b"".join(batch.rows), batch.first_ms, batch.last_ms


class Log:
    """The log of one partition."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.end = start
        self.batches: list[Stored] = []
        self.aborted: list[tuple[int, int, int]] = []
        """Producer, first offset, and the offset of the marker."""
        self.open: dict[int, int] = {}
        self.committed: list[tuple[int, Row]] = []
        self._pending: dict[int, list[tuple[int, Row]]] = {}

    @property
    def stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def append(
        self, rows: Sequence[Row], *, producer: int = -1, codec: str = "none", append_ms: int = -1, epoch: int = 0
    ) -> int:
        """Append a batch, of a transaction of ``producer`` if there is one."""
        base, following = self.end, self.end + len(rows)
        records, first_ms, latest_ms = encoded(rows)
        compression = compression_of({"compression.type": codec})
        attributes = TRANSACTIONAL if producer >= 0 else 0
        if compression is not None:
            records, attributes = compression.compress(records), attributes | compression.attribute
        if append_ms >= 0:
            attributes, latest_ms = attributes | APPEND_TIME, append_ms
            rows = [one._replace(timestamp_ms=append_ms) for one in rows]
        content = framed(
            base,
            records,
            len(rows),
            attributes=attributes,
            first_ms=first_ms,
            latest_ms=latest_ms,
            producer=producer,
            epoch=epoch,
        )
        self.put(Stored(base, following, producer, False, content))
        placed = [*enumerate(rows, base)]
        if producer >= 0:
            self.open.setdefault(producer, base)
            self._pending.setdefault(producer, []).extend(placed)
        else:
            self.committed += placed
        return base

    def mark(self, producer: int, *, commit: bool) -> None:
        """End the transaction of a producer."""
        kind = struct.pack(">hh", 0, 1 if commit else 0)
        record = row(0, 0, kind, b"\0\0\0\0\0\0", b"\0")
        base = self.end
        content = framed(base, varint(len(record)) + record, 1, attributes=TRANSACTIONAL | CONTROL, producer=producer)
        self.put(Stored(base, base + 1, producer, True, content))
        first = self.open.pop(producer, None)
        pending = self._pending.pop(producer, [])
        if commit:
            self.committed += pending
        elif first is not None:
            self.aborted.append((producer, first, base))

    def put(self, batch: Stored) -> None:
        self.batches.append(batch)
        self.end = batch.following

    def skip(self, offsets: int) -> None:
        """Leave a hole, as compaction does."""
        self.end += offsets

    def expected(self, start: int, end: int | None = None) -> list[tuple[int, Row]]:
        """The records that a reader of committed ones gets, up to the stable offset."""
        limit = self.stable if end is None else end
        return sorted(one for one in self.committed if start <= one[0] < limit)

    def fetch(self, offset: int, most: int, *, committed_only: bool = True) -> tuple[bytes, list[tuple[int, int]]]:
        """The bytes of an answer, the last batch cut off where ``most`` ends, and the aborted transactions in it."""
        limit = self.stable if committed_only else self.end
        found = [one for one in self.batches if one.following > offset and one.base < limit]
        size, taken = 0, 0
        for one in found:
            if taken and size >= most:
                break
            size, taken = size + len(one.content), taken + 1
        data = b"".join(one.content for one in found[:taken])
        if taken > 1:
            data = data[: max(most, len(found[0].content))]
        last = found[taken - 1].following if taken else offset
        aborted = [(who, first) for who, first, marker in self.aborted if marker >= offset and first < last]
        return data, aborted


def random_rows(rng: random.Random, count: int) -> list[Row]:
    """Records of all kinds: nulls, empty ones, large ones, headers, times that go back."""

    def content() -> bytes | None:
        return rng.choice([None, b"", rng.randbytes(rng.choice([1, 20, 63, 64, 65])), b"x" * rng.choice([200, 8200])])

    lists: list[list[tuple[str, bytes | None]]] = [[], [("__grt__", b"A")], [("h", None), ("\u00e9", b"")]]
    return [
        Row(content(), content(), rng.choice(lists), START_MS + rng.choice([0, 0, 1, -5, 70, 10_000, -(1 << 40)]))
        for _ in range(count)
    ]


def random_log(rng: random.Random, batches: int) -> Log:
    """Batches of all codecs, of no transaction and of some at once, committed, aborted and open; and holes."""
    log = Log(rng.choice([0, 0, 1_000_000_000_000]))
    for _ in range(batches):
        match rng.randrange(8):
            case 0:
                log.skip(rng.choice([1, 7, 1000]))
            case 1 | 2 if log.open:
                log.mark(rng.choice([*log.open]), commit=rng.random() < 0.5)
            case 3:
                log.put(Stored(log.end, log.end + 3, -1, False, framed(log.end, b"", 0, following=log.end + 3)))
            case _:
                rows = random_rows(rng, rng.choice([1, 2, 5, 40]))
                append_ms = rng.choice([-1, -1, START_MS + 5])
                log.append(rows, producer=rng.choice([-1, 1, 2, 3]), codec=rng.choice(CODECS), append_ms=append_ms)
    return log


class LogBrokers:
    """So many brokers that serve the logs of one topic, each for partitions that ``leaders`` gives it, on a thread.

    ``script[api]`` has what is done in place of the next answers of that name: one of the words above, or a function
    that changes the answer. ``requests`` has all that was requested, with the number of the broker.
    """

    def __init__(self, logs: dict[int, Log], *, brokers: int = 1, topic: str = "t") -> None:
        self.logs, self.topic, self.topic_id = logs, topic, UUID(int=7)
        self.leaders = {number: number % brokers for number in logs}
        self.epochs = dict.fromkeys(logs, 0)
        self.fetch_versions = (4, 16)
        self.script: dict[str, deque[Any]] = {}
        self.requests: list[tuple[int, str, Any]] = []
        self.is_there = True
        self.fetch_seconds = 0.0
        self.keeps_sessions = True
        self.sessions: dict[int, dict[int, Any]] = {}
        """Of each session the partitions, as they were requested."""
        self._epochs_of: dict[int, int] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self.brokers = brokers
        self.ports: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def answer(self, api: str, *said: Any) -> None:
        self.script.setdefault(api, deque()).extend(said)

    def fetched(self) -> list[tuple[int, int, int]]:
        """Broker, partition and offset of all fetches."""
        return [
            (broker, one.partition, one.fetch_offset)
            for broker, name, request in self.requests
            if name == "Fetch"
            for topic in request.topics
            for one in topic.partitions
        ]

    @contextmanager
    def serving(self) -> Iterator[LogBrokers]:
        ready = threading.Event()

        async def run() -> None:
            for number in range(self.brokers):
                server = await asyncio.start_server(self._accept(number), "127.0.0.1", 0)
                self._servers.append(server)
                self.ports.append(server.sockets[0].getsockname()[1])
            self._done = asyncio.Event()
            ready.set()
            await self._done.wait()
            for server in self._servers:
                server.close()
            turns = 10
            while turns:  # a connection that was just taken gets its task some turns later
                turns -= 1
                for task in [*self._serving]:
                    task.cancel()
                await asyncio.gather(*self._serving, return_exceptions=True)
                await asyncio.sleep(0)

        thread = threading.Thread(target=self._loop.run_until_complete, args=[run()])
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._done.set)
            thread.join(10)
            self._loop.close()

    def _accept(self, number: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)  # only these are ended: a connection without its task would not be closed
            task.add_done_callback(self._serving.discard)
            try:
                while True:
                    frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                    answer = await self._answered(number, frame)
                    if answer is None:
                        break
                    writer.write(len(answer).to_bytes(4, "big") + answer)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            except asyncio.CancelledError:
                writer.transport.abort()  # not close, which waits for a client to read what is buffered
            finally:
                writer.close()

        return serve

    async def _answered(self, number: int, frame: bytes) -> bytes | None:
        key, version, correlation, size = struct.unpack_from(">hhih", frame)
        kind = _REQUESTS[key]
        at = 10 + max(size, 0) + (1 if is_flexible(kind, version) else 0)
        request = decode(kind, frame, version, at)
        name = kind.__name__.removesuffix("Request")
        self.requests.append((number, name, request))
        scripted = self.script.get(name)
        said = scripted.popleft() if scripted else None
        if said == GONE:
            return None
        if said == NO_ANSWER:
            await asyncio.Event().wait()
        answer = await getattr(self, f"_{name.lower()}")(number, request, version)
        if callable(said):
            said(answer)
        body = b"\1\2\3" if said == GARBAGE else encode(answer, version)
        tags = b"\0" if is_flexible(kind, version) and key != ApiVersionsRequest.API_KEY else b""
        return struct.pack(">i", correlation) + tags + body

    async def _apiversions(self, number: int, request: Any, version: int) -> Message:
        of = ApiVersionsResponse.ApiVersion
        return ApiVersionsResponse(
            api_keys=[
                of(api_key=ApiVersionsRequest.API_KEY, min_version=0, max_version=3),
                of(api_key=MetadataRequest.API_KEY, min_version=0, max_version=12),
                of(api_key=ListOffsetsRequest.API_KEY, min_version=1, max_version=8),
                of(
                    api_key=FetchRequest.API_KEY, min_version=self.fetch_versions[0], max_version=self.fetch_versions[1]
                ),
            ]
        )

    async def _metadata(self, number: int, request: Any, version: int) -> Message:
        of = MetadataResponse.MetadataResponseTopic
        has_ids = self.fetch_versions[1] > 11  # metadata have them before Fetch does
        partitions = [
            of.MetadataResponsePartition(
                partition_index=one, leader_id=self.leaders[one], leader_epoch=self.epochs[one], error_code=0
            )
            for one in sorted(self.logs)
        ]
        known = of(name=self.topic, topic_id=self.topic_id if has_ids else UUID(int=0), partitions=partitions)
        topics = [
            known if self.is_there and one.name == self.topic else of(name=one.name, error_code=3)
            for one in request.topics
        ]
        broker = MetadataResponse.MetadataResponseBroker
        brokers = [broker(node_id=one, host="127.0.0.1", port=port) for one, port in enumerate(self.ports)]
        return MetadataResponse(brokers=brokers, topics=topics)

    async def _listoffsets(self, number: int, request: Any, version: int) -> Message:
        of = ListOffsetsResponse.ListOffsetsTopicResponse
        found = [
            of.ListOffsetsPartitionResponse(
                partition_index=one.partition_index,
                offset=self.logs[one.partition_index].start
                if one.timestamp == -2
                else self.logs[one.partition_index].end,
            )
            for topic in request.topics
            for one in topic.partitions
        ]
        return ListOffsetsResponse(topics=[of(name=self.topic, partitions=found)])

    async def _fetch(self, number: int, request: Any, version: int) -> Message:
        session, epoch = request.session_id, request.session_epoch
        requested = {one.partition: (topic, one) for topic in request.topics for one in topic.partitions}
        if epoch > 0:
            if session not in self.sessions or self._epochs_of[session] != epoch:
                return FetchResponse(error_code=71 if session in self.sessions else 70)
            known = self.sessions[session]
            known.update(requested)
            for gone in request.forgotten_topics_data:
                for partition in gone.partitions:
                    del known[partition]
            requested = known
            self._epochs_of[session] += 1
        elif epoch == 0:
            self.sessions.pop(session, None)
            session = 100 + len(self._epochs_of) if self.keeps_sessions else 0
            self.sessions[session], self._epochs_of[session] = dict(requested), 1
        began = self._loop.time()
        until = began + request.max_wait_ms / 1000
        while self._loop.time() < began + self.fetch_seconds:
            await asyncio.sleep(0.01)
        while True:
            found, left = [], request.max_bytes
            for topic, one in requested.values():
                data = self._fetched(number, topic, one, request.isolation_level == 1, left, version)
                left -= len(data.records or b"")
                is_new = (
                    data.records or data.error_code or self._seen.get((session, one.partition)) != data.high_watermark
                )
                if epoch <= 0 or is_new:
                    found.append(data)
            if any(one.records or one.error_code for one in found) or self._loop.time() >= until:
                break
            await asyncio.sleep(0.005)
        self._seen.update({(session, one.partition_index): one.high_watermark for one in found})
        of = FetchResponse.FetchableTopicResponse
        responses = [of(topic=self.topic, topic_id=self.topic_id, partitions=found)] if found else []
        return FetchResponse(session_id=max(session, 0), responses=responses)

    def _fetched(self, number: int, topic: Any, one: Any, committed_only: bool, left: int, version: int) -> Any:
        of = FetchResponse.FetchableTopicResponse.PartitionData
        data = of(partition_index=one.partition, records=b"", aborted_transactions=None)
        log = self.logs.get(one.partition)
        if log is None or not self.is_there:
            data.error_code = 3
        elif version > 12 and topic.topic_id != self.topic_id:
            data.error_code = 100
        elif self.leaders[one.partition] != number:
            data.error_code = 6
        elif one.current_leader_epoch != self.epochs[one.partition]:
            data.error_code = 74 if one.current_leader_epoch < self.epochs[one.partition] else 75
        elif not log.start <= one.fetch_offset <= log.end:
            data.error_code = 1
        else:
            data.high_watermark, data.last_stable_offset, data.log_start_offset = log.end, log.stable, log.start
            if left > 0:
                data.records, aborted = log.fetch(
                    one.fetch_offset, min(one.partition_max_bytes, left), committed_only=committed_only
                )
                named = of.AbortedTransaction
                data.aborted_transactions = [named(producer_id=who, first_offset=first) for who, first in aborted]
        return data


_REQUESTS: dict[int, Any] = {
    kind.API_KEY: kind for kind in (ApiVersionsRequest, FetchRequest, ListOffsetsRequest, MetadataRequest)
}
