"""Typed writing: rows as events of a class, in the order that is meant, once."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as _compute
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.codecs import JsonCodec, PydanticCodec
from streams.errors import ConfigError, TransactionFailed
from streams.events import EventType, event_type_of
from streams.spark.columns import SINK_COLUMNS
from streams.spark.options import addressed, agreed
from streams.spark.session import activate
from streams.spark.typed import json_encoding, python_codec
from streams.spark.typed.shapes import Structure, shape_of
from streams.spark.writing.sink import WriteResult, find_write, target_of
from streams.spark.writing.write_options import MICRO_BATCH, stream_write_options, write_options

pc: Any = _compute  # its functions are made at run time

_ROWS: Final = 10_000
_OUTPUT: Final = "__kes_output__"
_BATCHES: Final[dict[str, tuple[str | None, int]]] = {}
"""The run of a query and the batch that this process has written to a sink last."""
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
    columns = _event_columns(df, Encoding(event_class, key=key, topic=topic, timestamp=timestamp))
    return df.select(*(column.alias(name) for name, column in columns.items()), *keep)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """One of the events that ``encode_each`` makes of a row: of ``event_class``, where the condition ``where`` holds
    (of every row without one). The rest is as for ``encode``."""

    event_class: type = field(kw_only=False)
    key: str | Column | None
    where: str | Column | None = None
    topic: str | Column | None = None
    timestamp: str | Column | None = None


def encode_each(df: DataFrame, *outputs: Encoding, keep: Iterable[str] = ()) -> DataFrame:
    """Encode several events of each row in one pass: a row of ``df`` becomes one row for each of the ``outputs`` whose
    condition holds, in their order, with the columns that ``encode`` gives.

    ``topic`` and ``timestamp`` are given for all outputs, or for none. Every class finds its fields in the columns of
    ``df``. For batch and streaming DataFrames. Raises ``ConfigError`` as ``encode`` does.
    """
    if not outputs:
        raise ConfigError("encode_each needs an Encoding")
    if taken := {_OUTPUT} & {*df.columns, *keep}:
        raise ConfigError(f"encode_each: the column {', '.join(taken)} is in the way: rename it")
    columns = [_event_columns(df, output) for output in outputs]
    for name in ("topic", "timestamp"):
        if len({name in each for each in columns}) > 1:
            raise ConfigError(f"encode_each: give {name}= for all outputs, or for none")
    conditions = (f.lit(True) if each.where is None else _condition(each.where) for each in outputs)
    numbers = f.array(*(f.when(condition, f.lit(number)) for number, condition in enumerate(conditions)))
    rows = df.select("*", f.explode(f.array_compact(numbers)).alias(_OUTPUT))
    chosen = []
    for name in columns[0]:
        value = f.when(f.col(_OUTPUT) == 0, columns[0][name])
        for number, each in enumerate(columns[1:], 1):
            value = value.when(f.col(_OUTPUT) == number, each[name])
        chosen.append(value.alias(name))
    return rows.select(*chosen, *keep)


def ordered(df: DataFrame, *by: str | Column, partitions: int) -> DataFrame:
    """Encoded events, all of one key in one of ``partitions`` tasks, sorted by ``by`` there: the order they are
    written in.

    Kafka keeps what is written in order per key; this makes the order of the rows the one that is meant. Columns that
    are no record's (those kept by ``encode(keep=...)``) are dropped after sorting. Nulls come first.

    A streaming DataFrame is sorted within each micro-batch; rows that come in a later batch are written later, whatever
    they say. Spark sorts no streams, so this is done by Arrow in the tasks: each holds its rows of one batch in memory,
    and ``by`` are names of columns (``ConfigError`` otherwise).
    """
    extra = [name for name in df.columns if name not in SINK_COLUMNS]
    together = df.repartition(partitions, "key")
    if not df.isStreaming:
        return together.sortWithinPartitions(*by).drop(*extra)
    names = [column for column in by if isinstance(column, str)]
    if len(names) != len(by):
        raise ConfigError("ordered: a stream is sorted by columns that are given by name, ascending")
    if missing := [name for name in names if name not in df.columns]:
        raise ConfigError(
            f"ordered: {', '.join(missing)} is no column of the DataFrame; it has {', '.join(df.columns)}"
        )
    return together.mapInArrow(_sorter(names, extra), df.drop(*extra).schema)


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
    named = agreed(options or {}, {"writeId": write_id, "topic": topic or None})
    given = {**addressed(named, servers), "runId": run}
    settings = write_options(given)
    activate(df.sparkSession)
    df.write.format("grt").options(**given).mode("append").save()
    found = find_write(settings)
    if found is None:
        raise TransactionFailed(
            "commit_transaction", "MARKER_MISSING", "unknown", f"writeId {write_id!r} left no marker"
        )
    if not found.written:
        _log.info("write %r was done before (%d rows); nothing was written", write_id, found.rows)
    return found


def write_batch(
    df: DataFrame,
    batch_id: int,
    *,
    sink: str,
    topic: str | None = None,
    servers: str | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Write encoded events inside of ``foreachBatch``, exactly once: what Spark repeats after a crash finds its marker,
    and writes nothing.

        def write(batch, batch_id):
            kes_spark.write_batch(kes_spark.encode(batch, ...), batch_id, sink="late-flights", topic="late-flights")

        df.writeStream.foreachBatch(write).option("checkpointLocation", ...).start()

    ``sink`` names the place as the option of ``writeStream.format("grt")`` does: by the same marker, guards and
    options. It is written in every batch, also when there are no rows, and once: a function that writes to several
    places gives each a sink of its own. (They are several transactions then: rows that name their ``topic`` in a column
    are one.) Raises ``ConfigError`` before any job for wrong options, for a second write in one batch, and outside of
    ``foreachBatch``; with Spark Connect too, which does not say there what query it is. Spark's own exceptions for
    what fails in the job.
    """
    given = addressed(agreed(options or {}, {"sink": sink, "topic": topic or None}), servers)
    identity = target_of(stream_write_options(given)).identity
    run = _run_of_query(df.sparkSession)
    if run is not None and _BATCHES.get(identity) == (run, batch_id):
        raise ConfigError(
            f"sink {sink!r}, batch {batch_id}: was written in this call of foreachBatch already. Give each write a "
            "sink of its own, or write all rows at once (unionByName)"
        )
    activate(df.sparkSession)
    df.write.format("grt").options(**given, **{MICRO_BATCH: str(batch_id)}).mode("append").save()
    _BATCHES[identity] = (run, batch_id)


def _run_of_query(spark: SparkSession) -> str | None:
    """Return the id of the query's run that this thread belongs to. Raises ``ConfigError`` where it is of none."""
    try:
        context = spark.sparkContext
    except PySparkException as error:
        raise ConfigError(
            "write_batch does not work with Spark Connect, which does not say in foreachBatch what query it is: use "
            "writeStream.format('grt')"
        ) from error
    if context.getLocalProperty("sql.streaming.queryId") is None:
        raise ConfigError("write_batch is for the function of foreachBatch; elsewhere use write, with a write_id")
    return context.getLocalProperty("spark.jobGroup.id")


def _event_columns(df: DataFrame, output: Encoding) -> dict[str, Column]:
    event: EventType[Any] = event_type_of(output.event_class)
    columns = {
        "key": _bytes_of(df, output.key, "key"),
        "value": _value_of(event, shape_of(output.event_class), df),
        "type": f.lit(event.name),
        "version": f.lit(event.version).cast("int"),
    }
    if output.topic is not None:
        columns = {"topic": f.lit(output.topic) if isinstance(output.topic, str) else output.topic, **columns}
    if output.timestamp is not None:
        stamp = f.col(output.timestamp) if isinstance(output.timestamp, str) else output.timestamp
        columns["timestamp"] = stamp.cast("timestamp")
    return columns


def _condition(where: str | Column) -> Column:
    return f.expr(where) if isinstance(where, str) else where


def _value_of(event: EventType[Any], shape: Structure, df: DataFrame) -> Column:
    if isinstance(event._codec, JsonCodec | PydanticCodec):
        return json_encoding.to_json(shape, df.schema)
    present = json_encoding.fitted(shape, df.schema, shape.name)
    fields = [json_encoding.encoded(f.col(f"`{field.name}`"), field.shape) for field in present.fields]
    named = [value.alias(field.wire) for value, field in zip(fields, present.fields, strict=True)]
    return python_codec.encode_event(event, f.struct(*named))


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


def _sorter(names: list[str], extra: list[str]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def sort(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # The end of the input may be a failure of what comes before (see sink.py): the task fails then, after this.
        rows: Any = list(batches)
        if not rows:
            return
        table = pa.Table.from_batches(rows)
        keys = [(name, "ascending") for name in names]
        order = pc.sort_indices(table, sort_keys=keys, null_placement="at_start")
        yield from table.drop_columns(extra).take(order).to_batches(max_chunksize=_ROWS)

    return sort
