"""Changelogs and compacted topics as tables: the latest value of each key, as it is or as it was.

A key's records stand in one partition, in the order of their offsets; so the latest is the one with the highest offset.
That is no longer true of a topic that was given more partitions: a key may be in two of them then. Offsets of two
partitions cannot be compared, so such keys fail the job, unless the caller takes the record time as the order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from streams.codecs import (
    RESERVED_KEY_PREFIX,
    BytesCodec,
    FixedIntCodec,
    IntCodec,
    JsonCodec,
    PydanticCodec,
    StrCodec,
    codec_for,
)
from streams.errors import ConfigError
from streams.protocols import Codec
from streams.spark.columns import check_records
from streams.spark.typed import json_decoding, python_codec
from streams.spark.typed.shapes import value_shape

ERROR, META = "_error", "_meta"
MovedKeys = Literal["fail", "newest"]

_META_COLUMNS: Final = ("topic", "partition", "offset", "timestamp")
_SIGN: Final = -(2**63)
_LONGEST: Final = 2**31 - 1

_log = logging.getLogger(__name__)


def table(
    df: DataFrame,
    *,
    key: Any,
    value: Any,
    key_codec: Codec[Any] | None = None,
    value_codec: Codec[Any] | None = None,
    structure: str = "",
    moved_keys: MovedKeys = "fail",
) -> DataFrame:
    """The latest value of each key in a changelog, or any compacted topic: columns ``key``, ``value``, ``_error``,
    ``_meta``. Deleted keys (tombstones) are not in it, nor what the toolkit itself writes into a changelog.

    ``key`` and ``value`` are the types that the store was made with (``Table.factory(key=str, value=Balance)``; keys of
    a ``SimpleStore`` are ``str``), and so are the codecs. A class is a struct column: ``select("key", "value.*")``.
    Where bytes cannot be read ``_error`` says why, and key or value is null. ``_meta`` is the place of the latest
    record: topic, partition, offset, timestamp.

    ``structure``: the name of a table of a ``Stores``, or of its heap: only its entries, as ``of_structure`` has them.

    A key in two partitions fails the job; ``moved_keys="newest"`` takes the record with the highest (timestamp,
    offset) instead, which is right as far as the clocks of its writers are. Batch DataFrames of one topic only. One
    shuffle; no row passes through Python, except for tuple keys and codecs that the JVM does not know. Raises
    ``ConfigError``.
    """
    check_records(df)
    _check(df, moved_keys)
    keys = ValueColumns(key, key_codec, "key")
    values = ValueColumns(value, value_codec, "value")
    latest = of_structure(_latest(df, moved_keys).where(f.col("value").isNotNull()), structure)
    return decoded(latest, keys, values).select("key", "value", ERROR, META)


def changes(
    df: DataFrame,
    *,
    key: Any,
    value: Any,
    key_codec: Codec[Any] | None = None,
    value_codec: Codec[Any] | None = None,
    structure: str = "",
    on_error: Literal["null", "fail"] = "null",
) -> DataFrame:
    """Every change of a changelog, or any compacted topic, in a row: columns ``key``, ``value``, ``deleted``,
    ``_error``, ``_meta``. For batch and streaming DataFrames: this is ``table`` before only the latest is left.

    Types, codecs and ``structure`` are as for ``table``. ``deleted``: a tombstone, whose ``value`` is null. What the
    toolkit itself writes into a changelog is left out. The changes of a key come in the order of ``_meta.offset``, as
    long as its topic has not got more partitions. ``on_error="fail"`` fails the job at the first record that cannot be
    read, with its place and the reason: for what follows the changes and does not look at ``_error``. Raises
    ``ConfigError``.
    """
    check_records(df)
    if on_error not in ("null", "fail"):
        raise ConfigError(f"on_error must be null or fail, not {on_error!r}")
    keys = ValueColumns(key, key_codec, "key")
    values = ValueColumns(value, value_codec, "value")
    # In this order: behind its prefix a key may be any bytes.
    records = of_structure(df.where(f.col("key").isNotNull() & ~is_reserved(f.col("key"))), structure)
    rows = records.select(
        "key", "value", f.col("value").isNull().alias("deleted"), f.struct(*_META_COLUMNS).alias(META)
    )
    read = decoded(rows, keys, values)
    if on_error == "fail":
        good, bad = f.col(ERROR).isNull(), f.raise_error(unreadable("changes"))
        read = read.withColumns(
            {name: f.when(good, f.col(name)).otherwise(bad) for name in ("key", "value", "deleted", META)}
        )
    return read.select("key", "value", "deleted", ERROR, META)


def as_of(
    df: DataFrame,
    *,
    timestamp: datetime | None = None,
    offsets: Mapping[str, Mapping[int, int]] | None = None,
) -> DataFrame:
    """The records up to a point: those with a record time up to ``timestamp``, or those below the ``offsets``
    (by topic and partition, as ``endingOffsets`` has them; a partition that is not named has none).

    ``table(as_of(df, ...), ...)`` is the table as it was then, as far as the topic still has it: compaction removes
    what was replaced. ``timestamp`` needs a zone. Offsets are exact; record times are those of the writers' clocks.
    Works on streams too. Raises ``ConfigError``.
    """
    check_records(df)
    if (timestamp is None) == (offsets is None):
        raise ConfigError("as_of needs one of timestamp and offsets")
    if timestamp is not None:
        if timestamp.tzinfo is None:
            raise ConfigError(f"as_of(timestamp={timestamp!r}) has no zone: give datetime(..., tzinfo=UTC)")
        return df.where(f.col("timestamp") <= f.lit(timestamp))
    below = f.lit(False)
    for topic, ends in (offsets or {}).items():
        for partition, end in ends.items():
            if type(end) is not int or end < 0:
                raise ConfigError(f"as_of: {topic}[{partition}] has the offset {end!r}; give a number from 0")
            place = (f.col("topic") == topic) & (f.col("partition") == int(partition))
            below = below | (place & (f.col("offset") < end))
    return df.where(below)


def sequence(df: DataFrame, *, moved_keys: MovedKeys = "fail") -> DataFrame:
    """``df`` with a column ``sequence``: 1 for the first record of a key that is in it, 2 for the next, and so on, by
    offset. Null for records without key.

    Takes records, and what ``events`` gives. Keys in two partitions are treated as ``table`` treats them. Batch only.
    Raises ``ConfigError``.
    """
    prefix = "" if "offset" in df.columns else f"{META}."
    if not prefix:
        check_records(df)
    elif META not in df.columns:
        raise ConfigError(f"the rows have neither records' columns nor {META}: give records, or what events() gives")
    if "sequence" in df.columns:
        raise ConfigError("the rows have a column sequence already: rename it")
    _check(df, moved_keys)
    place = {name: f.col(prefix + name) for name in ("topic", "partition", "offset", "timestamp", "key")}
    of_key = Window.partitionBy(place["topic"], place["key"])
    order = [place["timestamp"], place["offset"]] if moved_keys == "newest" else [place["offset"]]
    number = f.row_number().over(of_key.orderBy(*order))
    if moved_keys == "fail":
        low, high = f.min(place["partition"]).over(of_key), f.max(place["partition"]).over(of_key)
        number = f.when(low == high, number).otherwise(_two_partitions(place["topic"], low, high).cast("int"))
    return df.withColumn("sequence", f.when(place["key"].isNotNull(), number))


def _latest(df: DataFrame, moved_keys: MovedKeys) -> DataFrame:
    """The last record of each key: ``key``, ``value``, ``_meta``."""
    records_only = df.where(f.col("key").isNotNull() & ~is_reserved(f.col("key")))
    record = f.struct(f.col("value"), f.struct(*_META_COLUMNS).alias(META))
    order: Column = f.col("offset")
    if moved_keys == "newest":
        order = f.struct("timestamp", "offset")
    grouped = records_only.groupBy("key").agg(
        f.max_by(record, order).alias("last"),
        f.min("topic").alias("first_topic"), f.max("topic").alias("last_topic"),
        f.min("partition").alias("low"), f.max("partition").alias("high"),
    )  # fmt: skip
    topics = f.raise_error(
        f.concat(f.lit("table: records of one topic only, not of "), "first_topic", f.lit(" and "), "last_topic")
    )
    value = f.when(f.col("first_topic") != f.col("last_topic"), topics.cast("binary"))
    if moved_keys == "fail":
        moved = _two_partitions(f.col("last_topic"), f.col("low"), f.col("high"))
        value = value.when(f.col("low") != f.col("high"), moved.cast("binary"))
    return grouped.select("key", value.otherwise(f.col("last.value")).alias("value"), f.col(f"last.{META}").alias(META))


def of_structure(df: DataFrame, name: str) -> DataFrame:
    """The records of one structure of a ``Stores``, all if there is no name: keys without it, and values without the
    time at which they were put, as a table of its own would have them. (A value of a later version stays as it is, and
    is none that its class can read.)"""
    from streams.stores.framed import FRAME, TIMED, prefix_of  # here: tasks load no stores

    if not name:
        return df
    prefix, timed = prefix_of(name), FRAME + bytes([TIMED])
    key, value = f.col("key"), f.col("value")
    is_timed = f.substring(value, 1, len(timed)) == f.lit(timed)
    bare = f.when(is_timed, f.substring(value, len(timed) + 9, _LONGEST)).otherwise(value)
    own = df.where(f.substring(key, 1, len(prefix)) == f.lit(prefix))
    return own.withColumns({"key": f.substring(key, len(prefix) + 1, _LONGEST), "value": bare})


def unreadable(who: str) -> Column:
    """Say of a row of ``changes`` where its record is, and why it cannot be read."""
    place = f.lit(f"{who}: "), f"{META}.topic", f.lit("["), f"{META}.partition", f.lit("] offset "), f"{META}.offset"
    return f.concat(*place, f.lit(": "), ERROR)


def is_reserved(key: Column) -> Column:
    """Check whether a key is one of the toolkit's own in a changelog (offset records, release markers)."""
    return f.substring(key, 1, len(RESERVED_KEY_PREFIX)) == f.lit(RESERVED_KEY_PREFIX)


def _two_partitions(topic: Column, low: Column, high: Column) -> Column:
    return f.raise_error(
        f.concat(
            topic, f.lit(": a key has records in the partitions "), low, f.lit(" and "), high,
            f.lit(", whose offsets cannot be compared (the topic was given more partitions?); moved_keys='newest' "
                  "takes the record time as the order"),
        )
    )  # fmt: skip


def _check(df: DataFrame, moved_keys: str) -> None:
    if df.isStreaming:
        raise ConfigError("a table or a sequence needs all records of a key: read in batch, or keep state in a store")
    if moved_keys not in ("fail", "newest"):
        raise ConfigError(f"moved_keys must be fail or newest, not {moved_keys!r}")
    if moved_keys == "newest":
        _log.warning("keys in two partitions are put in order by record time, which clocks may have wrong")


class ValueColumns:
    """Expressions for one column of bytes, called ``name``. Each of ``converted``, ``parsed`` and then ``problem`` and
    ``value`` uses the columns of the step before it.

    Without a codec, ``codec_for`` chooses, as the stores do. Raises ``ConfigError`` for a type without a column type,
    and for a class that workers would have to import and cannot.
    """

    def __init__(self, type_: Any, codec: Codec[Any] | None, name: str) -> None:
        self._codec: Codec[Any] = codec_for(type_) if codec is None else codec
        self._bytes = f.col(name)
        self._is_json = isinstance(self._codec, JsonCodec | PydanticCodec)
        self._plain = isinstance(self._codec, BytesCodec | StrCodec | IntCodec | FixedIntCodec)
        self.shape = value_shape(type_)
        self._text, self._parsed = f"__{name}_text__", f"__{name}_parsed__"
        self._converted = f"__{name}_converted__"
        self._size = 8 if isinstance(self._codec, IntCodec) else getattr(self._codec, "_bits", 0) // 8

    def converted(self) -> list[Column]:
        """Return the columns that need Python: tuples, and codecs that the JVM does not know."""
        if self._is_json or self._plain:
            return []
        return [python_codec.decode_value(self._codec, self.shape, self._bytes).alias(self._converted)]

    def parsed(self) -> list[Column]:
        """The JSON, parsed; numbers, read."""
        if self._is_json:
            text = self._bytes.cast("string")
            return [text.alias(self._text), json_decoding.from_json(text, self.shape).alias(self._parsed)]
        if isinstance(self._codec, IntCodec):
            return [_big_endian(self._bytes, self._size).bitwiseXOR(f.lit(_SIGN)).alias(self._parsed)]
        if isinstance(self._codec, FixedIntCodec):
            return [_big_endian(self._bytes, self._size).alias(self._parsed)]
        return []

    def problem(self) -> Column:
        """Why these bytes are no such value, or null."""
        match self._codec:
            case BytesCodec():
                return f.lit(None).cast("string")
            case StrCodec():
                return f.when(~f.is_valid_utf8(self._bytes.cast("string")), f.lit("not UTF-8"))
            case IntCodec() | FixedIntCodec():
                found = f.octet_length(self._bytes)
                return f.when(found != self._size, f.concat(f.lit(f"{self._size} bytes expected, got "), found))
            case JsonCodec() | PydanticCodec():
                return json_decoding.unreadable(f.col(self._parsed), f.col(self._text), self.shape)
            case _:
                return f.col(f"{self._converted}.error")

    def value(self) -> Column:
        """The value; of no use where it has a problem."""
        match self._codec:
            case BytesCodec():
                return self._bytes
            case StrCodec():
                return self._bytes.cast("string")
            case IntCodec() | FixedIntCodec():
                return f.col(self._parsed)
            case JsonCodec() | PydanticCodec():
                return json_decoding.decoded(f.col(self._parsed), f.col(self._text), self.shape)
            case _:
                return f.col(f"{self._converted}.value")


def decoded(rows: DataFrame, keys: ValueColumns, values: ValueColumns) -> DataFrame:
    """``rows`` with ``key`` and ``value`` read, null where their bytes cannot be, and ``_error``, which says why. Null
    bytes are a null value, and no error."""
    pair = (("key", keys), ("value", values))
    rows = rows.select("*", *keys.converted(), *values.converted())
    rows = rows.select("*", *keys.parsed(), *values.parsed())
    wrong = [
        f.when(f.col(name).isNotNull() & part.problem().isNotNull(), f.concat(f.lit(f"{name}: "), part.problem()))
        for name, part in pair
    ]
    read = {name: f.when(part.problem().isNull(), part.value()) for name, part in pair}
    return rows.withColumns(read | {ERROR: f.coalesce(*wrong)})


def _big_endian(data: Column, size: int) -> Column:
    """The signed integer in ``size`` bytes; null for another length."""
    number = f.conv(f.hex(data), 16, -10).cast("bigint")  # of 8 bytes it is signed, of fewer it is not yet
    if size < 8:
        number = number - f.when(number >= 1 << (8 * size - 1), f.lit(1 << (8 * size))).otherwise(f.lit(0))
    return f.when(f.octet_length(data) == size, number)
