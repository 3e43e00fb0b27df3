"""A log as it lies on its broker: batches with producer and epoch, and the markers of transactions, which no consumer
shows."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final, NamedTuple

from streams.errors import LogDamaged
from streams.kafka import permissions
from streams.kafka.questions.asking import Questions
from streams.kafka.reading.record_batches import HEAD, FetchedBatches
from streams.kafka.wire.codec import MalformedAnswer, WireBytes
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.topic_questions import EARLIEST, LATEST, fetch

_TRANSACTIONAL, _CONTROL = 0x10, 0x20  # in the attributes
_INT16: Final = struct.Struct(">h")
_LEAST_LENGTH: Final = 14  # of a batch behind its offset and its length, in the oldest format
_MARKER_TYPE: Final = HEAD.size + 7
"""Bytes of a batch in front of a marker's type: its head, five numbers of one byte each (length, attributes, time,
offset, length of the key), and the version of the key (two bytes)."""
_FETCH_BYTES: Final = 4 << 20
"""Bytes of one fetch, at most."""


class LogBatch(NamedTuple):
    """One batch. ``marker``: whether it is the marker of a commit; ``None``: it is none, or compaction took what it
    said (``is_control``). ``max_timestamp``: of a marker, the clock of the broker that wrote it. ``content``: all
    bytes of it. ``is_transactional``: of a transaction, or its marker."""

    base: int
    last: int
    records: int
    producer_id: int
    epoch: int
    is_control: bool
    marker: bool | None
    max_timestamp: int
    content: bytes
    is_transactional: bool = False


class Stretch(NamedTuple):
    """A range of a partition. ``is_whole``: it begins where the partition does."""

    partition: int
    start: int
    end: int
    is_whole: bool


def batches(data: bytes) -> Iterator[LogBatch]:
    """Read the batches of an answer, without the last one if it is cut off. Formats before v2 are left out. Raises
    ``MalformedAnswer`` for what is no batch."""
    at = 0
    while at + HEAD.size <= len(data):
        base, length, _, magic, _, attributes, delta, _, newest, producer, epoch, _, count = HEAD.unpack_from(data, at)
        end = at + 12 + length
        if length < _LEAST_LENGTH:
            raise MalformedAnswer(f"a batch of {length} bytes at {at} of {len(data)}")
        if end > len(data):
            return
        if magic >= 2:  # older ones have no transactions
            marker, is_control, content = None, bool(attributes & _CONTROL), data[at:end]
            if is_control and count:  # compaction may have emptied it
                marker = WireBytes(content, _MARKER_TYPE).take(_INT16)[0] == 1
            is_transactional = bool(attributes & _TRANSACTIONAL)
            yield LogBatch(
                base, base + delta, count, producer, epoch, is_control, marker, newest, content, is_transactional
            )
        at = end


def values(batch: LogBatch, topic: str, partition: int) -> list[bytes]:
    """Return the values of the records of a batch of this partition, without deletions. Raises ``MalformedAnswer``."""
    try:
        records = FetchedBatches(topic, partition, batch.base, batch.content, None).take(batch.records)
    except LogDamaged as error:
        raise MalformedAnswer(str(error)) from error
    return [record.value for record in records if record.value is not None]


class RawLogs(Questions):
    """Reads logs up to their high watermark, whatever is committed. Coroutines for the client's loop."""

    def end_transactional(self, topic: str, ends: Mapping[int, int], deadline: float) -> dict[int, bool]:
        """Check of each partition whether the batch in front of its high watermark is one of a transaction; partitions
        without any are left out. Blocks."""

        async def work() -> dict[int, bool]:
            found: dict[int, bool] = {}
            for number, end in ends.items():
                for batch in await self._fetch(topic, number, end - 1, deadline) if end else ():
                    if batch.base < end:
                        found[number] = batch.is_transactional
            return found

        return self._run(deadline, work)

    def has_holes(self, topic: str, partition: int, start: int, end: int, deadline: float) -> bool:
        """Check whether records between these offsets are gone: compaction leaves the numbers of the others as they
        were. Blocks."""

        async def work() -> bool:
            expected = start
            async for batch in self._walk(topic, partition, start, end, deadline):
                if batch.base > expected or batch.records != batch.last - batch.base + 1:
                    return True
                expected = batch.last + 1
            return expected < end

        return self._run(deadline, work)

    async def _walk(self, topic: str, partition: int, start: int, end: int, deadline: float) -> AsyncIterator[LogBatch]:
        """Read the batches from ``start`` on, up to ``end`` (exclusive). Raises as ``_until``, also at the
        deadline: less than all of them would prove nothing."""
        while start < end:
            found = start
            for batch in await self._fetch(topic, partition, start, deadline):
                if batch.base >= end:
                    return
                found = batch.last + 1
                if batch.last >= start:
                    yield batch
            if found == start:
                return  # what is left of the range is compacted; another fetch would bring as little
            start = found

    async def _fetch(self, topic: str, partition: int, offset: int, deadline: float) -> list[LogBatch]:
        async def attempt(limit: float) -> list[LogBatch]:
            described = await self._metadata(topic, limit)
            # Not only what is stable: what hangs lies above the last stable offset, where committed reads end.
            found = await fetch(self._client, described, partition, offset, _FETCH_BYTES, limit)
            try:
                return list(batches(found.records or b""))
            except MalformedAnswer as error:
                raise LostConnection(f"{topic}[{partition}] at {offset}: {error}", "_BAD_MSG") from error

        needed = [permissions.on_topic("Read", topic)]
        return await self._until(deadline, f"reading {topic}[{partition}] at {offset}", attempt, needed)

    async def _stretches(self, topic: str, numbers: list[int], since: int, deadline: float) -> list[Stretch]:
        """Return what these partitions have since that time (ms since 1970) by the brokers' clocks: a marker that was
        written since is in it."""

        async def attempt(limit: float) -> list[Stretch]:
            found: list[Stretch] = []
            for leader, led in (await self._by_leader(topic, numbers, limit)).items():
                lows, starts, ends = [
                    await self._list_offsets(topic, led, leader, at, limit) for at in (EARLIEST, since, LATEST)
                ]
                for number in led:
                    start = starts[number] if starts[number] >= 0 else ends[number]  # nothing is as young
                    found.append(Stretch(number, start, ends[number], start == lows[number]))
            return found

        return await self._until(deadline, f"reading the offsets of topic {topic}", attempt)
