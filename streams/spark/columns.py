"""The columns of records: of rows to write, and of what ``format("grt")`` or Spark's Kafka connector reads."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.errors import ConfigError
from streams.records import TYPE_HEADER, VERSION_HEADER

HEADERS_TYPE: Final = t.ArrayType(
    t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
)
_HEADERS: Final = HEADERS_TYPE.simpleString()
_INTEGER: Final = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
SINK_COLUMNS: Final[dict[str, tuple[type[t.DataType], ...]]] = {
    "topic": (t.StringType,),
    "key": (t.BinaryType, t.StringType),
    "value": (t.BinaryType, t.StringType),
    "type": (t.StringType,),
    "version": _INTEGER,
    "headers": (t.ArrayType,),
    "partition": _INTEGER,
    "timestamp": (t.TimestampType,),
}
"""What a written row may have; ``value`` is the only one it must have. Null key: spread; null value: a tombstone."""
RECORD_COLUMNS: Final[dict[str, t.DataType]] = {
    "topic": t.StringType(),
    "partition": t.IntegerType(),
    "offset": t.LongType(),
    "timestamp": t.TimestampType(),
    "key": t.BinaryType(),
    "value": t.BinaryType(),
}
"""What every DataFrame of records has."""
_IGNORED: Final = frozenset({"offset", "timestampType"})  # so that what was read can be written as it is


def check_columns(schema: t.StructType, *, topic_given: bool) -> None:
    """Raises ``ConfigError`` (column named) for rows that are no records."""
    for field in schema.fields:
        if schema.names.count(field.name) > 1:
            raise ConfigError(f"column {field.name} is there {schema.names.count(field.name)} times; drop one")
        if field.name in _IGNORED:
            continue
        taken = SINK_COLUMNS.get(field.name)
        if taken is None:
            raise ConfigError(
                f"column {field.name} is no part of a record; drop it (known: {', '.join(SINK_COLUMNS)}), or make "
                "events of the rows with streams.spark.encode"
            )
        if not isinstance(field.dataType, taken):
            wanted = " or ".join(kind.typeName() for kind in taken)
            raise ConfigError(f"column {field.name} must be {wanted}, not {field.dataType.simpleString()}")
    if "value" not in schema.names:
        raise ConfigError("column value is missing: it holds the record's bytes (streams.spark.encode makes it)")
    if not topic_given and "topic" not in schema.names:
        raise ConfigError("option topic is missing, and the rows have no column topic either")
    if "headers" in schema.names and schema["headers"].dataType.simpleString() != _HEADERS:
        raise ConfigError("column headers must be array<struct<key: string, value: binary>>")


def described(df: DataFrame) -> DataFrame:
    """``df`` with the columns ``type`` and ``version``, made from ``headers`` where the source has not made them.

    ``type`` is null without a type header, or when it is null or not UTF-8; ``version`` is 1 without a version header,
    null when it is no number. Raises ``ConfigError`` for a DataFrame that has no records in it.
    """
    check_records(df)
    missing = [name for name in ("type", "version") if name not in df.columns]
    if not missing:
        return df
    if "headers" not in df.columns:
        raise ConfigError(
            f"the rows have no column {' and no column '.join(missing)}, and no headers to make it from: read with "
            "option('includeHeaders', 'true')"
        )
    made = {"type": _event_name(), "version": _version()}
    return df.withColumns({name: made[name] for name in missing})


def check_records(df: DataFrame, *, headers: bool = False) -> None:
    """Raises ``ConfigError`` (column named) unless these are rows as a source of records gives them."""
    for name, kind in RECORD_COLUMNS.items():
        if name not in df.columns:
            raise ConfigError(
                f"the rows have no column {name}: this takes what format('grt') or Spark's Kafka connector reads "
                f"(columns {', '.join(RECORD_COLUMNS)}); there are {', '.join(df.columns) or 'none'}"
            )
        found = df.schema[name].dataType
        if found != kind:
            raise ConfigError(f"column {name} must be {kind.simpleString()}, not {found.simpleString()}")
    if headers and ("headers" not in df.columns or df.schema["headers"].dataType.simpleString() != _HEADERS):
        raise ConfigError(
            "the rows have no column headers, and a dead letter carries the record's own: read with "
            "option('includeHeaders', 'true')"
        )


def _event_name() -> Column:
    name = _header(TYPE_HEADER).cast("string")
    return f.when(f.is_valid_utf8(name), name)


def _version() -> Column:
    there = f.exists("headers", lambda header: header["key"] == VERSION_HEADER)
    digits = _header(VERSION_HEADER).cast("string")
    number = f.when(digits.rlike(r"^[0-9]{1,9}\z"), digits.try_cast("int"))
    return f.when(f.coalesce(there, f.lit(False)), number).otherwise(f.lit(1))


def _header(name: str) -> Column:
    """The value of the first header of this name."""
    return f.get(f.filter("headers", lambda header: header["key"] == name), 0)["value"]
