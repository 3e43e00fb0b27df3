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

from streams.spark.frames import encode, ordered, write
from streams.spark.session import local_session, register
from streams.spark.shapes import schema_of
from streams.spark.sink import WriteResult
from streams.spark.source import GrtDataSource
from streams.spark.tables import as_of, sequence, table
from streams.spark.topic_logs import end_offsets
from streams.spark.typed import dead_letters, events, read_events, split

if TYPE_CHECKING:
    from streams.spark.bootstrapping import Bootstrapped, bootstrap
    from streams.spark.comparison import Comparison, compare
    from streams.spark.pipeline import Pipeline
    from streams.spark.replays import Replay, State, changelog_state, replay

__all__ = [
    "Bootstrapped",
    "Comparison",
    "GrtDataSource",
    "Pipeline",
    "Replay",
    "State",
    "WriteResult",
    "as_of",
    "bootstrap",
    "changelog_state",
    "compare",
    "dead_letters",
    "encode",
    "end_offsets",
    "events",
    "local_session",
    "ordered",
    "read_events",
    "register",
    "replay",
    "schema_of",
    "sequence",
    "split",
    "table",
    "write",
]

_ENGINE = {
    "bootstrapping": ("Bootstrapped", "bootstrap"),
    "comparison": ("Comparison", "compare"),
    "pipeline": ("Pipeline",),
    "replays": ("Replay", "State", "changelog_state", "replay"),
}
"""Modules that tasks do not need, most of them with the engine, and their names: imported when a name is first used, so
that tasks that only read or write do not pay for it."""


def __getattr__(name: str) -> Any:
    for module, names in _ENGINE.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"streams.spark.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
