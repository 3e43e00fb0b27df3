"""The executor's side of a read: one partition of a topic, from one position to another, as Arrow batches.

Where a range ends is a *position*. "The record before the end" may not exist: transaction markers, aborted records
and compacted ones take offsets too. So the end is reached by a record at or past it, or by the broker's word that the
partition (as a reader of committed records sees it) ends at or past it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from pyspark.sql import types as t
from pyspark.sql.datasource import InputPartition

from streams.errors import BrokerUnavailable, ConfigError, OffsetError
from streams.records import TYPE_HEADER, VERSION_HEADER
from streams.spark.columns import HEADERS_TYPE
from streams.spark.kafka import client, translated
from streams.spark.read_options import ReadOptions

_BATCH: Final = 5000
_POLL_SECONDS: Final = 0.5

_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("type", pa.string()),
        ("version", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
    ]
)


READ_SCHEMA: Final = t.StructType(
    [
        t.StructField("key", t.BinaryType()),
        t.StructField("value", t.BinaryType()),
        t.StructField("type", t.StringType()),
        t.StructField("version", t.IntegerType()),
        t.StructField("headers", HEADERS_TYPE),
        t.StructField("topic", t.StringType()),
        t.StructField("partition", t.IntegerType()),
        t.StructField("offset", t.LongType()),
        t.StructField("timestamp", t.TimestampType()),
        t.StructField("timestampType", t.IntegerType()),
    ]
)


def check_schema(schema: t.StructType) -> None:
    """Raises ``ConfigError`` for a schema of the user's own."""
    if schema.simpleString() != READ_SCHEMA.simpleString():
        raise ConfigError("format('grt') has columns of its own; leave out .schema(...) and use streams.spark.events")


class Range(InputPartition):
    """Records of one partition from offset ``start`` up to, without, ``end``."""

    def __init__(self, topic: str, partition: int, start: int, end: int) -> None:
        self.topic = topic
        self.partition = partition
        self.start = start
        self.end = end


def batches(span: Range, options: ReadOptions) -> Iterator[Any]:
    """The range as ``pyarrow.RecordBatch``es in offset order, with an own consumer that is closed at the end."""
    for messages in _messages(span, options):
        rows = [(message, *_type_and_version(message)) for message in messages]
        if options.types is not None:
            rows = [row for row in rows if row[1] in options.types]
        if rows:
            yield _arrow(rows, span)


def _messages(span: Range, options: ReadOptions) -> Iterator[list[Message]]:
    settings = {
        "group.id": "kes-spark",  # asked for by the client; nothing is ever committed under it
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed" if options.committed_only else "read_uncommitted",
        "queued.max.messages.kbytes": 32768,
        "fetch.queue.backoff.ms": 10,  # 1,000 by default: a full queue would stay unfilled for a second
    }
    consumer = client(Consumer, options.kafka, settings)
    try:
        consumer.assign([TopicPartition(span.topic, span.partition, span.start)])
        # The partition's leader would be looked for by a timer of up to a second; asking finds it now.
        with contextlib.suppress(KafkaException):
            consumer.list_topics(span.topic, timeout=5)
        progress = time.monotonic()
        while True:
            # `consume(n, timeout)` waits the whole timeout when fewer than n are there: wait for one, then take the
            # rest.
            first = consumer.poll(_POLL_SECONDS)
            if first is None:
                _check_stall(span, options, progress)
                continue
            wanted, ended = _until_end([first, *consumer.consume(_BATCH - 1, 0)], span, options)
            if wanted:
                progress = time.monotonic()
                yield wanted
            if ended:
                return
    finally:
        consumer.close()


def _until_end(messages: list[Message], span: Range, options: ReadOptions) -> tuple[list[Message], bool]:
    wanted: list[Message] = []
    for message in messages:
        error = message.error()
        offset = message.offset()
        if error is None:
            if offset is None or offset >= span.end:
                return wanted, True
            wanted.append(message)
            if offset == span.end - 1:
                return wanted, True
        elif error.code() == KafkaError._PARTITION_EOF:
            if offset is not None and offset >= span.end:
                return wanted, True
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise OffsetError(
                f"{span.topic}[{span.partition}]: records from offset {span.start} are gone (retention, or the "
                "topic was "
                "made again) since the read was planned; run it again"
            )
        elif not error.retriable():
            raise translated(KafkaException(error), f"reading {span.topic}[{span.partition}]", options.kafka)
    return wanted, False


def _check_stall(span: Range, options: ReadOptions, progress: float) -> None:
    if time.monotonic() - progress > options.stall_seconds:
        raise BrokerUnavailable(
            f"reading {span.topic}[{span.partition}] up to {span.end}: nothing from "
            f"{options.kafka['bootstrap.servers']} for "
            f"{options.stall_seconds:g} s (option stallSeconds)"
        )


def _type_and_version(message: Message) -> tuple[str | None, int | None]:
    """The event's name and version; version 1 when the header is missing, ``None`` when it makes no sense."""
    name: str | None = None
    version: int | None = 1
    seen_type = seen_version = False
    for header, value in _headers(message):
        if header == TYPE_HEADER and not seen_type:
            seen_type = True
            name = _text(value)
        elif header == VERSION_HEADER and not seen_version:
            seen_version = True
            digits = _text(value) or ""
            version = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 9 else None
    return name, version


def _headers(message: Message) -> Any:
    # The stubs say that headers may be a mapping or text; what is received is a list of pairs.
    return message.headers() or ()


def _text(value: str | bytes | None) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return value


def _arrow(rows: list[tuple[Message, str | None, int | None]], span: Range) -> Any:
    names: list[str] = []
    values: list[bytes | None] = []
    ends = [0]
    for message, _, _ in rows:
        for name, value in _headers(message):
            names.append(name)
            values.append(value.encode() if isinstance(value, str) else value)
        ends.append(len(names))
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, pa.string()), pa.array(values, pa.binary())], names=["key", "value"]
    )
    stamps = [message.timestamp() for message, _, _ in rows]
    return pa.RecordBatch.from_arrays(
        [
            pa.array([message.key() for message, _, _ in rows], pa.binary()),
            pa.array([message.value() for message, _, _ in rows], pa.binary()),
            pa.array([name for _, name, _ in rows], pa.string()),
            pa.array([version for _, _, version in rows], pa.int32()),
            pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pairs),
            pa.array([span.topic] * len(rows), pa.string()),
            pa.array([span.partition] * len(rows), pa.int32()),
            pa.array([message.offset() for message, _, _ in rows], pa.int64()),
            pa.array([stamp * 1000 if kind else None for kind, stamp in stamps], pa.timestamp("us", "UTC")),
            pa.array([kind - 1 for kind, _ in stamps], pa.int32()),
        ],
        schema=_SCHEMA,
    )
