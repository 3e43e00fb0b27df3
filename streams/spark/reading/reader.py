"""The executor's side of a read: one partition of a topic, from one position to another, as Arrow batches.

Where a range ends is a *position*. "The record before the end" may not exist: transaction markers, aborted records
and compacted ones take offsets too. So the end is reached by a record at or past it, or by the broker's word that the
partition (as a reader of committed records sees it) ends at or past it.

Offsets mean nothing without the topic that they were planned for: one that was deleted and recreated has the same
name, and other records under the same offsets. So a range names the topic's id, and the reader asks for it again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from streams.errors import BrokerUnavailable, OffsetError, StreamsError
from streams.kafka.permissions import on_topic
from streams.kafka.translate import BAD_OFFSET, NO_SUCH_TOPIC, READING_ENDS
from streams.spark.kafka import client, topic_admin, translated
from streams.spark.reading.consumers import KeptConsumer, fetch_settings, keep, take
from streams.spark.reading.planning import Advance, split
from streams.spark.reading.pushed import Pushed
from streams.spark.reading.read_options import Edge, ReadOptions
from streams.spark.reading.record_batches import batch_of, collector_off
from streams.spark.reading.topic_logs import LogView, require

_CHUNK: Final = 5000
_POLL_SECONDS: Final = 0.5
_ASK_SECONDS: Final = 10.0
_CHECK_SECONDS: Final = 3.0

_BELIEVE_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 0.3

_WAYS_ON: Final = "Load the DataFrame again, or start the query again; failOnDataLoss=false goes on with what is there"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Range(InputPartition):
    """Records of one partition from offset ``start`` up to, without, ``end``, of the topic with the id ``topic_id``."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str


def ranges(planned: Advance, ids: Mapping[str, str], options: ReadOptions) -> list[Range]:
    """Return the planned ranges, without the empty ranges, cut as the options say. ``ids`` are those of the topics."""
    return [
        Range(place.topic, place.partition, begin, stop, ids[place.topic])
        for place, begin, stop in split(
            {place: (begin, planned.end[place]) for place, begin in planned.begin.items()},
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
        )
    ]


class BatchReader(DataSourceReader):
    """``spark.read.format("grt")``: a bounded read, whose ranges are fixed once, when Spark plans the query."""

    inside: tuple[str, ...] = ()
    """The column of structs that the columns of a read are in."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._pushed = Pushed()
        # Not a method: Spark refuses a reader that has one of its own where the session has push-down off, which a
        # read does without. Where it is on, Spark calls what it finds.
        self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def take_over(self, filters: list[Filter]) -> list[Filter]:
        """Spark's ``pushFilters``: all are left to Spark, too."""
        self._pushed = self._pushed.of(filters, self.inside)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Ask the cluster. Raises ``TopicError``, ``BrokerUnavailable``, and ``OffsetError`` when the log does not hold
        the requested offsets (any more)."""
        view = LogView(self._options)
        logs = view.logs()
        require(logs, self._options)
        start, end = (view.resolve(edge, logs) for edge in (self._options.starting, self._options.ending))
        begin, stop = dict(start.at), dict(end.at)
        if (since := self._pushed.since_ms()) is not None:
            # As an ending: a time that no record has is the end of the log, and no error.
            earliest = view.resolve(Edge("endingTimestamp", since, is_time=True), logs).at
            begin = {place: max(at, earliest[place]) for place, at in begin.items()}
        planned = Advance()
        for place in sorted(begin):
            if self._pushed.reads(place):
                planned.begin[place], planned.end[place] = self._pushed.clipped(begin[place], stop[place])
        return ranges(planned, start.ids, self._options)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, Range):  # Spark's way of saying that there is nothing to read
            return iter(())
        found = map(self._pushed.kept, batches(partition, self._options))
        return (batch for batch in found if batch.num_rows)


class _PushFilters:
    """A stand-in for ``pushFilters`` of a reader, which looks like the inherited method, and takes filters over."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._reader.take_over(filters)


def batches(span: Range, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """The range as ``pyarrow.RecordBatch``es in offset order. The consumer is kept for the next range, and closed when
    this one was not read up to its end.

    Raises ``OffsetError`` when records of the range are gone, or the topic is another one than was planned (with
    ``failOnDataLoss``; otherwise goes on with the next ones there are, and logs), ``BrokerUnavailable`` when nothing
    comes for ``stallSeconds``.
    """
    with contextlib.closing(_RangeReader(span, options)) as reader:
        begun = False
        while True:
            with collector_off():
                messages = reader.next()
                batch = batch_of(messages, span.topic, span.partition, options) if messages else None
                del messages
            # Always after records have come, never before: an id does not come back, so a topic that has it still was
            # the same one all the time before. A check before they are read would be too early: the topic could be made
            # again in between.
            asked = reader.ended or (batch is not None and not begun)
            if asked and not reader.is_planned_topic():
                return
            if batch is not None:
                begun, reader.unproven = True, not asked
                yield batch
            if reader.ended:
                reader.give_back()
                return


class _RangeReader:
    """One consumer at one range. ``next`` gives what has come, in pieces; ``ended`` says that there is no more;
    ``unproven``, that records were handed on since the topic's id was compared."""

    def __init__(self, span: Range, options: ReadOptions) -> None:
        self.ended = False
        self.unproven = False
        self._span = span
        self._options = options
        self._last_error = ""
        self._log_end: int | None = None  # where the broker says that the partition ends, below the range's end
        fetching = fetch_settings(span.end - span.start)
        self._key = (
            frozenset(options.kafka.items()), options.group, options.committed_only, span.topic, span.topic_id,
            span.partition, *fetching.values(),
        )  # fmt: skip
        kept = take(self._key)
        self._kept = kept or KeptConsumer(self._made(fetching), fetching["queued.min.messages"] > 1000)
        self._consumer = self._kept.consumer
        if kept is not None:
            self._consumer.resume(self._consumer.assignment())  # first: an assignment leaves a paused partition paused
        if kept is None or kept.position != span.start:
            self._begin_at(span.start, found=kept is not None)
        self._progress = time.monotonic()
        self._checked_at = 0.0  # when the topic was last looked at, while nothing came
        self._gone = False  # the topic that was planned
        self._sound = True  # nothing but records has come, so the next range may go on
        self._returned = False

    def _made(self, fetching: Mapping[str, int]) -> Consumer:
        settings: dict[str, Any] = {
            **fetching,
            "fetch.queue.backoff.ms": 5,  # with the default, 1 s, reading halts each time that the queue was full
            "reconnect.backoff.max.ms": 1000,
            **self._options.kafka,
            "group.id": self._options.group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed" if self._options.committed_only else "read_uncommitted",
        }
        consumer: Consumer = client(Consumer, settings)
        return consumer

    def give_back(self) -> None:
        """Leave the consumer to the next range, at the end of this one."""
        if self._sound and not self._gone:
            self._kept.position, self._returned = self._span.end, True
            keep(self._key, self._kept)

    def close(self) -> None:
        """Close the consumer, unless it was given back."""
        if not self._returned:
            self._consumer.close()

    def next(self) -> list[Message]:
        """The next messages of the range; none when something else has happened, or nothing for half a second."""
        found, self._kept.ahead = self._kept.ahead, []
        if not found:
            # `consume(n, timeout)` waits the whole timeout when fewer than n are there: wait for one, take the rest.
            first = self._consumer.poll(_POLL_SECONDS)
            if first is None:
                self._check_stall()
                return []
            found = [first]
            # No more than the range may have: the client fetches nothing before its queue is empty.
            if first.error() is None and (left := min(_CHUNK, self._span.end - _offset(first)) - 1) > 0:
                found += self._consumer.consume(left, 0)
        if any(error is not None for error in map(Message.error, found)) or _offset(found[-1]) >= self._span.end - 1:
            found = self._until_end(found)
        if found:
            self._progress = time.monotonic()
        return found

    def _begin_at(self, offset: int, *, found: bool = False) -> None:
        """Begin there; ``found``: this client has found the partition before."""
        self._kept.ahead = []
        self._consumer.assign([TopicPartition(self._span.topic, self._span.partition, offset)])
        if found:
            return
        # The partition's leader would be looked for by a timer of up to a second; asking finds it now.
        with contextlib.suppress(KafkaException):
            self._consumer.list_topics(self._span.topic, timeout=min(_ASK_SECONDS, self._options.stall_seconds))

    def _until_end(self, messages: list[Message]) -> list[Message]:
        wanted: list[Message] = []
        for at, message in enumerate(messages, 1):
            error = message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                self._log_end = _offset(message)
                self.ended = self._log_end >= self._span.end
                at -= self._log_end > self._span.end  # the next range may end there, too, and it is not said again
            elif error is not None:
                self._take_error(error)
            elif (offset := _offset(message)) < self._span.end:
                wanted.append(message)
                self.ended = offset == self._span.end - 1
            else:
                self.ended, at = True, at - 1
            if self.ended:  # what came with the last records of this range begins the next one
                self._kept.ahead = messages[at:]
                break
        return wanted

    def _take_error(self, error: KafkaError) -> None:
        """Raises errors that do not pass by themselves. The others are reported when nothing comes any more."""
        span, code, self._sound = self._span, error.code(), False
        if code in BAD_OFFSET:
            self._skip_what_is_gone()
        elif code in NO_SUCH_TOPIC:
            self.ended = not self.is_planned_topic()
        elif code in READING_ENDS or error.fatal():
            needed = [on_topic("Read", span.topic)]
            doing = f"reading {span.topic}[{span.partition}]"
            raise translated(KafkaException(error), doing, self._options.kafka, needed)
        self._last_error = error.str()

    def _skip_what_is_gone(self) -> None:
        span = self._span
        if not self.is_planned_topic():
            self.ended = True
            return
        place = TopicPartition(span.topic, span.partition)
        try:
            first, end = self._consumer.get_watermark_offsets(place, timeout=_ASK_SECONDS, cached=False)
        except KafkaException as error:
            raise translated(error, f"reading {span.topic}[{span.partition}]", self._options.kafka) from error
        (at,) = self._consumer.position([place])
        stood = at.offset if at.offset >= 0 else span.start
        self._lost(
            f"{span.topic}[{span.partition}]: records from offset {stood} are gone (retention, or the log was "
            f"truncated) since the read was planned, which is up to {span.end}; the log has {first} to {end} now"
        )
        if stood < first < span.end:
            self._begin_at(first)
        else:
            self.ended = True

    def _lost(self, text: str) -> None:
        if self._options.fail_on_data_loss:
            raise OffsetError(f"{text}. {_WAYS_ON}")
        _log.warning("failOnDataLoss=false: goes on although records are gone: %s", text)

    def _check_stall(self) -> None:
        now = time.monotonic()
        if now - self._progress > self._options.stall_seconds:
            raise self._stalled()
        if now - max(self._progress, self._checked_at) > _CHECK_SECONDS:
            self._checked_at = now
            self._check_topic()

    def _check_topic(self) -> None:
        """A consumer of a topic that is deleted, or was recreated, does not notice it for a long time."""
        try:
            now = self._id_now(_CHECK_SECONDS)
        except BrokerUnavailable as error:
            self._last_error = str(error)
            return
        self.ended = now != self._span.topic_id and not self.is_planned_topic()

    def _id_now(self, seconds: float) -> str | None:
        """Return the id that the topic has now; ``None`` when there is none of this name."""
        found = topic_admin(self._options.kafka).identity(self._span.topic, seconds)
        return None if found is None else found[0]

    def is_planned_topic(self) -> bool:
        """Check whether the topic is still the one that was planned. Otherwise raises ``OffsetError``, or logs the
        loss."""
        deadline = time.monotonic() + _BELIEVE_SECONDS
        while not self._gone and (now := self._id_now(self._options.stall_seconds)) != self._span.topic_id:
            if time.monotonic() > deadline:  # so it is not just a broker that does not know the topic yet
                self._tell_gone(now)
            else:
                time.sleep(_AGAIN_SECONDS)
        return not self._gone

    def _tell_gone(self, now: str | None) -> None:
        """The topic that was planned is not there; one with the id ``now`` may be."""
        self._gone = True
        span = self._span
        place = f"{span.topic}[{span.partition}]"
        what = f"{place} was deleted before it was read up to {span.end} (its id was {span.topic_id})"
        if now is not None:
            what = (
                f"{span.topic} was deleted and recreated (id {span.topic_id} then, {now} now) before offsets "
                f"{span.start} to {span.end - 1} of {place} were read"
            )
        if self.unproven:  # rows that are out cannot be taken back: the task fails, and its next attempt gives none
            raise OffsetError(f"{what}; what this task has read may be of either topic and must not count. {_WAYS_ON}")
        self._lost(what)

    def _stalled(self) -> StreamsError:
        span, seconds = self._span, f"{self._options.stall_seconds:g} s (option stallSeconds)"
        if self._log_end is not None:
            return OffsetError(
                f"reading {span.topic}[{span.partition}] up to {span.end}: the log ends at {self._log_end} and nothing "
                f"came for {seconds}; was the topic recreated, or its log truncated?"
            )
        because = f": {self._last_error}" if self._last_error else ""
        return BrokerUnavailable(
            f"reading {span.topic}[{span.partition}] up to {span.end}: nothing from "
            f"{self._options.kafka['bootstrap.servers']} for {seconds}{because}"
        )


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None  # a message that came from a partition has one
    return offset
