"""Following changelog partitions without an end: what warm copies and restores are fed from."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from streams.clients.connection import ConnectionLog, find_leaders
from streams.clients.consumer import partition_in, reading_failed
from streams.clients.received import received
from streams.clients.settings import ClientSettings, build
from streams.clients.translate import BAD_OFFSET
from streams.errors import StreamsError
from streams.records import IncomingRecord

logger = logging.getLogger(__name__)

SILENCE_SECONDS: Final = 0.5
LONGEST_SILENCE_SECONDS: Final = 8.0
LOG_START: Final = -1
"""The offset that stands for "whatever the log begins with"."""

_BOUNDS: Final[dict[str, object]] = {
    # What is prefetched in one partition is what news of the others wait behind while that one has a backlog: 8 ms with
    # these (at 2 us a record for the receiver), 30 ms with 5,000 messages and 512 KB, at the same 200,000 records/s.
    "queued.max.messages.kbytes": 16 * 1024,
    "queued.min.messages": 2_000,
    "fetch.message.max.bytes": 128 * 1024,
}
_LARGEST_FETCH: Final = 8 * 1024 * 1024


class Progress(NamedTuple):
    """What is new in one partition: ``records`` (committed ones, in order, maybe none); all below ``position`` was
    read; ``end`` is the high watermark as far as it is known (-1: not yet). ``at_end``: nothing that is committed is
    left to read (an open transaction may keep ``position`` below ``end``)."""

    records: list[IncomingRecord]
    position: int
    end: int
    at_end: bool


class ChangelogTail:
    """Reads partitions of one topic, ``read_committed``, and tells how far it got also where there are no records.

    Owned by one thread. It belongs to no group, commits nothing and never resets a position.

    Measured against one broker: a record is here 1 to 3 ms after its transaction was committed; that the end was
    reached is known one ``fetch_wait_ms`` after the last record, and a partition that is added while the others are
    silent waits for up to as long. With 20 ms, an idle tail of 8 partitions costs 1 % of a core.
    """

    def __init__(self, settings: ClientSettings, topic: str, *, fetch_wait_ms: int = 20) -> None:
        self.topic = topic
        self._connection = ConnectionLog(settings.bootstrap_servers, f"tail {topic}")
        config = settings.consumer(partition_eof=True, fetch_wait_ms=fetch_wait_ms, role="tail")
        largest = max(_LARGEST_FETCH, int(str(config.get("message.max.bytes") or 0)))  # or librdkafka refuses it
        bounds = {**_BOUNDS, "fetch.max.bytes": largest}
        config.update({key: value for key, value in bounds.items() if key not in settings.overrides})
        self._consumer = build(Consumer, config, self._connection)
        self._positions: dict[int, int] = {}
        """All below it was read; ``LOG_START``: nothing came so far."""
        self._guessed: set[int] = set()
        """Read from offset 0, where logs begin that nothing was deleted from: the question where a log begins costs
        librdkafka 500 ms on a new connection. Compaction deletes records, but leaves the start where it is."""
        self._failures: dict[int, StreamsError] = {}
        self._silent: dict[int, tuple[float, float]] = {}
        """Partitions that are not known to be at their end: when to fetch them anew if nothing comes, and the pause."""
        self._look_at = 0.0

    def add(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on, or from the start of its log (``LOG_START``). ``ValueError`` if it is
        read already."""
        if partition in self._positions:
            raise ValueError(f"{self.topic}[{partition}] is followed already")
        if offset == LOG_START:
            self._guessed.add(partition)
        self._consumer.incremental_assign([TopicPartition(self.topic, partition, max(offset, 0))])
        if not self._positions:
            find_leaders(self._consumer, self.topic)
        self._positions[partition] = offset
        self._silent[partition] = (time.monotonic() + SILENCE_SECONDS, SILENCE_SECONDS)

    def remove(self, partition: int) -> None:
        """Stop reading: nothing of it is returned any more. An unknown one is passed over."""
        self._failures.pop(partition, None)
        self._silent.pop(partition, None)
        self._guessed.discard(partition)
        if self._positions.pop(partition, None) is not None:
            self._consumer.incremental_unassign([TopicPartition(self.topic, partition)])

    def poll_batch(self, timeout_seconds: float, limit: int = 500) -> dict[int, Progress]:
        """Wait for something new and take what else is there, up to ``limit`` records and ends of partitions.

        Per partition in order, each record once. What came before a failure is returned before ``take_failures`` tells
        of it. An outage looks as if nothing came (it is logged when it begins and when it ends).
        """
        first = self._consumer.poll(timeout_seconds)
        news: dict[int, Progress] = {}
        if first is not None:
            messages = self._consumer.consume(limit - 1, 0) if limit > 1 else []
            messages.insert(0, first)
            news = self._accept(messages)
        for error in self._connection.take_topic_errors():
            self._note(error, partition_in(error.str()))
        if news:
            self._connection.on_answer()
        self._mind_silence(news)
        return news

    def take_failures(self) -> dict[int, StreamsError]:
        """Partitions that can not be read on, since the last call; they are removed already. ``OffsetError``: the
        position is not in the log (any more). ``TopicError``: the topic is gone, or not to be read."""
        failures, self._failures = self._failures, {}
        for partition in failures:
            self.remove(partition)
        return failures

    def close(self) -> None:
        """Free everything. Does not raise; repeating is harmless."""
        self._positions.clear()
        self._silent.clear()
        with contextlib.suppress(KafkaException, RuntimeError):
            self._consumer.close()

    def _accept(self, messages: list[Message]) -> dict[int, Progress]:
        """The hot loop: runs of one partition at a time, since that is how they come."""
        topic, positions = self.topic, self._positions
        batches: dict[int, list[IncomingRecord]] = {}
        at_end: set[int] = set()
        current, position = -1, LOG_START
        append = None
        for message in messages:
            partition: int = message.partition()  # type: ignore[assignment]  # a record always has one
            offset: int = message.offset()  # type: ignore[assignment]
            error = message.error()
            if error is not None:
                if append is not None:
                    positions[current] = position
                    append, current = None, -1
                if error.code() != KafkaError._PARTITION_EOF:
                    self._note(error, partition)
                elif offset >= positions.get(partition, offset + 1):
                    positions[partition] = offset  # with the markers, aborted records and holes before it
                    at_end.add(partition)
                continue
            if partition != current:
                if append is not None:
                    positions[current] = position
                following = positions.get(partition)
                if following is None:  # a left-over of what was removed
                    append, current = None, -1
                    continue
                current, position = partition, following
                append = batches.setdefault(partition, []).append
                at_end.discard(partition)
            if offset < position:
                continue
            position = offset + 1
            append(  # type: ignore[misc]  # set whenever current is
                IncomingRecord(
                    topic,
                    partition,
                    offset,
                    message.key(),
                    message.value(),
                    received(message.headers()),
                    message.timestamp()[1],
                )
            )
        if append is not None:
            positions[current] = position
        news = {number: records for number, records in batches.items() if records}
        news.update((number, []) for number in at_end - news.keys())
        return {number: self._progress(number, records, number in at_end) for number, records in news.items()}

    def _progress(self, partition: int, records: list[IncomingRecord], at_end: bool) -> Progress:
        position, end = self._positions[partition], self._end(partition)
        return Progress(records, position, end, at_end or position == end)

    def _end(self, partition: int) -> int:
        try:
            _, end = self._consumer.get_watermark_offsets(TopicPartition(self.topic, partition), cached=True)
        except KafkaException as exception:
            logger.debug("tail %s[%d]: no watermark: %s", self.topic, partition, exception)
            return -1
        return end if end >= self._positions[partition] else -1  # not known, or the log was cut: the next fetch tells

    def _mind_silence(self, news: Mapping[int, Progress]) -> None:
        """Assigning one partition makes librdkafka drop what is on its way for the others, and the end of a partition
        is told once only: a silent one that is not known to be at its end is fetched anew, ever more rarely (an open
        transaction keeps it from its end for a while). After an outage all are, as soon as the cluster answers: seen
        once, in the middle of a move, that nothing more was fetched, without an error, from a broker that was back."""
        now = time.monotonic()
        for partition, progress in news.items():
            if progress.at_end:
                self._silent.pop(partition, None)
            else:
                self._silent[partition] = (now + SILENCE_SECONDS, SILENCE_SECONDS)
        if now < self._look_at:
            return
        self._look_at = now + SILENCE_SECONDS / 2
        for partition, position in self._positions.items():
            if partition not in self._silent and (self._connection.down or self._end(partition) > position):
                self._silent[partition] = (now + SILENCE_SECONDS, SILENCE_SECONDS)
        due = [partition for partition, (when, _) in self._silent.items() if now >= when]
        if not due or (self._connection.down and not find_leaders(self._consumer, self.topic)):
            return
        # Not "it answers again" yet: failures of before may still wait in the queue, and what is fetched comes after.
        self._consumer.incremental_unassign([TopicPartition(self.topic, partition) for partition in due])
        self._consumer.incremental_assign([TopicPartition(self.topic, n, self._fetch_offset(n)) for n in due])
        for partition in due:
            pause = min(self._silent[partition][1] * 2, LONGEST_SILENCE_SECONDS)
            self._silent[partition] = (now + pause, pause)

    def _fetch_offset(self, partition: int) -> int:
        position = self._positions[partition]
        if position == LOG_START:
            return 0 if partition in self._guessed else OFFSET_BEGINNING
        return position

    def _start_at_log_start(self, partition: int) -> None:
        self._guessed.discard(partition)
        self._consumer.incremental_unassign([TopicPartition(self.topic, partition)])
        self._consumer.incremental_assign([TopicPartition(self.topic, partition, OFFSET_BEGINNING)])

    def _note(self, error: KafkaError, partition: int | None) -> None:
        """An error that came in place of a record: of one partition, or of the topic and so of all of them."""
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:  # librdkafka looks a coordinator up; none is needed
            return
        number = -1 if partition is None else partition
        for about in [number] if number >= 0 else list(self._positions):
            position = self._positions.get(about)
            if position is None or about in self._failures:  # it was removed meanwhile
                continue
            if position == LOG_START and about in self._guessed and error.code() in BAD_OFFSET:
                self._start_at_log_start(about)
                continue
            failure = reading_failed(error, self.topic, about, position, self._connection.addresses)
            if failure is None:
                logger.debug("tail %s[%d]: %s", self.topic, about, error)
            else:
                self._failures[about] = failure
