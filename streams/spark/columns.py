"""The columns that a written row may have, and what is wrong with others."""

from __future__ import annotations

from typing import Final

from pyspark.sql import types as t

from streams.errors import ConfigError

HEADERS_TYPE: Final = t.ArrayType(
    t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
)
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
    if "headers" in schema.names and schema["headers"].dataType.simpleString() != HEADERS_TYPE.simpleString():
        raise ConfigError("column headers must be array<struct<key: string, value: binary>>")
