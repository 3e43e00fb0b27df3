"""Reading whole partitions up to a position: changelogs at a restore, and look-ups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from streams.clients.connection import ConnectionLog, find_leaders
from streams.clients.consumer import partition_in, reading_failed
from streams.clients.received import received
from streams.clients.settings import ClientSettings, build
from streams.clients.translate import broker_unavailable
from streams.errors import OffsetError, Stopped, TopicError
from streams.records import IncomingRecord

_POLL_SECONDS = 0.05
_BATCH = 500


class PartitionReader:
    """``read_committed``; owned by one thread. It belongs to no group and commits nothing; ``read`` may be repeated."""

    def __init__(self, settings: ClientSettings, *, fetch_wait_ms: int = 20) -> None:
        self._connection = ConnectionLog(settings.bootstrap_servers, "reader")
        config = settings.consumer(partition_eof=True, fetch_wait_ms=fetch_wait_ms, role="reader")
        self._consumer = build(Consumer, config, self._connection)

    def read(
        self,
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
        *,
        stalled_after_seconds: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """Read each partition from ``start`` until its position has reached ``end``, several partitions at once.

        ``ranges``: partition -> (first offset to read, high watermark). ``receive(partition, records)`` is called on
        this thread with the committed records below ``end``, per partition in order; never with an empty list. The
        position counts, not the records: the end of a log may be markers, aborted records and compacted holes.

        Open transactions hold the position back (at the last stable offset); so does an outage. When nothing moves for
        ``stalled_after_seconds``, ``BrokerUnavailable`` says which partitions stand where. ``OffsetError``: a start is
        not in the log. ``TopicError``: no such topic. ``Stopped``: ``cancelled()``, asked between batches, was true; a
        part was read then.
        """
        self._connection.take_topic_errors()  # of an earlier topic
        reading = _Reading(topic, ranges, receive)
        if not reading.positions:
            return
        assigned = [TopicPartition(topic, number, offset) for number, offset in reading.positions.items()]
        self._consumer.incremental_assign(assigned)
        find_leaders(self._consumer, topic)
        try:
            self._follow(reading, stalled_after_seconds, cancelled)
        finally:
            with contextlib.suppress(KafkaException):
                self._consumer.incremental_unassign([TopicPartition(topic, number) for number in reading.assigned])

    def close(self) -> None:
        """Free everything. Does not raise; repeating is harmless."""
        with contextlib.suppress(KafkaException, RuntimeError):
            self._consumer.close()

    def _follow(self, reading: _Reading, stalled_after_seconds: float, cancelled: Callable[[], bool]) -> None:
        last_progress = time.monotonic()
        while reading.positions:
            if cancelled():
                raise Stopped(f"reading {reading.topic} was cancelled")
            first = self._consumer.poll(_POLL_SECONDS)
            if first is not None:
                messages = self._consumer.consume(_BATCH - 1, 0)
                messages.insert(0, first)
                if self._accept(reading, messages):
                    last_progress = time.monotonic()
                    self._connection.on_answer()
                done = reading.take_done()
                if done and reading.positions:  # fetch no further what is done
                    self._consumer.incremental_unassign([TopicPartition(reading.topic, number) for number in done])
                    reading.assigned -= done
            for error in self._connection.take_topic_errors():
                failure = self._failure(reading, error, partition_in(error.str()))
                if failure is not None:
                    raise failure
            if reading.positions and time.monotonic() - last_progress > stalled_after_seconds:
                raise broker_unavailable(
                    f"reading {reading.stand()}: no progress for {stalled_after_seconds:g} s",
                    self._connection.addresses,
                    None,
                    self._connection.reason or "an open transaction may hold the end of the log back",
                )

    def _failure(self, reading: _Reading, error: KafkaError, number: int | None) -> OffsetError | TopicError | None:
        number = -1 if number is None else number
        if number >= 0 and number not in reading.positions:
            return None
        position = reading.positions.get(number, -1)
        return reading_failed(error, reading.topic, number, position, self._connection.addresses)

    def _accept(self, reading: _Reading, messages: list[Message]) -> bool:
        """Whether anything moved."""
        positions, ends = reading.positions, reading.ends
        batches: dict[int, list[IncomingRecord]] = {}
        moved = False
        for message in messages:
            number: int = message.partition()  # type: ignore[assignment]
            offset: int = message.offset()  # type: ignore[assignment]
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:  # offset is the position: all below it was read
                    if offset > positions.get(number, offset):
                        positions[number] = offset
                        moved = True
                    elif number in positions:
                        moved = moved or offset >= ends[number]
                else:
                    failure = self._failure(reading, error, number)
                    if failure is not None:
                        reading.deliver(batches)
                        raise failure
                continue
            position = positions.get(number)
            if position is None or offset < position:
                continue
            positions[number] = offset + 1
            moved = True
            if offset < ends[number]:
                batch = batches.get(number)
                if batch is None:
                    batch = batches[number] = []
                batch.append(
                    IncomingRecord(
                        reading.topic,
                        number,
                        offset,
                        message.key(),
                        message.value(),
                        received(message.headers()),
                        message.timestamp()[1],
                    )
                )
        reading.deliver(batches)
        return moved


class _Reading:
    """The state of one ``read``: positions of the partitions that are not done."""

    def __init__(
        self,
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        receive: Callable[[int, list[IncomingRecord]], None],
    ) -> None:
        self.topic = topic
        self.positions = {number: start for number, (start, end) in ranges.items() if start < end}
        self.ends = {number: end for number, (_start, end) in ranges.items()}
        self.assigned = set(self.positions)
        self._receive = receive

    def deliver(self, batches: dict[int, list[IncomingRecord]]) -> None:
        for number, records in batches.items():
            self._receive(number, records)

    def take_done(self) -> set[int]:
        done = {number for number, position in self.positions.items() if position >= self.ends[number]}
        for number in done:
            del self.positions[number]
        return done

    def stand(self) -> str:
        where = [f"{self.topic}[{n}] at {position} of {self.ends[n]}" for n, position in sorted(self.positions.items())]
        return ", ".join(where[:5]) + (f" and {len(where) - 5} more" if len(where) > 5 else "")
