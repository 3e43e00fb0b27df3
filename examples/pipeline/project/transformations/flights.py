"""Flights as files -> events in Kafka -> (an event source, which is no part of Spark) -> tables, and a report.

Spark allows no look at a DataFrame's columns within the functions of a pipeline, and typed events need one: so these
DataFrames are made at the top of the file, and the functions return them. The broker is the one that
``KES_BOOTSTRAP_SERVERS`` named when Spark was started.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from examples.flights import ingest
from examples.flights.aircraft import Aircraft
from examples.flights.cluster import CHANGELOGS
from examples.flights.events import AIRCRAFT_GROUP, FLIGHTS_TOPIC

FILES_A_BATCH = 3
RECORDS_A_BATCH = 10_000

spark = SparkSession.active()

files = (
    spark.readStream.schema(ingest.COLUMNS)
    .options(header=True, nullValue="NA", mode="FAILFAST", pathGlobFilter="*.csv", maxFilesPerTrigger=FILES_A_BATCH)
    .csv(spark.conf.get("flights.folder"))
)
events = ingest.encoded(files)

changelog = (
    spark.readStream.format("grt")
    .option("subscribe", CHANGELOGS[AIRCRAFT_GROUP])
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", RECORDS_A_BATCH)
    .load()
)
changes = kes_spark.changes(changelog, key=str, value=Aircraft)

dp.create_sink("flights", "grt", {"topic": FLIGHTS_TOPIC, "sink": "flights-of-the-day"})


@dp.append_flow(target="flights")
def flights_to_kafka() -> DataFrame:
    """Every file once, each batch of them in one transaction."""
    return events


@dp.table
def aircraft_changes() -> DataFrame:
    """Every change of an aircraft's state, once."""
    return changes.select("key", "value", "deleted", "_error", "_meta.partition", "_meta.offset")


@dp.materialized_view
def aircraft() -> DataFrame:
    """The latest state of each aircraft."""
    last = f.max_by(f.struct("value", "deleted"), "offset").alias("last")
    latest = spark.read.table("aircraft_changes").groupBy("key").agg(last)
    return latest.where("NOT last.deleted").select("key", "last.value.*")


@dp.materialized_view
def airports() -> DataFrame:
    """The report: the aircraft by the airport where each was seen last."""
    seen = (
        spark.read.table("aircraft").where("last_airport IS NOT NULL").groupBy(f.col("last_airport").alias("airport"))
    )
    return seen.agg(
        f.count("*").alias("aircraft"), *(f.sum(name).alias(name) for name in ("flights", "arrived", "minutes_late"))
    )
