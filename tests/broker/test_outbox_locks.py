"""Who waits for whom in an outbox of PostgreSQL, under functions of any release, schema and ``search_path``; and what a
crash cannot take back any more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest

from streams import Outbox, Record
from streams.codecs import codec_for
from streams.outbox.postgres import PostgresSession
from tests.broker.outbox_kit import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def database(each_postgres: PostgresServer) -> str:
    address = each_postgres.make_database()
    with PostgresSession(address, "kes_outbox") as session:
        assert session.apply(4)
    return address


def in_one_call(db: psycopg.Connection[Any], keys: list[bytes]) -> None:
    Outbox().stash_many(db, [Record("t", b"", key) for key in keys])


def one_by_one(db: psycopg.Connection[Any], keys: list[bytes]) -> None:
    for key in keys:
        in_one_call(db, [key])


def in_sql(db: psycopg.Connection[Any], keys: list[bytes]) -> None:
    db.cursor().executemany("SELECT kes_stash('t', 'T', %s, '{}')", [(key.decode(),) for key in keys])


WAYS = pytest.mark.parametrize("stash", [in_one_call, one_by_one, in_sql])
Stash = Callable[[psycopg.Connection[Any], list[bytes]], None]


@contextlib.contextmanager
def held_up(db: psycopg.Connection[Any]) -> Iterator[None]:
    """The block waits for a lock."""
    db.execute("SET LOCAL lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        yield
    db.rollback()


@WAYS
def test_a_transaction_with_very_many_keys_holds_up_those_keys_only(database: str, stash: Stash) -> None:
    with psycopg.connect(database) as bulk, psycopg.connect(database) as other:
        stash(bulk, [b"%d" % number for number in range(1_000)])
        other.execute("SET lock_timeout = '10s'")
        stash(other, [b"other-%d" % number for number in range(200)])
        other.commit()
        with held_up(other):
            stash(other, [b"500"])


@WAYS
def test_a_transaction_takes_a_bounded_number_of_locks(database: str, stash: Stash) -> None:
    """Beyond that it holds up other keys, too, and no order is lost; what follows in the session begins anew."""
    with psycopg.connect(database) as db, psycopg.connect(database) as other:
        stash(db, [b"%d" % number for number in range(3_000)])
        count = """SELECT count(DISTINCT (classid, objid, objsubid)) FROM pg_locks
            WHERE locktype = 'advisory' AND pid = pg_backend_pid()"""
        [taken] = db.execute(count).fetchone() or [0]
        assert 500 < taken <= 1_000 + 1_024 + 4
        with held_up(other):
            stash(other, [b"2999"])
        db.commit()
        stash(db, [b"a", b"b"])
        assert (db.execute(count).fetchone() or [99])[0] < 9


def test_writers_without_a_common_key_meet_no_deadlock(database: str) -> None:
    failures: list[Exception] = []

    def write(writer: int) -> None:
        try:
            with psycopg.connect(database) as db:
                for number in range(15):
                    with db.transaction():
                        one_by_one(db, [b"%d-%d-%d" % (writer, number, key) for key in range(8)])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=[writer]) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


OLDER_LOCK = """
    SELECT pg_advisory_xact_lock('kes_outbox'::regclass::oid::integer,
      (get_byte(sha256('a'), 1) * 256 + get_byte(sha256('a'), 2)) % 1024)
"""


@WAYS
def test_functions_of_earlier_releases_and_these_wait_for_each_other(database: str, stash: Stash) -> None:
    """As long as an older one is under way while they are replaced, or is put back."""
    with psycopg.connect(database) as older, psycopg.connect(database) as newer:
        older.execute(OLDER_LOCK)
        with held_up(newer):
            stash(newer, [b"a"])
        older.rollback()
        stash(newer, [b"a"])
        with held_up(older):
            older.execute(OLDER_LOCK)


@pytest.mark.parametrize("schema", ["public", "O'Brien's dept"])
def test_functions_and_triggers_work_under_any_search_path(each_postgres: PostgresServer, schema: str) -> None:
    address = each_postgres.make_database()
    name = f'"{schema}"'
    with psycopg.connect(address, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA IF NOT EXISTS {name}; CREATE SCHEMA tenant".encode())
        db.execute("CREATE TABLE tenant.orders (id text)")
        db.execute("CREATE TABLE tenant.kes_outbox (LIKE pg_class)")  # of somebody else
    path = name.replace(" ", "\\ ")
    there = psycopg.conninfo.make_conninfo(address, options=f"-c search_path={path}")
    with PostgresSession(there, "kes_outbox") as session:
        assert session.apply(4)
        assert session.apply(4) == ""
    with psycopg.connect(address) as db:
        db.execute(
            f"""
            CREATE FUNCTION tenant.told() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
              PERFORM {name}.kes_stash('t', 'Ordered', NEW.id, to_jsonb(NEW)); RETURN NEW; END $$;
            CREATE TRIGGER told BEFORE INSERT ON tenant.orders FOR EACH ROW EXECUTE FUNCTION tenant.told()""".encode()
        )
        db.commit()
        for number, path in enumerate(("tenant", "''", "tenant, public")):
            db.execute(f"SET search_path = {path}".encode())
            db.execute("INSERT INTO tenant.orders VALUES (%s)", [str(number)])
            db.execute(
                f"SELECT {name}.kes_stash_rows(ARRAY['t', 't'], ARRAY['a', 'b']::bytea[], ARRAY['', '']::bytea[], "
                "ARRAY[NULL, NULL]::integer[], ARRAY[0, 0], '{}', '{}', true)".encode()
            )
            db.commit()
        assert db.execute(f"SELECT count(*) FROM {name}.kes_outbox".encode()).fetchone() == (9,)


@WAYS
@pytest.mark.parametrize("wake", ["on", "off"])
def test_a_transaction_that_is_to_be_prepared_sends_no_wake_up(database: str, stash: Stash, wake: str) -> None:
    """PREPARE TRANSACTION refuses one that has."""
    with PostgresSession(database, "kes_outbox") as session, psycopg.connect(database) as db:
        place = session.about().lock_class
        session.listen()
        assert all(session.fall_asleep(place, shard) for shard in range(4))
        db.execute(f"SET LOCAL kes_outbox.wake = {wake}".encode())
        stash(db, [b"a", b"b"])
        db.commit()
        assert bool([*session._connection.notifies(timeout=0.2, stop_after=1)]) is (wake == "on")


def test_what_is_fetched_outlives_a_crash(each_postgres: PostgresServer, database: str) -> None:
    """Also if its writer did not wait for the disk."""
    with psycopg.connect(each_postgres.address(), autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        admin.execute("SELECT pg_reload_conf()")
    try:
        with psycopg.connect(database) as db, PostgresSession(database, "kes_outbox") as session:
            db.execute("SET synchronous_commit = off")
            in_one_call(db, [b"a"])
            db.commit()
            [at] = db.execute("SELECT pg_current_wal_insert_lsn()").fetchone() or [None]
            assert [row.output.key for shard in range(4) for row in session.fetch(shard, 10, 1_000)] == [b"a"]
            assert db.execute("SELECT pg_current_wal_flush_lsn() >= %s", [at]).fetchone() == (True,)
    finally:
        with psycopg.connect(each_postgres.address(), autocommit=True) as admin:
            admin.execute("ALTER SYSTEM RESET wal_writer_delay")
            admin.execute("SELECT pg_reload_conf()")


DURATION = "replace(format('PT%sS', extract(epoch FROM x)), 'PT-', '-PT')"
COLUMNS: list[tuple[str, type, Any]] = [
    ("5.00::numeric(10, 2)", Decimal, Decimal("5.00")),
    ("trim_scale(5.00::numeric(10, 2))", int, 5),
    ("2::bigint", int, 2),
    ("0.5::real", float, 0.5),
    ("true", bool, True),
    ("'7f0c1de2-9f4e-4a55-8d8e-0d6a3d2b7a11'::uuid", UUID, UUID("7f0c1de2-9f4e-4a55-8d8e-0d6a3d2b7a11")),
    ("'2026-11-28'::date", date, date(2026, 11, 28)),
    ("'10:30:00.5'::time", time, time(10, 30, 0, 500_000)),
    ("'2026-11-28 10:30'::timestamp", datetime, datetime(2026, 11, 28, 10, 30)),
    ("'2026-11-28 10:30+00'::timestamptz", datetime, datetime(2026, 11, 28, 10, 30, tzinfo=UTC)),
    (DURATION.replace("x)", "'1 day 00:00:01.5'::interval)"), timedelta, timedelta(days=1, seconds=1.5)),
    (DURATION.replace("x)", "'-1 month -0.5 s'::interval)"), timedelta, -timedelta(days=30, seconds=0.5)),
    ("translate(encode(decode(repeat('ff', 60), 'hex'), 'base64'), E'\\n', '')", bytes, b"\xff" * 60),
    ("ARRAY[1, 2]", list[int], [1, 2]),
    ("jsonb_build_object('a', 1)", dict[str, int], {"a": 1}),
]


def test_columns_of_postgresql_arrive_in_typed_events_as_the_guide_says(database: str) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "outbox.md").read_text(encoding="utf-8")
    with psycopg.connect(database) as db:
        for expression, kind, value in COLUMNS:
            [text] = db.execute(f"SELECT jsonb_build_object('x', {expression})::text".encode()).fetchone() or [""]
            event: Any = msgspec.defstruct("Event", [("x", kind)])
            assert codec_for(event).decode(text.encode()) == event(value), expression
    for way in (
        "trim_scale(x)",
        DURATION,
        "translate(encode(x, 'base64'), E'\\n', '')",
    ):
        assert way in guide
