"""The consumer of a source's input: some partitions of one topic, assigned by hand."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from streams.clients.connection import ConnectionLog
from streams.clients.settings import ClientSettings, build
from streams.clients.translate import BAD_OFFSET, NO_SUCH_TOPIC, NOT_AUTHORIZED, error_of
from streams.errors import OffsetError, StreamsError, TopicError
from streams.records import IncomingRecord

logger = logging.getLogger(__name__)


class InputConsumer:
    """Reads partitions of one topic, ``read_committed``, from the offsets that it is told.

    Owned by one thread: every method is called by it (confluent-kafka lets a second thread wait for as long as the
    first one polls). It never joins a group, never commits, and never resets a position.
    """

    def __init__(self, settings: ClientSettings, topic: str, *, fetch_wait_ms: int = 20) -> None:
        self.topic = topic
        self._connection = ConnectionLog(settings.bootstrap_servers, f"input {topic}")
        config = settings.consumer(partition_eof=False, fetch_wait_ms=fetch_wait_ms, role="input")
        self._consumer = build(Consumer, config, self._connection)
        self._expected: dict[int, int] = {}
        """The next offset of each assigned partition; records below it, or of other partitions, are left-overs."""
        self._failure: tuple[int, StreamsError] | None = None

    def add(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on. ``ValueError`` if it is there already."""
        if partition in self._expected:
            raise ValueError(f"{self.topic}[{partition}] is read already")
        self._consumer.incremental_assign([TopicPartition(self.topic, partition, offset)])
        self._expected[partition] = offset

    def remove(self, partitions: Collection[int]) -> None:
        """Stop reading: no record of these partitions is returned any more. Unknown ones are passed over."""
        known = [partition for partition in partitions if self._expected.pop(partition, None) is not None]
        if known:
            self._consumer.incremental_unassign(self._positions(known))

    def pause(self, partitions: Collection[int]) -> None:
        """Return nothing of these partitions until ``resume``. What was prefetched is dropped, and fetched again."""
        known = [partition for partition in partitions if partition in self._expected]
        if known:
            self._consumer.pause(self._positions(known))

    def resume(self, partitions: Collection[int]) -> None:
        """Undo ``pause``; the next record is the one after the last that ``poll_batch`` returned."""
        known = [partition for partition in partitions if partition in self._expected]
        if known:
            self._consumer.resume(self._positions(known))

    def poll_batch(self, timeout_seconds: float, limit: int = 500) -> dict[int, list[IncomingRecord]] | None:
        """Wait for one record and take what else is there, up to ``limit``; ``None``: nothing came in time.

        Per partition in order, each record once. Raises ``OffsetError`` (the position is not in the log any more) and
        ``TopicError`` (the topic is gone, or not to be read); the partition stays assigned, and silent. That the
        cluster does not answer is logged when it begins and when it ends, and otherwise looks as if nothing came.
        """
        self._raise_failure()
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            return None
        messages = self._consumer.consume(limit - 1, 0) if limit > 1 else []
        messages.insert(0, first)
        batch = self._accept(messages)
        if not batch:
            self._raise_failure()
        if batch and self._connection.down:
            self._connection.on_answer()
        return batch or None

    def close(self) -> None:
        """Free everything. Does not raise; repeating is harmless."""
        self._expected.clear()
        with contextlib.suppress(KafkaException, RuntimeError):
            self._consumer.close()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None and (failure[0] < 0 or failure[0] in self._expected):
            raise failure[1]

    def _positions(self, partitions: Collection[int]) -> list[TopicPartition]:
        return [TopicPartition(self.topic, partition) for partition in partitions]

    def _accept(self, messages: list[Message]) -> dict[int, list[IncomingRecord]]:
        """The hot loop: 0.5 us a record on top of librdkafka's own."""
        topic, expected = self.topic, self._expected
        batch: dict[int, list[IncomingRecord]] = {}
        current = -1
        following = -1
        append = None
        for message in messages:
            if message.error() is not None:
                self._note(message)
                continue
            partition: int = message.partition()  # type: ignore[assignment]  # a record always has one
            offset: int = message.offset()  # type: ignore[assignment]
            if partition != current:
                if append is not None:
                    expected[current] = following
                following = expected.get(partition, -1)
                if following < 0:
                    append = None
                    current = -1
                    continue
                current = partition
                append = batch.setdefault(partition, []).append
            if offset < following:
                continue
            following = offset + 1
            append(  # type: ignore[misc]  # set whenever current is
                IncomingRecord(
                    topic,
                    partition,
                    offset,
                    message.key(),
                    message.value(),
                    message.headers(),  # type: ignore[arg-type]  # a list when received
                    message.timestamp()[1],
                )
            )
        if append is not None:
            expected[current] = following
        return {partition: records for partition, records in batch.items() if records}

    def _note(self, message: Message) -> None:
        """An error that came in place of a record. The first one that matters is raised after the records before it."""
        failure = consumer_failure(message, self.topic, self._connection.addresses, self._expected)
        if failure is None:
            logger.debug("input %s: %s", self.topic, message.error())
        elif self._failure is None:
            partition = message.partition()
            self._failure = (-1 if partition is None else partition, failure)


def consumer_failure(
    message: Message, topic: str, addresses: str, positions: dict[int, int]
) -> OffsetError | TopicError | None:
    """What an error message of a consumer means; ``None``: something that passes."""
    error = message.error()
    if error is None:
        return None
    partition = message.partition()
    if partition is not None and partition >= 0 and partition not in positions:
        return None  # removed meanwhile
    where = topic if partition is None or partition < 0 else f"{topic}[{partition}]"
    code = error.code()
    if code in BAD_OFFSET and partition is not None:
        return OffsetError(
            f"{where}: offset {positions[partition]} is not in the log at {addresses} ({error.str()}): it was deleted"
            " by retention, or the topic was truncated or made again. Nothing was reset; start from another offset on"
            " purpose, or restore the topic"
        )
    if code in NO_SUCH_TOPIC:
        return TopicError(f"{where} does not exist at {addresses} ({error.name()}); it was deleted, or never made")
    if code in NOT_AUTHORIZED:
        return TopicError(f"{where} may not be read by this principal ({error.name()}); check the cluster's ACLs")
    if error.fatal():
        return TopicError(f"{where} can not be read from {addresses}: {error_of(KafkaException(error)).str()}")
    return None
