"""The handlers of an event source over a DataFrame: what they send and what they store, without Kafka.

    with kes_spark.replay("bank:source", df) as replayed:
        replayed.outputs.show()
        replayed.stores.write.parquet(...)

``mapInArrow`` over rows that are brought together by Kafka partition and sorted by offset. The other ways were turned
down: ``applyInPandas`` and ``applyInArrow`` have no order inside of a group (and hold all of it as one frame, if not
used with iterators); ``transformWithState`` keeps Spark's state per key and has no order between the keys of a
partition, while a handler may read and write any key of its partition's store, in offset order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_schema

from streams.errors import ConfigError, EventFailure, StreamsError
from streams.protocols import Codec
from streams.runtime.changelog import OFFSET_KEY, PARKED_EVENT_LENGTH, PARKED_PREFIX
from streams.runtime.replay import Program
from streams.source.event_source import EventSource
from streams.spark.columns import HEADERS_TYPE
from streams.spark.options import addressed, agreed, names_brokers
from streams.spark.replaying.replay_task import END, POSITION, RECORD, RESULT, STATE, loaded, replayer, travelling
from streams.spark.typed.tables import ERROR, ValueColumns, decoded, is_reserved, of_structure

_AFTER_ALL: Final = 2**31 - 1  # sorts behind every partition

_INPUT: Final[Mapping[str, t.DataType]] = {
    "key": t.BinaryType(),
    "value": t.BinaryType(),
    "type": t.StringType(),
    "headers": HEADERS_TYPE,
    "timestamp": t.TimestampType(),
}
_TASK_COLUMNS: Final[Mapping[str, t.DataType]] = {
    "task": t.IntegerType(),
    "partition": t.IntegerType(),
    "kind": t.IntegerType(),
    "offset": t.LongType(),
    "key": t.BinaryType(),
    "value": t.BinaryType(),
    "type": t.StringType(),
    "version": t.IntegerType(),
    "headers": HEADERS_TYPE,
    "timestamp_ms": t.LongType(),
}
_CHANGELOG: Final = ("partition", "offset", "key", "value")
_RESULT_SCHEMA: Final = from_arrow_schema(RESULT)


class Kept:
    """Something with a persisted DataFrame, ``_kept``, that is freed by ``unpersist`` or the end of a ``with``."""

    _kept: DataFrame | None

    def unpersist(self) -> None:
        """Free what is kept: from now on the DataFrames compute everything anew."""
        if self._kept is not None:
            self._kept.unpersist()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.unpersist()


class State(Kept):
    """The state of an event source at one point: ``stores`` (partition, key, value, type) and ``positions``
    (partition, offset: the next one to handle). Both are views of ``kept``, if that is given: a DataFrame that is
    persisted until ``unpersist``, or the end of a ``with``. ``parked`` (partition, key): a row for each event of a
    parked key, which is below its partition's position and not in the stores; ``None``: there are none."""

    def __init__(
        self,
        stores: DataFrame,
        positions: DataFrame,
        kept: DataFrame | None = None,
        parked: DataFrame | None = None,
    ) -> None:
        self.stores = stores
        self.positions = positions
        self.parked = parked
        self._kept = kept

    def table(
        self,
        *,
        key: Any,
        value: Any,
        key_codec: Codec[Any] | None = None,
        value_codec: Codec[Any] | None = None,
        structure: str = "",
    ) -> DataFrame:
        """The stores, read: columns ``partition``, ``key``, ``value``, ``_error``. Types and codecs are those that the
        store was made with, as for ``streams.spark.table``, and so is ``structure``; where bytes cannot be read
        ``_error`` says why."""
        keys, values = ValueColumns(key, key_codec, "key"), ValueColumns(value, value_codec, "value")
        return decoded(of_structure(self.stores, structure), keys, values).select("partition", "key", "value", ERROR)


def changelog_state(df: DataFrame) -> State:
    """The state in a changelog topic: ``stores`` with the last value of each key of each partition (deleted keys are
    not in it), ``positions`` with the input offset that each partition goes on at.

    ``df`` is what ``format("grt")`` reads of the changelog, committed records only, from its start. Read once, when it
    is first used, and kept until ``unpersist``, so that state and position are of one moment, also while the source is
    running: each of its transactions ends with an offset record. Raises ``ConfigError`` for missing columns.
    """
    if missing := [name for name in _CHANGELOG if name not in df.columns]:
        raise ConfigError(f"changelog_state needs the columns {', '.join(missing)} as format('grt') reads them")
    kind = f.col("type") if "type" in df.columns else f.lit(None).cast("string")
    last = (
        df.where(f.col("key").isNotNull())
        .groupBy("partition", "key")
        .agg(f.max_by(f.struct(f.col("value"), kind.alias("type")), "offset").alias("last"))
        .select("partition", "key", "last.*")
        .where(f.col("value").isNotNull())  # behind the grouping: a deleted key's older value must not come back
        .persist()
    )
    offset = f.get_json_object(f.col("value").cast("string"), "$.offset").cast("long")
    positions = last.where(f.col("key") == f.lit(OFFSET_KEY)).select("partition", offset.alias("offset"))
    key, prefix = f.col("key"), f.lit(PARKED_PREFIX)
    is_parked = (f.length(key) == PARKED_EVENT_LENGTH) & (f.substring(key, 1, len(PARKED_PREFIX)) == prefix)
    parked = last.where(is_parked).select("partition", "key")
    return State(last.where(~is_reserved(key)), positions, last, parked)


def read_state(
    spark: SparkSession,
    source: EventSource[Any] | str,
    *,
    servers: str | None = None,
    options: Mapping[str, str] | None = None,
) -> State:
    """The state of an event source, or of one named ``"module:source"``, as its changelog has it now:
    ``changelog_state`` of the topic that its settings name.

    Without ``servers`` (or an option that names them), the brokers are those of its settings. ``options`` are more of
    ``format("grt")``: credentials, say, which are not taken from its settings. The source may run meanwhile. Raises
    ``ConfigError``.
    """
    config = (loaded(source) if isinstance(source, str) else source).config
    given = agreed(options or {}, {"subscribe": config.changelog})
    given = addressed(given, servers or (None if names_brokers(given) else config.bootstrap_servers))
    return changelog_state(spark.read.format("grt").options(**given).load())


class Replay(State):
    """The results of a replay. Its DataFrames are views of one result, which is kept until ``unpersist``.

    ``outputs``, ``dead_letters``: rows as ``format("grt")`` writes them, and ``cause`` (partition, offset, number: the
    input record, and which of its outputs this is; drop it before writing), in order within a partition.
    ``stores``, ``positions``: see ``State``. ``failures``: every event that failed for good (partition, offset,
    response, error), those that were skipped included. ``offsets``: ``positions`` as a dict. ``records``: how many
    were handled. ``stopped``: per partition that did not come to its end, why (only with ``on_stop="keep"``).
    """

    def __init__(self, rows: DataFrame, offsets: Mapping[int, int], records: int, stopped: Mapping[int, str]) -> None:
        stores = rows.where("kind = 'store'").select(
            f.col("input_partition").alias("partition"), "key", "value", "type"
        )
        positions = rows.where("kind = 'position'").select(
            f.col("input_partition").alias("partition"), f.col("input_offset").alias("offset")
        )
        super().__init__(stores, positions, rows)
        self._rows = rows
        self.offsets = dict(offsets)
        self.records = records
        self.stopped = dict(stopped)

    @property
    def outputs(self) -> DataFrame:
        """Return the outputs of the handlers, in order within an input partition. Where a handler names no partition,
        ``format("grt")`` places them by murmur2: for an output with another ``partitioner`` fill the column first."""
        return _writable(self._rows.where("kind = 'output'"))

    @property
    def dead_letters(self) -> DataFrame:
        """Return the records for the source's dead-letter topic."""
        return _writable(self._rows.where("kind = 'dead_letter'"))

    @property
    def failures(self) -> DataFrame:
        """Events that failed for good: partition, offset, response (what was done about it), error."""
        return self._rows.where("kind = 'failure'").select(
            f.col("input_partition").alias("partition"),
            f.col("input_offset").alias("offset"),
            f.col("type").alias("response"),
            f.col("text").alias("error"),
        )


def replay(
    source: EventSource[Any] | str,
    df: DataFrame,
    *,
    state: State | None = None,
    interjections: Literal["refuse", "ignore"] = "refuse",
    on_stop: Literal["raise", "keep"] = "raise",
    storage: StorageLevel = StorageLevel.MEMORY_AND_DISK,
) -> Replay:
    """Run the handlers of an event source over records, each partition in the order of its offsets. Sends nothing.

    ``df`` is what ``format("grt")`` reads of the source's topic, or the same from files: ``partition``, ``offset``,
    ``key``, ``value``, and ``headers`` or ``type`` (with ``version``, where there are several); ``timestamp`` and
    ``topic`` if handlers look at them. ``state``: where to go on from, an earlier replay or ``changelog_state``;
    records below its positions are passed over. Runs one job, at once, with one task for each partition of the topic,
    and keeps its result (``storage``).

    The decode policy, retries (without their pauses) and error policies are the source's. A record whose policy stops
    the source raises ``EventFailure``, with ``on_stop="keep"`` its partition ends there: see ``Replay.stopped``.
    Scheduled interjections and timers cannot be replayed: a source that has some, and an event that sets one, are
    refused unless they are to be ignored.
    Raises ``ConfigError`` for a source that cannot travel, missing columns, and partitions that the source has not.
    """
    if df.isStreaming:
        raise ConfigError("replay takes a batch DataFrame: read with spark.read; for work that goes on, run the source")
    if state is not None and not isinstance(state, State):
        raise ConfigError(f"state is {type(state).__name__}; give a Replay, a State, or changelog_state(df)")
    there, program = travelling(source)
    if program.interjections and interjections != "ignore":
        raise ConfigError(
            f"the source has scheduled interjections ({', '.join(program.interjections)}), which a replay does not run:"
            " what they store and send would be missing. If that is nothing, say interjections='ignore'"
        )
    count = program.config.num_partitions
    rows = _records(df, program)
    if state is not None:
        rows = rows.unionByName(_positions(state.positions)).unionByName(_contents(state.stores))
    now_ms = int(time.time() * 1000)
    end = {"task": f.col("id").cast("int"), "partition": f.lit(_AFTER_ALL), "kind": f.lit(END)}
    rows = rows.unionByName(_task_rows(df.sparkSession.range(count), end))
    results = (
        rows.repartitionById(count, "task")
        .sortWithinPartitions("partition", "kind", "offset")
        .drop("task")
        .mapInArrow(replayer(there, wall_ms=now_ms, ignores_timers=interjections == "ignore"), _RESULT_SCHEMA)
        .persist(storage)
    )
    try:
        ended = results.where("kind in ('position', 'stop', 'error')").orderBy("input_partition").collect()
        stopped = {row.input_partition: row.text for row in ended if row.kind == "stop"}
        for row in ended:
            if row.kind == "error":
                raise StreamsError(f"replay of {program.config.topic}[{row.input_partition}]: {row.text}")
        if stopped and on_stop == "raise":
            raise EventFailure("; ".join(stopped.values()))
    except BaseException:
        results.unpersist()
        raise
    done = [row for row in ended if row.kind == "position"]
    offsets = {row.input_partition: row.input_offset for row in done}
    return Replay(results, offsets, sum(row.number for row in done), stopped)


def _task_rows(df: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    nothing = f.lit(None)
    return df.select(*(columns.get(name, nothing).cast(kind).alias(name) for name, kind in _TASK_COLUMNS.items()))


def _records(df: DataFrame, program: Program) -> DataFrame:
    """The rows of a topic as tasks want them."""
    topic, count = program.config.topic, program.config.num_partitions
    have = {field.name: field.dataType for field in df.schema}
    if missing := {"partition", "offset", "key", "value"} - have.keys():
        raise ConfigError(f"replay needs the columns {', '.join(sorted(missing))}; the DataFrame has {', '.join(have)}")
    if not {"headers", "type"} & have.keys():
        raise ConfigError("replay needs the column headers or type: handlers are found by an event's type")
    for name, expected in _INPUT.items():
        if name in have and have[name].simpleString() != expected.simpleString():
            raise ConfigError(f"column {name} must be {expected.simpleString()}, not {have[name].simpleString()}")
    partition = f.col("partition")
    wrong = partition.isNull() | (partition < 0) | (partition >= count)
    where = f.concat(f.lit("replay: a row has partition "), f.coalesce(partition.cast("string"), f.lit("null")),
                     f.lit(f", but the source {topic!r} has {count}"))  # fmt: skip
    partition = f.when(wrong, f.raise_error(where).cast("int")).otherwise(partition)
    if "topic" in have:
        other = f.concat(f.lit("replay: a row is of topic "), f.col("topic"), f.lit(f", not of {topic!r}"))
        partition = f.when(f.col("topic") != topic, f.raise_error(other).cast("int")).otherwise(partition)
    columns: dict[str, Column] = {
        name: f.col(name) for name in ("offset", "key", "value", "type", "version", "headers") if name in have
    }
    stamp = f.unix_millis("timestamp") if "timestamp" in have else f.lit(None)
    columns["timestamp_ms"] = f.coalesce(stamp, f.lit(-1))
    return _task_rows(df, columns | {"task": partition, "partition": f.col("partition"), "kind": f.lit(RECORD)})


def _positions(df: DataFrame) -> DataFrame:
    columns = {name: f.col(name) for name in ("partition", "offset")}
    return _task_rows(df, columns | {"task": f.col("partition"), "kind": f.lit(POSITION)})


def _contents(df: DataFrame) -> DataFrame:
    columns = {name: f.col(name) for name in ("partition", "key", "value", "type") if name in df.columns}
    return _task_rows(df, columns | {"task": f.col("partition"), "kind": f.lit(STATE)})


def _writable(rows: DataFrame) -> DataFrame:
    cause = f.struct(
        f.col("input_partition").alias("partition"), f.col("input_offset").alias("offset"), f.col("number")
    )
    stamp = f.timestamp_millis(f.col("timestamp_ms")).alias("timestamp")
    return rows.select("topic", "key", "value", "type", "version", "headers", "partition", stamp, cause.alias("cause"))
