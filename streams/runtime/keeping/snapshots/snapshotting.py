"""Making and using snapshots in time: two threads beside that of the folders, so that no folder waits for a store.

* A snapshot of a partition is due when the newest one at the store is older than ``snapshot_seconds``. An owner waits
  for a quarter of that longer: where there is a standby, it has made one then.
* A partition without a folder that can be used gets the newest snapshot into its folder first. That is opened as any
  other: log, codec, age and checksum decide, and the changelog is read from its mark.
* A store that fails or hangs costs a warning. No commit waits for it. A start without a folder does, for the time-out
  of a call that hangs; those that follow within a minute do not.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import anyio

from streams.core.checkpoints import MARGIN_MS, FolderMark, LogIdentity, reason_to_distrust
from streams.core.manifests import BLOCK_BYTES
from streams.disk.blobs import open_blobs
from streams.errors import Stopped, StoreError, StreamsError
from streams.model.group import TakeOver
from streams.model.topics import TopicIdentity
from streams.runtime.bridge import Inlet
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.folders.folder import StateFolder, check_private, partition_of_name, read_mark
from streams.runtime.keeping.kept_partition import KeeperHost, KeptPartition
from streams.runtime.keeping.snapshots.bundles import SnapshotStore, open_snapshots, read_secret
from streams.runtime.ports import Blocking
from streams.runtime.signal import Signal
from streams.settings.config import EventSourceConfig

_log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0
"""What is due is looked for every so many seconds."""
PATIENCE: Final = 1.25
"""An owner waits so many times ``snapshot_seconds``, for a standby to make the snapshot."""
REQUEST_SECONDS: Final = 10.0
"""One request to the broker about the changelog takes so many seconds, at most."""
RETRY_SECONDS: Final = 60.0
"""The next try comes so many seconds after a failure, at the earliest."""
_TRIES: Final = 3
"""A data file that is rewritten meanwhile is read so many times, at most. Each time may upload all of it."""
_WRONG: Final = (OSError, StoreError, Damaged)


class WantedFolder(NamedTuple):
    """A partition whose folder is about to be opened."""

    partition: int
    codec: str
    find: Callable[[Path, int, Callable[[FolderMark], str]], StateFolder]
    load: Callable[[], Any]
    progress: Callable[[int, int], None]
    is_discarded: Callable[[], bool]


class SnapshotKeeper(Protocol):
    """The keeper of a member's folders, as its snapshots use it (``keeper.StateKeeper``)."""

    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def parent(self) -> Path: ...  # of the folders
    @property
    def open_ones(self) -> list[KeptPartition]: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def wall_ms(self) -> Callable[[], int]: ...
    @property
    def questions(self) -> Callable[[], TakeOver]: ...  # about the changelog

    def identity(self, known: TopicIdentity, partition: int, codec: str) -> LogIdentity: ...
    def known_changelog(self) -> tuple[TopicIdentity, int]: ...  # with the life of its tombstones in ms; blocks
    async def changelog(self) -> tuple[TopicIdentity, int]: ...
    def post(self, function: Callable[..., object], *args: Any) -> None: ...  # call it on the thread of the folders


class Snapshotting:
    """The snapshots of one member. On the loop, but for what is called ``_..._on_thread``."""

    def __init__(self, keeper: SnapshotKeeper, thread: Callable[[], Blocking]) -> None:
        """Raises ``ConfigError`` for an address or a secret that cannot be used, and without the store's package."""
        self._keeper, self._config = keeper, keeper.config.state
        open_blobs(self._config.snapshots)
        read_secret(self._config.snapshot_secret_file)
        self._saving, self._restoring = thread(), thread()
        self._is_over = self._is_compared = False
        self._next: dict[int, float] = {}  # when to look whether a snapshot of a partition is due
        self._failing: set[int] = set()
        self._refused: defaultdict[int, set[str]] = defaultdict(set)
        self._skip_until = 0.0  # the store has just failed: others do not wait for it, too
        self._wanted: deque[WantedFolder] = deque()
        self._lacking: Inlet[WantedFolder] = Inlet(self._queue)
        self._news = Signal()

    async def run(self, host: KeeperHost) -> None:
        """Make snapshots, and use them, until cancelled."""
        try:
            async with anyio.create_task_group() as both:
                both.start_soon(self._restore_all)
                both.start_soon(self._save_all, host)
        finally:
            self._is_over = True
            while self._wanted:
                self._keeper.post(self._wanted.popleft().load)

    # -- using them ----------------------------------------------------------------------------------------------------

    def fetch(self, wanted: WantedFolder) -> None:
        """Fill the folder of a partition, if it is empty and there is a snapshot; then call ``load`` on the keeper's
        thread, whatever has happened."""
        self._keeper.post(self._load_on_thread, wanted)

    def _load_on_thread(self, wanted: WantedFolder) -> None:
        """Load a folder that is there, which waits for no store. On the keeper's thread."""
        keeper = self._keeper
        try:
            known, tombstones_ms = keeper.known_changelog()
            self._compare_ages(tombstones_ms)
            identity = keeper.identity(known, wanted.partition, wanted.codec)
            is_there = has_folder(keeper.parent, identity, now_ms=keeper.wall_ms(), tombstones_ms=tombstones_ms)
        except (StreamsError, OSError):
            is_there = True  # opening the folder meets the same
        if is_there or wanted.is_discarded():
            wanted.load()
        else:
            self._lacking.put(wanted)

    def _queue(self, wanted: WantedFolder) -> None:
        if self._is_over:
            self._keeper.post(wanted.load)
            return
        self._wanted.append(wanted)
        self._news.notify()

    async def _restore_all(self) -> None:
        while True:
            while self._wanted:
                wanted = self._wanted.popleft()
                try:
                    if not wanted.is_discarded() and self._keeper.now() >= self._skip_until:
                        await self._restore(wanted)
                finally:
                    self._keeper.post(wanted.load)
            await self._news.wait()

    async def _restore(self, wanted: WantedFolder) -> None:
        where = f"{self._keeper.config.changelog}[{wanted.partition}]"
        try:
            known, tombstones_ms = await self._keeper.changelog()
        except StreamsError:
            return  # opening the folder meets the same, and waits for the broker
        identity = self._keeper.identity(known, wanted.partition, wanted.codec)
        try:
            await self._restoring.call(self._fill_on_thread, wanted, identity, tombstones_ms)
        except Stopped:
            pass
        except _WRONG as error:
            scope = ""
            if isinstance(error, OSError):
                self._skip_until = self._keeper.now() + RETRY_SECONDS
                scope = f", also of the partitions that start within {RETRY_SECONDS:g} s"
            _log.warning("%s: snapshots cannot be used: %s; the changelog is read%s", where, error, scope)
        except Exception:
            _log.exception("%s: snapshots cannot be used; the changelog is read", where)

    def _compare_ages(self, tombstones_ms: int) -> None:
        """Warn once of snapshots that are too old when the next one is made."""
        if not self._is_compared and self._config.snapshot_seconds * 1000 * PATIENCE > tombstones_ms - MARGIN_MS:
            _log.warning(
                "StateConfig.snapshot_seconds is %g, and %s keeps tombstones for %g h (delete.retention.ms): a "
                "snapshot may be too old for use before there is the next one",
                self._config.snapshot_seconds,
                self._keeper.config.changelog,
                tombstones_ms / 3_600_000,
            )
        self._is_compared = True

    def _fill_on_thread(self, wanted: WantedFolder, identity: LogIdentity, tombstones_ms: int) -> None:
        parent = self._keeper.parent
        began = time.monotonic()
        store = self._open(is_over=lambda: self._is_over or wanted.is_discarded())
        name = store.fill(
            partial(wanted.find, parent, wanted.partition),
            identity,
            self._refused[wanted.partition],
            wanted.progress,
            tombstones_ms=tombstones_ms,
        )
        if name:
            seconds = time.monotonic() - began
            _log.info("%s[%d]: the snapshot %s, %.1f s", identity.topic, identity.partition, name, seconds)

    # -- making them ---------------------------------------------------------------------------------------------------

    async def _save_all(self, host: KeeperHost) -> None:
        while True:
            await anyio.sleep(min(CHECK_SECONDS, self._config.snapshot_seconds))
            now = self._keeper.now()
            due = [kept for kept in self._keeper.open_ones if self._next.get(kept.partition, now) <= now]
            for kept in sorted(due, key=lambda kept: self._next.get(kept.partition, 0.0)):
                is_at_work = host.kept(kept.partition) is kept
                # A copy in the middle of its restore is an older state, and maybe that of another log.
                if kept not in self._keeper.open_ones or kept.folder.mark is None or kept.distrusted:
                    continue
                if is_at_work or kept.is_ready:
                    await self._save(kept, PATIENCE if is_at_work else 1.0)

    async def _save(self, kept: KeptPartition, patience: float) -> None:
        partition, seconds = kept.partition, self._config.snapshot_seconds * patience
        where = f"{self._keeper.config.changelog}[{partition}]"
        try:
            left = await self._saving.call(self._save_on_thread, kept, seconds)
        except Stopped:
            return
        except Exception as error:
            left = max(RETRY_SECONDS, seconds / 4)
            is_known = isinstance(error, _WRONG)
            if kept in self._keeper.open_ones and (partition not in self._failing or not is_known):
                self._failing.add(partition)
                _log.warning(
                    "%s: no snapshot can be made: %s; tried again every %.0f s",
                    where,
                    error if is_known else repr(error),
                    left,
                )
        else:
            self._failing.discard(partition)
        self._next[partition] = self._keeper.now() + left

    def _save_on_thread(self, kept: KeptPartition, seconds: float) -> float:
        """Make a snapshot, if one is due; return after how many seconds to look again."""
        store = self._open(is_over=lambda: self._is_over, pace=WritingPace(self._config.snapshot_bytes_per_second))
        identity, mark = kept.identity, kept.folder.mark
        if mark is None:  # it is set aside just now
            return seconds / 4
        names = store.names(store.prefix(identity.topic_id, identity.partition))
        cut = store.cut_at(mark, (name.offset for name in names))
        ages = [(self._keeper.wall_ms() - name.made_at_ms) / 1000 for name in names if name.offset < cut]
        youngest = min((age for age in ages if age >= 0), default=seconds)  # one from the future says nothing
        if youngest < seconds:
            kept.snapshot_at_ms = self._keeper.wall_ms() - int(youngest * 1000)
            return seconds - youngest
        for tries_left in range(_TRIES - 1, -1, -1):
            data = kept.folder.data(BLOCK_BYTES)
            if data is None or store.has(data[0]):
                return seconds / 4  # nothing is new; the mark of a partition at rest is renewed every hour
            try:
                saved = store.save(*data)
            except Damaged:  # by the folder: the store raises OSError
                mark = kept.folder.mark
                if not tries_left or mark is None or mark.file == data[0].file:
                    raise
                continue  # its file was rewritten meanwhile
            kept.snapshot_at_ms = self._keeper.wall_ms()
            where = f"{identity.topic}[{identity.partition}]"
            _log.info("%s: %s, %d bytes, of which %d are new", where, saved.name, saved.size, saved.uploaded)
            return seconds
        raise AssertionError("unreachable")

    def _open(self, *, is_over: Callable[[], bool], pace: Callable[[int], None] = lambda size: None) -> SnapshotStore:
        config = self._keeper.config
        wall_ms, end = self._keeper.wall_ms, self._end_on_thread
        return open_snapshots(
            self._config, config.group_id, config.topic, wall_ms=wall_ms, pace=pace, is_over=is_over, end=end
        )

    def _end_on_thread(self, partition: int) -> int:
        """Return the end of a partition of the changelog, -1 if it cannot be had now."""
        keeper, changelog = self._keeper, self._keeper.config.changelog
        try:
            found = keeper.questions().log_range(changelog, [partition], keeper.now() + REQUEST_SECONDS)
        except StreamsError as error:
            _log.info(
                "%s[%d]: its end is not known, snapshots are not compared with it: %s", changelog, partition, error
            )
            return -1
        return found[partition][1]


class WritingPace:
    """Waits after each block, so that no more than so many bytes are written in a second; 0: as many as possible."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._free_at = time.monotonic()

    def __call__(self, size: int) -> None:
        """Wait until the next block may be written."""
        if self._rate:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._rate
            time.sleep(max(0.0, self._free_at - now))


def has_folder(parent: Path, identity: LogIdentity, *, now_ms: int, tombstones_ms: int) -> bool:
    """Check for a folder of this partition that seems to be of use, by its mark. Reads no data, and takes no lock."""
    for name in os.listdir(parent):
        named = partition_of_name(name)
        if named is None or named[0] != identity.partition:
            continue
        try:
            check_private(parent / name)
            mark = read_mark(parent / name)
        except (Damaged, OSError):
            continue
        if mark and not reason_to_distrust(mark, identity, now_ms=now_ms, tombstones_ms=tombstones_ms):
            return True
    return False
