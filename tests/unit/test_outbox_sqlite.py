"""An outbox in a file of SQLite: what is stashed, fetched, deleted, parked and taken back."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streams import Outbox, Record
from streams.core.outbox import RowId
from streams.errors import OutboxError
from streams.outbox import database, sqlite
from streams.outbox.database import DatabaseLost, StashedRow
from streams.outbox.sessions import open_session
from streams.outbox.sqlite import SqliteSession
from tests.unit.waiting import PATIENCE
from tests.vocabulary import Named

Stash = Callable[..., None]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@pytest.fixture
def session(file: Path) -> Iterator[SqliteSession]:
    with SqliteSession(str(file), "kes_outbox") as session:
        assert session.apply(2)
        assert not session.apply(2)
        yield session


@pytest.fixture
def stash(session: SqliteSession, file: Path) -> Iterator[Stash]:
    db = sqlite3.connect(file)

    def stash(*records: Record) -> None:
        with db:
            Outbox().stash_many(db, records)

    yield stash
    db.close()


def rows(session: SqliteSession) -> list[StashedRow]:
    return sorted((row for shard in range(2) for row in session.fetch(shard, 100, 10**9)), key=lambda row: row.row)


def test_an_event_is_fetched_as_it_was_stashed(session: SqliteSession, file: Path) -> None:
    db = sqlite3.connect(file)
    with db:
        Outbox().stash(db, "notes", Named("a"), key="k", headers=[("h", b"\x00\xff"), ("none", None)], partition=3)
        Outbox().stash(db, "notes", None, key="k")
    first, second = rows(session)
    assert first.output.topic == "notes"
    assert (first.output.key, first.output.value, first.output.partition) == (b"k", b'{"name":"a"}', 3)
    assert {("h", b"\x00\xff"), ("none", None)} <= set(first.output.headers or ())
    assert (second.output.value, second.output.headers, second.output.partition) == (None, None, -1)
    assert first.row.id < second.row.id
    assert time.time() * 1000 - first.output.timestamp_ms < 60_000
    db.close()


def test_what_is_rolled_back_is_not_there_and_autocommit_is_refused(session: SqliteSession, file: Path) -> None:
    db = sqlite3.connect(file)
    Outbox().stash(db, "notes", Named("a"))
    db.rollback()
    db.close()
    db = sqlite3.connect(file, isolation_level=None)
    with pytest.raises(OutboxError, match="in autocommit"):
        Outbox().stash(db, "notes", Named("a"))
    db.execute("BEGIN")
    Outbox().stash(db, "notes", Named("b"))
    db.execute("COMMIT")
    db.close()
    assert [row.output.value for row in rows(session)] == [b'{"name":"b"}']


def test_rows_of_a_key_are_in_one_shard_and_batches_are_bounded(session: SqliteSession, stash: Stash) -> None:
    stash(*(Record("t", b"x" * 100, key=b"k%d" % (number % 5)) for number in range(50)))
    for key in range(5):
        assert len({row.output.origin_partition for row in rows(session) if row.output.key == b"k%d" % key}) == 1
    shard = rows(session)[0].output.origin_partition
    assert [row.output.origin for row in session.fetch(shard, 3, 10**9)] == [0, 1, 2]
    assert len(session.fetch(shard, 100, 1)) == 1
    assert len(session.fetch(shard, 100, 250)) == 3


def test_headers_count_in_the_bytes_of_a_batch(session: SqliteSession, stash: Stash) -> None:
    stash(*(Record("t", None, b"k", [("h", bytes(1_000))]) for _ in range(5)))
    assert sum(len(session.fetch(shard, 100, 1_500)) for shard in range(2)) == 2


def test_a_row_is_deleted_by_id_and_tag_and_the_greater_serial_stays(session: SqliteSession, stash: Stash) -> None:
    stash(*(Record("t", b"", key=b"k") for _ in range(3)))
    first, second, third = rows(session)
    shard = first.output.origin_partition
    session.delete(shard, [first.row, RowId(second.row.id, second.row.tag ^ 1)], 5)
    session.delete(shard, [], 3)
    assert [row.row for row in rows(session)] == [second.row, third.row]
    assert session.noted_serial(shard) == 5


def test_a_parked_row_holds_its_key_and_comes_back_to_its_place(session: SqliteSession, stash: Stash) -> None:
    stash(Record("t", b"1", key=b"a"), Record("t", b"2", key=b"a"), Record("t", b"3", key=b"b"))
    first = rows(session)[0]
    shard = first.output.origin_partition
    session.park(shard, first.row, "no such topic", 60.0, 3600.0)
    session.park(shard, first.row, "once more, by one that was frozen", 60.0, 3600.0)
    assert [row.output.value for row in rows(session)] == [b"3"]
    (parked,) = session.parked()
    assert (parked.id, parked.tag) == first.row
    assert (parked.id, parked.key, parked.attempts, parked.error) == (first.row.id, "b'a'", 1, "no such topic")
    assert 50 < parked.next_try_seconds <= 60
    assert [one.output.value for one in session.parked_records(first.row.id)] == [first.output.value]
    assert session.parked_records(first.row.id + 1) == []
    assert session.retry_parked(shard) == 0
    assert session.hasten_parked() == 1
    assert session.retry_parked(shard) == 1
    assert [row.output.value for row in rows(session)] == [b"1", b"2", b"3"]
    session.park(shard, first.row, "again", 60.0, 3600.0)
    assert 100 < session.parked()[0].next_try_seconds <= 120
    assert session.drop_parked(first.row._replace(tag=first.row.tag ^ 1)) == 0  # another one of the same id
    assert session.drop_parked(first.row) == 1
    assert session.drop_parked(first.row) == 0
    assert [row.output.value for row in rows(session)] == [b"2", b"3"]


def test_what_is_fetched_is_on_the_disk_also_behind_a_link(
    file: Path, session: SqliteSession, stash: Stash, monkeypatch: pytest.MonkeyPatch
) -> None:
    (link := file.with_name("link.db")).symlink_to(file)
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    with contextlib.closing(SqliteSession(str(link), "kes_outbox")) as behind:
        stash(Record("t", b"1", b"a"))
        assert rows(behind)
    assert flushed == [f"{file}-wal"]


def test_a_sleep_ends_with_a_commit_also_with_one_before_it(session: SqliteSession, stash: Stash) -> None:
    assert rows(session) == []
    assert not session.sleep(0, 0.01)
    stash(Record("t", b""))
    assert session.sleep(0, 10.0)


def test_another_thread_ends_a_sleep(session: SqliteSession) -> None:
    rows(session)
    for ending in (session.rouse, session.close):
        timer, began = threading.Timer(0.05, ending), time.monotonic()
        timer.start()
        assert not session.sleep(0, PATIENCE)
        assert time.monotonic() - began < PATIENCE
        timer.join()
    with pytest.raises(DatabaseLost):
        session.fetch(0, 1, 1)


def test_tables_that_do_not_fit_are_refused(session: SqliteSession, file: Path, tmp_path: Path) -> None:
    with pytest.raises(OutboxError, match="has 2 shards, not 4"):
        session.apply(4)
    missing = "no such table: kes_outbox_about: run `kes outbox apply`"
    with open_session(f"sqlite:{tmp_path}/other.db", "kes_outbox") as other, pytest.raises(OutboxError, match=missing):
        other.about()
    db = sqlite3.connect(file)
    db.execute("ALTER TABLE kes_outbox_parked DROP COLUMN tag")
    with pytest.raises(OutboxError, match="column tag of kes_outbox_parked is missing"):
        session.about()
    db.execute("UPDATE kes_outbox_about SET version = 9")
    db.commit()
    with pytest.raises(OutboxError, match="have version 9, this program needs 1: update this program"):
        session.about()
    with pytest.raises(OutboxError, match="have version 9"):
        Outbox().stash(db, "t", Named("a"))
    db.close()
    with pytest.raises(DatabaseLost):
        SqliteSession(str(tmp_path / "nowhere" / "x.db"), "kes_outbox")


def test_tables_of_an_older_version_are_upgraded_with_their_rows(
    session: SqliteSession, stash: Stash, monkeypatch: pytest.MonkeyPatch
) -> None:
    stash(Record("t", b"1"))
    for module in (database, sqlite):
        monkeypatch.setattr(module, "VERSION", 2)
    monkeypatch.setitem(sqlite._UPGRADES, 1, "ALTER TABLE {table} ADD COLUMN note TEXT; UPDATE {table} SET note = 'x'")
    with pytest.raises(OutboxError, match="have version 1, this program needs 2: run `kes outbox apply`"):
        session.about()
    assert session.apply(2) == "version 2 of the tables of kes_outbox, from 1"
    assert session.apply(2) == ""
    assert (session.about().version, len(rows(session))) == (2, 1)


def test_an_outbox_describes_itself(session: SqliteSession) -> None:
    about = session.about()
    assert (about.shards, about.version, about.topic_id) == (2, 1, "")
    assert session.adopt("topic-id") == session.adopt("another") == "topic-id"
    assert [status.waiting for status in session.status(about)] == [0, 0]
