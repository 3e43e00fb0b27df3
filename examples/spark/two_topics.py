"""Two output topics and the dead letters of a stream: each batch is one transaction over all three.

    python -m examples.spark.two_topics --out out/sorted                  writeStream.format("grt")
    python -m examples.spark.two_topics --out out/sorted --each-batch     the same inside of foreachBatch

Deposits of 50.00 and more go to one topic, smaller ones to another, and what is no deposit goes to the dead letters:
each row names its topic. A reader of committed records sees all of a batch, or nothing of it, in all three.

``foreachBatch`` is for batches that are read more than once (here twice: for the deposits, which are sorted in one
pass, and for what is none), or that do something else besides. A batch that Spark repeats, after a crash, finds the
marker of its sink and writes nothing.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

import streams.spark as kes_spark
from examples.bank import Deposited
from examples.spark.common import command_line
from examples.topics import create_topics
from streams import event_type

SOURCE, LARGE, SMALL, REFUSED = "bank-events", "bank-large", "bank-small", "bank-refused"
SINK, BATCH_SINK = "bank-sorted", "bank-sorted-by-batch"


@event_type("LargeDeposit")
class LargeDeposit(msgspec.Struct, frozen=True):
    """Somebody should look at this one."""

    account: str
    cents: int


def sorted_out(records: DataFrame) -> DataFrame:
    """Rows for all three topics, each naming its own."""
    deposits = kes_spark.events(records, [Deposited], on_error="deadletter").select("Deposited.*")
    sorted_deposits = kes_spark.encode_each(
        deposits,
        kes_spark.Encoding(LargeDeposit, where="cents >= 5000", key="account", topic=LARGE),
        kes_spark.Encoding(Deposited, where="cents < 5000", key="account", topic=SMALL),
    )
    refused = kes_spark.dead_letters(records, [Deposited], topic=REFUSED)
    return sorted_deposits.unionByName(refused, allowMissingColumns=True)


def write_batch(batch: DataFrame, number: int, *, servers: str) -> None:
    """Called by Spark, in the driver, with the rows of one batch."""
    batch.persist()
    try:
        kes_spark.write_batch(
            sorted_out(batch), number, sink=BATCH_SINK, servers=servers, options={"markerTopic": REFUSED}
        )
    finally:
        batch.unpersist()


def start(
    spark: SparkSession, servers: str, out: Path, *, each_batch: bool = False, at_most: int = 200_000
) -> StreamingQuery:
    """Sort what is there now, in batches of up to ``at_most`` records."""
    records = (
        spark.readStream.format("grt")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", SOURCE)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", at_most)
        .load()
    )
    writer: DataStreamWriter
    if each_batch:
        writer = records.writeStream.foreachBatch(functools.partial(write_batch, servers=servers))
    else:
        writer = (
            sorted_out(records)
            .writeStream.format("grt")
            .option("kafka.bootstrap.servers", servers)
            .option("sink", SINK)
            .option("markerTopic", REFUSED)
        )
    return writer.option("checkpointLocation", str(out / "checkpoint")).trigger(availableNow=True).start()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--each-batch", action="store_true", help="with foreachBatch")
    given = parser.parse_args()
    create_topics(given.servers, {LARGE: 10, SMALL: 10, REFUSED: 10})
    spark = kes_spark.local_session("two-topics")
    try:
        start(spark, given.servers, given.out, each_batch=given.each_batch).awaitTermination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
