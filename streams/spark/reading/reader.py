"""The executor's side of a read: one partition of a topic, from one position to another, as Arrow batches.

Where a range ends is a *position*. "The record before the end" may not exist: transaction markers, aborted records
and compacted ones take offsets too. So the end is reached by a record batch that reaches there.

Offsets mean nothing without the topic that they were planned for: one that was deleted and recreated has the same
name, and other records under the same offsets. So a range names the topic's id, and brokers get it with each fetch;
of those that do not take it (before Kafka 3.1) it is requested after records have come.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from streams.errors import BrokerUnavailable, LogDamaged, OffsetError, StreamsError, TopicError, TopicReplaced
from streams.kafka.reading.fetch_session import NO_ID, FetchKind
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.reading.reading_loop import ReadingLoop
from streams.kafka.reading.record_batches import FetchedBatches
from streams.spark.kafka import settings_of, topic_admin, translated
from streams.spark.reading.kept import keep_loop, keep_rest, take_loop, take_rest
from streams.spark.reading.planning import Advance, split
from streams.spark.reading.pushed import Pushed
from streams.spark.reading.read_options import Edge, ReadOptions
from streams.spark.reading.record_batches import Columns
from streams.spark.reading.topic_logs import LogView, require

_MANY: Final = 16
"""Ranges; of more than so many, small ones share tasks."""
_SHARED_OFFSETS: Final = 1000
"""Offsets of the ranges that share a task, together."""
_MOST_SHARED: Final = 64
"""Ranges that share a task."""
_CHUNK: Final = 5000
_CHUNK_BYTES: Final = 8 << 20
_POLL_SECONDS: Final = 0.5
_ASK_SECONDS: Final = 10.0

_BELIEVE_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 0.3

_WAYS_ON: Final = "Load the DataFrame again, or start the query again; failOnDataLoss=false goes on with what is there"

_FIRST_BYTES: Final = ((8_000, 32 << 10), (20_000, 64 << 10), (200_000, 256 << 10))
"""Up to how many offsets of a range; bytes of its first fetch. The next ones bring what is left, as far as the first
tells: what is fetched beyond the end is of use only if the next range is read by the same worker."""
_MOST_BYTES: Final = 1 << 20
"""Bytes of one fetch, unless a record batch is larger."""
_LIMITS: Final = ("fetch.message.max.bytes", "max.partition.fetch.bytes")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Range(InputPartition):
    """Records of one partition from offset ``start`` up to, without, ``end``, of the topic with the id ``topic_id``."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str


@dataclass(frozen=True)
class SmallRanges(InputPartition):
    """Ranges that one task reads, one after the other: a task costs Spark as much as some thousand rows."""

    parts: tuple[Range, ...]


def ranges(planned: Advance, ids: Mapping[str, str], options: ReadOptions) -> list[InputPartition]:
    """Return the planned ranges, without the empty ranges, cut as the options say. ``ids`` are those of the topics.
    Where there are many, small ones share tasks, unless ``minPartitions`` asks for more of these."""
    found = [
        Range(place.topic, place.partition, begin, stop, ids[place.topic])
        for place, begin, stop in split(
            {place: (begin, planned.end[place]) for place, begin in planned.begin.items()},
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
        )
    ]
    if len(found) <= _MANY or options.min_partitions is not None:
        return [*found]
    tasks: list[list[Range]] = []
    left = 0
    for span in found:
        size = span.end - span.start
        if size > left or len(tasks[-1]) == _MOST_SHARED:
            tasks.append([])
            left = _SHARED_OFFSETS
        tasks[-1].append(span)
        left -= size
    return [SmallRanges(tuple(parts)) if len(parts) > 1 else parts[0] for parts in tasks]


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
        found = map(self._pushed.kept, batches(partition, self._options))
        return (batch for batch in found if batch.num_rows)


class _PushFilters:
    """A stand-in for ``pushFilters`` of a reader, which looks like the inherited method, and takes filters over."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._reader.take_over(filters)


def batches(partition: InputPartition, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """A range, or some of them, as ``pyarrow.RecordBatch``es, each in offset order. Connections, and what was fetched
    beyond the end, are kept for the next range.

    Raises ``OffsetError`` when records of the range are gone, or the topic is another one than was planned (with
    ``failOnDataLoss``; otherwise goes on with the next ones there are, and logs), ``BrokerUnavailable`` when nothing
    comes for ``stallSeconds``, ``LogDamaged`` for what cannot be decoded.
    """
    # Neither of them is Spark's way of saying that there is nothing to read.
    parts = (partition,) if isinstance(partition, Range) else getattr(partition, "parts", ())
    for span in parts:
        with contextlib.closing(_RangeReader(span, options)) as reader:
            while not reader.ended:
                batch = reader.next()
                if batch is not None:
                    for at in range(0, batch.num_rows, _CHUNK):
                        yield batch.slice(at, _CHUNK)
                    reader.resume()


class _RangeReader:
    """Reads one range. ``next`` gives what has come, in pieces; ``ended`` says that there is no more."""

    def __init__(self, span: Range, options: ReadOptions) -> None:
        self.ended = False
        self._span = span
        self._options = options
        self._where = f"{span.topic}[{span.partition}]"
        self._id = _id_of(span.topic_id)
        self._rest_key = (
            frozenset(options.kafka.items()), options.committed_only, span.topic, span.topic_id, span.partition
        )  # fmt: skip
        self._position = span.start
        self._waiting: deque[FetchedBatches] = deque()
        self._columns = Columns()
        self._loop: ReadingLoop | None = None
        self._fetcher: LogFetcher | None = None
        self._failure: StreamsError | None = None
        self._progress = time.monotonic()
        self._has_failed = False  # since the last record, while the topic was there
        self._is_unproven = False  # rows are out, of brokers that do not take the topic's id
        if (rest := take_rest(self._rest_key, span.start)) is not None:
            self._waiting.append(rest)

    def next(self) -> pa.RecordBatch | None:
        """The next rows of the range; none when something else has happened, or nothing for half a second."""
        columns, end = self._columns, self._span.end
        columns.clear()
        while self._position < end and columns.rows < _CHUNK and columns.size < _CHUNK_BYTES:
            if self._waiting:
                self._decode()
            elif self._failure is None and self._receive():
                continue
            elif columns.rows:  # what is there goes first
                break
            else:
                self._mind_failure()
                return None
        self.ended = self._position >= end
        batch = columns.batch(self._span.topic, self._span.partition, self._options) if columns.rows else None
        if self._fetcher is not None and self._fetcher.by_name and (self.ended or not self._is_unproven):
            # After records have come, never before: an id does not come back, so a topic that has it still was the same
            # one all the time before. Earlier, the topic could be made again in between.
            if not self.is_planned_topic():
                self.ended = True
                return None
            self._is_unproven = True
        if self.ended and self._waiting:
            keep_rest(self._rest_key, self._waiting[0])
        return batch

    def resume(self) -> None:
        """Go on: the time that Spark has taken for the rows is no silence of the broker's."""
        self._progress = time.monotonic()

    def close(self) -> None:
        """Leave the connections to the next range."""
        if self._fetcher is not None:
            self._fetcher.close()
        if self._loop is not None:
            keep_loop(self._options.kafka, self._loop)

    def _decode(self) -> None:
        batches = self._waiting[0]
        try:
            batches.fill(self._columns, _CHUNK, self._span.end)
        except StreamsError as error:
            self._waiting.clear()
            self._failure = error
            return
        self._position, self._progress, self._has_failed = batches.position, time.monotonic(), False
        if batches.is_done:
            self._waiting.popleft()

    def _receive(self) -> bool:
        """Wait for answers of the broker. ``False``: nothing came, or a failure."""
        fetcher = self._fetcher or self._begin()
        self._waiting.extend(found for _, found in fetcher.poll_fetched(_POLL_SECONDS))
        self._failure = next(iter(fetcher.take_failures().values()), None)
        return bool(self._waiting)

    def _begin(self) -> LogFetcher:
        """Begin to fetch at the position."""
        span, options = self._span, self._options
        if self._loop is None:
            self._loop = take_loop(options.kafka)
        if self._fetcher is None:
            self._fetcher = LogFetcher(
                settings_of(options.kafka), span.topic, _kind_of(span.end - span.start, options),
                loop=self._loop, committed_only=options.committed_only,
            )  # fmt: skip
        self._fetcher.add_all({span.partition: self._position}, {span.partition: span.end}, self._id)
        return self._fetcher

    def _mind_failure(self) -> None:
        """Raises errors that do not pass by themselves, and ends what lasts too long."""
        error, self._failure = self._failure, None
        if error is None:
            self._check_stall()
        elif isinstance(error, OffsetError) and not isinstance(error, TopicReplaced):
            self._skip_what_is_gone()
        elif isinstance(error, LogDamaged) or not isinstance(error, TopicError | TopicReplaced):
            raise error
        elif not self.is_planned_topic():
            self.ended = True
        elif self._has_failed:
            raise error
        else:  # one broker was late to know it
            self._has_failed = True
            self._begin()

    def _skip_what_is_gone(self) -> None:
        span, stood = self._span, self._position
        if not self.is_planned_topic():
            self.ended = True
            return
        marks = topic_admin(self._options.kafka).watermarks(span.topic, [span.partition], _ASK_SECONDS)[span.partition]
        self._lost(
            f"{self._where}: records from offset {stood} are gone (retention, or the log was "
            f"truncated) since the read was planned, which is up to {span.end}; the log has {marks.start} to "
            f"{marks.end} now"
        )
        if stood < marks.start < span.end:
            self._position = marks.start
            self._begin()
        else:
            self.ended = True

    def _lost(self, text: str) -> None:
        if self._options.fail_on_data_loss:
            raise OffsetError(f"{text}. {_WAYS_ON}")
        _log.warning("failOnDataLoss=false: goes on although records are gone: %s", text)

    def _check_stall(self) -> None:
        fetcher = self._fetcher
        assert fetcher is not None
        if (refused := fetcher.refused) is not None:
            raise translated(refused, f"reading {self._where}", self._options.kafka)
        if time.monotonic() - self._progress > self._options.stall_seconds:
            if fetcher.by_name and not self.is_planned_topic():
                self.ended = True
                return
            raise self._stalled(fetcher)

    def _id_now(self, seconds: float) -> str | None:
        """Return the id that the topic has now; ``None`` when there is none of this name."""
        found = topic_admin(self._options.kafka).identity(self._span.topic, seconds)
        return None if found is None else found[0]

    def is_planned_topic(self) -> bool:
        """Check whether the topic is still the one that was planned. Otherwise raises ``OffsetError``, or logs the
        loss."""
        deadline = time.monotonic() + _BELIEVE_SECONDS
        while (now := self._id_now(self._options.stall_seconds)) != self._span.topic_id:
            if time.monotonic() > deadline:  # so it is not just a broker that does not know the topic yet
                self._tell_gone(now)
                return False
            time.sleep(_AGAIN_SECONDS)
        return True

    def _tell_gone(self, now: str | None) -> None:
        """The topic that was planned is not there; one with the id ``now`` may be."""
        span = self._span
        what = f"{self._where} was deleted before it was read up to {span.end} (its id was {span.topic_id})"
        if now is not None:
            is_proven = self._fetcher is not None and not self._fetcher.by_name
            what = (
                f"{span.topic} was deleted and recreated (id {span.topic_id} then, {now} now) before offsets "
                f"{self._position if is_proven else span.start} to {span.end - 1} of {self._where} were read"
            )
        if self._is_unproven:  # rows that are out cannot be taken back: the task fails, and its next attempt gives none
            raise OffsetError(f"{what}; what this task has read may be of either topic and must not count. {_WAYS_ON}")
        self._lost(what)

    def _stalled(self, fetcher: LogFetcher) -> StreamsError:
        span, seconds = self._span, f"{self._options.stall_seconds:g} s (option stallSeconds)"
        if 0 <= (log_end := fetcher.end_of(span.partition)) <= self._position:
            return OffsetError(
                f"reading {self._where} up to {span.end}: the log ends at {log_end} and nothing "
                f"came for {seconds}; was the topic recreated, or its log truncated?"
            )
        because = f": {fetcher.reason}" if fetcher.reason else ""
        return BrokerUnavailable(
            f"reading {self._where} up to {span.end}: nothing from "
            f"{self._options.kafka['bootstrap.servers']} for {seconds}{because}"
        )


def _kind_of(offsets: int, options: ReadOptions) -> FetchKind:
    most = next((int(options.kafka[name]) for name in _LIMITS if name in options.kafka), _MOST_BYTES)
    first = next((size for limit, size in _FIRST_BYTES if offsets <= limit), most)
    answer = int(options.kafka.get("fetch.max.bytes", 8 << 20))
    return FetchKind("range", 20, 500, min(first, most), most, answer, keeps_session=False)


def _id_of(text: str) -> UUID:
    """Read the id of a topic as ``topic_id_text`` writes it."""
    return UUID(bytes=base64.b64decode(f"{text}==")) if len(text) == 22 else NO_ID
