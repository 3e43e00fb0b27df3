"""The consumer of a source's input: some partitions of one topic, assigned by hand."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Collection
from concurrent.futures import Future
from importlib import import_module
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from streams.clients.connection import ConnectionLog, find_leaders
from streams.clients.received import received
from streams.clients.settings import ClientSettings, build
from streams.clients.translate import BAD_OFFSET, NO_SUCH_TOPIC, NOT_AUTHORIZED
from streams.errors import OffsetError, StreamsError, TopicError
from streams.records import IncomingRecord, ReceivedHeaders

logger = logging.getLogger(__name__)

SILENCE_SECONDS: Final = 10.0
LONGEST_SILENCE_SECONDS: Final = 300.0
END_SECONDS: Final = 5.0
"""Until the question for the end of a silent partition is given up. Nobody waits for it."""
FETCH_WAIT_MS: Final = 40
"""How long the broker may hold a fetch that brings nothing: so often an idle consumer asks, and so long a partition may
wait that is added while all others are silent. A record ends the fetch of its partition at once."""
_LATEST: Final[Any] = import_module("confluent_kafka.admin").OffsetSpec.latest()  # its types leave it out
_PARTITION: Final = re.compile(r" \[(\d+)\]")


class _Question(NamedTuple):
    """For the end of a partition; ``in_outage``: it was asked while nobody answered."""

    partition: int
    in_outage: bool
    answer: Future[Any]


class InputConsumer:
    """Reads partitions of one topic, ``read_committed``, from the offsets that it is told.

    Owned by one thread: every method is called by it (confluent-kafka lets a second thread wait for as long as the
    first one polls). It never joins a group, never commits, and never resets a position.
    """

    def __init__(self, settings: ClientSettings, topic: str, *, fetch_wait_ms: int = FETCH_WAIT_MS) -> None:
        self.topic = topic
        self._connection = ConnectionLog(settings.bootstrap_servers, f"input {topic}")
        config = settings.consumer(partition_eof=False, fetch_wait_ms=fetch_wait_ms, role="input")
        self._consumer = build(Consumer, config, self._connection)
        self._expected: dict[int, int] = {}
        """The next offset of each assigned partition; records below it, or of other partitions, are left-overs."""
        self._paused: dict[int, int] = {}
        """The same of paused ones."""
        self._failure: tuple[int, StreamsError] | None = None
        self._heard_at: dict[int, tuple[float, float]] = {}
        """When a partition last said something, and how long it may be silent until its end is asked for."""
        self._look_at = 0.0
        self._settings = settings
        self._admin: AdminClient | None = None
        self._question: _Question | None = None
        self._answered = False
        """A question was answered in an outage, since the last poll. What was heard before is told by that poll, so the
        answer counts after it: else "answers again" would be followed by the failures of before."""

    def add(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on. ``ValueError`` if it is there already."""
        if partition in self._expected or partition in self._paused:
            raise ValueError(f"{self.topic}[{partition}] is read already")
        self._consumer.incremental_assign([TopicPartition(self.topic, partition, offset)])
        if not self._expected and not self._paused:
            find_leaders(self._consumer, self.topic)
        self._expected[partition] = offset

    def remove(self, partitions: Collection[int]) -> None:
        """Stop reading: no record of these partitions is returned any more. Unknown ones are passed over."""
        for number in partitions:
            self._paused.pop(number, None)
        self._take(partitions)

    def pause(self, partitions: Collection[int]) -> None:
        """Return nothing of these partitions until ``resume``. What was prefetched is dropped, and fetched again.

        By giving them up and taking them again: librdkafka's own pause drops as much, and its resume lets a consumer
        that fetches nothing else wait for 850 ms (this one for one fetch that is under way).
        """
        self._paused.update(self._take(partitions))

    def resume(self, partitions: Collection[int]) -> None:
        """Undo ``pause``; the next record is the one after the last that ``poll_batch`` returned."""
        back = {number: self._paused.pop(number) for number in list(partitions) if number in self._paused}
        if back:
            self._consumer.incremental_assign([TopicPartition(self.topic, *position) for position in back.items()])
            self._expected.update(back)

    def poll_batch(self, timeout_seconds: float, limit: int = 500) -> dict[int, list[IncomingRecord]] | None:
        """Wait for one record and take what else is there, up to ``limit``; ``None``: nothing came in time.

        Per partition in order, each record once. Raises ``OffsetError`` (the position is not in the log any more) and
        ``TopicError`` (the topic is gone, or not to be read); the partition stays assigned, and silent. That the
        cluster does not answer is logged when it begins and when it ends, and otherwise looks as if nothing came.
        """
        self._raise_failure()
        messages = self._consumer.consume(limit, 0)  # with a backlog one call, so one wait for the GIL, is enough
        if not messages:
            first = self._consumer.poll(timeout_seconds)
            if first is not None:
                messages = [first, *(self._consumer.consume(limit - 1, 0) if limit > 1 else ())]
        batch = self._accept(messages)
        for error in self._connection.take_topic_errors():
            self._note(error, partition_in(error.str()))
        if not batch:
            self._raise_failure()
        if batch or self._answered:
            self._answered = False
            self._connection.on_answer()
        self._mind_silence(batch)
        return batch or None

    def close(self) -> None:
        """Free everything. Does not raise; repeating is harmless."""
        self._expected.clear()
        self._paused.clear()
        self._admin = None
        with contextlib.suppress(KafkaException, RuntimeError):
            self._consumer.close()

    def _mind_silence(self, batch: Collection[int]) -> None:
        """A second line: a partition that was silent for long is asked for its end, one a second, and fetched anew if
        there is more. (Seen once after an outage of 30 s in the middle of a hand-over: nothing came any more, and no
        error; librdkafka had assigned and unassigned others meanwhile.)"""
        now = time.monotonic()
        for partition in batch:
            self._heard_at[partition] = (now, SILENCE_SECONDS)
        if self._question is not None:
            if self._admin is not None:
                self._admin.poll(0)  # what the user's callbacks want to know must not pile up
            if self._question.answer.done():
                self._heed(self._question)
                self._question = None
            return
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        waits = {number: self._heard_at.setdefault(number, (now, SILENCE_SECONDS)) for number in self._expected}
        self._heard_at = dict(waits)
        silent = min(waits, key=lambda number: sum(waits[number]), default=None)
        if silent is None or now < sum(waits[silent]):
            return
        pause = waits[silent][1] if self._connection.down else min(waits[silent][1] * 2, LONGEST_SILENCE_SECONDS)
        self._heard_at[silent] = (now, pause)
        # By another client, which does not block: the consumer's own question would hold up all partitions for as long
        # as a frozen broker is silent, and asked from another thread it would wait until this one does not poll.
        if self._admin is None:
            quiet: Any = {"log_level": 0, "error_cb": lambda _: None}  # of an outage the consumer tells
            self._admin = AdminClient(self._settings.admin() | quiet)
        place = TopicPartition(self.topic, silent)
        asked = self._admin.list_offsets(
            {place: _LATEST}, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=END_SECONDS
        )
        self._question = _Question(silent, self._connection.down, asked[place])

    def _heed(self, question: _Question) -> None:
        """The end of a silent partition is known: is there more than what came?"""
        silent = question.partition
        try:
            end = question.answer.result().offset
        except KafkaException as exception:
            logger.debug("%s[%d]: silent, and its end cannot be asked for: %s", self.topic, silent, exception)
            self._admin = None  # after a broker's restart one gets FENCED_LEADER_EPOCH for ever; a new one does not
            return
        self._answered = question.in_outage and self._connection.down
        if end > self._expected.get(silent, end):
            logger.debug("%s[%d]: silent at %d of %d: fetched anew", self.topic, silent, self._expected[silent], end)
            position = TopicPartition(self.topic, silent, self._expected[silent])
            self._consumer.incremental_unassign([TopicPartition(self.topic, silent)])
            self._consumer.incremental_assign([position])

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None and (failure[0] < 0 or failure[0] in self._expected):
            raise failure[1]

    def _take(self, partitions: Collection[int]) -> dict[int, int]:
        """Unassign; the positions of those that were assigned."""
        taken = {number: self._expected.pop(number) for number in list(partitions) if number in self._expected}
        if taken:
            self._consumer.incremental_unassign([TopicPartition(self.topic, number) for number in taken])
        return taken

    def _accept(self, messages: list[Message]) -> dict[int, list[IncomingRecord]]:
        """The hot loop: 0.5 us a record on top of librdkafka's own."""
        topic, expected = self.topic, self._expected
        batch: dict[int, list[IncomingRecord]] = {}
        current = -1
        following = -1
        append = None
        headers: ReceivedHeaders | None = None
        listed: list[tuple[str, bytes | None]] | None = None  # those of the record before, as they came
        for message in messages:
            error = message.error()
            partition: int = message.partition()  # type: ignore[assignment]  # a record always has one
            if error is not None:
                self._note(error, partition)
                continue
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
            found: Any = message.headers()
            if found != listed:
                listed, headers = found, received(found)
            append(  # type: ignore[misc]  # set whenever current is
                IncomingRecord(
                    topic,
                    partition,
                    offset,
                    message.key(),
                    message.value(),
                    headers,
                    message.timestamp()[1],
                )
            )
        if append is not None:
            expected[current] = following
        return {partition: records for partition, records in batch.items() if records}

    def _note(self, error: KafkaError, partition: int | None) -> None:
        """An error that came in place of a record. The first one that matters is raised after the records before it."""
        partition = -1 if partition is None else partition
        failure = None
        if partition < 0 or partition in self._expected:  # else it was removed meanwhile
            position = self._expected.get(partition, -1)
            failure = reading_failed(error, self.topic, partition, position, self._connection.addresses)
        if failure is None:
            logger.debug("input %s[%d]: %s", self.topic, partition, error)
        elif self._failure is None:
            self._failure = (partition, failure)


def reading_failed(
    error: KafkaError, topic: str, partition: int, position: int, addresses: str
) -> OffsetError | TopicError | None:
    """What an error means to a consumer at ``position`` of a partition (-1: of none); ``None``: it passes."""
    where = topic if partition < 0 else f"{topic}[{partition}]"
    code = error.code()
    if code in BAD_OFFSET and partition >= 0:
        return OffsetError(
            f"{where}: offset {position} is not in the log at {addresses} ({error.str()}): it was deleted by retention,"
            " or the topic was truncated or made again. Nothing was reset; start from another offset on purpose, or"
            " restore the topic"
        )
    if code in NO_SUCH_TOPIC:
        return TopicError(f"{where} does not exist at {addresses} ({error.name()}); it was deleted, or never made")
    if code in NOT_AUTHORIZED:
        return TopicError(f"{where} may not be read by this principal ({error.name()}); check the cluster's ACLs")
    if error.fatal():
        return TopicError(f"{where} can not be read from {addresses}: {error.name()}: {error.str()}")
    return None


def partition_in(text: str) -> int | None:
    """The partition that a text of librdkafka names (``topic [3]: ...``)."""
    found = _PARTITION.search(text)
    return int(found[1]) if found else None
