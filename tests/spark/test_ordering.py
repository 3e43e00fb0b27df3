"""``ordered``: the order per key that is meant, in batches (see also ``test_writing.py``) and in streams."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.errors import ConfigError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SCHEMA = "key string, value string, timestamp timestamp, at int, rank int"


def stream_of(
    spark: SparkSession, folder: Path, rows: list[tuple[str, str, dt.datetime, int | None, int]]
) -> DataFrame:
    spark.createDataFrame(rows, SCHEMA).repartition(3).write.mode("append").parquet(str(folder))
    return spark.readStream.schema(SCHEMA).parquet(str(folder))


@pytest.mark.nightly
def test_a_stream_is_in_order_per_key_within_each_batch(spark: SparkSession, tmp_path: Path) -> None:
    random_ = random.Random(7)
    now = dt.datetime(2026, 1, 1)
    rows = [(f"k{random_.randrange(9)}", str(n), now, random_.choice([None, 1, 2, 3]), n) for n in range(500)]
    ordered = kes_spark.ordered(stream_of(spark, tmp_path / "in", rows), "at", "rank", partitions=2)
    assert ordered.columns == ["key", "value", "timestamp"]
    found: dict[str, list[str]] = {}
    tasks = set()

    def take(batch: DataFrame, number: int) -> None:
        for row in batch.withColumn("task", f.spark_partition_id()).collect():
            found.setdefault(row.key, []).append(row.value)
            tasks.add((row.key, row.task))

    writer = ordered.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    wanted: dict[str, list[str]] = {}
    for key, value, _, at, _ in sorted(rows, key=lambda row: (row[3] or 0, row[4])):  # nulls first, as in a batch
        wanted.setdefault(key, []).append(value)
        assert at is None or at > 0
    assert found == wanted
    assert len(tasks) == len(wanted) == 9


def test_a_batch_is_in_the_same_order(spark: SparkSession) -> None:
    rows = [(key, str(n), dt.datetime(2026, 1, 1), at, n) for n, at in enumerate([3, None, 1, 3, 2]) for key in "abcd"]
    shuffled = spark.createDataFrame(rows, SCHEMA).repartition(7).orderBy(f.rand(seed=1))
    for columns, order in ((("at", "rank"), ["1", "2", "4", "0", "3"]), ((f.desc("rank"),), ["4", "3", "2", "1", "0"])):
        found: dict[str, list[str]] = {}
        for row in kes_spark.ordered(shuffled, *columns, partitions=3).collect():
            found.setdefault(row.key, []).append(row.value)
        assert found == dict.fromkeys("abcd", order)


def test_what_a_stream_cannot_be_sorted_by_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    rows = stream_of(spark, tmp_path / "in", [("k", "v", dt.datetime(2026, 1, 1), 1, 1)])
    with pytest.raises(ConfigError, match="by name, ascending"):
        kes_spark.ordered(rows, f.desc("at"), partitions=1)
    with pytest.raises(ConfigError, match="when is no column"):
        kes_spark.ordered(rows, "when", partitions=1)
