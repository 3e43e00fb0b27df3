"""State in a database on disk (``DiskEngine``): its folder, and its way there.

The mark is in the database, and is written in one step with what it counts. The file of the mark beside it is a copy,
for the comparison of folders. What follows a mark is written, too, if it is much: reading the changelog on from the
mark ends at the same state (each record says what its key is), as long as no tombstone behind the mark can be gone. So
a database that has got to no mark is removed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streams.core.checkpoints import FolderMark, LogIdentity, reason_to_distrust
from streams.errors import ConfigError, DiskDamaged, StoreError, StreamsError
from streams.protocols import DiskDatabase, DiskEngine, DiskStore, more_may_follow
from streams.records import Change
from streams.runtime.changelog import KEPT_PREFIXES
from streams.runtime.keeping.folders.entries import HEAD, Damaged, HalfLoaded, NotKept, Point, decode_pieces, encode
from streams.runtime.keeping.folders.folder import Broken, StateFolder, check_private, read_mark
from streams.runtime.keeping.folders.parents import room_for
from streams.runtime.keeping.folders.shelf import set_aside
from streams.runtime.keeping.keeper import StateKeeper
from streams.runtime.keeping.kept_partition import FolderKeeper, KeptPartition
from streams.runtime.keeping.snapshots.snapshotting import WantedFolder
from streams.settings.config import EventSourceConfig

_log = logging.getLogger(__name__)

PAGE = 512
"""So many rows are read at a time, or fewer if they are large."""
LEAST_PIECE = 1 << 20
"""A piece of a database has so many bytes, at least. Above that one row in ``CUTS`` ends it."""
CUTS = 1024
"""One key in so many ends a piece. Its checksum decides."""

Finder = Callable[[Path, int, Callable[[FolderMark], str]], StateFolder]
"""Opens the folder of a partition, below a parent (``StateFolder.find``)."""


class DatabaseFolder(StateFolder):
    """A folder with a database in it. One thread."""

    engine: DiskEngine
    memory_bytes: int
    partitions: int
    database: DiskDatabase | None = None
    left: Collection[bytes] = ()

    def equip(self, engine: DiskEngine, config: EventSourceConfig, left: Collection[bytes] = ()) -> None:
        """Set the engine, and what its databases may take. ``left``: prefixes of the keys that are not loaded,
        because the store reads them in the database."""
        self.engine, self.left = engine, left
        self.memory_bytes, self.partitions = config.state.memory_bytes // 2, config.num_partitions

    @property
    def database_path(self) -> Path:
        """Return where the database is."""
        return self.path / f"data-{self.engine.name}"

    def open_database(self) -> DiskDatabase:
        """Open the database, or make it. Raises ``Damaged``, ``OSError`` and ``ConfigError``."""
        if self.database is None:
            self._file = self.database_path.name
            if self.database_path.is_symlink() or self.database_path.exists():
                check_private(self.database_path)
            with _damaged():
                self.database = self.engine.open(
                    str(self.database_path), memory_bytes=self.memory_bytes, partitions=self.partitions
                )
        return self.database

    def check(self, identity: LogIdentity, *, now_ms: int, tombstones_ms: int) -> bool:
        """See ``StateFolder``: the database itself tells whether it is as it was written."""
        if not self.database_path.exists():
            mark = self.mark = self._read_mark()
            if mark is not None:
                reason = reason_to_distrust(mark, identity, now_ms=now_ms, tombstones_ms=tombstones_ms)
                raise Damaged(reason or f"{self.database_path.name} is missing")
            self.remove_strays()
            return False
        mark = self.read_own_mark()
        self.remove_strays()
        if mark is None:
            if self.spares:  # the copy of its mark came before theirs
                raise Damaged("its database has no mark")
            # Nothing says from where the changelog is to be read on, and the tombstones of keys in it may be gone.
            self.close_database()
            shutil.rmtree(self.database_path)
            return False
        reason = reason_to_distrust(mark, identity, now_ms=now_ms, tombstones_ms=tombstones_ms)
        if reason:
            raise Damaged(reason)
        return True

    def read_own_mark(self) -> FolderMark | None:
        """Read the mark in the database, and keep it; ``None``: there is none. The copy beside it may name a later
        offset: a database may lose its last writes with the power. Raises as ``open_database``."""
        with _damaged():
            found = self.open_database().mark()
        try:
            self.mark = None if found is None else msgspec.json.decode(found, type=FolderMark)
        except msgspec.DecodeError as error:
            raise Damaged(f"its mark cannot be read ({error})") from error
        return self.mark

    def load(self) -> Iterator[list[Change]]:
        """Yield what the source keeps beside the store's state: timers, and rows of joined tables in memory."""
        database = self.open_database()
        for low, high in self._loaded():
            while low < high:
                with _damaged():
                    rows = database.scan(low, high, reverse=False, limit=PAGE)
                yield [Change(key, value) for key, value in rows]
                low = rows[-1][0] + b"\0" if more_may_follow(rows, PAGE) else high

    def _loaded(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the spans of keys that ``load`` reads."""
        for low in KEPT_PREFIXES:
            end = _behind(low)
            for left in sorted(self.left):
                if low <= left < end:
                    yield low, left
                    low = _behind(left)
            yield low, end

    def data(self, length: int) -> tuple[FolderMark, Iterator[bytes]] | None:
        """Return the mark of this moment, and everything that is there, as a data file: by the order of keys, cut where
        a key says so, so that what does not change has the same pieces. What was written behind the mark may be in it.
        Any thread."""
        mark, database = self.mark, self.database
        return None if mark is None or database is None else (mark, _rows(database, length))

    def fill(self, pieces: Iterable[bytes]) -> None:
        """Write what is in a data file into a database that is empty; see ``StateFolder``. Raises ``Damaged``, too."""
        for changes in decode_pieces(pieces, "its data"):
            last = {change.key: change for change in changes}
            # It is written without a mark: it counts with ``commit``, and a start removes what got no farther than
            # this.
            self.write(list(last.values()), None, None)

    def commit(self, identity: LogIdentity, offset: int, record: bytes, as_of_ms: int) -> None:
        """Make everything written so far count."""
        self.write([], identity, Point(offset, record, as_of_ms))

    def write(self, changes: Sequence[Change], identity: LogIdentity | None, point: Point | None) -> None:
        """Write changes, and with them the mark, if there is a ``point``. Raises ``OSError``: nothing of them is there;
        ``Broken``: the database cannot be used any more."""
        mark = None if point is None or identity is None else FolderMark(identity, *point, self._file, 0, 0, 0)
        rows = [(change.key, change.value) for change in changes]
        try:
            self.open_database().write(rows, None if mark is None else msgspec.json.encode(mark))
        except OSError:
            raise
        except Exception as error:
            raise Broken(0, f"{self._file} cannot be written to: {error!r}") from error
        if mark is not None:
            self.mark = mark
            with contextlib.suppress(OSError):  # it is a copy
                self._replace_mark(mark)

    def rewrite_if_due(self, *, pause: bool = True) -> bool:
        # An engine does that by itself.
        return False

    def set_aside(self) -> Path:
        """See ``StateFolder``."""
        # The database is closed before its files are moved: an open engine goes on writing to them.
        self.close_database()
        return super().set_aside()

    def close_database(self) -> None:
        """Close the database; it may be opened again."""
        # It is taken out first, so that one that fails to close is not used again.
        database, self.database = self.database, None
        if database is not None:
            database.close()

    def close(self) -> None:
        """Free database and lock."""
        try:
            self.close_database()
        finally:
            # The lock is freed last: from then on another process may open the database (K6).
            super().close()


class PartitionOnDisk(KeptPartition):
    """The way of one partition's committed changes into its database."""

    folder: DatabaseFolder
    needs_disk = True

    def __init__(self, store: DiskStore, keeper: FolderKeeper, identity: LogIdentity, folder: DatabaseFolder) -> None:
        """Raises ``NotKept``; ``HalfLoaded`` for a database that is damaged, which is set aside."""
        super().__init__(keeper, identity, folder)
        self.store = store
        try:
            store.attach(folder.open_database(), self.unreadable)
        except (DiskDamaged, Damaged) as error:
            keeper.folders_set_aside += 1
            if not set_aside(folder, str(error)):
                raise StreamsError(f"{folder.path} is damaged, and cannot be set aside: remove it") from error
            raise HalfLoaded from error
        except OSError as error:
            raise NotKept(str(error)) from error
        # This partition is among the open ones only when this has returned.
        self._share([*keeper.open_ones, self])

    def _checkpoint(self, pause: bool) -> None:
        with self._lock:
            if self._is_over:
                return
            # No offset record has come since the mark, so nothing more may count.
            if self._is_marked and not self._gathered:
                if self.size < self._keeper.config.state.checkpoint_bytes:
                    return
                point, changes, self._behind = None, self._behind, {}  # it does not count yet
            else:
                point, changes, self._gathered = self.point, self._gathered, {}
            self._writing = len(changes)
        self._append(changes, point, pause)
        if point is not None:
            with self._lock:
                # A further offset record may have come during the write.
                self._is_marked = self.point is point
        # The store is called behind the write: it lets go of these values in memory, and reads them from the disk
        # (K3).
        self.store.written(list(changes.values()))

    def _put(self, changes: dict[bytes, Change], point: Point | None, pause: bool) -> None:
        """See ``KeptPartition``; the mark comes with them."""
        self.folder.write(list(changes.values()), self.identity, point)

    def relieve(self) -> None:
        """See ``KeptPartition``."""
        self.store.relieve()

    def give_up(self, why: str) -> None:
        """Leave the folder, which cannot be used any more: the partition starts over. Any thread."""
        self._start_over(why)

    def unreadable(self, error: Exception) -> None:
        """Have the partition start over after a read has failed; from this folder if the error is one of the system,
        which says nothing of the data: closing the database frees what was short, or the next start names it. Any
        thread."""
        if isinstance(error, OSError):
            room = room_for(error, self.folder.path)
            _log.warning("%s cannot be read now (%s; %s); it is opened again", self.folder.path, error, room)
        self._start_over("" if isinstance(error, OSError) else str(error))

    def _start_over(self, distrusted: str) -> None:
        with self._lock:
            # Many reads may fail at the same time. The partition has to start over once.
            if self._is_over:
                return
            self._drop()
            self.distrusted = distrusted
        self._keeper.damages.deliver(self)

    def abandon(self) -> None:
        """See ``KeptPartition``."""
        super().abandon()
        self._share(list(self._keeper.open_ones))

    def _share(self, all_of_them: Sequence[KeptPartition]) -> None:
        """Give each table its part of a half of the memory; the other half is for the databases."""
        stores = [kept.store for kept in all_of_them if isinstance(kept, PartitionOnDisk)]
        for store in stores:
            store.limit_cache(self._keeper.config.state.memory_bytes // 2 // len(stores))


def open_for(
    keeper: StateKeeper,
    store: object,
    partition: int,
    restore: Callable[[Sequence[Change]], None],
    progress: Callable[[int, int], None],
) -> KeptPartition | None:
    """Open the folder of a partition with this store; see ``StateKeeper.open``. ``None``: there can be none; the reason
    is logged. Raises ``StreamsError`` if there can be none, and the store needs one."""
    find, where = finder_for(keeper.config, store), f"{keeper.config.changelog}[{partition}]"
    kind = partial(PartitionOnDisk, store) if isinstance(store, DiskStore) else KeptPartition
    try:
        return keeper.open(partition, layout_of(store), restore, progress, find, kind)
    except NotKept as error:
        # Other stores work without a folder. This one has its state nowhere else.
        if isinstance(store, DiskStore):
            what = "its state is on disk, and StateConfig.folder cannot be used for it"
            raise StreamsError(f"{where}: {what}: {error}") from error
        _log.warning("%s is not kept on disk: %s", where, error)
        return None


class Fillable(Protocol):
    """A partition's copy, whose folder is about to be opened (``ownership.replica.Replica``)."""

    partition: int
    store: Any
    is_discarded: bool

    def loads(self, loaded: int, size: int) -> None: ...


def load_after_snapshot(keeper: StateKeeper, copy: Fillable, load: Callable[[], object]) -> None:
    """Have ``load`` called on the keeper's thread; where there are snapshots, after the folder got one if it is empty.
    On the loop."""
    if keeper.snapshots is None:
        keeper.post(load)
    else:
        find, store = finder_for(keeper.config, copy.store), copy.store
        is_discarded = lambda: copy.is_discarded  # noqa: E731
        keeper.snapshots.fetch(WantedFolder(copy.partition, layout_of(store), find, load, copy.loads, is_discarded))


def finder_for(config: EventSourceConfig, store: object) -> Finder:
    """Return the function that opens folders of this kind of store."""
    if not isinstance(store, DiskStore):
        return StateFolder.find
    engine = store.disk

    def find(parent: Path, partition: int, distrust: Callable[[FolderMark], str]) -> StateFolder:
        folder = DatabaseFolder.find(parent, partition, distrust)
        assert isinstance(folder, DatabaseFolder)
        folder.equip(engine, config, getattr(store, "row_prefixes", ()))
        return folder

    return find


def read_database(path: Path, store: object, config: EventSourceConfig) -> bool:
    """Read the whole database in a folder; ``False``: a process has it locked. Changes nothing. Raises ``Damaged``,
    ``StoreError`` for one that the store would not use, and ``OSError``."""
    engine = store.disk if isinstance(store, DiskStore) else None
    mark = read_mark(path)
    if engine is None or mark is None or mark.file != f"data-{engine.name}":
        raise StoreError(f"{path} has a database that this source would not use")
    folder = DatabaseFolder.open(path)
    if folder is None:
        return False
    assert isinstance(folder, DatabaseFolder)
    try:
        folder.equip(engine, config)
        folder.mark = mark
        folder.open_database()
        data = folder.data(LEAST_PIECE)
        # Reading is the check: the engine compares the checksums of what it reads.
        for _ in () if data is None else data[1]:
            pass
    finally:
        folder.close()
    return True


def _behind(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with one of the toolkit's prefixes."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def layout_of(store: object) -> str:
    """Name a store's class and its codecs: another one does not take over what this one has kept."""
    named: str = getattr(store, "layout", "") or f"{type(store).__module__}.{type(store).__qualname__}"
    return named


def refuse_without_folder(store: object) -> None:
    """Raise ``ConfigError`` for a store, or a factory of stores, that needs a folder where none is set."""
    engine = getattr(store, "disk", None)
    if engine is not None and hasattr(engine, "open"):
        raise ConfigError(f"a store with engine={type(engine).__name__}() keeps state on disk: set StateConfig.folder")


@contextlib.contextmanager
def _damaged() -> Iterator[None]:
    try:
        yield
    except DiskDamaged as error:
        raise Damaged(str(error)) from error


def _rows(database: DiskDatabase, length: int) -> Iterator[bytes]:
    low: bytes | None = None
    parts, size = [HEAD], len(HEAD)
    while True:
        with _damaged():
            rows = database.scan(low, None, reverse=False, limit=PAGE)
        for key, value in rows:
            entry = encode([Change(key, value)])
            parts.append(entry)
            size += len(entry)
            # The key alone decides: where nothing has changed the pieces are the same, and a snapshot uses the blocks
            # again that are there.
            if size >= length or (size >= LEAST_PIECE and zlib.crc32(key) % CUTS == 0):
                yield b"".join(parts)
                parts, size = [], 0
        if not more_may_follow(rows, PAGE):
            break
        low = rows[-1][0] + b"\0"
    if parts:
        yield b"".join(parts)
