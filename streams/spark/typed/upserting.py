"""The changes of a changelog in a table of a database, each once: what comes twice, or late, changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.errors import ConfigError
from streams.spark.typed.tables import ERROR, META

OFFSET: Final = "log_offset"
_AT_ONCE: Final = 1_000
_MARKS: Final = {"qmark": "?", "format": "%s", "pyformat": "%s"}
_NESTED: Final = (t.ArrayType, t.MapType, t.StructType, t.VariantType)


def upsert(changes: DataFrame, *, connect: Callable[[], Any], table: str) -> None:
    """Bring a table of a database up to date with what ``changes`` gives: the last change of each key, unless the table
    has a later one. Runs one job; in ``foreachBatch``, for a stream.

        def write(batch, batch_id):
            upsert(changes(batch, key=str, value=Account), connect=connect, table="accounts")

    The table exists. Its columns are ``key`` (the primary key), the fields of the value (or ``value``, if that is no
    class), ``deleted`` (a boolean) and ``log_offset`` (a bigint). A deleted key stays as a row whose ``deleted`` is
    true and whose other columns are null: by it a change that comes late is known for one. A view leaves such rows out.

    ``connect`` makes a connection of Python's DB-API on the worker; the database must know ``ON CONFLICT`` (PostgreSQL,
    SQLite). Each task is a transaction of its own, so readers may see a part of a batch. Offsets are compared, so the
    table is for one topic, which never gets more partitions and is not recreated. Raises ``ConfigError`` before the
    job for columns that a table cannot have; records with an ``_error`` fail the job.
    """
    names, values = _columns(changes)
    bad = f.concat(
        f.lit("upsert: "), f"{META}.topic", f.lit("["), f"{META}.partition", f.lit("] offset "), f"{META}.offset",
        f.lit(": "), ERROR,
    )  # fmt: skip
    change = f.struct(*values, "deleted", f.col(f"{META}.offset").alias(OFFSET))
    checked = f.when(f.col(ERROR).isNotNull(), f.raise_error(bad).cast("bigint")).otherwise(f.col(f"{META}.offset"))
    last = changes.groupBy("key").agg(f.max_by(change, checked).alias("last")).select("key", "last.*")
    # In the order of the keys: two writers of the same ones then wait for each other, and are not in a deadlock.
    last.sortWithinPartitions("key").foreachPartition(_writer(connect, table, [*names, "deleted", OFFSET]))


def _columns(changes: DataFrame) -> tuple[list[str], list[Column]]:
    """Return the value's columns in the table. Raises ``ConfigError``."""
    schema = changes.schema
    if missing := {"key", "value", "deleted", ERROR, META} - set(schema.names):
        raise ConfigError(f"upsert takes what changes() gives: {', '.join(sorted(missing))} is missing")
    kind = schema["value"].dataType
    fields = kind.fields if isinstance(kind, t.StructType) else [t.StructField("value", kind)]
    for field in (schema["key"], *fields):
        if isinstance(field.dataType, _NESTED):
            raise ConfigError(
                f"upsert: {field.name} is {field.dataType.simpleString()}, which is no column of a table: give a "
                "value without it (withColumn('value', struct(...)))"
            )
    names = [field.name for field in fields]
    if taken := {"key", "deleted", OFFSET} & set(names):
        raise ConfigError(f"upsert: a field of the value is called {', '.join(sorted(taken))}, as a column of its own")
    if not isinstance(kind, t.StructType):
        return names, [f.col("value")]
    return names, [f.col(f"value.`{name}`").alias(name) for name in names]


def _writer(connect: Callable[[], Any], table: str, names: list[str]) -> Callable[[Iterator[Row]], None]:
    columns = ", ".join(map(_quoted, ["key", *names]))
    place = ".".join(map(_quoted, table.split(".")))
    updates = ", ".join(f"{_quoted(name)} = excluded.{_quoted(name)}" for name in names)
    later = f"{place}.{_quoted(OFFSET)} < excluded.{_quoted(OFFSET)}"

    def write(rows: Iterator[Row]) -> None:
        with contextlib.closing(connect()) as connection:
            mark = _mark(connection)
            values = ", ".join([mark] * (len(names) + 1))
            statement = (
                f"INSERT INTO {place} ({columns}) VALUES ({values}) "
                f"ON CONFLICT ({_quoted('key')}) DO UPDATE SET {updates} WHERE {later}"
            )
            cursor = connection.cursor()
            while some := [tuple(row) for row in islice(rows, _AT_ONCE)]:
                cursor.executemany(statement, some)
            connection.commit()

    return write


def _quoted(name: str) -> str:
    if '"' in name or "%" in name or not name:
        raise ConfigError(f"upsert: {name!r} is no name of a table or column")
    return f'"{name}"'


def _mark(connection: Any) -> str:
    """Return the mark for a value that the connection's module wants."""
    module = type(connection).__module__.partition(".")[0]
    style = getattr(import_module(module), "paramstyle", "")  # where its C part was unpickled, it is not imported yet
    if style not in _MARKS:
        raise ConfigError(f"upsert: connections of {module} have the paramstyle {style!r}, not one of {list(_MARKS)}")
    return _MARKS[style]
