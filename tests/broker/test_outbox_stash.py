"""Stashing on a real PostgreSQL, by each driver: in the user's transaction, refused outside of one, keys locked."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from streams import AsyncOutbox, Outbox, Record
from streams.errors import EncodeError, OutboxError
from streams.outbox import database as database_module
from streams.outbox import postgres, schema
from streams.outbox.postgres import PostgresSession
from streams.records import TYPE_HEADER
from tests.broker.battery_kit import wait_until
from tests.broker.outbox_kit import Counted, PostgresServer
from tests.unit.waiting import PATIENCE

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def database(each_postgres: PostgresServer) -> str:
    address = each_postgres.make_database()
    with PostgresSession(address, "kes_outbox") as session:
        assert session.apply(4)
        assert not session.apply(4)
        with pytest.raises(OutboxError, match="has 4 shards, not 8"):
            session.apply(8)
    return address


def rows(address: str, columns: str = "topic, key, value, header_names, header_values, partition") -> list[Any]:
    with psycopg.connect(address) as db:
        return db.execute(f"SELECT {columns} FROM kes_outbox ORDER BY id".encode()).fetchall()


def test_a_row_has_the_parts_of_the_record(database: str) -> None:
    outbox = Outbox()
    with psycopg.connect(database) as db:
        outbox.stash(db, "t", Counted("ä", 1), key="ä", headers=[("h", None), ("h", b"\0")], partition=2)
        outbox.stash(db.cursor(), "t", None, key=b"\xff", ordered=False)
        outbox.stash_many(db, [])
        outbox.stash_many(
            db, [Record("u", b"", headers=[("x", b"1")]), Record("v", b"2"), Record("w", None, b"k", [("y", b"")])]
        )
        db.execute("SELECT kes_stash('sql', 'Counted', 'k', jsonb_build_object('key', 'k', 'number', 7))")
    assert rows(database) == [
        ("t", "ä".encode(), '{"key":"ä","number":1}'.encode(), ["__grt__", "h", "h"], [b"Counted", None, b"\0"], 2),
        ("t", b"\xff", None, [], [], None),
        ("u", None, b"", ["x"], [b"1"], None),
        ("v", None, b"2", [], [], None),
        ("w", b"k", None, ["y"], [b""], None),
        ("sql", b"k", rows(database)[5][2], ["__grt__"], [b"Counted"], None),
    ]
    assert json.loads(rows(database)[5][2]) == {"key": "k", "number": 7}


async def test_the_same_on_an_event_loop(database: str) -> None:
    outbox = AsyncOutbox()
    async with await psycopg.AsyncConnection.connect(database) as db:
        await outbox.stash(db, "t", Counted("a", 1), key="a")
        await outbox.stash(db.cursor(), "t", None, key="a")
        await outbox.stash_many(db, [])
    assert [row[:2] for row in rows(database)] == [("t", b"a"), ("t", b"a")]
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as db:
        with pytest.raises(OutboxError, match="in autocommit"):
            await outbox.stash(db, "t", None, key="a")
        async with db.transaction():
            await outbox.stash(db, "t", None, key="b")
    assert len(rows(database)) == 3


def test_outside_of_a_transaction_it_is_refused_and_inside_it_belongs_to_it(database: str) -> None:
    outbox = Outbox()
    with psycopg.connect(database, autocommit=True) as db:
        with pytest.raises(OutboxError, match="in autocommit, and no transaction is open"):
            outbox.stash(db, "t", None, key="a")
        with pytest.raises(OutboxError, match="in autocommit, and no transaction is open"):
            outbox.stash(db.cursor(), "t", None, key="a")
        with db.transaction():
            outbox.stash(db, "t", None, key="kept")
            with db.transaction() as savepoint:
                outbox.stash(db, "t", None, key="undone")
                raise psycopg.Rollback(savepoint)
        with db.transaction():
            outbox.stash(db, "t", None, key="undone")
            raise psycopg.Rollback
        with pytest.raises(EncodeError), db.transaction():
            outbox.stash(db, "t", Counted("a", 1), key=7)  # type: ignore[arg-type]
    assert [row[1] for row in rows(database)] == [b"kept"]


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO kes_outbox (topic, value) VALUES ('a b', '')",
        "INSERT INTO kes_outbox (topic, value) VALUES ('..', '')",
        "INSERT INTO kes_outbox (topic, value, partition) VALUES ('t', '', -1)",
        "INSERT INTO kes_outbox (topic, value) VALUES ('t', convert_to(repeat('x', 1000001), 'UTF8'))",
        "INSERT INTO kes_outbox (topic, header_names) VALUES ('t', ARRAY['a'])",
        "INSERT INTO kes_outbox (topic, header_names, header_values) VALUES ('t', ARRAY[NULL], ARRAY['x'::bytea])",
        "SELECT kes_stash('a b', 'T', 'k', '1')",
    ],
)
def test_the_table_refuses_what_kafka_would(database: str, statement: str) -> None:
    with psycopg.connect(database) as db, pytest.raises(psycopg.errors.CheckViolation):
        db.execute(statement.encode())


def test_ids_of_a_key_are_in_the_order_of_the_commits(database: str) -> None:
    """The second transaction waits for the first, also with its id; that of another key does not."""
    outbox, done = Outbox(), threading.Event()
    with psycopg.connect(database) as first:
        outbox.stash(first, "t", None, key="a")

        def second() -> None:
            with psycopg.connect(database) as db:
                outbox.stash_many(db, [Record("t", b"2", b"z"), Record("t", b"2", b"a")])
            done.set()

        thread = threading.Thread(target=second)
        thread.start()
        with psycopg.connect(database, autocommit=True) as watch:
            waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            wait_until(lambda: watch.execute(waits).fetchone() == (1,), "the second one waits")
        with psycopg.connect(database) as other:
            outbox.stash(other, "t", None, key="b")
        assert not done.is_set()
        outbox.stash(first, "t", None, key="a")
    thread.join(30)
    assert done.is_set()
    assert [row[0] for row in rows(database, "key")] == [b"a", b"b", b"a", b"z", b"a"]


def test_two_orders_of_two_keys_are_a_deadlock_that_the_database_names(database: str) -> None:
    outbox, failures = Outbox(), []
    barrier = threading.Barrier(2)

    def write(*keys: str) -> None:
        try:
            with psycopg.connect(database) as db:
                outbox.stash(db, "t", None, key=keys[0])
                barrier.wait(30)
                outbox.stash(db, "t", None, key=keys[1])
        except psycopg.errors.DeadlockDetected as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=keys) for keys in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(failures) == 1
    assert len(rows(database)) == 2


def test_tables_that_are_missing_or_of_another_version_are_named(each_postgres: PostgresServer, database: str) -> None:
    with (
        PostgresSession(each_postgres.make_database(), "kes_outbox") as session,
        pytest.raises(OutboxError, match="kes outbox apply"),
    ):
        session.about()
    with psycopg.connect(database) as db:
        db.execute("UPDATE kes_outbox_about SET version = 2")
    with PostgresSession(database, "kes_outbox") as session, pytest.raises(OutboxError, match="update this program"):
        session.about()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("ALTER TABLE kes_outbox DROP COLUMN tag CASCADE", "column tag of kes_outbox is missing: make an outbox"),
        ("ALTER TABLE kes_outbox_parked DROP COLUMN error", "column error of kes_outbox_parked is missing"),
        (
            "ALTER TABLE kes_outbox ALTER COLUMN topic TYPE varchar(9)",
            "column topic .* type character varying, not text",
        ),
        ("ALTER TABLE kes_outbox ALTER COLUMN id SET CACHE 20", "CACHE 20: .* SET CACHE 1"),
        ("UPDATE kes_outbox_about SET shards = 8", "has 8 shards, kes_outbox_shards 4, and .* modulo 4"),
        ("DELETE FROM kes_outbox_shards WHERE shard = 3", "has 4 shards, kes_outbox_shards 3"),
        ("UPDATE kes_outbox_about SET version = 0", "have version 0, this program needs 1: run `kes outbox apply`"),
        ("DELETE FROM kes_outbox_about", "are not whole"),
        ("DROP TABLE kes_outbox_parked", 'relation "kes_outbox_parked" does not exist: run `kes outbox apply`'),
    ],
)
def test_tables_that_were_changed_by_hand_are_refused_by_name(database: str, statement: str, reason: str) -> None:
    with psycopg.connect(database) as db:
        db.execute(statement.encode())
    with PostgresSession(database, "kes_outbox") as session, pytest.raises(OutboxError, match=reason):
        session.about()


def test_tables_of_an_older_version_are_upgraded_with_their_rows(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(database) as db:
        Outbox().stash(db, "t", None, key="a")
        db.execute(
            "CREATE OR REPLACE FUNCTION kes_stash(topic text, type text, key text, value jsonb) RETURNS void "
            "LANGUAGE sql AS 'SELECT'"
        )  # that of the older version
    for module in (database_module, schema, postgres):
        monkeypatch.setattr(module, "VERSION", 3)
    monkeypatch.setitem(schema.UPGRADES, 1, "ALTER TABLE {table} ADD COLUMN note text;\n")
    monkeypatch.setitem(schema.UPGRADES, 2, "UPDATE {table} SET note = 'x' || NULL; SELECT 1 / 0;\n")
    with PostgresSession(database, "kes_outbox") as session:
        with pytest.raises(OutboxError, match="have version 1, this program needs 3: run `kes outbox apply`"):
            session.about()
        with pytest.raises(OutboxError, match="the database refuses a statement: division by zero"):
            session.apply(4)
        with pytest.raises(OutboxError, match="have version 1"):  # all of it, or nothing
            session.about()
        monkeypatch.setitem(schema.UPGRADES, 2, "UPDATE {table} SET note = 'upgraded';\n")
        assert session.apply(4) == "version 3 of the tables of kes_outbox, from 1"
        assert session.apply(4) == ""
        assert session.about().version == 3
    with psycopg.connect(database) as db:
        db.execute("SELECT kes_stash('sql', 'Counted', 'k', '1')")
    assert rows(database, "topic, key, note") == [("t", b"a", "upgraded"), ("sql", b"k", None)]


@pytest.mark.parametrize("part", ["key", "value", "headers"])
def test_a_fetch_ends_where_its_bytes_are_used_up(database: str, part: str) -> None:
    """Whichever part they are in: a relay holds what it fetches."""
    size = 300_000
    parts: dict[str, Any] = {"key": b"k", "value": b""}
    parts[part] = [("h", bytes(size))] if part == "headers" else bytes(size)
    with psycopg.connect(database) as db:
        Outbox().stash_many(db, [Record("t", **parts) for _ in range(5)])
    with PostgresSession(database, "kes_outbox") as session:
        shards = range(session.about().shards)
        assert sum(len(session.fetch(shard, 10, 2 * size + 1_000)) for shard in shards) == 3  # one goes over
        assert sum(len(session.fetch(shard, 10, 1)) for shard in shards) == 1


def test_a_sleep_ends_with_a_wake_up_and_by_other_threads(database: str) -> None:
    with PostgresSession(database, "kes_outbox") as session, psycopg.connect(database, autocommit=True) as writer:
        session.listen()
        assert not session.sleep(1, 0.01)
        writer.execute("NOTIFY kes_outbox, '1'")
        session.about()  # takes it in with its answer
        assert session.sleep(1, PATIENCE)
        endings = [(lambda: writer.execute("NOTIFY kes_outbox, '1'"), True), (session.rouse, False)]
        for ending, is_wake_up in endings:
            timer, began = threading.Timer(0.1, ending), time.monotonic()
            timer.start()
            assert session.sleep(1, PATIENCE) is is_wake_up
            assert time.monotonic() - began < PATIENCE
            timer.join()
        closing, began = threading.Timer(0.1, session.close), time.monotonic()
        closing.start()
        with pytest.raises(database_module.DatabaseLost):
            session.sleep(1, PATIENCE)
        assert time.monotonic() - began < PATIENCE


def test_an_index_that_older_tables_lack_is_made(database: str) -> None:
    with PostgresSession(database, "kes_outbox") as session:
        with psycopg.connect(database) as db:
            db.execute("DROP INDEX kes_outbox_parked_keys")
        session.about()  # it works without, but slower
        assert session.apply(4) == "index kes_outbox_parked_keys"
        assert session.apply(4) == ""


def test_functions_of_an_older_release_are_replaced_and_lock_the_same_keys(database: str) -> None:
    with PostgresSession(database, "kes_outbox") as session:
        with psycopg.connect(database) as db:
            db.execute("DROP FUNCTION kes_stash(text, text, text, jsonb)")
            db.execute(OLDER_FUNCTION)
        assert session.apply(4) == "functions kes_stash and kes_stash_rows"
        assert session.apply(4) == ""
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        first.execute("""SELECT kes_stash('t', 'Noted', 'a', '{"n": 1}'), kes_stash('t', 'Noted', NULL, '{"n": 2}')""")
        second.execute("SET lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            Outbox().stash_many(second, [Record("t", b"", b"a")])
        second.rollback()
        Outbox().stash_many(second, [Record("t", b"", b"b"), Record("t", b"")])
        rows = first.execute("SELECT key, value, header_names, header_values FROM kes_outbox ORDER BY id").fetchall()
        headers = ([TYPE_HEADER], [b"Noted"])
        assert rows == [(b"a", b'{"n": 1}', *headers), (None, b'{"n": 2}', *headers)]


OLDER_FUNCTION = """
    CREATE FUNCTION kes_stash(topic text, type text, key text, value jsonb) RETURNS void LANGUAGE sql AS $body$
      SELECT kes_stash_rows(
        ARRAY[topic], ARRAY[convert_to(key, 'UTF8')], ARRAY[convert_to(value::text, 'UTF8')], ARRAY[NULL]::integer[],
        ARRAY[1], ARRAY['__grt__'], ARRAY[convert_to(type, 'UTF8')], true)
    $body$
"""


PARKED = """
    INSERT INTO kes_outbox_parked (shard, id, tag, topic, key, stashed_at, attempts, header_names, header_values,
      error, next_try_at)
    SELECT shard, id + 1000000, tag, topic, key, stashed_at, attempts, header_names, header_values, 'no', now()
    FROM kes_outbox
"""


@pytest.mark.nightly
def test_very_many_parked_rows_hold_up_no_other_key_and_come_back_in_parts(database: str) -> None:
    """With a look at all of them for each row, a fetch would take longer than a statement may."""
    with psycopg.connect(database, autocommit=True) as db:
        fill = (
            "INSERT INTO kes_outbox (topic, key) SELECT 't', convert_to('k' || n, 'UTF8') FROM generate_series(1, %s) n"
        )
        db.execute(fill, [400_000])
        db.execute(PARKED)
        db.execute("DELETE FROM kes_outbox")
        db.execute("INSERT INTO kes_outbox (topic, key) SELECT 't', 'k5' FROM generate_series(1, 2000)")
        db.execute("ANALYZE kes_outbox, kes_outbox_parked")
        with db.transaction():
            Outbox().stash_many(db, [Record("t", b"", b"free-%d" % number) for number in range(100)])
    with PostgresSession(database, "kes_outbox") as session:
        keys = {row.output.key for shard in range(4) for row in session.fetch(shard, 2_000, 10**6)}
        assert keys == {b"free-%d" % number for number in range(100)}
        assert [session.retry_parked(shard) for shard in range(4)] == [10_000] * 4


GRANTS = """
    GRANT INSERT, SELECT (shard) ON kes_outbox TO {writer};
    GRANT SELECT, INSERT, DELETE ON kes_outbox, kes_outbox_parked TO {relay};
    GRANT SELECT, UPDATE ON kes_outbox_shards, kes_outbox_about TO {relay}
"""


def test_writers_and_relays_need_few_rights(database: str) -> None:
    name = database.partition("?")[0].rpartition("/")[2]
    with psycopg.connect(database) as db:
        for role in ("writer", "relay"):
            db.execute(f"CREATE ROLE {name}_{role} LOGIN".encode())
        db.execute(GRANTS.format(writer=f"{name}_writer", relay=f"{name}_relay").encode())
    with psycopg.connect(database, user=f"{name}_writer") as db:
        Outbox().stash_many(db, [Record("t", b"1", b"a"), Record("t", b"2", b"b")])
    with psycopg.connect(database, user=f"{name}_writer") as db, pytest.raises(psycopg.errors.InsufficientPrivilege):
        db.execute("SELECT value FROM kes_outbox")
    with PostgresSession(psycopg.conninfo.make_conninfo(database, user=f"{name}_relay"), "kes_outbox") as session:
        about = session.about()
        session.adopt("topic")
        left = 2
        for shard in range(about.shards):
            session.show_owner(about.lock_class, shard)
            for row in session.fetch(shard, 10, 1_000):
                session.park(shard, row.row, "refused", 0.0, 0.0)
                assert session.retry_parked(shard) == 1
                session.delete(shard, [row.row], 1)
                left -= 1
        assert left == 0
        assert [status.waiting for status in session.status(about)] == [0] * 4
    writer = psycopg.conninfo.make_conninfo(database, user=f"{name}_writer")
    denied = "the database refuses the relay: permission denied"
    with PostgresSession(writer, "kes_outbox") as session, pytest.raises(OutboxError, match=denied):
        session.about()


def test_a_role_without_a_right_is_refused_by_name(database: str) -> None:
    name = database.partition("?")[0].rpartition("/")[2]
    with psycopg.connect(database) as db:
        db.execute(f"CREATE ROLE {name}_reader LOGIN".encode())
        grants = "GRANT SELECT ON kes_outbox, kes_outbox_parked, kes_outbox_shards, kes_outbox_about TO {role}"
        db.execute(grants.format(role=f"{name}_reader").encode())
        Outbox().stash(db, "t", None, key="a")
    with PostgresSession(psycopg.conninfo.make_conninfo(database, user=f"{name}_reader"), "kes_outbox") as session:
        (row,) = (row for shard in range(session.about().shards) for row in session.fetch(shard, 10, 1_000))
        for call in (
            lambda: session.delete(row.output.origin_partition, [row.row], 1),
            lambda: session.park(row.output.origin_partition, row.row, "refused", 0.0, 0.0),
            lambda: session.adopt("topic"),
        ):
            with pytest.raises(OutboxError, match="the database refuses the relay: permission denied for table"):
                call()
    assert len(rows(database)) == 1


def test_a_server_of_another_encoding_keeps_bytes_and_errors(each_postgres: PostgresServer) -> None:
    address = each_postgres.make_database("ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    with PostgresSession(address, "kes_outbox") as session:
        session.apply(1)
        with psycopg.connect(address) as db:
            Outbox().stash(db, "t", Counted("→", 1), key="→", headers=[("ä", "→".encode())])
            db.execute("SELECT kes_stash('t', 'Counted', 'ä', jsonb_build_object('key', 'ä'))")
        with pytest.raises((UnicodeEncodeError, psycopg.DataError)), psycopg.connect(address) as db:
            Outbox().stash(db, "t", None, key="k", headers=[("→", b"")])
        first, second = session.fetch(0, 10, 1_000)
        assert (first.output.key, first.output.value) == ("→".encode(), '{"key":"→","number":1}'.encode())
        assert ("ä", "→".encode()) in (first.output.headers or ())
        assert (second.output.key, json.loads(second.output.value or b"")) == ("ä".encode(), {"key": "ä"})
        session.park(0, first.row, "no → such\0 topic", 60.0, 60.0)
        assert [row.error for row in session.parked()] == ["no \\u2192 such topic"]


@pytest.mark.parametrize("at", ["-infinity", "0001-01-01 BC", "1969-12-31", "2999-01-01", "infinity"])
def test_a_time_that_was_set_by_hand_or_by_a_wrong_clock_holds_up_nothing(database: str, at: str) -> None:
    with psycopg.connect(database) as db:
        db.execute("INSERT INTO kes_outbox (topic, key, stashed_at) VALUES ('t', '', %s)", [at])
    with PostgresSession(database, "kes_outbox") as session:
        about = session.about()
        (row,) = (row for shard in range(about.shards) for row in session.fetch(shard, 10, 1_000))
        assert 0 < row.output.timestamp_ms < 1000 * (time.time() + 60)
        assert (row.output.key, row.output.value) == (b"", None)
        assert all(status.oldest_seconds >= 0 for status in session.status(about))


GOHARVEST = """
CREATE TABLE outbox (
  id BIGSERIAL PRIMARY KEY, create_time TIMESTAMP WITH TIME ZONE NOT NULL, kafka_topic VARCHAR(249) NOT NULL,
  kafka_key VARCHAR(100) NOT NULL, kafka_value VARCHAR(10000), kafka_header_keys TEXT[] NOT NULL,
  kafka_header_values TEXT[] NOT NULL, leader_id UUID
)
"""


def test_a_table_of_goharvest_is_taken_over_with_its_writers(database: str) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "outbox.md").read_text(encoding="utf-8")
    statements = guide.partition("## Coming from goharvest")[2].partition("```postgresql\n")[2].partition("```")[0]
    insert = "INSERT INTO outbox VALUES (DEFAULT, now(), %s, %s, %s, %s, %s, NULL)"
    with psycopg.connect(database, autocommit=True) as db:
        db.execute(GOHARVEST)
        db.execute(insert, ["t", "a", "1", ["h", "h"], ["x", "ä"]])
        db.execute(insert, ["t", "a", None, [], []])
        db.execute(statements.encode())
        db.execute(insert, ["t", "b", "3", ["h"], ["y"]])
        assert db.execute("SELECT count(*) FROM outbox").fetchone() == (0,)
    assert rows(database) == [
        ("t", b"a", b"1", ["h", "h"], [b"x", "ä".encode()], None),
        ("t", b"a", None, [], [], None),
        ("t", b"b", b"3", ["h"], [b"y"], None),
    ]
