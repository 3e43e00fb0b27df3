"""The shelf: how far all folders of a source on this machine are, for the group's plan (``core/incremental.py``).

Only the marks are read, without locks: also those of partitions that neighbours work on. So when one of them dies, the
next report has its folders. Nothing depends on it but where partitions go: a folder is checked when it is opened.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from streams.core.checkpoints import FORMAT, TOMBSTONES_MS, FolderMark, LogIdentity, reason_to_distrust
from streams.errors import BrokerUnavailable, StreamsError
from streams.model.group import Shelf
from streams.model.topics import TopicIdentity
from streams.records import Change
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.folders.folder import MARK, StateFolder, check_private, partition_of_name, read_mark
from streams.runtime.ports import Topics

_log = logging.getLogger(__name__)

SCAN_SECONDS: Final = 5.0
"""The folders are looked at every so many seconds."""
TRIES: Final = 10
"""A folder whose file is written anew meanwhile is read so many times, at most."""
_NAME: Final = "shelf"
"""A file of this name has the name of the shelf."""
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EBUSY)
"""These errors say what the machine lacks, and nothing of the folder."""


class ShelfWatch:
    """Scans the folders below ``parent``. ``found``: what the last scan has seen, replaced as a whole; for any
    thread. Scans are for one thread at a time."""

    def __init__(self, parent: Path, changelog: str, wall_ms: Callable[[], int]) -> None:
        self._parent, self._changelog, self._wall_ms = parent, changelog, wall_ms
        self._known: dict[str, tuple[tuple[int, int], FolderMark | None]] = {}  # marks that have not changed since
        self.found = Shelf(_name_of(parent))
        self.codec = ""
        """Name of the store and its codecs, once it is known here."""

    def scan(self, log: TopicIdentity | None = None, tombstones_ms: int = TOMBSTONES_MS) -> None:
        """Read the marks that are new. ``log``: the changelog, if it is known. Blocks."""
        offsets: dict[int, int] = {}
        try:
            names = os.listdir(self._parent)
        except OSError as error:
            _log.debug("%s cannot be looked at: %s", self._parent, error)
            names = []
        for name in names:
            named, mark = partition_of_name(name), None
            if named is not None:
                mark = self._mark(name)
            if named is not None and mark is not None and self._fits(mark, named[0], log, tombstones_ms):
                # A partition may have several folders. Its start takes the one that goes farthest.
                offsets[named[0]] = max(mark.offset, offsets.get(named[0], 0))
        # It is replaced as a whole, because the loop reads it at any time.
        self.found = Shelf(self.found.name, dict(sorted(offsets.items())))

    def _mark(self, name: str) -> FolderMark | None:
        path = self._parent / name
        try:
            check_private(path)
            found = (path / MARK).stat(follow_symlinks=False)
            # Each mark is a new file that is renamed over the old one, so it has another number or time.
            signature = (found.st_ino, found.st_mtime_ns)
            known = self._known.get(name)
            if known is None or known[0] != signature:
                self._known[name] = known = signature, read_mark(path)
        except (Damaged, OSError):  # the reason is logged when it is opened
            return None
        return known[1]

    def _fits(self, mark: FolderMark, partition: int, log: TopicIdentity | None, tombstones_ms: int) -> bool:
        """Check that a folder with this mark would be used, as far as that is known before a request is made."""
        known = mark.identity
        cluster, topic_id = (known.cluster, known.topic_id) if log is None else (log.cluster, log.topic_id)
        codec = self.codec or known.codec
        wanted = LogIdentity(cluster, self._changelog, topic_id, partition, codec, FORMAT)
        return not reason_to_distrust(mark, wanted, now_ms=self._wall_ms(), tombstones_ms=tombstones_ms)


def partitions_in(parent: Path) -> list[int]:
    """Return the partitions that have a folder with a mark, in order. Raises ``Damaged`` and ``OSError``."""
    named = ((partition_of_name(name), parent / name) for name in os.listdir(parent))
    return sorted({found[0] for found, path in named if found is not None and read_mark(path) is not None})


def choose(found: Sequence[tuple[FolderMark, Path]], distrust: Callable[[FolderMark], str]) -> tuple[FolderMark, Path]:
    """Return that of a partition's folders which ``StateFolder.find`` would choose, as far as that is known without a
    broker. The log comes before the offset: if the topic was made again, the marks of the new one are younger."""
    fitting = [one for one in found if not distrust(one[0])] or found
    log = max(fitting, key=lambda one: one[0].as_of_ms)[0].identity
    return max((one for one in fitting if one[0].identity == log), key=lambda one: one[0].offset)


def read_state(
    parent: Path, partition: int, distrust: Callable[[FolderMark], str] = lambda mark: ""
) -> tuple[FolderMark, list[Change]]:
    """Return the mark and all changes of the folder that a partition's start would choose, without a lock: another
    process may be writing to it, or write its file anew. Raises ``Damaged`` and ``OSError``."""
    for tries_left in range(TRIES - 1, -1, -1):
        found: list[tuple[FolderMark, Path]] = []
        for name in sorted(os.listdir(parent)):
            if (named := partition_of_name(name)) is not None and named[0] == partition:
                check_private(parent / name)
                mark = read_mark(parent / name)
                found += [] if mark is None else [(mark, parent / name)]
        if not found:
            break
        mark, path = choose(found, distrust)
        if (path / mark.file).is_dir():
            raise Damaged(f"its state is in a database ({mark.file}): kes state reads the changelog, without --folder")
        folder = StateFolder(path, -1)
        folder.mark = mark
        try:
            return mark, [change for changes in folder.load() for change in changes]
        except (Damaged, FileNotFoundError):
            if not tries_left or read_mark(path) == mark:  # else it was replaced meanwhile
                raise
    raise Damaged("it has no mark: there is nothing in it yet")


def _name_of(parent: Path) -> str:
    """Return the name of a folder's shelf, the same for all processes of the machine; made at the first time."""
    path, name = parent / _NAME, secrets.token_hex(8)
    new = parent / f"{_NAME}.{name}"
    try:
        new.write_text(name)
        try:
            os.link(new, path)  # of two that do it at once, one is the first
        except FileExistsError:
            found = path.read_text()
            return found if len(found) == len(name) and found.isalnum() and found.isascii() else name
        finally:
            new.unlink()
    except (OSError, UnicodeDecodeError) as error:  # a full disk; the name is one for this run
        _log.info("the folders in %s have no name of their own: %s", parent, error)
    return name


def is_shortage(folder: StateFolder, error: Exception) -> bool:
    """Check for an error that says nothing of the folder: there are no open files, memory or room left, or another
    program has the database locked. Log it."""
    found = isinstance(error, OSError) and error.errno in _SHORTAGES
    if found:
        _log.warning("%s cannot be read, and stays as it is: %s", folder.path, error)
    return found


def set_aside(folder: StateFolder, why: str) -> bool:
    """Move a folder's content away, with one warning that names it; ``False``: the disk refuses even that."""
    try:
        aside = folder.set_aside()
    except OSError as error:
        _log.warning("%s is not used: %s; and it cannot be set aside: %s", folder.path, why, error)
        return False
    _log.warning(
        "%s is not used: %s; it is set aside as %s, the state comes from the changelog", folder.path, why, aside
    )
    return True


def tombstones_ms_of(topics: Topics, changelog: str, seconds: float) -> int:
    """Return for how many milliseconds a changelog keeps tombstones. Raises ``BrokerUnavailable``."""
    try:
        found = topics.describe([changelog], seconds)[changelog]
    except BrokerUnavailable:
        raise
    except StreamsError as error:
        _log.info("%s: its delete.retention.ms is not known, a day is assumed: %s", changelog, error)
        found = None
    return TOMBSTONES_MS if found is None else int(found.configs.get("delete.retention.ms", TOMBSTONES_MS))
