"""``spark.read.format("grt")``: a bounded read, whose ranges are fixed once, when Spark plans it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from confluent_kafka.admin import AdminClient
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader, InputPartition

from streams.errors import ConfigError, OffsetError
from streams.spark.kafka import bounds, client, partitions_of
from streams.spark.read_options import EARLIEST, LATEST, Offsets, ReadOptions
from streams.spark.reader import Range, batches
from streams.spark.sink import HEADERS_TYPE

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
    ]
)


class BatchReader(DataSourceReader):
    """A bounded read: its ranges are fixed once, when Spark plans the query."""

    def __init__(self, options: ReadOptions, schema: t.StructType) -> None:
        if schema.simpleString() != READ_SCHEMA.simpleString():
            raise ConfigError(
                "format('grt') has columns of its own; leave out .schema(...) and use streams.spark.events"
            )
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return list(planned(self._options))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, Range):  # Spark's way of saying that there is nothing to read
            return iter(())
        return batches(partition, self._options)


def planned(options: ReadOptions) -> list[Range]:
    """One range for each partition that has something between start and end. Asks the cluster; blocks.

    Raises ``TopicError``, ``BrokerUnavailable``, and ``OffsetError`` when the log does not hold the offsets asked for
    (any more).
    """
    admin = client(AdminClient, options.kafka)
    topics = partitions_of(admin, options.topics, options.kafka)
    edges = bounds(admin, topics, committed_only=options.committed_only, kafka=options.kafka)
    found = []
    for (topic, partition), (first, end) in sorted(edges.items()):
        start = _position("startingOffsets", options.starting, topic, partition, first, end)
        stop = _position("endingOffsets", options.ending, topic, partition, first, end)
        if start < stop:
            found.append(Range(topic, partition, start, stop))
    return found


def _position(option: str, offsets: Offsets, topic: str, partition: int, first: int, end: int) -> int:
    if offsets == "earliest":
        return first
    if offsets == "latest":
        return end
    assert isinstance(offsets, dict)
    given = offsets[topic].get(partition)
    if given is None:
        raise ConfigError(f"option {option} says nothing about {topic}[{partition}]: name all partitions of the topic")
    if given in (EARLIEST, LATEST):
        return first if given == EARLIEST else end
    if not first <= given <= end:
        raise OffsetError(
            f"option {option}: {topic}[{partition}] has the offsets {first} to {end} now, not {given}; records "
            "before the "
            "first are gone (retention), the end is that of committed records"
        )
    return given
