"""The changes of a changelog in a table, each once: what comes twice, or late, changes nothing."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from typing import Any, Final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from streams.errors import ConfigError
from streams.spark.typed.tables import ERROR, META, unreadable

OFFSET: Final = "log_offset"
_AT_ONCE: Final = 1_000
_MARKS: Final = {"qmark": "?", "format": "%s", "pyformat": "%s"}
_NESTED: Final = (t.ArrayType, t.MapType, t.StructType, t.VariantType)


def upsert(
    changes: DataFrame,
    *,
    table: str,
    connect: Callable[[], Any] | None = None,
    jdbc: Mapping[str, str] | None = None,
) -> None:
    """Bring a table up to date with what ``changes`` gives: the last change of each key, unless the table has a later
    one. Blocks until it is done; in ``foreachBatch``, for a stream.

        def write(batch, batch_id):
            upsert(changes(batch, key=str, value=Account), table="lake.accounts")

    The table exists. Its columns are ``key``, the fields of the value (or ``value``, if that is no class), ``deleted``
    (a boolean) and ``log_offset`` (a bigint). A deleted key stays as a row whose ``deleted`` is true and whose other
    columns are null: by it a change that comes late is known for one. A view leaves such rows out.

    * Without ``connect`` and ``jdbc`` it is a table of the session's catalog, of a format that knows ``MERGE`` (Delta,
      Iceberg). Each call is one commit of it.
    * ``jdbc``: the options of Spark's ``format("jdbc")`` (``url``, ``user``, ...). The rows go into a new table
      ``kes_...`` beside it, and from there, in one transaction, into the table. Not with Spark Connect.
    * ``connect`` makes a connection of Python's DB-API, on the worker. Each task is a transaction of its own, so
      readers may see a part of a batch.

    A database must know ``ON CONFLICT`` (PostgreSQL, SQLite), and ``key`` is the table's primary key. Offsets are
    compared, so a table is for one topic, which never gets more partitions and is not recreated. Raises
    ``ConfigError`` before the job for columns that a table cannot have, and for a table of the catalog that has
    others; records with an ``_error`` fail the job.
    """
    if connect is not None and jdbc is not None:
        raise ConfigError("upsert: give connect or jdbc, not both")
    is_merged = connect is None and jdbc is None
    columns = _columns(changes, nested=is_merged)
    bad = unreadable("upsert")
    change = f.struct(*(column.alias(name) for name, column in columns.items()))
    checked = f.when(f.col(ERROR).isNotNull(), f.raise_error(bad).cast("bigint")).otherwise(f.col(f"{META}.offset"))
    last = changes.groupBy("key").agg(f.max_by(change, checked).alias("last")).select("key", "last.*")
    if is_merged:
        _merge(last, table)
    elif jdbc is not None:
        _through_jdbc(last, dict(jdbc), table)
    else:
        assert connect is not None
        # In the order of the keys: two writers of the same ones then wait for each other, and are not in a deadlock.
        last.sortWithinPartitions("key").foreachPartition(_writer(connect, table, list(columns)))


def _columns(changes: DataFrame, *, nested: bool) -> dict[str, Column]:
    """Return the columns of the table but the key. Raises ``ConfigError``."""
    schema = changes.schema
    if missing := {"key", "value", "deleted", ERROR, META} - set(schema.names):
        raise ConfigError(f"upsert takes what changes() gives: {', '.join(sorted(missing))} is missing")
    kind = schema["value"].dataType
    fields = kind.fields if isinstance(kind, t.StructType) else [t.StructField("value", kind)]
    for field in (schema["key"], *fields):
        if isinstance(field.dataType, _NESTED) and not nested:
            raise ConfigError(
                f"upsert: {field.name} is {field.dataType.simpleString()}, which is no column of a table: give a "
                "value without it (withColumn('value', struct(...)))"
            )
    if taken := {"key", "deleted", OFFSET} & {field.name for field in fields}:
        raise ConfigError(f"upsert: a field of the value is called {', '.join(sorted(taken))}, as a column of its own")
    inside = isinstance(kind, t.StructType)
    values = {field.name: f.col(f"value.`{field.name}`" if inside else "value") for field in fields}
    return {**values, "deleted": f.col("deleted"), OFFSET: f.col(f"{META}.offset")}


# -- a table of the catalog --------------------------------------------------------------------------------------------


def _merge(last: DataFrame, table: str) -> None:
    spark = last.sparkSession
    _check_table(spark, table, last.schema)
    names = [f"`{name}`" for name in last.columns]
    updates, values = ", ".join(f"t.{name} = c.{name}" for name in names), ", ".join(f"c.{name}" for name in names)
    spark.sql(
        f"MERGE INTO {table} AS t USING {{changes}} AS c ON t.key <=> c.key "
        f"WHEN MATCHED AND t.{OFFSET} < c.{OFFSET} THEN UPDATE SET {updates} "
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(names)}) VALUES ({values})",
        changes=last,
    )


def _check_table(spark: SparkSession, table: str, wanted: t.StructType) -> None:
    """Raise ``ConfigError`` unless the table has the columns that are written, and no others: one that is left out
    would keep the value of an earlier change."""
    due = {field.name: field.dataType.simpleString() for field in wanted}
    made_by = f"CREATE TABLE {table} ({', '.join(f'`{name}` {kind}' for name, kind in due.items())})"
    try:
        found = {field.name: field.dataType.simpleString() for field in spark.table(table).schema}
    except AnalysisException as error:
        raise ConfigError(f"upsert: no table {table} ({error.getCondition()}); one that fits: {made_by}") from error
    wrong = [f"no {name}" for name in due if name not in found]
    wrong += [f"{name}, which is none of theirs" for name in found if name not in due]
    wrong += [f"{name} as {found[name]}, not {kind}" for name, kind in due.items() if found.get(name, kind) != kind]
    if wrong:
        raise ConfigError(
            f"upsert: table {table} was not made for these changes: it has {'; '.join(wrong)}. One that fits: {made_by}"
        )


# -- a database --------------------------------------------------------------------------------------------------------


def _writer(connect: Callable[[], Any], table: str, names: list[str]) -> Callable[[Iterator[Row]], None]:
    begin, end = _statement(table, ["key", *names])

    def write(rows: Iterator[Row]) -> None:
        with contextlib.closing(connect()) as connection:
            values = ", ".join([_mark(connection)] * (len(names) + 1))
            cursor = connection.cursor()
            while some := [tuple(row) for row in islice(rows, _AT_ONCE)]:
                cursor.executemany(f"{begin} VALUES ({values}) {end}", some)
            connection.commit()

    return write


def _through_jdbc(last: DataFrame, jdbc: dict[str, str], table: str) -> None:
    """By a table in between: Spark's executors can insert rows by JDBC, and nothing else."""
    jvm = _java_of(last.sparkSession)
    begin, end = _statement(table, last.columns)
    schema, dot, _ = table.rpartition(".")
    between = _path_of(f"{schema}{dot}kes_{uuid.uuid4().hex}")
    try:
        last.write.format("jdbc").options(**{**jdbc, "dbtable": between}).mode("error").save()
        columns = ", ".join(map(_quoted, last.columns))
        # In the order of the keys, as above. WHERE true: without it SQLite takes ON for a join's.
        statement = f'{begin} SELECT {columns} FROM {between} WHERE true ORDER BY "key" {end}'
        _execute(jvm, jdbc, statement, f"DROP TABLE {between}")
    except BaseException:
        with contextlib.suppress(Exception):
            _execute(jvm, jdbc, f"DROP TABLE IF EXISTS {between}")
        raise


def _java_of(spark: SparkSession) -> Any:
    try:
        return spark.sparkContext._jvm
    except PySparkException as error:
        raise ConfigError("upsert: jdbc does not work with Spark Connect: give connect") from error


def _execute(jvm: Any, jdbc: dict[str, str], *statements: str) -> None:
    """Run statements in one transaction, by a connection of the driver's Java."""
    given = jvm.PythonUtils.toScalaMap({"dbtable": "-", **jdbc})
    options = jvm.org.apache.spark.sql.execution.datasources.jdbc.JDBCOptions(given)
    dialect = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(options.url())
    with contextlib.closing(dialect.createConnectionFactory(options).apply(-1)) as connection:
        connection.setAutoCommit(False)
        for statement in statements:
            connection.createStatement().executeUpdate(statement)
        connection.commit()


def _statement(table: str, names: list[str]) -> tuple[str, str]:
    """Return the statement before and after the rows."""
    path = _path_of(table)
    updates = ", ".join(f"{_quoted(name)} = excluded.{_quoted(name)}" for name in names if name != "key")
    later = f"{path}.{_quoted(OFFSET)} < excluded.{_quoted(OFFSET)}"
    begin = f"INSERT INTO {path} ({', '.join(map(_quoted, names))})"
    return begin, f"ON CONFLICT ({_quoted('key')}) DO UPDATE SET {updates} WHERE {later}"


def _path_of(table: str) -> str:
    return ".".join(map(_quoted, table.split(".")))


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
