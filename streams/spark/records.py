"""DataFrames of records: what ``format("grt")`` reads, and what Spark's Kafka connector reads, brought to one form."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.errors import ConfigError
from streams.records import TYPE_HEADER, VERSION_HEADER
from streams.spark.columns import HEADERS_TYPE

RECORD_COLUMNS: Final[dict[str, t.DataType]] = {
    "topic": t.StringType(),
    "partition": t.IntegerType(),
    "offset": t.LongType(),
    "timestamp": t.TimestampType(),
    "key": t.BinaryType(),
    "value": t.BinaryType(),
}
"""What every DataFrame of records has."""


def described(df: DataFrame) -> DataFrame:
    """``df`` with the columns ``type`` and ``version``, made from ``headers`` where the source has not made them.

    ``type`` is null without a type header, or when it is null or not UTF-8; ``version`` is 1 without a version header,
    null when it is no number. Raises ``ConfigError`` for a DataFrame that has no records in it.
    """
    check(df)
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


def check(df: DataFrame, *, headers: bool = False) -> None:
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


_HEADERS: Final = HEADERS_TYPE.simpleString()


def where() -> Column:
    """``topic[partition]@offset`` of a row, as error messages name a record."""
    return f.concat(f.col("topic"), f.lit("["), f.col("partition"), f.lit("]@"), f.col("offset"))


def _event_name() -> Column:
    name = _header(TYPE_HEADER).cast("string")
    return f.when(f.is_valid_utf8(name), name)


def _version() -> Column:
    there = f.exists("headers", lambda header: header["key"] == VERSION_HEADER)
    digits = _header(VERSION_HEADER).cast("string")
    number = f.when(digits.rlike("^[0-9]{1,9}$"), digits.try_cast("int"))
    return f.when(f.coalesce(there, f.lit(False)), number).otherwise(f.lit(1))


def _header(name: str) -> Column:
    """The value of the first header of this name."""
    return f.get(f.filter("headers", lambda header: header["key"] == name), 0)["value"]
