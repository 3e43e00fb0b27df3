"""One partition's changes on their way to its folder.

Rules of this file
* Only what is committed is gathered: the cuts of committed transactions, and what a tail that reads committed received.
* A mark is an offset record of the changelog, and the folder holds exactly what is up to it. What a copy has received
  behind the last offset record waits for the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Protocol

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.admission import size_of_changes
from streams.core.checkpoints import LogIdentity
from streams.core.transaction import Cut
from streams.records import TYPE_HEADER, Change, IncomingRecord
from streams.runtime.bridge import Inlet
from streams.runtime.changelog import KEPT_PREFIXES, OFFSET_KEY
from streams.runtime.keeping.folders.entries import Damaged, Point
from streams.runtime.keeping.folders.folder import Broken, StateFolder
from streams.runtime.keeping.folders.parents import room_at, room_for
from streams.runtime.keeping.folders.shelf import set_aside
from streams.settings.config import EventSourceConfig

_log = logging.getLogger(__name__)


class FolderKeeper(Protocol):
    """The keeper of a member's folders, as each of them uses it (``keeper.StateKeeper``)."""

    folders_set_aside: int  # in this run

    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def lock(self) -> threading.Lock: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def open_ones(self) -> list[KeptPartition]: ...
    @property
    def damages(self) -> Inlet[KeptPartition]: ...  # those whose folder cannot be used any more

    def check(self, kept: KeptPartition) -> None: ...  # it may have gathered enough for a checkpoint
    def wait_for_room(self) -> None: ...  # a moment, while much is unwritten
    def wrote(self) -> None: ...  # there is room
    def close_one(self, kept: KeptPartition) -> None: ...


class KeeperHost(Protocol):
    """The partitions of a member, as the keeper of their folders uses them. On the loop."""

    def renew_offset(self, partition: int) -> None: ...  # send the offset record again: tombstones will be gone
    def kept(self, partition: int) -> KeptPartition | None: ...  # None: not worked on here
    def begin_anew(self, kept: KeptPartition) -> None: ...  # its folder cannot be used any more


class KeptPartition:
    """One partition's changes on their way to its folder. The lock is the keeper's; each method names its thread."""

    needs_disk = False  # its store cannot go on without the folder

    def __init__(self, keeper: FolderKeeper, identity: LogIdentity, folder: StateFolder) -> None:
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
        self._keeper.check(self)
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
        self._keeper.check(self)
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
