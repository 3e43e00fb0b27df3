"""A topic as Parquet, and back into a topic: same partitions, order, keys, headers, times; a second run does nothing.

    python -m examples.spark.restore save --topic bank-events --out out/backup
    python -m examples.spark.restore load --topic bank-events-restored --out out/backup

The target exists already, with as many partitions as the topic had. Its retention counts from the records' own times:
what is older than it keeps is deleted soon after it was written.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

import streams.spark as kes_spark
from examples.spark.common import command_line, read

COLUMNS = ("key", "value", "headers", "partition", "offset", "timestamp")
"""All of a record. ``type`` and ``version`` are not among them, they are headers, and come back with the headers."""


def save(spark: SparkSession, servers: str, topic: str, out: Path) -> None:
    """Every committed record that the topic holds now. Refuses a folder that exists."""
    read(spark, servers, topic).select(*COLUMNS).write.parquet(str(out))


def load(spark: SparkSession, servers: str, topic: str, out: Path, *, tasks: int = 4) -> kes_spark.WriteResult:
    """Write what ``save`` has kept, in one transaction, once for each topic."""
    saved = spark.read.parquet(str(out))
    # All of a partition in one task, in the order that it had: records without a key have no other.
    records = saved.repartition(tasks, "partition").sortWithinPartitions("partition", "offset")
    return kes_spark.write(records, topic=topic, write_id=f"restore-{out.name}", servers=servers)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["save", "load"])
    parser.add_argument("--topic", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the Parquet files")
    given = parser.parse_args()
    spark = kes_spark.local_session("restore")
    try:
        if given.what == "save":
            save(spark, given.servers, given.topic, given.out)
            print(f"{spark.read.parquet(str(given.out)).count():,} records in {given.out}")
        else:
            result = load(spark, given.servers, given.topic, given.out)
            print(f"{result.rows:,} records, {'written now' if result.written else 'which an earlier run has written'}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
