"""Operators with state before the sink, for the proof: whatever they keep wrongly is a record that the oracle misses,
sees twice, or does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

import streams.spark as kes_spark

KEYS = 200
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}


def deduplicated(rows: DataFrame) -> DataFrame:
    """The first of those with one key and value, in the order that they were given in."""
    first = rows.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["key", "value"])
    numbered = first.selectExpr("key", "value", "cast(substring_index(cast(value as string), ' ', 1) as int) number")
    return kes_spark.ordered(numbered, "number", partitions=2)


class Numbered(StatefulProcessor):
    """Gives on each record of a key that is the next one by its state; of others it makes what was never sent."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", StructType([StructField("count", LongType())]))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        count = self._count.get()[0] if self._count.exists() else 0
        first = int(bytes(key[0]).removeprefix(b"key-"))
        for number, value in sorted((int(bytes(row.value).split(b" ")[0]), bytes(row.value)) for row in rows):
            yield Row(key=key[0], value=value if number == first + KEYS * count else b"-2 not the next one")
            count += 1
        self._count.update((count,))

    def close(self) -> None:
        pass


def numbered(rows: DataFrame) -> DataFrame:
    """By a processor of one's own."""
    return rows.groupBy("key").transformWithState(
        statefulProcessor=Numbered(), outputStructType="key binary, value binary", outputMode="append", timeMode="none"
    )


OPERATORS = {"": lambda rows: rows, "deduplicated": deduplicated, "numbered": numbered}
