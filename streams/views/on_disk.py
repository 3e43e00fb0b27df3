"""Views on disk: an engine that one thread writes to while all read, and the folders that a view goes on from.

What is not written yet waits in memory, in front of the database. The mark of a folder says how far it goes, and when
the view was proven to be complete.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from streams.core.checkpoints import TOMBSTONES_MS, LogIdentity, distrust_by
from streams.errors import ConfigError, DiskDamaged, StoreError, StreamsError
from streams.protocols import DiskDatabase, DiskEngine, more_may_follow
from streams.records import Change
from streams.runtime.keeping.folders.entries import Damaged, Point
from streams.runtime.keeping.folders.parents import prepare_root
from streams.runtime.keeping.folders.shelf import set_aside
from streams.views.shared import ABSENT, FrozenInOrder, SharedOrderedEngine

if TYPE_CHECKING:
    from streams.kafka.questions.admin import Watermarks
    from streams.runtime.keeping.on_disk import DatabaseFolder

T = TypeVar("T")
_log = logging.getLogger(__name__)

MEMORY_BYTES: Final = 64 << 20
"""Bytes for the caches and buffers of the databases of one view."""
MOST_WAITING: Final = 5_000
MOST_BYTES: Final = 16 << 20
"""Number of changes of a partition that wait in memory for the disk, and the bytes of their keys and values: beyond
either they are written."""


class SharedDiskEngine:
    """An ordered engine over the database of one partition. One thread writes at a time; reads may be made on any, and
    raise ``DiskDamaged`` for a disk that does not hold what was written, ``StoreError`` after ``close``."""

    def __init__(self, folder: DatabaseFolder, identity: LogIdentity) -> None:
        self._folder, self._identity = folder, identity
        self._database: DiskDatabase = folder.open_database()
        self._lock = threading.Lock()  # a database has one reader at a time
        self._newer = SharedOrderedEngine()  # than the disk; ``ABSENT``: deleted
        self._bytes = 0  # in there, at most
        self._is_open = True
        self.position, self.as_of_ms = (-1, 0) if folder.mark is None else (folder.mark.offset, folder.mark.as_of_ms)
        """Everything below the position is here. The folder was complete at the time that its mark named."""
        self.damage = ""
        """Why the database cannot be used any more."""

    def get(self, key: bytes, /) -> bytes | None:
        """Return the value of a key."""
        value = self._newer.get(key)  # first: what is gone from here since then is in the database
        if value is None:
            return self._read(lambda: self._database.get(key))
        return None if value is ABSENT else value

    def put(self, key: bytes, value: bytes, /) -> None:
        """Set the value of a key."""
        self._newer.put(key, value)
        self._bytes += len(key) + len(value)

    def delete(self, key: bytes, /) -> None:
        """Delete a key."""
        self._newer.put(key, ABSENT)
        self._bytes += len(key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Scan everything, in order."""
        return self.range(None, None)

    def range(
        self,
        low: bytes | None,
        high: bytes | None,
        /,
        *,
        reverse: bool = False,
        inclusive: tuple[bool, bool] = (True, False),
    ) -> Iterator[tuple[bytes, bytes]]:
        """Scan between two keys; see ``OrderedKeyValueEngine``."""
        return FrozenInOrder(self).range(low, high, reverse=reverse, inclusive=inclusive)

    def clear(self) -> None:
        """Do nothing: the folder is closed by ``close``."""

    def __len__(self) -> int:
        """Count by a scan of everything."""
        return sum(1 for _ in self.items())

    def estimated_len(self) -> int:
        """Estimate the number of keys, at once: one that was just written may count twice."""
        return self._read(lambda: self._database.count()) + len(self._newer)

    def _chunk(
        self, low: bytes | None, high: bytes | None, inclusive: tuple[bool, bool], reverse: bool, size: int
    ) -> list[bytes]:
        """Return the first keys between two keys, among them some that were deleted; fewer than ``size``: all."""
        keys = set(self._newer._chunk(low, high, inclusive, reverse, size))  # first, as in ``get``
        first = low if low is None or inclusive[0] else low + b"\0"
        end = high + b"\0" if high is not None and inclusive[1] else high
        left = size
        while left > 0 and (first is None or end is None or first < end):
            # At once: it sees the values of this turn.
            page = self._read(lambda: self._database.scan(first, end, reverse=reverse, limit=left))  # noqa: B023
            keys.update(key for key, _ in page)
            if not more_may_follow(page, left):
                break
            left -= len(page)
            if reverse:
                end = page[-1][0]
            else:
                first = page[-1][0] + b"\0"
        return sorted(keys, reverse=reverse)[:size]

    def _read(self, read: Callable[[], T]) -> T:
        with self._lock:
            if not self._is_open:
                raise StoreError(f"{self._folder.path} is closed: its view was stopped")
            try:
                return read()
            except DiskDamaged as error:
                self.damage = self.damage or str(error)
                raise

    # -- on the thread that writes -------------------------------------------------------------------------------------

    def passed(self, position: int, as_of_ms: int) -> None:
        """Note that everything below a position was put here; write it if it is much. ``as_of_ms``: when the view was
        proven to be complete (0: not yet). Raises ``OSError``."""
        self.position = max(self.position, position)
        if self.damage:
            raise DiskDamaged(self.damage)
        if len(self._newer) >= MOST_WAITING or self._bytes >= MOST_BYTES:
            self.flush(as_of_ms)

    def flush(self, as_of_ms: int) -> None:
        """Write what waits; it counts if the view was complete once. Raises ``OSError``."""
        changes = [Change(key, None if value is ABSENT else value) for key, value in self._newer.items()]
        # A mark only for a view that was complete, with that time: a tombstone behind the mark is younger, so it is
        # still in the topic as long as the mark is younger than delete.retention.ms.
        point = Point(self.position, b"", as_of_ms) if as_of_ms and self.position >= 0 else None
        self._folder.write(changes, self._identity, point)
        self._newer, self._bytes = SharedOrderedEngine(), 0  # after the write: a reader finds each key in one of them

    def close(self, as_of_ms: int) -> None:
        """Write what waits, as far as the disk takes it, and free the folder. A damaged one is set aside."""
        try:
            if not self.damage:
                self.flush(as_of_ms)
        except (OSError, StreamsError) as error:
            _log.warning("%s stays at its mark: %s", self._folder.path, error)
        with self._lock:
            self._is_open = False
            if self.damage:
                set_aside(self._folder, self.damage)
            self._folder.close()


class ViewFolders:
    """The folders of a view's partitions, in one process for one block at a time."""

    def __init__(self, engine: DiskEngine, folder: str, topic: str, layout: str, topic_id: str, wall_ms: int) -> None:
        """Raises ``ConfigError`` for a folder that cannot be used."""
        try:
            self._parent = prepare_root(folder, "", topic)  # no group has this name
        except ConfigError as error:
            raise ConfigError(str(error).replace("StateConfig.folder", "the folder of a view")) from None
        self._engine, self._topic, self._layout = engine, topic, layout
        self._topic_id = topic_id
        self._ends: Mapping[int, Watermarks] = {}
        self._ages = {"now_ms": wall_ms, "tombstones_ms": 0}

    def open_all(self, ends: Mapping[int, Watermarks], settings: Mapping[str, str]) -> dict[int, SharedDiskEngine]:
        """Open the folders of all partitions; blocks. ``settings``: of the topic, which say for how long it keeps
        tombstones. Raises ``StreamsError`` if a disk refuses."""
        if "delete.retention.ms" not in settings:
            _log.info("%s: its delete.retention.ms is not known, a day is assumed", self._topic)
        self._ends = ends
        self._ages["tombstones_ms"] = int(settings.get("delete.retention.ms", TOMBSTONES_MS))
        opened: dict[int, SharedDiskEngine] = {}
        try:
            for number in sorted(ends):
                opened[number] = self.open(number)
        except BaseException:
            for engine in opened.values():  # a folder that stays open is locked for the next block
                engine.close(0)
            raise
        return opened

    def open(self, number: int) -> SharedDiskEngine:
        """Open the folder of one partition; empty if what is in it is not to be gone on from."""
        # Here: a view in memory, which has no folder, does not load what keeps the state of an engine on disk.
        from streams.runtime.keeping.on_disk import DatabaseFolder

        folder = None
        try:
            identity = LogIdentity("", self._topic, self._topic_id, number, self._layout)
            folder = DatabaseFolder.find(self._parent, number, distrust_by(identity, **self._ages))
            assert isinstance(folder, DatabaseFolder)
            folder.engine, folder.memory_bytes = self._engine, MEMORY_BYTES
            folder.partitions = max(1, len(self._ends))
            try:
                self._check(folder, identity, number)
            except Damaged as error:
                if not set_aside(folder, str(error)):
                    raise OSError(f"{folder.path} is damaged, and cannot be set aside: remove it") from error
                if folder.spares:  # a copy that is less far, and may be good
                    folder.close()
                    return self.open(number)
            folder.remove_spares()
            return SharedDiskEngine(folder, identity)
        except BaseException as error:
            if folder is not None:
                folder.close()
            if isinstance(error, OSError):
                raise StreamsError(f"{self._topic}[{number}] cannot be kept on disk: {error}") from error
            raise

    def _check(self, folder: DatabaseFolder, identity: LogIdentity, number: int) -> None:
        if not folder.check(identity, **self._ages):
            return
        assert folder.mark is not None
        offset, log = folder.mark.offset, self._ends.get(number)
        # Below the start records are missing between; above the end the log was cut, and other records will have these
        # offsets.
        if log is None or not log.start <= offset <= log.end:
            raise Damaged(f"it goes on at offset {offset}, and the log is {log}")
