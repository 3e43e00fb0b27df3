"""RocksDB as engine, by ``rocksdict`` (extra ``rocksdb``): for state that is much larger than memory.

* Its own log is off. A write is some batches, the mark in the last one, and a flush: killed before that, the database
  is as it was, or has some of the changes, and the mark of before.
* Only bytes: the other mode of ``rocksdict`` unpickles what it reads. The file in the folder that could ask for it is
  read before anything is opened.
* Every block has a checksum, which every read checks. A scan that an error ends looks as if it were complete, so its
  status is read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from streams.errors import ConfigError, DiskDamaged, StoreError
from streams.protocols import PAGE_BYTES, DiskDatabase

BATCH: Final = 250
"""Changes that are written without a pause: they are written with the interpreter held."""
STALL_SECONDS: Final = 30.0
"""For which a write waits for compaction; then it is tried again later."""
LEAST_FILES: Final = 16
"""Of one database."""
_FILES_TO_OPEN: Final = 8
_ROOM_TO_OPEN: Final = 1 << 20
"""More than a database needs while it is opened, beside what it had: files, bytes on the disk."""
_SETTINGS: Final = "rocksdict-config.json"
_MARK, _KEY, _END = b"\0", b"\1", b"\2"  # the first byte of every key here


def _rocksdict() -> Any:
    try:
        return import_module("rocksdict")
    except ImportError:
        raise ConfigError("RocksDB() needs rocksdict: pip install 'kafka-event-source[rocksdb]'") from None


class RocksDB:
    """State in RocksDB databases. A ``DiskEngine``. Raises ``ConfigError`` if the extra is missing."""

    name: str = "rocksdb1"

    def __init__(self) -> None:
        _rocksdict()

    def open(self, folder: str, /, *, memory_bytes: int, partitions: int) -> DiskDatabase:
        """See ``DiskEngine``. Files of all databases together take at most half of what the process may open."""
        import resource  # not on Windows, which has no folders of state either

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = 1_000_000 if soft == resource.RLIM_INFINITY else soft
        return RocksDatabase(Path(folder), memory_bytes, max(LEAST_FILES, files // 2 // max(1, partitions)))


@cache
def _shared(memory_bytes: int) -> tuple[Any, Any]:
    """The block cache and the write buffers of all databases of the process: the latter are counted in the cache."""
    rocks = _rocksdict()
    blocks = rocks.Cache(memory_bytes)
    return blocks, rocks.WriteBufferManager.new_write_buffer_manager_with_cache(memory_bytes // 2, False, blocks)


class RocksDatabase:
    """One database."""

    def __init__(self, folder: Path, memory_bytes: int, files: int) -> None:
        self.path = folder
        self._rocks = _rocksdict()
        self._limits = memory_bytes, files
        self._lock = threading.Lock()  # a reader is never within a database that is being closed
        self._db: Any = None
        self._mark: bytes | None = None
        self._refuses = False
        self._lost = ""  # why it is not open, although it was not closed
        folder.mkdir(mode=0o700, exist_ok=True)
        _refuse_pickles(folder / _SETTINGS)
        try:
            self._open()
        except Exception as error:
            self.close()
            raise self._passing(error) or self._translated(error) from error

    def _open(self) -> None:
        self._db = self._rocks.Rdict(str(self.path), self._options(*self._limits))
        fast = self._rocks.WriteOptions()
        fast.disable_wal = True
        fast.no_slowdown = True
        self._db.set_write_options(fast)
        self._mark = self._db.get(_MARK)

    def _options(self, memory_bytes: int, files: int) -> Any:
        rocks = self._rocks
        blocks, buffers = _shared(memory_bytes)
        tables = rocks.BlockBasedOptions()
        tables.set_block_cache(blocks)
        tables.set_bloom_filter(10.0, False)
        tables.set_cache_index_and_filter_blocks(True)  # else they are outside of the budget
        tables.set_pin_l0_filter_and_index_blocks_in_cache(True)
        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_paranoid_checks(True)
        options.set_block_based_table_factory(tables)
        options.set_write_buffer_manager(buffers)
        options.set_write_buffer_size(16 << 20)
        options.set_arena_block_size(64 << 10)  # a database at rest takes that
        options.set_compression_type(rocks.DBCompressionType.lz4())
        options.set_level_compaction_dynamic_level_bytes(True)
        options.set_max_background_jobs(2)
        options.set_max_open_files(files)
        options.set_keep_log_file_num(1)
        options.set_max_log_file_size(1 << 20)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        return options

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, key: bytes, /) -> bytes | None:
        with self._lock:
            db = self._opened()
            try:
                found: bytes | None = db.get(_KEY + key)
            except Exception as error:
                raise self._passing(error) or self._translated(error) from error
        return found

    def scan(
        self, low: bytes | None, high: bytes | None, /, *, reverse: bool, limit: int, size: int = PAGE_BYTES
    ) -> list[tuple[bytes, bytes]]:
        first, end = _KEY + (low or b""), _END if high is None else _KEY + high
        found: list[tuple[bytes, bytes]] = []
        with self._lock:
            db = self._opened()
            try:
                rows = db.iter()
                if reverse:
                    rows.seek_for_prev(end)
                    if rows.valid() and rows.key() == end:
                        rows.prev()
                else:
                    rows.seek(first)
                advance = rows.prev if reverse else rows.next
                while len(found) < limit and size > 0 and rows.valid():
                    key = rows.key()
                    if not first <= key < end:
                        break
                    value = rows.value()
                    found.append((key[1:], value))
                    size -= len(key) - 1 + len(value)
                    advance()
                rows.status()  # raises if it is an error that has ended it
            except Exception as error:
                raise self._passing(error) or self._translated(error) from error
        return found

    def mark(self) -> bytes | None:
        return self._mark

    def count(self) -> int:
        with self._lock:
            return max(0, (self._opened().property_int_value("rocksdb.estimate-num-keys") or 0) - 1)

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], mark: bytes | None, /) -> None:
        """See ``DiskDatabase``. The mark is in the last batch, and all is flushed at the end."""
        if self._refuses:
            self._reopen()
        db = self._opened()
        try:
            for start in range(0, len(changes), BATCH):
                began = time.monotonic()
                batch = self._rocks.WriteBatch(raw_mode=True)
                for key, value in changes[start : start + BATCH]:
                    if value is None:
                        batch.delete(_KEY + key)
                    else:
                        batch.put(_KEY + key, value)
                self._write(db, batch)
                if start + BATCH < len(changes):
                    time.sleep(time.monotonic() - began)
            if mark is not None:
                batch = self._rocks.WriteBatch(raw_mode=True)
                batch.put(_MARK, mark)
                self._write(db, batch)
            db.flush(True)
        except OSError:
            raise
        except Exception as error:
            passing = self._passing(error)
            if passing is None:
                raise self._translated(error) from error
            self._refuses = True
            raise passing from error
        self._mark = self._mark if mark is None else mark

    def _reopen(self) -> None:
        """Open the database again, as it was flushed: after an error it refuses every write, although the cause is
        gone. Reads wait for it, a second or so. Raises ``OSError`` while the cause is there, ``DiskDamaged`` if the
        database cannot be opened."""
        probe = self.path / "000001.dbtmp"  # one that a killed process leaves is removed by RocksDB, by its name
        with contextlib.ExitStack() as probes:  # closed too early, it could not be read any more
            for _ in range(_FILES_TO_OPEN):
                probes.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            probes.callback(probe.unlink, missing_ok=True)
            with open(probe, "wb") as file:
                file.write(bytes(_ROOM_TO_OPEN))
                file.flush()
                os.fsync(file.fileno())
        with self._lock:
            db, self._db = self._opened(), None
            with contextlib.suppress(Exception):  # the error of before
                db.close()
            try:
                self._open()
            except Exception as error:
                self._lost = f"{self.path} cannot be opened again: {error}"
                raise DiskDamaged(self._lost) from error
        self._refuses = False

    def _write(self, db: Any, batch: Any) -> None:
        """Write a batch; while compaction is behind, wait without the interpreter."""
        deadline = time.monotonic() + STALL_SECONDS
        while True:
            try:
                db.write(batch)
                return
            except Exception as error:
                if "stall" not in str(error).lower():
                    raise
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, f"{self.path}: {error}") from error
            time.sleep(0.01)

    # -- errors and the end --------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        if self._db is None and self._lost:
            raise DiskDamaged(self._lost)
        if self._db is None:
            raise StoreError(f"{self.path} is closed: the partition is no longer here")
        return self._db

    def _passing(self, error: Exception) -> OSError | None:
        """Return the error of the system that this one tells of, if it says nothing of the data."""
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            if os.strerror(code) in str(error):
                return OSError(code, f"{self.path}: {error}")
        return None

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, OSError):
            return error
        return DiskDamaged(f"{self.path}: {error}")

    def close(self) -> None:
        """See ``DiskDatabase``."""
        with self._lock:
            db, self._db = self._db, None
            if db is not None:
                with contextlib.suppress(Exception):  # an error of before, which was raised then
                    db.close()


def _refuse_pickles(settings: Path) -> None:
    """Raise ``DiskDamaged`` for settings under which values would be unpickled: anybody's code."""
    try:
        found = json.loads(settings.read_bytes())
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise DiskDamaged(f"{settings} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("raw_mode") is not True:
        raise DiskDamaged(f"{settings} does not say that values are bytes: they would be unpickled")
