"""The schedules in which relays that go by ids or transaction ids lose rows, wait, or invert a key, step by step, on
PostgreSQL 18 and 16. The table ``account`` has the order of the commits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from streams import Outbox, Record
from streams.outbox.postgres import PostgresSession
from tests.broker.battery_kit import wait_until
from tests.broker.outbox_kit import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def database(each_postgres: PostgresServer) -> str:
    address = each_postgres.make_database()
    with PostgresSession(address, "kes_outbox") as session:
        session.apply(1)
    with psycopg.connect(address) as db:
        db.execute("CREATE TABLE account AS SELECT '' AS history")
        db.execute("CREATE TABLE other (name text)")
    return address


def stash(db: psycopg.Connection[Any], name: str, key: str = "one") -> None:
    Outbox().stash_many(db, [Record("t", name.encode(), key.encode())])


def change(db: psycopg.Connection[Any], name: str) -> None:
    """Change the account: its row is locked until the end of the transaction."""
    db.execute("UPDATE account SET history = history || %s", [name])


def history(database: str) -> str:
    with psycopg.connect(database) as db:
        row = db.execute("SELECT history FROM account").fetchone()
    assert row is not None
    return str(row[0])


def sent(session: PostgresSession) -> str:
    """What a relay sends now; it deletes it then."""
    rows = session.fetch(0, 10, 1_000)
    session.delete(0, [row.row for row in rows], 1)
    return "".join((row.output.value or b"").decode() for row in rows)


def until_one_waits(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as watch:
        text = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        wait_until(lambda: watch.execute(text).fetchone() == (1,), "a transaction waits")


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_row_that_is_committed_late_is_sent_late_and_holds_up_no_other(
    each_postgres: PostgresServer, database: str
) -> None:
    """1 to 3, and 5: going on behind the last id loses it, and a horizon waits for all who write, in any database."""
    with (
        PostgresSession(database, "kes_outbox") as session,
        psycopg.connect(each_postgres.make_database()) as elsewhere,
    ):
        elsewhere.execute("CREATE TABLE other (name text)")
        with psycopg.connect(database) as late:
            stash(late, "A")
            with psycopg.connect(database) as early:
                stash(early, "B", "two")
            assert sent(session) == "B"
            assert sent(session) == ""
        assert sent(session) == "A"


@pytest.mark.parametrize("writes_first", ["A", "B"])
def test_stashes_behind_the_locks_of_rows_come_in_the_order_of_the_commits(database: str, writes_first: str) -> None:
    """4, 4c and 4f: B is the first to write or to begin, and commits last."""
    has_begun, locked = threading.Event(), threading.Event()

    def second() -> None:
        with psycopg.connect(database) as db:
            if writes_first == "B":
                db.execute("INSERT INTO other VALUES ('B')")  # and so has the lower transaction id
            has_begun.set()
            locked.wait(30)
            change(db, "B")  # waits
            stash(db, "B")

    thread = beside(second)
    with psycopg.connect(database) as first:
        has_begun.wait(30)
        change(first, "A")
        locked.set()
        until_one_waits(database)
        stash(first, "A")
    thread.join(30)
    with PostgresSession(database, "kes_outbox") as session:
        assert sent(session) == history(database) == "AB"


def test_a_stash_before_the_lock_of_a_row_is_a_deadlock_and_no_wrong_order(database: str) -> None:
    """4, 4d and 4e: B has its id first, and waits for the row of A, which waits for the key of B. One of them is told
    by PostgreSQL, and does it again."""
    stashed, locked = threading.Event(), threading.Event()
    failures: list[str] = []

    def until_done(name: str, work: Callable[[psycopg.Connection[Any]], None]) -> None:
        for _ in range(2):
            try:
                with psycopg.connect(database) as db:
                    db.execute("SET deadlock_timeout = '20ms'")
                    work(db)
                return
            except psycopg.errors.DeadlockDetected:
                failures.append(name)

    def stashes_first(db: psycopg.Connection[Any]) -> None:
        stash(db, "B")
        stashed.set()
        locked.wait(30)
        change(db, "B")

    def locks_first(db: psycopg.Connection[Any]) -> None:
        change(db, "A")
        locked.set()
        stashed.wait(30)
        stash(db, "A")

    thread = beside(lambda: until_done("B", stashes_first))
    until_done("A", locks_first)
    thread.join(30)
    assert len(failures) == 1
    with PostgresSession(database, "kes_outbox") as session:
        assert sent(session) == history(database)
    assert sorted(history(database)) == ["A", "B"]
