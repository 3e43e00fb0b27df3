"""Types by a rule (``streams.formats``) instead of our header: the rule runs in Python on the workers."""

from __future__ import annotations

from typing import Any, Final, cast

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf

from streams.errors import ConfigError, DecodeError
from streams.events import parse_version
from streams.formats.rules import TypeRule
from streams.records import VERSION_HEADER, IncomingRecord, TypedRecord
from streams.spark.columns import check_records
from streams.spark.typed import schemas

CAME: Final = "__came__"
"""The column with the value as it came, of which that of the event may be a part."""
REASON: Final = "__reason__"
"""The column that says why a record has no type; null: it has one."""
_GIVEN: Final = ("topic", "partition", "offset", "key", "value", "headers")
_FOUND: Final = pa.struct(
    [("type", pa.string()), ("version", pa.int32()), ("value", pa.binary()), ("reason", pa.string())]
)
_SPARK: Final = "type string, version int, value binary, reason string"


def ruled(df: DataFrame, rule: TypeRule) -> DataFrame:
    """Return records with the types that the rule gives them: ``type``, ``version``, ``value``, and ``REASON``. Raises
    ``ConfigError`` for what is no rule, and for rows that are no records or have no headers."""
    given: object = rule
    if not isinstance(given, TypeRule):
        raise ConfigError(f"types is {given!r}; it must be a rule of streams.formats, such as Only(Click)")
    check_records(df, headers=True)
    schemas.of_rule(rule)

    def find(*columns: pa.Array) -> pa.Array:
        return pa.array([_found(rule, *row) for row in zip(*(one.to_pylist() for one in columns), strict=True)], _FOUND)

    found = cast(Any, arrow_udf)(find, _SPARK)(*_GIVEN, f.coalesce(f.unix_millis("timestamp"), f.lit(-1)))
    rows = df.withColumn("__found__", found).withColumn(CAME, f.col("value"))
    made = {"type": "type", "version": "version", "value": "value", REASON: "reason"}
    return rows.withColumns({name: f.col("__found__")[field] for name, field in made.items()}).drop("__found__")


def _found(
    rule: TypeRule,
    topic: str,
    partition: int,
    offset: int,
    key: bytes | None,
    value: bytes | None,
    headers: list[dict[str, Any]] | None,
    timestamp_ms: int,
) -> dict[str, Any]:
    pairs = tuple((each["key"], each["value"]) for each in headers or ())
    typed = rule.typed(IncomingRecord(topic, partition, offset, key, value, pairs, timestamp_ms))
    reason = typed.reason if isinstance(typed, TypedRecord) else ""
    digits = [content for name, content in typed.headers or () if name == VERSION_HEADER]
    version: int | None
    try:
        version = parse_version(digits[0]) if digits else 1
    except DecodeError as error:
        version, reason = None, str(error)
    return {"type": typed.record_type, "version": version, "value": typed.value, "reason": reason or None}
