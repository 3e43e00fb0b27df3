"""A log as it lies on its broker: batches with producer and epoch, and the markers of transactions, which no consumer
shows."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, NamedTuple

from streams.kafka import permissions
from streams.kafka.questions.asking import Questions
from streams.kafka.wire.kafka_python import FetchRequest, MemoryRecords
from streams.kafka.wire.kafka_python import errors as kafka_errors
from streams.kafka.wire.kafka_python_client import raise_for

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")  # of record batches v2 (Kafka's documentation, "Message Format")
_CONTROL: Final = 0x20  # in the attributes
_MARKER_TYPE: Final = _HEADER.size + 7
"""Bytes of a batch in front of a marker's type: its head, five numbers of one byte each (length, attributes, time,
offset, length of the key), and the version of the key (two bytes)."""
_FETCH_BYTES: Final = 4 << 20
"""Bytes of one fetch, at most."""
_EARLIEST, _LATEST = -2, -1  # in the place of a time: the first offset, the end


class LogBatch(NamedTuple):
    """One batch. ``marker``: whether it is the marker of a commit; ``None``: it is none, or compaction took what it
    said (``is_control``). ``max_timestamp``: of a marker, the clock of the broker that wrote it. ``content``: all
    bytes of it."""

    base: int
    last: int
    records: int
    producer_id: int
    epoch: int
    is_control: bool
    marker: bool | None
    max_timestamp: int
    content: bytes


class Stretch(NamedTuple):
    """A range of a partition. ``is_whole``: it begins where the partition does."""

    partition: int
    start: int
    end: int
    is_whole: bool


def batches(data: bytes) -> Iterator[LogBatch]:
    """Read the batches of an answer, without the last one if it is cut off. Formats before v2 are left out."""
    at = 0
    while at + _HEADER.size <= len(data):
        base, length, _, magic, _, attributes, delta, _, newest, producer, epoch, _, count = _HEADER.unpack_from(
            data, at
        )
        end = at + 12 + length
        if end > len(data):
            return
        if magic >= 2:  # older ones have no transactions
            marker, is_control = None, bool(attributes & _CONTROL)
            if is_control and count:  # compaction may have emptied it
                marker = struct.unpack_from(">h", data, at + _MARKER_TYPE)[0] == 1
            content = data[at:end]
            yield LogBatch(base, base + delta, count, producer, epoch, is_control, marker, newest, content)
        at = end


def values(batch: LogBatch) -> list[bytes]:
    """Return the values of the records of a batch, without deletions."""
    records: Any = MemoryRecords(batch.content).next_batch()
    return [bytes(record.value) for record in records if record.value is not None]


class RawLogs(Questions):
    """Reads logs up to their high watermark, whatever is committed. Coroutines for the client's IO thread."""

    async def _walk(self, topic: str, partition: int, start: int, end: int, deadline: float) -> AsyncIterator[LogBatch]:
        """Read the batches from ``start`` on, up to ``end`` (exclusive). Raises as ``_until``, also at the
        deadline: less than all of them would prove nothing."""
        while start < end:
            data = await self._fetch(topic, partition, start, deadline)
            found = start
            for batch in batches(data):
                if batch.base >= end:
                    return
                found = batch.last + 1
                if batch.last >= start:
                    yield batch
            if found == start:
                return  # what is left of the range is compacted; another fetch would bring as little
            start = found

    async def _fetch(self, topic: str, partition: int, offset: int, deadline: float) -> bytes:
        async def attempt(limit: float) -> bytes:
            ((leader, _),) = (await self._by_leader(topic, [partition], limit)).items()
            if leader < 0:
                raise kafka_errors.LeaderNotAvailableError()
            topic_of = FetchRequest.FetchTopic
            wanted = topic_of.FetchPartition(
                partition=partition, fetch_offset=offset, log_start_offset=-1, partition_max_bytes=_FETCH_BYTES
            )
            request = FetchRequest(
                replica_id=-1,
                max_wait_ms=0,
                min_bytes=0,
                max_bytes=_FETCH_BYTES,
                isolation_level=0,  # what hangs lies above the last stable offset, where committed reads end
                session_id=0,
                session_epoch=-1,
                topics=[topic_of(topic=topic, partitions=[wanted])],
                forgotten_topics_data=[],
                rack_id="",
                min_version=4,
                max_version=11,
            )
            answer = await self._client.send(request, leader, limit)
            for each in answer.responses:
                for entry in each.partitions:
                    raise_for(entry.error_code)
                    return bytes(entry.records or b"")
            raise kafka_errors.UnknownTopicOrPartitionError()

        needed = [permissions.on_topic("Read", topic)]
        return await self._until(deadline, f"reading {topic}[{partition}] at {offset}", attempt, needed)

    async def _stretches(self, topic: str, numbers: list[int], since: int, deadline: float) -> list[Stretch]:
        """Return what these partitions have since that time (ms since 1970) by the brokers' clocks: a marker that was
        written since is in it."""

        async def attempt(limit: float) -> list[Stretch]:
            found: list[Stretch] = []
            for leader, led in (await self._by_leader(topic, numbers, limit)).items():
                if leader < 0:
                    raise kafka_errors.LeaderNotAvailableError()
                lows, starts, ends = [
                    await self._list_offsets(topic, led, leader, at, limit) for at in (_EARLIEST, since, _LATEST)
                ]
                for number in led:
                    start = starts[number] if starts[number] >= 0 else ends[number]  # nothing is as young
                    found.append(Stretch(number, start, ends[number], start == lows[number]))
            return found

        return await self._until(deadline, f"reading the offsets of topic {topic}", attempt)
