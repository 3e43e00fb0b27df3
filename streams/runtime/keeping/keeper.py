"""State on disk, beside the engine: what is committed is gathered, and written by a thread of its own.

Rules of this file
* Neither the loop nor a commit waits for a disk: dictionaries change hands under a lock that is never held while
  something is written. A folder that cannot keep up, or cannot be written to, is left at its mark, which stays true.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.core.checkpoints import KEEPS, FolderMark, LogIdentity, distrust_by
from streams.core.transaction import Cut
from streams.model.group import TakeOver
from streams.model.topics import TopicIdentity
from streams.records import Change
from streams.runtime.bridge import Inlet
from streams.runtime.keeping.figures import LoadRate, figures_of
from streams.runtime.keeping.folders.entries import Damaged, HalfLoaded, NotKept
from streams.runtime.keeping.folders.folder import PIECE, StateFolder
from streams.runtime.keeping.folders.parents import prepare_root
from streams.runtime.keeping.folders.shelf import SCAN_SECONDS, ShelfWatch, is_shortage, set_aside, tombstones_ms_of
from streams.runtime.keeping.intake import Intake
from streams.runtime.keeping.kept_partition import KeeperHost, KeptPartition
from streams.runtime.keeping.snapshots.snapshotting import REQUEST_SECONDS, Snapshotting
from streams.runtime.ports import Blocking, Topics
from streams.runtime.signal import Signal
from streams.sak.open_files import refuse_if_few_are_free
from streams.settings.config import EventSourceConfig
from streams.statistics import FolderStatistics

_log = logging.getLogger(__name__)

RENEW_MS: Final = 3_600_000
"""An idle partition sends its offset record again when its mark is so many milliseconds old. An hour is short beside
the time that tombstones live, a day by default."""
TAIL_SECONDS: Final = 0.2
"""A tail waits so many seconds per batch, at most, while too much is unwritten: so a restore goes no faster than the
disk."""


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
        self.has_ids = False  # the source has ``once=``, so its state has ids
        self.snapshots = Snapshotting(self, thread) if config.state.snapshots else None
        self.lock = threading.Lock()
        self.now = now
        self.open_ones: list[KeptPartition] = []
        self.folders_set_aside = 0  # in this run
        self._load_rate = LoadRate()
        self._room = threading.Condition()
        self.parent = prepare_root(config.state.folder, config.group_id, config.topic)
        self.shelf = ShelfWatch(self.parent, config.changelog, wall_ms)
        self.shelf.scan()  # for the first report to the group
        self._thread = thread()
        self.questions, self._topics = questions, topics
        self.wall_ms = wall_ms
        self._log_known: tuple[TopicIdentity, int] | None = None
        self._work = Signal()
        self._inlet: Inlet[None] = Inlet(lambda _: self._work.notify())
        self._is_woken = False
        self._host: KeeperHost | None = None
        self._intake: Intake | None = None
        self.damages: Inlet[KeptPartition] = Inlet(self._is_damaged)

    async def run(
        self, host: KeeperHost, hold_intake: Callable[[bool], None], fail: Callable[[BaseException], None]
    ) -> None:
        """Make checkpoints, until cancelled. ``hold_intake`` and ``fail``: see ``Intake``."""
        self._host = host
        self._intake = Intake(self.config.state.unwritten_bytes, self.now, hold_intake, fail)
        renewed: dict[int, int] = {}
        scanned_at = self.now()
        while True:
            await self._work.wait(min(1.0, self.config.state.checkpoint_seconds))
            # Taken back before the look at the folders: one that fills up from now on has to wake this task again.
            self._is_woken = False
            for kept in list(self.open_ones):
                # The folder may have been closed while another one was written.
                if kept in self.open_ones and kept.is_due(self.now()):
                    await self._thread.call(kept.write)
            self._bound()
            if self.now() - scanned_at >= SCAN_SECONDS:
                scanned_at = self.now()
                await self._thread.call(self.shelf.scan, *(self._log_known or ()))
            self._hold()
            wall_ms = self.wall_ms()
            for kept in self.open_ones:
                if host.kept(kept.partition) is kept:
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
        # This is no later than the offset record was written: the age of a mark must not be counted too short (K4).
        as_of_ms = self.wall_ms() - int(age_seconds * 1000)
        for partition, cut in cuts.items():
            kept = kept_of(partition)
            if kept is not None:
                size = kept.committed(cut, as_of_ms)
                if self._intake is not None and self._intake.grew(size, kept):
                    self._hold()

    def _hold(self) -> None:
        if self._intake is not None:
            self._intake.check([kept for kept in self.open_ones if kept.needs_disk])

    def _is_damaged(self, kept: KeptPartition) -> None:
        # The news may be late: a folder that was closed since belongs to no partition any more.
        if kept in self.open_ones and self._host is not None:
            self._host.begin_anew(kept)

    def check(self, kept: KeptPartition) -> None:
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
        # This call comes behind all of them: the thread takes its calls in order.
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
        identity = self.identity(known, partition, codec)
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
            # Begin again with an empty store if a part is in this one, or if another folder or a snapshot may fill it.
            # Otherwise the folder is empty now, and the state comes from the changelog.
            if has_begun or not is_aside or folder.spares or self.snapshots is not None:
                folder.close()
                if not (has_begun or is_aside):
                    raise NotKept(str(error)) from error
                raise HalfLoaded from error
        except BaseException:
            folder.close()
            raise
        keeps = KEEPS if folder.mark is None else folder.mark.identity.keeps  # one that is continued stays as it is
        try:
            kept = kind(self, msgspec.structs.replace(identity, keeps=keeps), folder)
        except BaseException:
            folder.close()
            raise
        # The spares go only now: until here one of them may have been needed.
        folder.remove_spares()
        self.open_ones.append(kept)
        return kept

    def identity(self, known: TopicIdentity, partition: int, codec: str) -> LogIdentity:
        """Return what a folder of this partition must be of. Any thread."""
        return LogIdentity(
            known.cluster, self.config.changelog, known.topic_id, partition, codec, keeps=KEEPS if self.has_ids else ()
        )

    def known_changelog(self) -> tuple[TopicIdentity, int]:
        """Return the changelog's identity, and for how many ms it keeps tombstones. Raises ``BrokerUnavailable``."""
        # The answer holds for the run: a changelog that is made again stops the source.
        if self._log_known is None:
            name = self.config.changelog
            identity = self.questions().identity(name, self.now() + REQUEST_SECONDS)
            with closing(self._topics()) as topics:
                self._log_known = identity, tombstones_ms_of(topics, name, REQUEST_SECONDS)
        return self._log_known
