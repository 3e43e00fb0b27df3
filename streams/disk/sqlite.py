"""SQLite as engine: nothing to install, and any tool can look into it. For modest rates.

SQLite has no checksums of its own, so a flipped bit may be another value, a key that is not found, or a page of another
time. Hence two of ours, both of which the mark's row names:

* each value ends with the CRC-32 of its key and value, which every read checks;
* the number of rows, and the sum of those checksums. Opening reads every row, in order: if keys ascend, and number and
  sum fit, nothing is missing and nothing is of another time. A lookup cannot miss a row that a scan in order meets.

Its log is not flushed at each commit (``synchronous=NORMAL``): without power the last commits may be gone, as a whole
and with their marks, which is what the changelog is read on from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from streams.errors import DiskDamaged, StoreError
from streams.protocols import PAGE_BYTES, DiskDatabase

FILE: Final = "state.db"
BATCH: Final = 250
"""Changes that are written without a pause: the event loop waits for the interpreter so long, at most."""
BUSY_SECONDS: Final = 1.0
"""For another program that has the database locked."""
_STATE: Final = "CREATE TABLE state (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
_MARK: Final = "CREATE TABLE mark (id INTEGER PRIMARY KEY, count INTEGER, sum INTEGER, mark BLOB, crc INTEGER)"
_CRC: Final = struct.Struct(">I")
_SUMS: Final = (1 << 63) - 1
_PASSING: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_IOERR_SHMSIZE: errno.ENOSPC,  # these two are of the file beside its log, which has no data
    sqlite3.SQLITE_IOERR_SHMMAP: errno.ENOMEM,
}
"""Errors that say nothing of the data, and after which a call may be tried again: whole codes, or their last bytes."""


class SQLite:
    """State in SQLite databases (standard library). A ``DiskEngine``."""

    name: str = "sqlite1"

    def open(self, folder: str, /, *, memory_bytes: int, partitions: int) -> DiskDatabase:
        """See ``DiskEngine``. Reads the whole database once."""
        return SQLiteDatabase(Path(folder), cache_bytes=memory_bytes // max(1, partitions) // 2)


class SQLiteDatabase:
    """One database: a connection that reads, and one that writes."""

    def __init__(self, folder: Path, cache_bytes: int) -> None:
        self.path = folder / FILE
        folder.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._lock = threading.Lock()  # a reader is never within a connection that is being closed
        self._is_open = True
        self._count = self._sum = 0
        self._mark: bytes | None = None
        try:
            self._writer = self._connect(cache_bytes)
            try:
                self._reader = self._connect(cache_bytes)
                with self._translated():
                    self._check()
            except BaseException:
                self._writer.close()
                raise
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN:  # it was opened just before
                raise OSError(errno.EMFILE, f"{self.path}: {error}: too many files are open") from error
            self._raise(error)

    def _connect(self, cache_bytes: int) -> sqlite3.Connection:
        found = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
        try:
            for pragma in (
                "journal_mode=WAL", "synchronous=NORMAL", "mmap_size=0", "temp_store=MEMORY", "trusted_schema=OFF",
                "cell_size_check=ON", "journal_size_limit=8388608", f"cache_size={-max(64, cache_bytes // 1024)}",
            ):  # fmt: skip
                found.execute(f"PRAGMA {pragma}").fetchall()
        except BaseException:
            found.close()
            raise
        return found

    # -- opening -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Make the tables, or read everything that is there. Raises ``DiskDamaged``."""
        writer = self._writer
        if not writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            if writer.execute("PRAGMA page_count").fetchone()[0] > 1:
                self._damaged("its tables are missing")
            writer.execute("BEGIN IMMEDIATE")
            writer.execute(_STATE)
            writer.execute(_MARK)
            self._set_mark(0, 0, None)
            writer.execute("COMMIT")
            return
        if [text for (text,) in writer.execute("SELECT sql FROM sqlite_master ORDER BY rowid")] != [_STATE, _MARK]:
            self._damaged("its tables are not those of this version")
        found = writer.execute("PRAGMA quick_check(1)").fetchall()
        if found != [("ok",)]:
            self._damaged(str(found[0][0]) if found else "it cannot be checked")
        marks = writer.execute("SELECT count, sum, mark, crc FROM mark").fetchall()
        if len(marks) != 1 or marks[0][3] != _crc_of_mark(*marks[0][:3]):
            self._damaged("its mark has a wrong checksum")
        self._count, self._sum, self._mark, _ = marks[0]
        count = total = 0
        last = None
        for key, stored in writer.execute("SELECT key, value FROM state ORDER BY key"):
            total = (total + self._checked(key, stored)[1]) & _SUMS
            if last is not None and key <= last:
                self._damaged("its keys are not in order")
            last, count = key, count + 1
        if (count, total) != (self._count, self._sum):
            self._damaged(f"it holds {count} rows, and not the {self._count} that were written")

    def _checked(self, key: Any, stored: Any) -> tuple[bytes, int]:
        """Return a value and its checksum. Raises ``DiskDamaged``."""
        if type(stored) is bytes and type(key) is bytes and len(stored) >= _CRC.size:
            value: bytes = stored[: -_CRC.size]
            (crc,) = _CRC.unpack(stored[-_CRC.size :])
            if crc == _crc(key, value):
                return value, crc
        self._damaged("a row has a wrong checksum")

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, key: bytes, /) -> bytes | None:
        rows = self._read("SELECT value FROM state WHERE key = ?", (key,), sqlite3.Cursor.fetchall)
        return self._checked(key, rows[0][0])[0] if rows else None

    def scan(
        self, low: bytes | None, high: bytes | None, /, *, reverse: bool, limit: int, size: int = PAGE_BYTES
    ) -> list[tuple[bytes, bytes]]:
        ends = [("key >= ?", low), ("key < ?", high)]
        where = " AND ".join(text for text, end in ends if end is not None)
        sql = f"SELECT key, value FROM state {'WHERE ' + where if where else ''} ORDER BY key"
        sql += f" {'DESC' if reverse else 'ASC'} LIMIT ?"

        def page(cursor: sqlite3.Cursor) -> list[tuple[bytes, bytes]]:
            found, left = [], size
            for key, stored in cursor:
                value = self._checked(key, stored)[0]
                found.append((key, value))
                left -= len(key) + len(value)
                if left <= 0:
                    break
            return found

        return self._read(sql, (*(end for _, end in ends if end is not None), limit), page)

    def _read(self, sql: str, values: tuple[Any, ...], take: Callable[[sqlite3.Cursor], list[Any]]) -> list[Any]:
        """Run a query, take its rows, and end it, so that it holds no old state of the database."""
        with self._lock:
            if not self._is_open:
                raise StoreError(f"{self.path} is closed: the partition is no longer here")
            try:
                with self._translated(), contextlib.closing(self._reader.execute(sql, values)) as cursor:
                    return take(cursor)
            except OverflowError as error:  # a size that is absurd
                raise DiskDamaged(f"{self.path}: {error}") from error

    def mark(self) -> bytes | None:
        return self._mark

    def count(self) -> int:
        return self._count

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], mark: bytes | None, /) -> None:
        """See ``DiskDatabase``: one transaction, the mark in it."""
        with self._translated():
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                count, total = self._count, self._sum
                for start in range(0, len(changes), BATCH):
                    began = time.monotonic()
                    count, total = self._put(changes[start : start + BATCH], count, total)
                    if start + BATCH < len(changes):
                        time.sleep(time.monotonic() - began)
                mark = self._mark if mark is None else mark
                self._set_mark(count, total, mark)
                self._writer.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise
            self._count, self._sum, self._mark = count, total, mark

    def _put(self, changes: Sequence[tuple[bytes, bytes | None]], count: int, total: int) -> tuple[int, int]:
        """Write changes; return the number of rows and the sum of their checksums."""
        execute = self._writer.execute
        puts: list[tuple[bytes, bytes]] = []
        deleted: list[tuple[bytes]] = []
        for key, value in changes:
            before = execute("SELECT substr(value, -4) FROM state WHERE key = ?", (key,)).fetchall()
            if before:
                count, total = count - 1, total - _CRC.unpack(before[0][0])[0]
            if value is not None:
                crc = _crc(key, value)
                puts.append((key, value + _CRC.pack(crc)))
                count, total = count + 1, total + crc
            elif before:
                deleted.append((key,))
        upsert = "INSERT INTO state VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._writer.executemany(upsert, puts)
        self._writer.executemany("DELETE FROM state WHERE key = ?", deleted)
        return count, total & _SUMS

    def _set_mark(self, count: int, total: int, mark: bytes | None) -> None:
        row = (count, total, mark, _crc_of_mark(count, total, mark))
        self._writer.execute("REPLACE INTO mark VALUES (1, ?, ?, ?, ?)", row)

    # -- errors and the end --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._raise(error)

    def _raise(self, error: sqlite3.Error) -> NoReturn:
        code = getattr(error, "sqlite_errorcode", 0)
        passing = _PASSING.get(code) or _PASSING.get(code & 0xFF)
        if passing:
            raise OSError(passing, f"{self.path}: {error}") from error
        raise DiskDamaged(f"{self.path}: {error}") from error

    def _damaged(self, why: str) -> NoReturn:
        raise DiskDamaged(f"{self.path}: {why}")

    def close(self) -> None:
        """See ``DiskDatabase``. What its log holds goes into the database, and the log away."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._reader.close()
                with contextlib.suppress(sqlite3.Error):
                    self._writer.close()


def _crc(key: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key, len(key) & 0xFFFFFFFF))


def _crc_of_mark(count: Any, total: Any, mark: Any) -> int:
    return zlib.crc32(repr((count, total, mark)).encode())
