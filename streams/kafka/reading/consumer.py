"""The consumer of an input: some partitions of its topic, assigned by hand, read committed."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from streams.errors import OffsetError, StreamsError, TopicError
from streams.kafka.connection import ConnectionLog, find_leaders
from streams.kafka.reading import accepting, failures
from streams.kafka.reading.fetch_session import LOG_START as LOG_START
from streams.kafka.reading.log_ends import LogEnds
from streams.kafka.settings import ClientSettings, build
from streams.kafka.translate import BAD_OFFSET, NO_SUCH_TOPIC, NOT_AUTHORIZED
from streams.records import IncomingRecord, PolledPartition

logger = logging.getLogger(__name__)

END_SECONDS: Final = 5.0
"""Seconds until the question for the end of a silent partition is given up. Nothing waits for it."""
_PARTITION: Final = re.compile(r" \[(\d+)\]")


FETCH_WAIT_MS: Final = 40
"""Milliseconds that the broker may hold a fetch that brings nothing. An idle consumer sends a request as often, and a
partition that is added while all others are silent may wait for as long (a record ends the fetch of its partition at
once)."""
SILENCE_SECONDS: Final = 10.0
"""The first pause after which a silent partition is checked; each further one is twice as long."""
_LONGEST_SILENCE_SECONDS: Final = 300.0
_CHECK_SECONDS: Final = 1.0  # between two searches for silent partitions
TAIL_OFFSETS: Final = 16
"""So many offsets behind the last record are looked at, at most: a transaction leaves one marker in a partition."""
MOST_TAILS: Final = 16
"""Partitions that are looked up at a time."""
BACKLOG_PARTS: Final = 8
"""There is a backlog where a poll brings this part of its limit, or more."""


class _Question(NamedTuple):
    """A request for the end of a partition; ``in_outage``: requested while no broker answered."""

    partition: int
    in_outage: bool
    answer: Future[int]


class _Tail(NamedTuple):
    """A request for what is behind a position of a partition."""

    position: int
    next_offset: Future[int]


class LogConsumer:
    """Reads partitions of one topic, ``read_committed``, from given offsets, and reports positions and ends also where
    there are no records.

    ``ends``: whether ends of partitions are reported. An input beside others takes that: they wait for it unless it is
    known to be at its end. Owned by one thread: every method is called by it (confluent-kafka lets a second thread wait
    for as long as the first one polls). It never joins a group, never commits, and never resets a position.
    """

    def __init__(self, settings: ClientSettings, topic: str, *, ends: bool) -> None:
        self.topic = topic
        self._reports_ends = ends
        self._settings = settings
        self._connection = ConnectionLog(settings.bootstrap_servers, f"input {topic}")
        config = settings.consumer(partition_eof=ends, fetch_wait_ms=FETCH_WAIT_MS, role="input")
        self._consumer = build(Consumer, config, self._connection)
        self._positions: dict[int, int] = {}
        """Of each assigned partition: all below it was read (``LOG_START``: nothing came so far). Records below it, or
        of other partitions, are left-overs."""
        self._paused: dict[int, int] = {}
        """The same of paused ones."""
        self._guessed: set[int] = set()
        """Read from offset 0, where logs begin that nothing was deleted from: the question where a log begins costs
        librdkafka 500 ms on a new connection. Compaction deletes records, but leaves the start where it is."""
        self._failures: dict[int, StreamsError] = {}
        self._silent: dict[int, tuple[float, float]] = {}
        """Partitions that are not known to be at their end: when to look after them if nothing comes, and the pause."""
        self._check_at = 0.0
        self._has_backlog = True  # as far as the last poll tells
        self._log_ends = LogEnds(settings)
        self._question: _Question | None = None
        self._tails: dict[int, _Tail] = {}
        self._answered = False
        """A question was answered in an outage, since the last poll. Errors from before come with that poll, so the
        answer counts after it: else "answers again" would be followed by the failures of before."""

    @property
    def reason(self) -> str:
        """The last complaint about the connection, for error messages."""
        return self._connection.reason

    def add(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on, or from the start of its log (``LOG_START``). ``ValueError`` if it is
        read already."""
        self.add_all({partition: offset})

    def add_all(self, positions: Mapping[int, int]) -> None:
        """Read these partitions; one assignment of many costs less than many of one. See ``add``."""
        for partition in positions:
            if partition in self._positions or partition in self._paused:
                raise ValueError(f"{self.topic}[{partition}] is read already")
        is_first = not self._positions and not self._paused
        self._guessed.update(number for number, offset in positions.items() if offset == LOG_START)
        self._assign(positions)
        if is_first:
            self._connection.take_topic_errors()  # they are about partitions that were removed
            find_leaders(self._consumer, self.topic)

    def remove(self, partitions: Collection[int]) -> None:
        """Stop reading: nothing of these partitions is returned any more. Unknown ones are passed over."""
        for number in partitions:
            self._paused.pop(number, None)
            self._failures.pop(number, None)
            self._guessed.discard(number)
        self._unassign(partitions)

    def pause(self, partitions: Collection[int]) -> None:
        """Return nothing of these partitions until ``resume``. What was prefetched is dropped, and fetched again."""
        # librdkafka's own pause drops as much, and its resume lets a consumer that fetches nothing else wait for
        # 850 ms; one that is assigned anew waits for the fetch that is under way.
        self._paused.update(self._unassign(partitions))

    def resume(self, partitions: Collection[int]) -> None:
        """Undo ``pause``; the next record is the one after the last that ``poll_batch`` returned."""
        self._assign({number: self._paused.pop(number) for number in list(partitions) if number in self._paused})

    def poll_batch(self, timeout_seconds: float, limit: int = 500) -> dict[int, PolledPartition]:
        """Wait for something new and take what else is there, up to ``limit`` records and ends of partitions.

        Per partition in order, each record once. Records from before a failure are returned before ``take_failures``
        has it. An outage looks as if nothing came (it is logged when it begins and when it ends).
        """
        # With a backlog one call, so one wait for the GIL, is enough. Of live traffic a poll brings a handful, and a
        # look for more of it in front of the next one finds nothing.
        messages = self._consumer.consume(limit, 0) if self._has_backlog else []
        if not messages:
            first = self._consumer.poll(timeout_seconds)
            if first is not None:
                messages = [first, *(self._consumer.consume(limit - 1, 0) if limit > 1 else ())]
        self._has_backlog = len(messages) * BACKLOG_PARTS >= limit
        news = self._accept(messages)
        for error in self._connection.take_topic_errors():
            self._note(error, partition_in(error.str()))
        if news or self._answered:  # an end of a partition is an answer, too
            self._answered = False
            self._connection.on_answer()
        self._mind_silence(news)
        return news

    def take_failures(self) -> dict[int, StreamsError]:
        """Return the partitions that failed since the last call; they are removed already. ``OffsetError``: the
        position is not in the log (any more). ``TopicError``: the topic is gone, or may not be read."""
        failures = self._failures
        if failures:
            self._failures = {}
            self.remove(failures)
        return failures

    def close(self) -> None:
        """Free everything. Does not raise; repeating is harmless."""
        self._positions.clear()
        self._paused.clear()
        self._silent.clear()
        self._tails.clear()
        self._log_ends.close()
        with contextlib.suppress(KafkaException, RuntimeError):
            self._consumer.close()

    def _assign(self, positions: Mapping[int, int]) -> None:
        if positions:
            self._positions.update(positions)
            try:
                self._consumer.incremental_assign(
                    [TopicPartition(self.topic, number, self._fetch_offset(number)) for number in positions]
                )
            except BaseException:  # nothing of them is read
                for number in positions:
                    del self._positions[number]
                raise
            self._silent.update(dict.fromkeys(positions, (time.monotonic() + SILENCE_SECONDS, SILENCE_SECONDS)))

    def _unassign(self, partitions: Collection[int]) -> dict[int, int]:
        """The positions of those that were assigned."""
        # Messages of these that are queued already are left-overs from here on: without a position they are passed
        # over.
        taken = {number: self._positions.pop(number) for number in list(partitions) if number in self._positions}
        if taken:
            for number in taken:
                self._silent.pop(number, None)
            self._consumer.incremental_unassign([TopicPartition(self.topic, number) for number in taken])
        return taken

    def _fetch_anew(self, partitions: Collection[int]) -> None:
        self._consumer.incremental_unassign([TopicPartition(self.topic, number) for number in partitions])
        self._consumer.incremental_assign(
            [TopicPartition(self.topic, number, self._fetch_offset(number)) for number in partitions]
        )

    def _fetch_offset(self, partition: int) -> int:
        position = self._positions[partition]
        if position == LOG_START:
            return 0 if partition in self._guessed else OFFSET_BEGINNING
        return position

    def _accept(self, messages: list[Message]) -> dict[int, PolledPartition]:
        positions = self._positions
        batches: dict[int, list[IncomingRecord]] = {}
        at_end: set[int] = set()
        place = accepting.accept(messages, 0, self.topic, positions, batches, at_end)
        while place < len(messages):
            message = messages[place]
            error: Any = message.error()
            partition: int = message.partition()  # type: ignore[assignment]  # that of an error may be -1
            offset: int = message.offset()  # type: ignore[assignment]
            if error.code() != KafkaError._PARTITION_EOF:
                self._note(error, partition)
            elif offset >= positions.get(partition, offset + 1):
                positions[partition] = offset  # with the markers, aborted records and holes before it
                at_end.add(partition)
            place = accepting.accept(messages, place + 1, self.topic, positions, batches, at_end)
        news: dict[int, PolledPartition] = {}
        for number in [*batches, *(at_end - batches.keys())]:
            records = batches.get(number, [])
            if records or number in at_end:
                position = positions[number]
                end = self._end(number) if self._reports_ends else -1
                news[number] = PolledPartition(records, position, end, number in at_end or position == end)
        return news

    def ends(self) -> dict[int, int]:
        """Return the ends of the partitions that are read, as far as they are known: the high watermark that came with
        the last fetch; the position, where nothing but a few markers of transactions are known to be behind it. Nothing
        is waited for: that is looked up for the next call."""
        found: dict[int, int] = {}
        for partition, position in self._positions.items():
            end = self._end(partition)
            if end >= 0:
                found[partition] = position if self._is_read(partition, position, end) else end
        return found

    def _is_read(self, partition: int, position: int, end: int) -> bool:
        if position < 0 or not 0 < end - position <= TAIL_OFFSETS:
            return False
        tail = self._tails.get(partition)
        if tail is None or tail.position != position:
            if sum(not each.next_offset.done() for each in self._tails.values()) < MOST_TAILS:
                asked = self._log_ends.ask_next(self.topic, partition, position, END_SECONDS)
                self._tails[partition] = _Tail(position, asked)
            return False
        if not tail.next_offset.done():
            return False
        if tail.next_offset.exception() is None and tail.next_offset.result() >= end:
            return True
        del self._tails[partition]  # it was not found, or there is more by now: looked up again
        return False

    def _end(self, partition: int) -> int:
        try:
            _, end = self._consumer.get_watermark_offsets(TopicPartition(self.topic, partition), cached=True)
        except KafkaException as exception:
            logger.debug("%s[%d]: no watermark: %s", self.topic, partition, exception)
            return -1
        return end if end >= self._positions[partition] else -1  # not known, or the log was cut: the next fetch tells

    def _mind_silence(self, news: Mapping[int, PolledPartition]) -> None:
        """Look after silent partitions, ever more rarely. (Seen after an outage of 30 s in the middle of a hand-over:
        nothing more was fetched, without an error, from a broker that was back.)

        Where ends are reported, a partition that is not known to be at its end is fetched anew (an open transaction
        keeps it from its end for a while); after an outage all are, as soon as the cluster answers. Elsewhere the
        broker gets a request for the end first, of one partition at a time.
        """
        now = time.monotonic()
        for partition, progress in news.items():
            if progress.at_end:
                self._silent.pop(partition, None)  # librdkafka reports each end once: what is silent there is well
            else:
                self._silent[partition] = (now + SILENCE_SECONDS, SILENCE_SECONDS)
        if self._question is not None:
            self._take_answer(self._question)
            return
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_SECONDS
        for partition, position in self._positions.items():
            if partition not in self._silent and (self._connection.down or self._end(partition) > position):
                self._silent[partition] = (now + SILENCE_SECONDS, SILENCE_SECONDS)
        due = sorted((when, partition) for partition, (when, _) in self._silent.items() if now >= when)
        # Assigning one makes librdkafka drop the fetches that are under way for the others. So an input is looked after
        # one at a time, and assigned anew only where the broker says that there is more.
        numbers = [partition for _, partition in due[: None if self._reports_ends else 1]]
        if not numbers:
            return
        if not self._reports_ends:
            self._ask_end(numbers[0])
        elif self._connection.down and not find_leaders(self._consumer, self.topic):
            return
        else:
            # Not "it answers again" yet: failures of before may still be queued, and what is fetched comes after them.
            self._fetch_anew(numbers)
        for number in numbers:
            pause = self._silent[number][1]
            if self._reports_ends or not self._connection.down:
                pause = min(pause * 2, _LONGEST_SILENCE_SECONDS)
            self._silent[number] = (now + pause, pause)

    def _ask_end(self, partition: int) -> None:
        """Request the end of a partition; the answer is taken in by a later poll."""
        # By another client, which does not block: the consumer's own question would hold up all partitions for as long
        # as a frozen broker is silent, and a call from another thread would wait until this one does not poll.
        answer = self._log_ends.ask(self.topic, partition, END_SECONDS)
        self._question = _Question(partition, self._connection.down, answer)

    def _take_answer(self, question: _Question) -> None:
        """Fetch a silent partition anew if the broker's answer is that there is more."""
        if not question.answer.done():
            return
        self._question, silent = None, question.partition
        if (failure := question.answer.exception()) is not None:
            logger.debug("%s[%d]: silent, and its end cannot be requested: %s", self.topic, silent, failure)
            return
        end = question.answer.result()
        self._answered = question.in_outage and self._connection.down
        if end > self._positions.get(silent, end):
            logger.debug("%s[%d]: silent at %d of %d: fetched anew", self.topic, silent, self._positions[silent], end)
            self._fetch_anew([silent])

    def _note(self, error: KafkaError, partition: int | None) -> None:
        """Keep an error that came in place of a record: of one partition, or of the topic and so of all of them."""
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:  # librdkafka looks a coordinator up; none is needed
            return
        number = -1 if partition is None else partition
        for about in [number] if number >= 0 else list(self._positions) or list(self._paused):
            position = self._positions.get(about, self._paused.get(about))
            if position is None or about in self._failures:  # it was removed meanwhile
                continue
            if position == LOG_START and about in self._guessed and error.code() in BAD_OFFSET:
                self._guessed.discard(about)
                self._fetch_anew([about])
                continue
            failure = reading_failed(error, self.topic, about, position, self._connection.addresses)
            if failure is None:
                logger.debug("input %s[%d]: %s", self.topic, about, error)
            else:
                self._failures[about] = failure


def reading_failed(
    error: KafkaError, topic: str, partition: int, position: int, addresses: str
) -> OffsetError | TopicError | None:
    """Return the meaning of an error for a consumer at ``position`` of a partition (-1: of none); ``None``: it
    passes."""
    where = topic if partition < 0 else f"{topic}[{partition}]"
    code = error.code()
    if code in BAD_OFFSET and partition >= 0:
        return failures.not_in_log(where, position, addresses, error.str())
    if code in NO_SUCH_TOPIC:
        return failures.no_such_topic(where, addresses, error.name())
    if code in NOT_AUTHORIZED:
        return failures.not_allowed(where, topic, error.name())
    if error.fatal():
        return failures.refused(where, addresses, f"{error.name()}: {error.str()}")
    return None


def partition_in(text: str) -> int | None:
    """The partition that a text of librdkafka names (``topic [3]: ...``)."""
    found = _PARTITION.search(text)
    return int(found[1]) if found else None
