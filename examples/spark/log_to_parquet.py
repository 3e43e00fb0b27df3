"""The event log as Parquet, every event once, by type and day: for notebooks, and for longer than topics keep it.

    python -m examples.spark.log_to_parquet --out out/bank              what is there now
    python -m examples.spark.log_to_parquet --out out/bank --follow     and what comes, until Ctrl-C

Run it again, or kill it and run it again: it goes on where it was. Spark's own log of finished files and the positions
in the checkpoint make the files exactly once. Both live in the folder ``--out``, because one without the other is worth
nothing: a new checkpoint counts its batches from 0, and the file sink leaves out the numbers that it has seen.
"""

from __future__ import annotations

from pathlib import Path

import pyspark.sql.functions as f
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import streams.spark as kes_spark
from examples.bank import Balance, Deposited
from examples.spark.common import command_line

CLASSES = [Deposited, Balance]
TOPICS = "bank-events,bank-balances"
NATURAL_KEY = ("topic", "partition", "offset")


def rows(records: DataFrame) -> DataFrame:
    """One row for each record: where it is in Kafka, when it came, and one struct column for each class.

    A record that is none of these events is kept, with the reason in ``_error`` and its place in the log.
    """
    place = [f.col(f"_meta.{name}") for name in (*NATURAL_KEY, "timestamp", "key", "version", "type")]
    day = f.to_date("_meta.timestamp").alias("date")
    names = [cls.__name__ for cls in CLASSES]
    return kes_spark.events(records, CLASSES).select(*place, day, *names, "_error")


def start(
    spark: SparkSession, servers: str, out: Path, *, follow: bool = False, at_most: int = 200_000
) -> StreamingQuery:
    """Begin, or go on, with up to ``at_most`` records in a batch. Without ``follow`` it ends at the present end."""
    records = (
        spark.readStream.format("grt")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", TOPICS)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", at_most)
        .load()
    )
    writer = (
        rows(records)
        .writeStream.format("parquet")
        .partitionBy("type", "date")
        .option("path", str(out / "events"))
        .option("checkpointLocation", str(out / "checkpoint"))
    )
    trigger = writer.trigger(processingTime="5 seconds") if follow else writer.trigger(availableNow=True)
    return trigger.start()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files and the checkpoint")
    parser.add_argument("--follow", action="store_true", help="go on with what comes")
    parser.add_argument("--at-most", type=int, default=200_000, help="records in one batch")
    given = parser.parse_args()
    spark = kes_spark.local_session("log-to-parquet")
    try:
        start(spark, given.servers, given.out, follow=given.follow, at_most=given.at_most).awaitTermination()
        spark.read.parquet(str(given.out / "events")).groupBy("type", "_error").count().show(truncate=False)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
