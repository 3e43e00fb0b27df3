"""Kafka from PySpark without a connector jar: typed events, exactly-once writes.

    import streams.spark as kes_spark

    spark = kes_spark.local_session("flights")
    rows = kes_spark.encode(df, FlightDeparted, key="tail_number")
    kes_spark.write(rows, topic="flights", write_id="flights-2013")
    kes_spark.read_events(spark, FlightDeparted, topic="flights").show()

Needs the extra ``spark``. The guide is ``docs/guides/spark.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import pyspark.sql.streaming.datasource  # noqa: F401
except ModuleNotFoundError as error:  # with a PySpark before 4.2, too, which some platforms bring
    if (error.name or "").partition(".")[0] != "pyspark":
        raise
    advice = "streams.spark needs pyspark>=4.2: pip install 'kafka-event-source[spark]', or a platform with Spark 4.2"
    raise ModuleNotFoundError(advice, name="pyspark>=4.2") from error

from streams.spark.reading.records import records
from streams.spark.reading.topic_logs import end_offsets
from streams.spark.session import local_session, register
from streams.spark.source import GrtDataSource
from streams.spark.typed.events import dead_letters, events, read_events, split
from streams.spark.typed.frames import Encoding, encode, encode_each, ordered, write, write_batch
from streams.spark.typed.shapes import schema_of
from streams.spark.typed.tables import as_of, changes, sequence, table
from streams.spark.typed.upserting import upsert
from streams.spark.writing.sink import WriteResult

if TYPE_CHECKING:
    from streams.spark.replaying.bootstrapping import Bootstrapped, bootstrap
    from streams.spark.replaying.comparison import Comparison, compare
    from streams.spark.replaying.replays import Replay, State, changelog_state, read_state, replay
    from streams.spark.running.pipeline import Pipeline

__all__ = [
    "Bootstrapped",
    "Comparison",
    "Encoding",
    "GrtDataSource",
    "Pipeline",
    "Replay",
    "State",
    "WriteResult",
    "as_of",
    "bootstrap",
    "changelog_state",
    "changes",
    "compare",
    "dead_letters",
    "encode",
    "encode_each",
    "end_offsets",
    "events",
    "local_session",
    "ordered",
    "read_events",
    "read_state",
    "records",
    "register",
    "replay",
    "schema_of",
    "sequence",
    "split",
    "table",
    "upsert",
    "write",
    "write_batch",
]

_ENGINE = {
    "replaying.bootstrapping": ("Bootstrapped", "bootstrap"),
    "replaying.comparison": ("Comparison", "compare"),
    "replaying.replays": ("Replay", "State", "changelog_state", "read_state", "replay"),
    "running.pipeline": ("Pipeline",),
}
"""Modules that tasks do not need, most of them with the engine, and their names: imported when a name is first used, so
that tasks that only read or write do not pay for it."""


def __getattr__(name: str) -> Any:
    for module, names in _ENGINE.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"streams.spark.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
