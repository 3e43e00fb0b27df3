"""An outbox in a file of SQLite, for programs of one machine, and tests without a server.

SQLite lets one connection write at a time, from its first change to its commit: so ids are in the order of the commits
without a lock of keys. It has no wake-ups: a relay that sleeps looks whether the file has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

from streams.core.outbox import RowId
from streams.errors import OutboxError
from streams.outbox.database import (
    DatabaseLost,
    OutboxAbout,
    ParkedRow,
    ShardStatus,
    StashedRow,
    check_columns,
    check_version,
    made_tables,
    other_shards,
)
from streams.outbox.schema import VERSION, checked_shards, checked_table
from streams.records import Headers, Output, Record, shown_key

_BUSY_SECONDS: Final = 10.0
"""Another connection may write for so long."""
_CHECK_SECONDS: Final = 0.02
_COLUMNS: Final = "id, tag, shard, topic, key, value, headers, partition, stashed_at_ms, attempts"
_TABLES: Final = """
CREATE TABLE {table} (
  id INTEGER PRIMARY KEY AUTOINCREMENT, -- an id is not used again
  tag INTEGER NOT NULL, shard INTEGER NOT NULL, topic TEXT NOT NULL, key BLOB, value BLOB, headers TEXT,
  partition INTEGER, stashed_at_ms INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX {table}_by_shard ON {table} (shard, id);
CREATE TABLE {table}_parked (
  id INTEGER PRIMARY KEY, tag INTEGER NOT NULL, shard INTEGER NOT NULL, topic TEXT NOT NULL, key BLOB, value BLOB,
  headers TEXT, partition INTEGER, stashed_at_ms INTEGER NOT NULL, attempts INTEGER NOT NULL,
  error TEXT NOT NULL, next_try_at REAL NOT NULL
);
CREATE TABLE {table}_shards (shard INTEGER PRIMARY KEY, serial INTEGER NOT NULL DEFAULT 0);
CREATE TABLE {table}_about (
  one INTEGER PRIMARY KEY CHECK (one = 1), identity TEXT NOT NULL, version INTEGER NOT NULL, shards INTEGER NOT NULL,
  topic_id TEXT NOT NULL DEFAULT ''
);
"""


_UPGRADES: Final[dict[int, str]] = {}
"""Statements that make the next version of each version; ``{table}`` is the outbox. No other version is known yet."""


@contextmanager
def sqlite_errors(table: str) -> Iterator[None]:
    """Turn SQLite's errors into those of this package."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            raise OutboxError(f"{error}: run `kes outbox apply`, or name the file that {table} is in") from None
        raise DatabaseLost(str(error)) from None
    except sqlite3.Error as error:
        raise DatabaseLost(str(error)) from None


def stash_rows(db: sqlite3.Connection, table: str, records: Sequence[Record]) -> None:
    """Insert records as rows, in the transaction of ``db``."""
    found = db.execute(f"SELECT shards, version FROM {table}_about").fetchone()
    if found is None:
        raise OutboxError(f"the tables of {table} are not whole: make them with `kes outbox apply`")
    check_version(found[1], table)
    now = int(time.time() * 1000)
    db.executemany(
        f"INSERT INTO {table} (tag, shard, topic, key, value, headers, partition, stashed_at_ms) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                random.getrandbits(31),
                _shard(record.key, found[0]),
                record.topic,
                record.key,
                record.value,
                _encoded(record.headers),
                record.partition,
                now,
            )
            for record in records
        ],
    )


def _shard(key: bytes | None, shards: int) -> int:
    """Return the shard of a key; rows without one have no order, and go anywhere."""
    return random.randrange(shards) if key is None else hashlib.sha256(key).digest()[0] % shards


def _encoded(headers: Sequence[tuple[str, bytes | None]] | None) -> str | None:
    return json.dumps([[name, None if value is None else value.hex()] for name, value in headers]) if headers else None


def _size(output: Output) -> int:
    return sum(len(part or b"") for part in (output.key, output.value, *(value for _, value in output.headers or ())))


def _stashed_row(
    index: int,
    number: int,
    tag: int,
    topic: str,
    key: bytes | None,
    value: bytes | None,
    headers: str | None,
    partition: int | None,
    timestamp_ms: int,
    shard: int,
) -> StashedRow:
    to = -1 if partition is None else partition
    return StashedRow(RowId(number, tag), Output(topic, value, key, _decoded(headers), to, timestamp_ms, shard, index))


def _decoded(headers: str | None) -> Headers | None:
    if headers is None:
        return None
    return [(name, None if value is None else bytes.fromhex(value)) for name, value in json.loads(headers)]


class SqliteSession:
    """One connection to the file. ``database.OutboxSession`` documents the methods."""

    def __init__(self, file: str, table: str) -> None:
        self._table = checked_table(table)
        self._file = os.path.realpath(file)  # SQLite names the log by what a link leads to
        self._roused = threading.Event()
        self._seen = 0
        with sqlite_errors(table):
            # Another thread may close it.
            self._db = sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("PRAGMA journal_mode = WAL")  # readers and the one writer do not wait for each other
                self._db.execute("PRAGMA synchronous = FULL")  # a delete that is known has to outlive a crash
            except BaseException:
                self._db.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._roused.set()
        self._db.close()

    def about(self) -> OutboxAbout:
        row = self._row(f"SELECT identity, version, shards, topic_id, 0 FROM {self._table}_about")
        found = OutboxAbout(*row)
        check_version(found.version, self._table)
        for name, wanted in ((self._table, _COLUMNS), (f"{self._table}_parked", f"{_COLUMNS}, error, next_try_at")):
            with sqlite_errors(self._table):
                there = self._db.execute("SELECT name, '' FROM pragma_table_info(?)", [name]).fetchall()
            check_columns(name, dict.fromkeys(wanted.split(", "), ""), there)
        return found

    def show_owner(self, lock_class: int, shard: int) -> None:
        """Nothing shows who works on a file."""

    def adopt(self, topic_id: str, replace: bool = False) -> str:
        with self._transaction() as db:
            db.execute(f"UPDATE {self._table}_about SET topic_id = ? WHERE topic_id = '' OR ?", [topic_id, replace])
        return str(self._row(f"SELECT topic_id FROM {self._table}_about")[0])

    def noted_serial(self, shard: int) -> int:
        return int(self._row(f"SELECT serial FROM {self._table}_shards WHERE shard = ?", shard)[0])

    def fetch(self, shard: int, rows: int, size: int) -> list[StashedRow]:
        text = f"""SELECT id, tag, topic, key, value, headers, partition, stashed_at_ms, shard FROM {self._table}
            WHERE shard = ?1 AND (key IS NULL OR key NOT IN (
              SELECT key FROM {self._table}_parked WHERE shard = ?1 AND key IS NOT NULL))
            ORDER BY id LIMIT ?2"""
        found: list[StashedRow] = []
        through = 0
        with sqlite_errors(self._table):
            self._seen = self._version()  # before the look: what comes meanwhile ends the next sleep
            for row in self._db.execute(text, [shard, rows]):
                stashed = _stashed_row(len(found), *row)
                found.append(stashed)
                through += _size(stashed.output)
                if through > size:
                    break
        if found:
            self._flush()
        return found

    def _flush(self) -> None:
        """Have what was seen outlive a crash of the machine: a writer with ``synchronous = NORMAL`` does not do it."""
        with contextlib.suppress(FileNotFoundError), open(f"{self._file}-wal", "rb") as log:
            os.fsync(log.fileno())

    def delete(self, shard: int, rows: Sequence[RowId], serial: int) -> int:
        deleted = 0
        with self._transaction() as db:
            for name in (self._table, f"{self._table}_parked"):
                deleted += max(0, db.executemany(f"DELETE FROM {name} WHERE id = ? AND tag = ?", rows).rowcount)
            self._note(shard, serial)
        return deleted

    def drop_through(self, shard: int, last: int, until_ms: int) -> int:
        which = "shard = ? AND id <= ? AND stashed_at_ms <= ?"
        with self._transaction() as db:
            return sum(
                db.execute(f"DELETE FROM {name} WHERE {which}", [shard, last, until_ms]).rowcount
                for name in (self._table, f"{self._table}_parked")
            )

    def _note(self, shard: int, serial: int) -> None:
        self._db.execute(f"UPDATE {self._table}_shards SET serial = max(serial, ?) WHERE shard = ?", [serial, shard])

    def park(self, shard: int, row: RowId, error: str, first_seconds: float, longest_seconds: float) -> None:
        with self._transaction() as db:
            found = db.execute(f"SELECT attempts FROM {self._table} WHERE id = ? AND tag = ?", row).fetchone()
            if found is None:
                return
            pause = min(first_seconds * 2.0 ** min(found[0], 30), longest_seconds)
            db.execute(
                f"INSERT INTO {self._table}_parked SELECT {_COLUMNS}, ?, ? FROM {self._table} WHERE id = ? AND tag = ?",
                [error, time.time() + pause, *row],
            )
            db.execute(f"UPDATE {self._table}_parked SET attempts = attempts + 1 WHERE id = ?", [row.id])
            db.execute(f"DELETE FROM {self._table} WHERE id = ? AND tag = ?", row)

    def retry_parked(self, shard: int) -> int:
        due = "shard = ? AND next_try_at <= ?"
        which = [shard, time.time()]
        if not self._row(f"SELECT EXISTS (SELECT 1 FROM {self._table}_parked WHERE {due})", *which)[0]:
            return 0  # without taking the lock of the writers
        with self._transaction() as db:
            db.execute(
                f"INSERT INTO {self._table} ({_COLUMNS}) SELECT {_COLUMNS} FROM {self._table}_parked WHERE {due}", which
            )
            return db.execute(f"DELETE FROM {self._table}_parked WHERE {due}", which).rowcount

    def listen(self) -> None:
        """The file is looked at."""

    def fall_asleep(self, lock_class: int, shard: int) -> bool:
        return True

    def sleep(self, shard: int, seconds: float) -> bool:
        with sqlite_errors(self._table):
            until = time.monotonic() + seconds
            while self._version() == self._seen:
                if time.monotonic() >= until or self._roused.wait(_CHECK_SECONDS):
                    self._roused.clear()
                    return False
        return True

    def rouse(self) -> None:
        self._roused.set()

    def wake(self, lock_class: int, shard: int) -> None:
        """No writer sends wake-ups."""

    def status(self, about: OutboxAbout) -> list[ShardStatus]:
        table, found = self._table, []
        for shard in range(about.shards):
            waiting, parked, oldest = self._row(
                f"""SELECT (SELECT count(*) FROM (SELECT 1 FROM {table} WHERE shard = ?1 LIMIT 100000)),
                    (SELECT count(*) FROM {table}_parked WHERE shard = ?1),
                    (SELECT stashed_at_ms FROM {table} WHERE shard = ?1 ORDER BY id LIMIT 1)""",
                shard,
            )
            age = 0.0 if oldest is None else max(time.time() - oldest / 1000, 0.0)
            found.append(ShardStatus(shard, waiting, parked, age, self.noted_serial(shard), None))
        return found

    def parked(self) -> list[ParkedRow]:
        text = f"""SELECT id, tag, shard, topic, key, attempts, next_try_at, error
            FROM {self._table}_parked ORDER BY id, tag LIMIT 1000"""
        with sqlite_errors(self._table):
            rows = self._db.execute(text).fetchall()
        now = time.time()
        return [
            ParkedRow(number, tag, shard, topic, shown_key(key), attempts, max(at - now, 0.0), error)
            for number, tag, shard, topic, key, attempts, at, error in rows
        ]

    def parked_records(self, number: int) -> list[StashedRow]:
        text = f"""SELECT id, tag, topic, key, value, headers, partition, stashed_at_ms, shard FROM {self._table}_parked
            WHERE id = ?"""
        with sqlite_errors(self._table):
            return [_stashed_row(index, *row) for index, row in enumerate(self._db.execute(text, [number]))]

    def hasten_parked(self) -> int:
        return self._change(f"UPDATE {self._table}_parked SET next_try_at = 0")

    def drop_parked(self, row: RowId) -> int:
        return self._change(f"DELETE FROM {self._table}_parked WHERE id = ? AND tag = ?", *row)

    def apply(self, shards: int) -> str:
        checked_shards(shards)
        made = ""
        with self._transaction() as db:
            text = "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = ?)"
            if not self._row(text, f"{self._table}_about")[0]:
                for statement in _TABLES.replace("{table}", self._table).split(";"):
                    db.execute(statement)
                db.executemany(
                    f"INSERT INTO {self._table}_shards (shard) VALUES (?)", [(number,) for number in range(shards)]
                )
                db.execute(
                    f"INSERT INTO {self._table}_about (one, identity, version, shards) VALUES (1, ?, ?, ?)",
                    [str(uuid.uuid4()), VERSION, shards],
                )
                return made_tables(self._table)
            version = self._row(f"SELECT version FROM {self._table}_about")[0]
            if version < VERSION:
                for statement in "".join(_UPGRADES[number] for number in range(version, VERSION)).split(";"):
                    db.execute(statement.replace("{table}", self._table))
                db.execute(f"UPDATE {self._table}_about SET version = ?", [VERSION])
                made = f"version {VERSION} of the tables of {self._table}, from {version}"
        if (about := self.about()).shards != shards:
            raise other_shards(self._table, about.shards, shards)
        return made

    def _version(self) -> int:
        """Return a number that changes when another connection has committed."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _change(self, text: str, *arguments: Any) -> int:
        with self._transaction() as db:
            return db.execute(text, arguments).rowcount

    def _row(self, text: str, *arguments: Any) -> tuple[Any, ...]:
        with sqlite_errors(self._table):
            row: tuple[Any, ...] | None = self._db.execute(text, arguments).fetchone()
        if row is None:
            raise OutboxError(f"the tables of {self._table} are not whole: a row of one beside it is missing")
        return row

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Take the lock of the writers at once: one that is taken later cannot be waited for."""
        with sqlite_errors(self._table):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
