"""A pipeline of one query that stays up: the bank's deposits, copied into another topic.

kes spark run examples.spark_pipeline:pipeline --metrics 9100
"""

from __future__ import annotations

import os

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import streams.spark as kes_spark

FOLDER = os.environ.get("CHECKPOINTS", "checkpoints")


def copy(spark: SparkSession) -> StreamingQuery:
    """Start it; the brokers are those of ``KES_BOOTSTRAP_SERVERS``."""
    records = spark.readStream.format("grt").option("subscribe", "bank-events").option("startingOffsets", "earliest")
    writer = records.load().writeStream.format("grt").option("topic", "bank-copy").option("sink", "bank-copy")
    return writer.option("checkpointLocation", f"{FOLDER}/bank-copy").start()


pipeline = kes_spark.Pipeline("bank-copy", copy)
