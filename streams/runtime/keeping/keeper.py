"""State on disk, beside the engine: what is committed is gathered, and written by a thread of its own.

Rules of this file
* Only what is committed is gathered: the cuts of committed transactions, and what a tail that reads committed received.
* A mark is an offset record of the changelog, and the folder holds exactly what is up to it. What a copy has received
  behind the last offset record waits for the next one.
* Neither the loop nor a commit waits for a disk: dictionaries change hands under a lock that is never held while
  something is written. A folder that cannot keep up, or cannot be written to, is left at its mark, which stays true.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.admission import size_of_changes
from streams.core.checkpoints import FolderMark, LogIdentity, distrust_by
from streams.core.transaction import Cut
from streams.model.group import TakeOver
from streams.model.topics import TopicIdentity
from streams.records import TYPE_HEADER, Change, IncomingRecord
from streams.runtime.bridge import Inlet
from streams.runtime.changelog import KEPT_PREFIXES, OFFSET_KEY
from streams.runtime.keeping.figures import LoadRate, figures_of, room_at, room_for
from streams.runtime.keeping.folders.entries import Damaged, HalfLoaded, NotKept, Point
from streams.runtime.keeping.folders.folder import PIECE, Broken, StateFolder
from streams.runtime.keeping.folders.place import prepare_root
from streams.runtime.keeping.folders.shelf import LOOK_SECONDS, ShelfWatch, is_shortage, set_aside, tombstones_ms_of
from streams.runtime.keeping.intake import Intake, KeeperHost
from streams.runtime.keeping.snapshots.snapshotting import REQUEST_SECONDS, Snapshotting
from streams.runtime.ports import Blocking, Topics
from streams.runtime.signal import Signal
from streams.sak.open_files import refuse_if_few_are_free
from streams.settings.config import EventSourceConfig
from streams.statistics import FolderStatistics

_log = logging.getLogger(__name__)

RENEW_MS: Final = 3_600_000
"""The age of a mark at which its partition, if nothing happens in it, sends its offset record again."""
TAIL_SECONDS: Final = 0.2
"""For which a tail waits, per batch, while too much is unwritten: so a restore goes no faster than the disk."""


class KeptPartition:
    """One partition's changes on their way to its folder. The lock is the keeper's; each method names its thread."""

    needs_disk = False  # its store cannot go on without the folder

    def __init__(self, keeper: StateKeeper, identity: LogIdentity, folder: StateFolder) -> None:
        self.folder = folder
        self.identity = identity
        self.partition = identity.partition
        self.distrusted = ""  # why the folder is not to be used any more
        self.written_at = keeper.now()
        self.checkpoint_seconds = 0.0
        self.snapshot_at_ms = -1  # when the newest snapshot was made that is known here
        mark = folder.mark
        self.point: Point | None = None if mark is None else Point(mark.offset, mark.record, mark.as_of_ms)
        """How far it goes, written or not."""
        self._keeper = keeper
        self._lock = keeper.lock
        self._is_marked = True  # the folder's mark says how far it goes
        self._gathered: dict[bytes, Change] = {}  # up to the point, exactly
        self._behind: dict[bytes, Change] = {}  # what follows it
        self._writing = 0
        self._changes, self._bytes = 1, 0  # that were gathered so far, for their mean size
        self._is_over = self._is_failing = self.is_ready = False  # ready: its log goes on from there, and is read

    # -- gathering -----------------------------------------------------------------------------------------------------

    def committed(self, cut: Cut, as_of_ms: int) -> int:
        """Gather this partition's part in a transaction that is committed; return its size. On the loop."""
        with self._lock:
            if self._is_over:
                return 0
            size = size_of_changes(list(cut.changes.values()), self._behind)
            self._count(len(cut.changes), size)
            known = -1 if self.point is None else self.point.offset
            if cut.end > known:
                self._advance(Point(cut.end, cut.record, as_of_ms))
        if 0 <= cut.end <= known:  # what is here is not the beginning of the log any more, wherever it were marked
            self.distrusted = f"the changelog goes on at offset {cut.end}, and went up to {known}: it lost its end"
            self.give_up(self.distrusted)
        self._keeper.look(self)
        return size

    def receive(self, records: Sequence[IncomingRecord], changes: Sequence[Change | None] = ()) -> None:
        """Gather records of the changelog, read committed; ``changes``: what the store was given for each of them. On
        the tail's thread; it may wait for the disk."""
        with self._lock:
            known = -1 if self.point is None else self.point.offset
            for record, change in zip_longest(records, changes):
                key, value = record.key, record.value
                if key is None or record.offset <= known or self._is_over:
                    continue
                if key == OFFSET_KEY:
                    if value is not None:
                        self._advance(Point(record.offset, value, record.timestamp_ms))
                elif not key.startswith(RESERVED_KEY_PREFIX) or key.startswith(KEPT_PREFIXES):
                    kind = record.header(TYPE_HEADER) if record.headers and change is None else None
                    self._behind[key] = change or Change(key, value, None, kind.decode() if kind else "")
                    self._count(1, len(key) + len(value or b""))
        self._keeper.look(self)
        self._keeper.wait_for_room()

    @property
    def size(self) -> int:
        """Estimate the bytes that are not written yet: what was written over is not there twice."""
        return self.gathered_changes * self._bytes // self._changes

    @property
    def gathered_changes(self) -> int:
        """Count the changes that are not written yet."""
        return 0 if self._is_over else len(self._gathered) + len(self._behind) + self._writing

    @property
    def state(self) -> str:
        """Name its state as ``FolderStatistics`` does."""
        return "left" if self._is_over else "failing" if self._is_failing else "kept"

    def _count(self, changes: int, size: int) -> None:
        self._changes, self._bytes = self._changes + changes, self._bytes + size

    def _advance(self, point: Point) -> None:
        if self._gathered:
            self._gathered.update(self._behind)
        else:
            self._gathered = self._behind
        self._behind = {}
        self.point, self._is_marked = point, False

    # -- writing, on the keeper's thread -------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Check whether it is time for a checkpoint. On the loop."""
        state, size = self._keeper.config.state, self.size
        if self._is_over or (self._is_marked and not size):
            return False
        return size >= state.checkpoint_bytes or now - self.written_at >= state.checkpoint_seconds

    def write(self, *, pause: bool = True) -> None:
        """Make a checkpoint. Errors are logged: a full disk may have room the next time, anything else ends the keeping
        of this partition."""
        began = self.written_at = self._keeper.now()
        try:
            self._checkpoint(pause)
            self.checkpoint_seconds = self._keeper.now() - began
            if pause:
                self.folder.rewrite_if_due()
        except Broken as error:
            self.give_up(str(error))
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                path, what = self.folder.path, "the state waits in memory, up to StateConfig.unwritten_bytes"
                _log.warning("%s cannot be written to (%s; %s); %s", path, error, room_for(error, path), what)
        except Exception as error:
            self.give_up(str(error) if isinstance(error, Damaged) else repr(error))
        else:
            self._is_failing = False

    def _checkpoint(self, pause: bool) -> None:
        with self._lock:
            if self._is_over:
                return
            point, is_marked, changes = self.point, self._is_marked, self._gathered
            self._gathered, self._writing = {}, len(changes)
        self._append(changes, point, pause)
        if point is not None and not is_marked:
            self.folder.commit(self.identity, *point)
            with self._lock:
                self._is_marked = self.point is point
        # What follows the point is written before the point that it leads to is there, if it is much: of a large state
        # that is restored only the last offset record is left. It does not count until then.
        with self._lock:
            if self.size < self._keeper.config.state.checkpoint_bytes or not self._is_marked or self._gathered:
                return
            behind = self._behind
            self._behind, self._writing = {}, len(behind)
        self._append(behind, point, pause)

    def _append(self, changes: dict[bytes, Change], point: Point | None, pause: bool) -> None:
        """Write what was taken from memory; put it back if that fails, before what has come meanwhile."""
        try:
            self._put(changes, point, pause)
        except OSError:
            with self._lock:
                if not self._is_over and self._is_marked:  # it followed the point, and no further one has come
                    self._behind = changes | self._behind
                elif not self._is_over:
                    self._gathered = changes | self._gathered
            raise
        finally:
            with self._lock:
                self._writing = 0
            self._keeper.wrote()

    def _put(self, changes: dict[bytes, Change], point: Point | None, pause: bool) -> None:
        """Write changes into the folder. Raises ``OSError``: nothing of them is there."""
        if changes:
            self.folder.append(changes.values(), pause=pause)

    def relieve(self) -> None:
        """Have the store let go of what is on disk. On the loop, of a partition that is worked on here."""

    def give_up(self, why: str) -> None:
        """Leave the folder at its mark for the rest of this run. Any thread."""
        with self._lock:
            if self._is_over:
                return
            self._drop()
        what = "the next start reads the changelog from there on"
        _log.warning("%s is left at its mark (%s; %s): %s", self.folder.path, why, room_at(self.folder.path), what)

    def _drop(self) -> None:
        self._is_over = True
        self._gathered, self._behind = {}, {}

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Make the last checkpoint, without waiting for it, and free the folder. On the loop."""
        self._keeper.close_one(self)

    def finish(self) -> None:
        """Carry out ``close``. On the keeper's thread."""
        if self.distrusted:
            self._keeper.folders_set_aside += 1
            set_aside(self.folder, self.distrusted)
        else:
            self.write(pause=False)
        self.abandon()

    def abandon(self) -> None:
        """Free the folder as it is."""
        with self._lock:
            self._drop()
        self.folder.close()


class StateKeeper:
    """The folders of one member. On the loop, but for the methods that name another thread."""

    def __init__(
        self,
        config: EventSourceConfig,
        thread: Callable[[], Blocking],
        questions: Callable[[], TakeOver],
        topics: Callable[[], Topics],
        *,
        now: Callable[[], float],
        wall_ms: Callable[[], int],
    ) -> None:
        """``thread`` starts the one that writes. ``questions`` and ``topics`` make requests about the changelog; they
        block. Raises ``ConfigError`` for a folder that cannot be used."""
        self.config = config
        self.snapshots = Snapshotting(self, thread) if config.state.snapshots else None
        self.lock = threading.Lock()
        self.now = now
        self.open_ones: list[KeptPartition] = []
        self.folders_set_aside = 0  # in this run
        self._load_rate = LoadRate()
        self._room = threading.Condition()
        self.parent = prepare_root(config.state.folder, config.group_id, config.topic)
        self.shelf = ShelfWatch(self.parent, config.changelog, wall_ms)
        self.shelf.look()  # for the first report to the group
        self._thread = thread()
        self.questions, self._topics = questions, topics
        self.wall_ms = wall_ms
        self._log_known: tuple[TopicIdentity, int] | None = None
        self._work = Signal()
        self._inlet: Inlet[None] = Inlet(lambda _: self._work.notify())
        self._is_woken = False
        self._intake = Intake(config.state.unwritten_bytes, now)
        self._host: KeeperHost | None = None
        self.damages: Inlet[KeptPartition] = Inlet(self._is_damaged)

    async def run(self, host: KeeperHost) -> None:
        """Make checkpoints, until cancelled."""
        self._host = host
        renewed: dict[int, int] = {}
        looked_at = self.now()
        while True:
            await self._work.wait(min(1.0, self.config.state.checkpoint_seconds))
            self._is_woken = False
            for kept in list(self.open_ones):
                if kept in self.open_ones and kept.is_due(self.now()):
                    await self._thread.call(kept.write)
            self._bound()
            if self.now() - looked_at >= LOOK_SECONDS:
                looked_at = self.now()
                await self._thread.call(self.shelf.look, *(self._log_known or ()))
            self._hold()
            wall_ms = self.wall_ms()
            for kept in self.open_ones:
                if host.at_work(kept.partition) is kept:
                    kept.relieve()
                point, last_ms = kept.point, renewed.get(kept.partition, 0)
                # Too old, or of a time when the clock was ahead: a start would believe neither.
                if point is not None and min(abs(wall_ms - point.as_of_ms), abs(wall_ms - last_ms)) > RENEW_MS:
                    renewed[kept.partition] = wall_ms
                    host.renew_offset(kept.partition)

    async def changelog(self) -> tuple[TopicIdentity, int]:
        """See ``known_changelog``."""
        return await self._thread.call(self.known_changelog)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have a function called on the keeper's thread."""
        self._thread.post(function, *args)

    def settled(
        self, cuts: Mapping[int, Cut], kept_of: Callable[[int], KeptPartition | None], age_seconds: float
    ) -> None:
        """Gather the parts of a committed transaction, which was sealed ``age_seconds`` ago."""
        as_of_ms = self.wall_ms() - int(age_seconds * 1000)
        for partition, cut in cuts.items():
            kept = kept_of(partition)
            if kept is not None and self._intake.grew(kept.committed(cut, as_of_ms), kept):
                self._hold()

    def _hold(self) -> None:
        if self._host is not None:
            self._intake.look(self._host, [kept for kept in self.open_ones if kept.needs_disk])

    def _is_damaged(self, kept: KeptPartition) -> None:
        if kept in self.open_ones and self._host is not None:
            self._host.begin_anew(kept)

    def look(self, kept: KeptPartition) -> None:
        """Wake the task if a partition has gathered enough. Any thread."""
        if not self._is_woken and kept.size >= self.config.state.checkpoint_bytes:
            self._is_woken = True
            self._inlet.put(None)
            self._bound()

    def _bound(self) -> None:
        """Leave the folder behind that has most to write, if there is too much."""
        most = self.config.state.unwritten_bytes
        while (unwritten := self._unwritten()) > most:
            largest = max(list(self.open_ones), key=lambda kept: 0 if kept.needs_disk else kept.size)
            if largest.needs_disk or not largest.size:
                return
            largest.give_up(f"{unwritten} bytes wait to be written, StateConfig.unwritten_bytes is {most}")

    def _unwritten(self) -> int:
        return sum([kept.size for kept in list(self.open_ones)])

    def wait_for_room(self) -> None:
        """Wait a moment while much is unwritten. On the tail's thread."""
        most = self.config.state.unwritten_bytes // 2
        if self._unwritten() > most:
            with self._room:
                self._room.wait_for(lambda: self._unwritten() <= most, TAIL_SECONDS)

    def wrote(self) -> None:
        """Let the tail go on. On the keeper's thread."""
        with self._room:
            self._room.notify_all()

    def close_one(self, kept: KeptPartition) -> None:
        """Close a folder after what is being written."""
        if kept in self.open_ones:
            self.open_ones.remove(kept)
            self._thread.post(kept.finish)

    async def close(self) -> None:
        """Close all folders; returns when the last checkpoints are made."""
        await self._thread.call(lambda: None)  # one may be being opened
        for kept in list(self.open_ones):
            self.close_one(kept)
        await self._thread.call(lambda: None)

    def statistics(self) -> tuple[FolderStatistics, ...]:
        """Return the figures of the folders that are open, ordered by partition."""
        wall_ms, found = self.wall_ms(), sorted(self.open_ones, key=lambda kept: kept.partition)
        return tuple(figures_of(kept, wall_ms, self._load_rate) for kept in found)

    # -- on its thread -------------------------------------------------------------------------------------------------

    def open(
        self,
        partition: int,
        codec: str,
        restore: Callable[[Sequence[Change]], None],
        progress: Callable[[int, int], None],
        find: Callable[[Path, int, Callable[[FolderMark], str]], StateFolder] = StateFolder.find,
        kind: Callable[[StateKeeper, LogIdentity, Any], KeptPartition] = KeptPartition,
    ) -> KeptPartition:
        """Open a partition's folder, and give what is in it to ``restore``; ``progress`` learns how many bytes that is
        of how many. ``find`` and ``kind`` make its parts. Raises ``NotKept``, ``BrokerUnavailable``, ``HalfLoaded``
        (begin again with an empty store: another folder may be there), and as ``restore``."""
        known, tombstones_ms = self.known_changelog()
        self.shelf.codec = codec
        identity = LogIdentity(known.cluster, self.config.changelog, known.topic_id, partition, codec)
        ages = {"now_ms": self.wall_ms(), "tombstones_ms": tombstones_ms}
        try:
            refuse_if_few_are_free()
            folder = find(self.parent, partition, distrust_by(identity, **ages))
        except OSError as error:
            raise NotKept(str(error)) from error
        has_begun, began = False, time.monotonic()
        try:
            if folder.check(identity, **ages):
                assert folder.mark is not None
                changes, size = 0, folder.mark.size
                for number, some in enumerate(folder.load(), 1):
                    has_begun = True
                    restore(some)
                    progress(min(number * PIECE, size), size)
                    changes += len(some)
                self._load_rate.loaded(size, seconds := time.monotonic() - began)
                upto = f"{self.config.changelog}[{partition}] up to offset {folder.mark.offset}"
                _log.info("%s: %d changes from %s, %.1f s", upto, changes, folder.path, seconds)
        except (Damaged, OSError) as error:
            is_aside = not is_shortage(folder, error) and set_aside(folder, str(error))
            self.folders_set_aside += is_aside
            if has_begun or not is_aside or folder.spares or self.snapshots is not None:
                folder.close()
                if not (has_begun or is_aside):
                    raise NotKept(str(error)) from error
                raise HalfLoaded from error
        except BaseException:
            folder.close()
            raise
        try:
            kept = kind(self, identity, folder)
        except BaseException:
            folder.close()
            raise
        folder.remove_spares()
        self.open_ones.append(kept)
        return kept

    def known_changelog(self) -> tuple[TopicIdentity, int]:
        """Return the changelog's identity, and for how many ms it keeps tombstones. Raises ``BrokerUnavailable``."""
        if self._log_known is None:
            name = self.config.changelog
            identity = self.questions().identity(name, self.now() + REQUEST_SECONDS)
            with closing(self._topics()) as topics:
                self._log_known = identity, tombstones_ms_of(topics, name, REQUEST_SECONDS)
        return self._log_known
