"""Typed DataFrames: event classes to rows of a topic, rows of a topic to columns of an event class."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.errors import ConfigError, TransactionFailed
from streams.spark import json_codec
from streams.spark.columns import SINK_COLUMNS
from streams.spark.commit import WriteResult, find_write
from streams.spark.options import bootstrap_servers
from streams.spark.shapes import json_event, shape_of
from streams.spark.write_options import write_options

ERROR, META = "_error", "_meta"
_META_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "type", "version")

_log = logging.getLogger(__name__)


def encode(
    df: DataFrame,
    event_class: type,
    *,
    key: str | Column | None,
    topic: str | Column | None = None,
    timestamp: str | Column | None = None,
    keep: Iterable[str] = (),
) -> DataFrame:
    """The rows of ``df`` as events of ``event_class``: columns ``key``, ``value``, ``type``, ``version``, for
    ``format("grt")``.

    The columns named like the class's fields become the JSON that ``streams.events`` reads; other columns are left
    out, unless ``keep`` names them (to sort by them; drop them before writing). Fields with a default may be missing.
    ``key`` is a column of text (written as UTF-8) or binary, or ``None`` for records without key. ``topic`` is a
    name, or a column; leave it out when the write's option ``topic`` names it. ``timestamp`` is the column for the
    record's own time: without it, the time of sending (old times meet the topic's retention at once).

    Order and partitions of the rows stay as they are; nothing passes through Python. Raises ``ConfigError`` for missing
    columns and wrong types; rows that the class could not read back fail the job.
    """
    event = json_event(event_class)
    columns = [
        _bytes_of(df, key, "key").alias("key"),
        json_codec.to_json(shape_of(event_class), df.schema).alias("value"),
        f.lit(event.name).alias("type"),
        f.lit(event.version).cast("int").alias("version"),
    ]
    if topic is not None:
        columns.insert(0, (f.lit(topic) if isinstance(topic, str) else topic).alias("topic"))
    if timestamp is not None:
        columns.append(
            (f.col(timestamp) if isinstance(timestamp, str) else timestamp).cast("timestamp").alias("timestamp")
        )
    return df.select(*columns, *keep)


def ordered(df: DataFrame, *by: str | Column, partitions: int) -> DataFrame:
    """Encoded events, all of one key in one of ``partitions`` tasks, sorted by ``by`` there: the order they are
    written in.

    Kafka keeps what is written in order per key; this makes the order of the rows the one that is meant. Columns that
    are no record's (those kept by ``encode(keep=...)``) are dropped after sorting.
    """
    extra = [name for name in df.columns if name not in SINK_COLUMNS]
    return df.repartition(partitions, "key").sortWithinPartitions(*by).drop(*extra)


def events(df: DataFrame, event_class: type, *, on_error: Literal["column", "fail"] = "column") -> DataFrame:
    """The records of one event class as typed columns, with ``_error`` and ``_meta``; records of other types are left
    out.

    ``df`` is what ``format("grt")`` reads. A record that the class cannot be made of has null in all its columns and
    the reason in ``_error`` (``corrupt``, ``missing field: x``, a null value, another version); with
    ``on_error="fail"`` it fails the job. ``_meta`` is a struct of topic, partition, offset, timestamp, key, type,
    version. Two loosenesses of the JVM's JSON parser remain: a number where text belongs arrives as its text, and a
    second object after the first is not seen. Raises ``ConfigError`` for classes without a schema.
    """
    event = json_event(event_class)
    shape = shape_of(event_class)
    if taken := {ERROR, META} & {field.name for field in shape.fields}:
        raise ConfigError(f"{event_class.__name__} has a field called {taken.pop()}, which events needs for itself")
    # Three steps, not one expression: Spark does not merge them, so that each value is parsed once.
    parsed = df.where(f.col("type") == event.name).select(
        f.struct(*_META_COLUMNS).alias(META),
        f.col("value"),
        json_codec.from_json(f.col("value").cast("string"), shape).alias("parsed"),
    )
    version = f.col(f"{META}.version")
    error = f.coalesce(
        f.when(f.col("value").isNull(), f.lit("null value")),
        f.when(
            version.isNull() | (version != event.version),
            f.concat(
                f.lit("version "), f.coalesce(version.cast("string"), f.lit("?")), f.lit(f", not {event.version}")
            ),
        ),
        f.when(f.length("value") == 0, f.lit("empty value")),
        f.when(
            ~f.rtrim(f.col("value").cast("string"), f.lit(" \t\r\n")).endswith("}"), f.lit("corrupt: no JSON object")
        ),
        f.when(~f.is_valid_utf8(f.col("value").cast("string")), f.lit("corrupt: not UTF-8")),
        json_codec.unreadable(f.col("parsed"), shape),
    )
    if on_error == "fail":
        where = f.concat_ws(
            "", f.lit(f"cannot read {event.name} at "), f"{META}.topic", f.lit("["), f"{META}.partition", f.lit("]@"),
            f"{META}.offset", f.lit(": "), error,
        )  # fmt: skip
        error = f.when(error.isNotNull(), f.raise_error(where).cast("string"))
    checked = parsed.select(META, error.alias(ERROR), json_codec.decoded(f.col("parsed"), shape).alias("event"))
    good = f.col(ERROR).isNull()
    fields = [f.when(good, f.col("event")[field.name]).alias(field.name) for field in shape.fields]
    return checked.select(*fields, ERROR, META)


def read_events(
    spark: SparkSession,
    event_class: type,
    *,
    topic: str,
    servers: str | None = None,
    options: Mapping[str, str] | None = None,
    on_error: Literal["column", "fail"] = "column",
) -> DataFrame:
    """The committed events of one class in a topic, as ``events`` gives them. Other types are skipped where they are
    read.

    ``servers``: ``host:port,...``, default ``KES_BOOTSTRAP_SERVERS``. ``options`` are those of ``format("grt")``.
    Each action on the DataFrame reads up to the end as it is then; give ``endingOffsets`` as JSON (or ``cache()``)
    for two actions that must agree.
    """
    reader = spark.read.format("grt").option("subscribe", topic).option("types", json_event(event_class).name)
    reader = reader.option("kafka.bootstrap.servers", bootstrap_servers(servers)).options(**(options or {}))
    return events(reader.load(), event_class, on_error=on_error)


def split(df: DataFrame, event_classes: Iterable[type]) -> dict[type, DataFrame]:
    """Several event types in one topic: a typed DataFrame for each class, as ``events`` gives it. ``cache()`` ``df``
    to read once."""
    return {cls: events(df, cls) for cls in event_classes}


def write(
    df: DataFrame,
    *,
    write_id: str,
    topic: str | None = None,
    servers: str | None = None,
    options: Mapping[str, str] | None = None,
) -> WriteResult:
    """Write encoded events exactly once, and say whether this call did it. All rows become visible at one instant.

    The same ``write_id`` (and ``topic``) a second time writes nothing: ``WriteResult.written`` is ``False`` then, and
    ``rows`` is the number of the first time. ``topic`` may be left out when the rows have a column ``topic`` and the
    option ``markerTopic`` is given. Otherwise the same as ``df.write.format("grt").option("writeId",
    write_id)...mode("append").save()``, which cannot answer. Raises ``ConfigError`` before any job for wrong options
    and columns; Spark's own exceptions for what fails in the job.
    """
    run = uuid.uuid4().hex
    given = {
        **(options or {}),
        "kafka.bootstrap.servers": bootstrap_servers(servers),
        "writeId": write_id,
        "runId": run,
        **({"topic": topic} if topic else {}),
    }
    settings = write_options(given)
    df.write.format("grt").options(**given).mode("append").save()
    found = find_write(settings)
    if found is None:
        raise TransactionFailed(
            "commit_transaction", "MARKER_MISSING", "unknown", f"writeId {write_id!r} left no marker"
        )
    if not found.written:
        _log.info("write %r was done before (%d rows); nothing was written", write_id, found.rows)
    return found


def _bytes_of(df: DataFrame, column: str | Column | None, name: str) -> Column:
    if column is None:
        return f.lit(None).cast("binary")
    if isinstance(column, str) and column not in df.columns:
        raise ConfigError(f"{name}={column!r} is no column of the DataFrame; it has {', '.join(df.columns)}")
    value: Column = f.col(f"`{column}`") if isinstance(column, str) else column
    kind = df.select(value.alias("k")).schema["k"].dataType
    if not isinstance(kind, t.StringType | t.BinaryType):
        raise ConfigError(f"{name} is {kind.simpleString()}; cast it to string, or encode it to binary yourself")
    return value.cast("binary")
