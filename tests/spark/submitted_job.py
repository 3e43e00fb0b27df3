"""A pipeline as a file for ``spark-submit``: one topic copied into another, then it ends.

``spark-submit ... submitted_job.py SERVERS SOURCE TARGET FOLDER``. Its last line says where it ran.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import streams.spark as kes_spark

SERVERS, SOURCE, TARGET, FOLDER = sys.argv[1:]


def copy(spark: SparkSession) -> StreamingQuery:
    print(f"master {spark.sparkContext.master}", flush=True)
    options = {"kafka.bootstrap.servers": SERVERS}
    stream = spark.readStream.format("grt").options(**options, subscribe=SOURCE, startingOffsets="earliest").load()
    writer = stream.select("key", "value").writeStream.format("grt").options(**options, topic=TARGET, sink="submitted")
    writer = writer.option("stagingDir", f"{FOLDER}/staging").option("checkpointLocation", f"{FOLDER}/checkpoint")
    return writer.trigger(availableNow=True).start()


pipeline = kes_spark.Pipeline("submitted", copy)

if __name__ == "__main__":
    sys.exit(pipeline.run())
