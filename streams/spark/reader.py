"""The executor's side of a read: one partition of a topic, from one position to another, as Arrow batches.

Where a range ends is a *position*. "The record before the end" may not exist: transaction markers, aborted records
and compacted ones take offsets too. So the end is reached by a record at or past it, or by the broker's word that the
partition (as a reader of committed records sees it) ends at or past it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from pyspark.sql.datasource import InputPartition

from streams.errors import BrokerUnavailable, OffsetError, StreamsError
from streams.spark.kafka import client, translated
from streams.spark.read_options import ReadOptions
from streams.spark.record_batches import batch_of, collector_off

_CHUNK: Final = 5000
_POLL_SECONDS: Final = 0.5
_ASK_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 3.0

_OUT_OF_RANGE: Final = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
_NO_SUCH_TOPIC: Final = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)
_FINAL: Final = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError._SSL,
    KafkaError._BAD_MSG,
    KafkaError._BAD_COMPRESSION,
    KafkaError.INVALID_MSG,
    KafkaError._NOT_IMPLEMENTED,
)

_log = logging.getLogger(__name__)


class Range(InputPartition):
    """Records of one partition from offset ``start`` up to, without, ``end``."""

    def __init__(self, topic: str, partition: int, start: int, end: int) -> None:
        self.topic = topic
        self.partition = partition
        self.start = start
        self.end = end


def batches(span: Range, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """The range as ``pyarrow.RecordBatch``es in offset order, with an own consumer that is closed at the end.

    Raises ``OffsetError`` when records of the range are gone (with ``failOnDataLoss``; otherwise goes on with the next
    ones there are, and logs), ``BrokerUnavailable`` when nothing comes for ``stallSeconds``.
    """
    with contextlib.closing(_RangeReader(span, options)) as reader:
        while True:
            with collector_off():
                messages = reader.next()
                batch = batch_of(messages, span.topic, span.partition, options) if messages else None
                del messages
            if batch is not None:
                yield batch
            if reader.ended:
                return


class _RangeReader:
    """One consumer at one range. ``next`` gives what has come, in pieces; ``ended`` says that there is no more."""

    def __init__(self, span: Range, options: ReadOptions) -> None:
        self.ended = False
        self._span = span
        self._options = options
        self._last_error = ""
        self._log_end: int | None = None  # where the broker says that the partition ends, below the range's end
        settings: dict[str, Any] = {
            "queued.max.messages.kbytes": 32768,
            "fetch.queue.backoff.ms": 5,  # with the default, 1 s, reading halts each time that the queue was full
            "reconnect.backoff.max.ms": 1000,
            **options.kafka,
            "group.id": "kes-spark",  # asked for by the client; nothing is ever committed under it
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed" if options.committed_only else "read_uncommitted",
        }
        self._consumer: Consumer = client(Consumer, settings)
        self._begin_at(span.start)
        self._progress = time.monotonic()
        self._looked = 0.0  # when it was last asked whether the topic is still there
        self._missing = 0  # how many times in a row it was not

    def close(self) -> None:
        self._consumer.close()

    def next(self) -> list[Message]:
        """The next messages of the range; none when something else has happened, or nothing for half a second."""
        # `consume(n, timeout)` waits the whole timeout when fewer than n are there: wait for one, then take the rest.
        first = self._consumer.poll(_POLL_SECONDS)
        if first is None:
            self._check_stall()
            return []
        found = [first, *self._consumer.consume(_CHUNK - 1, 0)]
        if any(error is not None for error in map(Message.error, found)) or _offset(found[-1]) >= self._span.end - 1:
            found = self._until_end(found)
        if found:
            self._progress = time.monotonic()
        return found

    def _begin_at(self, offset: int) -> None:
        self._consumer.assign([TopicPartition(self._span.topic, self._span.partition, offset)])
        # The partition's leader would be looked for by a timer of up to a second; asking finds it now.
        with contextlib.suppress(KafkaException):
            self._consumer.list_topics(self._span.topic, timeout=min(_ASK_SECONDS, self._options.stall_seconds))

    def _until_end(self, messages: list[Message]) -> list[Message]:
        wanted: list[Message] = []
        for message in messages:
            error = message.error()
            if error is None:
                offset = _offset(message)
                if offset >= self._span.end:
                    self.ended = True
                    break
                wanted.append(message)
                self.ended = offset == self._span.end - 1
            elif error.code() == KafkaError._PARTITION_EOF:
                self._log_end = _offset(message)
                self.ended = self._log_end >= self._span.end
            else:
                self._take_error(error)
            if self.ended:
                break
        return wanted

    def _take_error(self, error: KafkaError) -> None:
        """Raises what does not pass by itself. The rest is told when nothing comes any more."""
        span, code = self._span, error.code()
        if code in _OUT_OF_RANGE:
            self._skip_what_is_gone()
        elif code in _NO_SUCH_TOPIC:
            self._lost(f"{span.topic}[{span.partition}] was deleted before it was read up to {span.end}")
            self.ended = True
        elif code in _FINAL or error.fatal():
            raise translated(KafkaException(error), f"reading {span.topic}[{span.partition}]", self._options.kafka)
        self._last_error = error.str()

    def _skip_what_is_gone(self) -> None:
        span = self._span
        place = TopicPartition(span.topic, span.partition)
        try:
            first, end = self._consumer.get_watermark_offsets(place, timeout=_ASK_SECONDS, cached=False)
        except KafkaException as error:
            raise translated(error, f"reading {span.topic}[{span.partition}]", self._options.kafka) from error
        (at,) = self._consumer.position([place])
        stood = at.offset if at.offset >= 0 else span.start
        self._lost(
            f"{span.topic}[{span.partition}]: records from offset {stood} are gone (retention, or the topic was made "
            f"again) since the read was planned, which is up to {span.end}; the log has {first} to {end} now"
        )
        if stood < first < span.end:
            self._begin_at(first)
        else:
            self.ended = True

    def _lost(self, told: str) -> None:
        if self._options.fail_on_data_loss:
            raise OffsetError(f"{told}. Run it again; failOnDataLoss=false goes on with what is there")
        _log.warning("failOnDataLoss=false: goes on although records are gone: %s", told)

    def _check_stall(self) -> None:
        now = time.monotonic()
        if now - self._progress > self._options.stall_seconds:
            raise self._stalled()
        if now - max(self._progress, self._looked) > _LOOK_SECONDS:
            self._looked = now
            self._look_for_topic()

    def _look_for_topic(self) -> None:
        """A consumer of a topic that is deleted hears nothing of it for a long time."""
        span = self._span
        try:
            topic = self._consumer.list_topics(span.topic, timeout=_ASK_SECONDS).topics.get(span.topic)
        except KafkaException as error:
            self._last_error = error.args[0].str()
            return
        missing = topic is not None and topic.error is not None and topic.error.code() in _NO_SUCH_TOPIC
        self._missing = self._missing + 1 if missing else 0
        if self._missing > 1:  # once may be a broker that has not heard of the topic yet
            self._lost(f"{span.topic}[{span.partition}] was deleted before it was read up to {span.end}")
            self.ended = True

    def _stalled(self) -> StreamsError:
        span, seconds = self._span, f"{self._options.stall_seconds:g} s (option stallSeconds)"
        if self._log_end is not None:
            return OffsetError(
                f"reading {span.topic}[{span.partition}] up to {span.end}: the log ends at {self._log_end} and nothing "
                f"came for {seconds}; was the topic made again, or its log truncated?"
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
