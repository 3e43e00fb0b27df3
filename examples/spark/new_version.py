"""A new version of a topic: its history in one batch write, and a stream that takes over at the very same offsets.

    python -m examples.spark.new_version --out out/version2              what is there now, then end
    python -m examples.spark.new_version --out out/version2 --follow     and what comes, until Ctrl-C

``bank-events-2`` gets every deposit of ``bank-events`` with the currency that the new version of the event asks for. No
record is missing or doubled at the seam: the batch ends where the stream begins, and that place is written down before
anything else happens. Readers move over when ``kes lag`` shows that the stream has caught up.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyspark.sql.functions as f
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import streams.spark as kes_spark
from examples.bank import Deposited
from examples.spark.common import command_line, read
from examples.topics import create_topics
from streams import event_type

OLD, NEW = "bank-events", "bank-events-2"


@event_type("Deposited", version=2)
class DepositedInCurrency(msgspec.Struct, frozen=True):
    """The next version of the event."""

    account: str
    cents: int
    currency: str


def renewed(records: DataFrame) -> DataFrame:
    """Old records as new ones, in the order they have, with their own time. What is no deposit fails the job."""
    deposits = kes_spark.events(records, Deposited, on_error="fail").withColumn("currency", f.lit("EUR"))
    return kes_spark.encode(deposits, DepositedInCurrency, key="account", timestamp=f.col("_meta.timestamp"))


def seam(servers: str, out: Path) -> str:
    """Where the batch ends and the stream begins: found once, then kept, for runs that come after a crash."""
    kept = out / "seam.json"
    if not kept.exists():
        out.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(".part")
        unfinished.write_text(kes_spark.end_offsets(OLD, servers=servers))
        unfinished.rename(kept)
    return kept.read_text()


def backfill(spark: SparkSession, servers: str, out: Path) -> kes_spark.WriteResult:
    """Everything before the seam, in one transaction, once."""
    history = read(spark, servers, OLD, endingOffsets=seam(servers, out))
    return kes_spark.write(renewed(history), topic=NEW, write_id="backfill", servers=servers)


def follow(spark: SparkSession, servers: str, out: Path, *, for_ever: bool) -> StreamingQuery:
    """Everything from the seam on. (An old checkpoint knows its place: ``startingOffsets`` is for a new one.)"""
    records = (
        spark.readStream.format("grt")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", OLD)
        .option("startingOffsets", seam(servers, out))
        .load()
    )
    writer = (
        renewed(records)
        .writeStream.format("grt")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", NEW)
        .option("sink", "bank-events-2")
        .option("checkpointLocation", str(out / "checkpoint"))
    )
    return (writer.trigger(processingTime="1 second") if for_ever else writer.trigger(availableNow=True)).start()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the seam and the checkpoint")
    parser.add_argument("--follow", action="store_true", help="go on with what comes")
    given = parser.parse_args()
    create_topics(given.servers, {NEW: 10})
    spark = kes_spark.local_session("new-version")
    try:
        result = backfill(spark, given.servers, given.out)
        print(f"{result.rows:,} old records, {'written now' if result.written else 'which an earlier run has written'}")
        follow(spark, given.servers, given.out, for_ever=given.follow).awaitTermination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
