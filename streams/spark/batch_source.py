"""``spark.read.format("grt")``: a bounded read, whose ranges are fixed once, when Spark plans it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from streams.spark.planning import split
from streams.spark.read_options import ReadOptions
from streams.spark.reader import Range, batches
from streams.spark.topic_logs import LogView, require


class BatchReader(DataSourceReader):
    """A bounded read: its ranges are fixed once, when Spark plans the query."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return list(planned(self._options))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, Range):  # Spark's way of saying that there is nothing to read
            return iter(())
        return batches(partition, self._options)


def planned(options: ReadOptions) -> list[Range]:
    """The ranges that have something between start and end. Asks the cluster; blocks.

    Raises ``TopicError``, ``BrokerUnavailable``, and ``OffsetError`` when the log does not hold the offsets asked for
    (any more).
    """
    view = LogView(options)
    logs = view.logs()
    require(logs, options)
    start = view.resolve(options.starting, logs).at
    end = view.resolve(options.ending, logs).at
    return [
        Range(place.topic, place.partition, begin, stop, logs[place.topic].id)
        for place, begin, stop in split(
            {place: (start[place], end[place]) for place in sorted(start)},
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
        )
    ]
