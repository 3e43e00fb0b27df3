"""The rows that both sides read and write.

An event is a ``Deposited`` of about 100 bytes of JSON with its account as key and its type as header. Rows are
numbered; an account is the number modulo ``ACCOUNTS``. What a topic must hold is known from the rows before they met
Kafka.
"""

from __future__ import annotations

from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from benchmarks.spark.judge import TYPE, Content
from streams import event_type

ACCOUNTS: Final = 2_000


@event_type(TYPE)
class Deposited(msgspec.Struct, frozen=True):
    """The event. ``id`` is the row's number and comes first in the JSON."""

    id: int
    account: str
    cents: int
    note: str


def typed_rows(spark: SparkSession, rows: int, tasks: int) -> DataFrame:
    """Columns of a ``Deposited``, made in ``tasks`` tasks."""
    number = f.col("id")
    return spark.range(0, rows, 1, tasks).select(
        "id",
        f.concat(f.lit("account-"), f.lpad((number % ACCOUNTS).cast("string"), 5, "0")).alias("account"),
        (number % 977).alias("cents"),
        f.lit("salary of the month, paid in").alias("note"),
    )


def header_column() -> Column:
    """The headers of every row, as the connector wants them."""
    return f.array(f.struct(f.lit("__grt__").alias("key"), f.lit(TYPE).cast("binary").alias("value")))


def for_grt(typed: DataFrame) -> DataFrame:
    """Rows as ``format("grt")`` writes them."""
    return kes_spark.encode(typed, Deposited, key="account")


def for_connector(typed: DataFrame) -> DataFrame:
    """The same records, made by hand for the connector."""
    return typed.select(
        f.col("account").cast("binary").alias("key"),
        f.to_json(f.struct("id", "account", "cents", "note")).cast("binary").alias("value"),
        header_column().alias("headers"),
    )


def content_of(records: DataFrame) -> Content:
    """Of columns ``key`` and ``value``."""
    found = records.agg(f.count("*"), f.sum(f.crc32("key")), f.sum(f.crc32("value"))).collect()[0]
    return Content(*(int(figure or 0) for figure in found))
