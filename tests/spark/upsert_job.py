"""``upsert`` into a table by Java: in a session of its own, which has the jars from its start.

python -m tests.spark.upsert_job KIND JARS FOLDER [URL]

``KIND``: ``delta``, or ``jdbc`` with the URL of a PostgreSQL. Exits with 1 when the table is not what the changelog
says.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from streams.codecs import codec_for
from streams.errors import ConfigError
from tests.spark.log_kit import seed
from tests.spark.test_typed_tables import Row, changelog, records
from tests.spark.typed_events import Balance

DELTA: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
}
Contents = list[tuple[Any, ...]]


def history(rng: random.Random) -> tuple[list[list[Row]], Contents]:
    """Batches of a changelog in any order, one of them twice, and the table that they make."""
    key, value = codec_for(str), codec_for(Balance)
    expected: dict[str, tuple[Any, ...]] = {}
    rows: list[tuple[bytes, bytes | None]] = []
    for at in range(60):
        name, cents = rng.choice(["a", "b", "c", "d", "e'\""]), rng.randrange(-(2**40), 2**40)
        gone = rng.random() < 0.3
        expected[name] = (name, None, None, True, 3 * at) if gone else (name, cents, name, False, 3 * at)
        rows.append((key.encode(name), None if gone else value.encode(Balance(cents, name))))
    log = records(rows)
    batches = [log[first : first + 15] for first in range(0, 60, 15)]
    batches.append(batches[0])  # what comes late
    rng.shuffle(batches)
    return batches, sorted(expected.values())


def check(
    spark: SparkSession, folder: Path, upsert: Callable[[DataFrame], None], contents: Callable[[], Contents]
) -> None:
    """Batch by batch, and all of it again as a stream that knows nothing of that."""
    batches, expected = history(random.Random(seed()))
    for number, batch in enumerate(batches):
        rows = changelog(spark, batch)
        upsert(rows)
        rows.coalesce(1).write.parquet(str(folder / "log" / str(number)))
    assert contents() == expected, (contents(), expected)
    stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 2).parquet(str(folder / "log" / "*"))
    writer = stream.writeStream.foreachBatch(lambda batch, _: upsert(batch)).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
    assert contents() == expected, (contents(), expected)


def lake(spark: SparkSession, folder: Path) -> None:
    spark.sql("CREATE DATABASE bank")
    table, theirs = "bank.accounts", "bank.theirs"

    def upsert(rows: DataFrame, name: str = table) -> None:
        kes_spark.upsert(kes_spark.changes(rows, key=str, value=Balance), table=name)

    batches, _ = history(random.Random(0))
    rows = changelog(spark, batches[0])
    refused("no table", table, lambda: upsert(rows))
    columns = "key string, cents bigint, owner string, deleted boolean, log_offset bigint"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING delta")
    check(spark, folder, upsert, lambda: [tuple(row) for row in spark.table(table).orderBy("key").collect()])
    spark.sql(f"CREATE TABLE {theirs} (key int, owner string, since date) USING delta")
    told = "no cents; no deleted; no log_offset; since, which is none of theirs; key as int, not string"
    refused(told, theirs, lambda: upsert(rows, theirs))
    assert spark.table(theirs).count() == 0


def refused(what: str, table: str, call: Callable[[], None], kind: type[Exception] = ConfigError) -> None:
    with pytest.raises(kind, match=re.escape(what)) as told:
        call()
    assert table in str(told.value)


def database(spark: SparkSession, folder: Path, url: str) -> None:
    jdbc = {"url": url, "driver": "org.postgresql.Driver"}

    def read(table: str) -> DataFrame:
        return spark.read.format("jdbc").options(**jdbc, dbtable=table).load()

    def upsert(rows: DataFrame) -> None:
        kes_spark.upsert(kes_spark.changes(rows, key=str, value=Balance), table="public.accounts", jdbc=jdbc)

    def contents() -> Contents:
        found = read("accounts").select("key", "cents", "owner", "deleted", "log_offset")
        return sorted(tuple(row) for row in found.collect())

    check(spark, folder, upsert, contents)
    before = contents()
    bad = changelog(spark, records([(b"a", b"no json")]))
    refused("offset 0: value: corrupt", "t.changelog", lambda: upsert(bad), Exception)
    fine = kes_spark.changes(bad.where("false"), key=str, value=Balance)
    refused("does not exist", "nowhere", lambda: kes_spark.upsert(fine, table="nowhere", jdbc=jdbc), Exception)
    assert read("(SELECT 1 FROM pg_tables WHERE tablename LIKE 'kes%') AS found").count() == 0, "left in between"
    assert contents() == before


def main(kind: str, jars: str, place: str, url: str = "") -> None:
    folder = Path(place)
    settings = {"spark.jars": jars, "spark.sql.warehouse.dir": str(folder / "warehouse")}
    if kind == "delta":
        settings |= DELTA
    spark = kes_spark.local_session("upsert", cores=2, settings=settings)
    try:
        if kind == "jdbc":
            database(spark, folder, url)
        else:
            lake(spark, folder)
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
