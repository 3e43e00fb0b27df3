"""Kafka from PySpark without a connector jar: typed events, exactly-once writes.

    import streams.spark as kes_spark

    spark = kes_spark.local_session("flights")
    rows = kes_spark.encode(df, FlightDeparted, key="tail_number")
    kes_spark.write(rows, topic="flights", write_id="flights-2013")
    kes_spark.read_events(spark, FlightDeparted, topic="flights").show()

Needs the extra ``spark``. The guide is ``docs/guides/spark.md``.
"""

from __future__ import annotations

from streams.spark.commit import WriteResult
from streams.spark.frames import encode, events, ordered, read_events, split, write
from streams.spark.schemas import schema_of
from streams.spark.session import local_session, register
from streams.spark.source import GrtDataSource

__all__ = [
    "GrtDataSource",
    "WriteResult",
    "encode",
    "events",
    "local_session",
    "ordered",
    "read_events",
    "register",
    "schema_of",
    "split",
    "write",
]
