"""The folder of one partition: a file of data, a mark that says how much of it counts, and a lock.

Killed or without power at any moment, the folder is as its last mark says: what is behind ``FolderMark.size`` in the
data file does not count, and is written over.

Everything here blocks; it runs on the keeper's thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Final

import msgspec

from streams.core.checkpoints import FolderMark, LogIdentity, reason_to_distrust
from streams.records import Change
from streams.runtime.keeping.folders.entries import HEAD, Damaged, decode_pieces, encode

_log = logging.getLogger(__name__)

BATCH: Final = 250
"""So many entries are encoded and written without a pause: the event loop waits for the interpreter no longer."""
PIECE: Final = 1 << 20
"""So many bytes are read at a time."""
LEAST_REWRITE: Final = 1 << 20
"""A data file of fewer bytes is not written anew."""

MARK, _NEW_MARK, LOCK = "mark", "mark.new", "lock"
_GONE, _ASIDE = ".gone", ".aside"
"""The name of a folder that is being removed ends with the first, that of one that is kept for inspection with the
second."""
_NUMBERED: Final = re.compile(r"(\d+)(?:\.(\d+))?")


class Broken(OSError):
    """The system may have lost what was written before: this folder is not written to any more in this run."""


class StateFolder:
    """One locked folder. ``mark``: the last one, if there is one that can be read. One thread."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.mark: FolderMark | None = None
        self.spares: list[StateFolder] = []  # of the same log, less far: for when this one turns out to be damaged
        self._lock = lock
        self._data: int | None = None
        self._file = ""
        self._size = self._crc = self._live = 0

    # -- opening -------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> StateFolder | None:
        """Make or open a folder, and lock it. ``None``: another process has it. Raises ``OSError``, also for a folder
        that others could write to."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            check_private(path)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another process has it, and removes it
            return None
        if not lock_file(lock) or not _is_at(path / LOCK, lock):  # the one who had it may have removed the folder
            os.close(lock)
            return None
        return cls(path, lock)

    @classmethod
    def find(cls, parent: Path, partition: int, distrust: Callable[[FolderMark], str] = lambda mark: "") -> StateFolder:
        """Open the newest folder of a partition that no other process has; older ones are its ``spares``, or removed. A
        partition has a second one while a process that was stopped, or a donor beside us, still holds the first.

        ``distrust`` returns why a mark is not to be believed. It decides first: offsets are compared only within one
        log, and the folder of a topic that was made again may well have the higher one.
        """
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        numbers = cls._numbers(parent, partition)
        found: list[StateFolder] = []
        try:
            for number in chain(numbers, count(numbers[-1] + 1)):
                if found and number > numbers[-1]:
                    break
                folder = cls.open(parent / (f"{partition}.{number}" if number else str(partition)))
                if folder is not None:
                    found.append(folder)
            ranks: list[tuple[bool, int]] = []
            reasons: list[str] = []
            for folder in found:
                with contextlib.suppress(Damaged):
                    folder.mark = folder._read_mark()
                mark = folder.mark
                reasons.append("" if mark is None else distrust(mark))
                ranks.append((False, -1) if mark is None else (not reasons[-1], mark.offset))
            best = max(range(len(found)), key=ranks.__getitem__)
            for place, folder in enumerate(found):
                if place != best and ranks[place][0]:
                    found[best].spares.append(folder)
                elif place != best:
                    folder._remove(reasons[place] if ranks[place][1] > ranks[best][1] else "")
        except BaseException:
            for folder in found:
                folder.close()
            raise
        return found[best]

    @staticmethod
    def _numbers(parent: Path, partition: int) -> list[int]:
        """Return the numbers of a partition's folders, in order, 0 among them; remove what is left of others."""
        numbers = {0}
        for entry in parent.iterdir():
            named = partition_of_name(entry.name.removesuffix(_GONE))
            if named is None or named[0] != partition:
                continue
            if entry.name.endswith(_GONE):  # of a process that was killed meanwhile
                shutil.rmtree(entry, ignore_errors=True)
            else:
                numbers.add(named[1])
        return sorted(numbers)

    def remove_spares(self) -> None:
        """Remove the spares: this folder is good."""
        while self.spares:
            self.spares.pop()._remove("")

    def _remove(self, why: str) -> None:
        """Remove an older folder; set aside one that goes farther, and is not believed for the reason given. It loses
        its name first: without its file ``lock``, which may be the first to go, another process could lock the rest."""
        gone = self.path.with_name(self.path.name + (_ASIDE if why else _GONE))
        with contextlib.suppress(OSError):  # then it stays, until the partition is opened again
            if why:
                shutil.rmtree(gone, ignore_errors=True)
            os.rename(self.path, gone)
            if why:
                _log.warning("%s is not used: %s; it is set aside as %s", self.path, why, gone)
            else:
                shutil.rmtree(gone, ignore_errors=True)
        self.close()

    def check(self, identity: LogIdentity, *, now_ms: int, tombstones_ms: int) -> bool:
        """Check the folder against the log and against its own checksum; ``False``: it is empty. Raises ``Damaged`` for
        one that is not to be used, and ``OSError``."""
        mark = self.mark = self._read_mark()
        if mark is not None:
            reason = reason_to_distrust(mark, identity, now_ms=now_ms, tombstones_ms=tombstones_ms)
            if reason:
                raise Damaged(reason)
            for _ in self._pieces(mark):  # all of it before any of it is used
                pass
            self._file, self._size, self._crc, self._live = mark.file, mark.size, mark.crc, mark.live
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # of a process that was killed; it may be all that fills the disk
                self.remove_strays()
        return mark is not None

    def load(self) -> Iterator[list[Change]]:
        """Yield the changes in a folder that was checked, many at a time; the checksum is compared once more. Raises
        ``Damaged`` and ``OSError``."""
        assert self.mark is not None
        yield from decode_pieces(self._pieces(self.mark), self.mark.file)

    def _pieces(self, mark: FolderMark, length: int = PIECE) -> Iterator[bytes]:
        """Read the data file; its end is reached only if the checksum fits."""
        crc, left = 0, mark.size
        try:
            data = open(self.path / mark.file, "rb", buffering=0, opener=_no_link)  # noqa: SIM115  # closed below
        except FileNotFoundError as error:
            raise Damaged(f"{mark.file} is missing") from error
        with data as file:
            while left > 0:
                piece = file.read(min(left, length))
                if not piece:
                    raise Damaged(f"{mark.file} is cut: {left} of {mark.size} bytes are missing")
                left, crc = left - len(piece), zlib.crc32(piece, crc)
                yield piece
        if crc != mark.crc:
            raise Damaged(f"{mark.file} has another checksum than its mark")

    def data(self, length: int) -> tuple[FolderMark, Iterator[bytes]] | None:
        """Return the mark of this moment and the data up to it, in pieces; ``None``: there is no mark. Any thread,
        while checkpoints are made: what counts is never changed. Raises ``Damaged`` and ``OSError``; also when the
        file was rewritten meanwhile."""
        mark = self.mark
        return None if mark is None else (mark, self._pieces(mark, length))

    def _read_mark(self) -> FolderMark | None:
        return read_mark(self.path)

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, changes: Iterable[Change], *, pause: bool = True) -> None:
        """Write changes behind those that are there; they count with the next ``commit``. Raises ``OSError``: nothing
        of them is there then. ``pause``: leave the interpreter to others for as long as each batch takes."""
        if self._data is None:
            self._open_data()
        self._append(changes, pause)

    def _append(self, changes: Iterable[Change], pause: bool) -> None:
        size, crc, rest = self._size, self._crc, iter(changes)
        while batch := list(islice(rest, BATCH)):
            began = time.monotonic()
            data = encode(batch)
            _write(self._data, data, size)
            size, crc = size + len(data), zlib.crc32(data, crc)
            if pause:
                time.sleep(time.monotonic() - began)
        self._size, self._crc = size, crc

    def fill(self, pieces: Iterable[bytes]) -> None:
        """Write a whole data file that was copied from elsewhere; it counts with the next ``commit``, its first. Raises
        ``OSError``, and what the pieces raise. The interpreter is free while something is written."""
        self._new_data()
        self._size = self._crc = 0
        for piece in pieces:
            _write(self._data, piece, self._size)
            self._size, self._crc = self._size + len(piece), zlib.crc32(piece, self._crc)
        self._live = self._size  # so it is not rewritten before it has grown

    def commit(self, identity: LogIdentity, offset: int, record: bytes, as_of_ms: int) -> None:
        """Make everything written so far count: the changelog up to its offset record at ``offset``. Raises
        ``OSError``: the mark is as it was; ``Broken``: also the data is in doubt."""
        if self._data is None:
            self._open_data()
        # The data is flushed before its mark is written: a mark must never name bytes that a loss of power takes away
        # (K2).
        self._sync_data()
        mark = FolderMark(identity, offset, record, as_of_ms, self._file, self._size, self._crc, self._live)
        self._replace_mark(mark)
        self._close_data()  # all of it is flushed; a process with many partitions keeps only their locks open
        self.remove_strays()

    def rewrite_if_due(self, *, pause: bool = True) -> bool:
        """Rewrite the data file without what was replaced, if it is twice as large as it was after the last time
        and all of it counts. Raises as ``commit`` does."""
        mark = self.mark
        if mark is None or mark.size != self._size or mark.size <= max(2 * mark.live, LEAST_REWRITE):
            return False
        last: dict[bytes, int] = {}
        for number, change in enumerate(chain.from_iterable(self.load())):
            last[change.key] = number
        old = self._data, self._file, self._size, self._crc, self._live
        try:
            self._new_data()
            again = enumerate(chain.from_iterable(self.load()))
            kept = (change for number, change in again if change.value is not None and last[change.key] == number)
            self._append(kept, pause)
            self._live = self._size
            self._sync_data()
            changes = {"file": self._file, "size": self._size, "crc": self._crc, "live": self._live}
            self._replace_mark(msgspec.structs.replace(mark, **changes))
        except (OSError, Damaged):
            if self.mark is mark:  # else the new one counts already
                if self._data is not None and self._data != old[0]:
                    os.close(self._data)
                if self._file != old[1]:  # half of it must not be what keeps a disk full
                    (self.path / self._file).unlink(missing_ok=True)
                self._data, self._file, self._size, self._crc, self._live = old
                old = (None, *old[1:])
            raise
        finally:
            if old[0] is not None and old[0] != self._data:
                os.close(old[0])
        self._close_data()
        self.remove_strays()
        return True

    def _open_data(self) -> None:
        if self._file:
            self._data = os.open(self.path / self._file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        else:
            self._new_data()

    def _new_data(self) -> None:
        numbers = [int(path.name[5:]) for path in self.path.glob("data-*") if path.name[5:].isdigit()]
        name = f"data-{max(numbers, default=0) + 1}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path / name, flags, 0o600)
        try:
            _write(handle, HEAD, 0)
            self._sync_folder()  # its name must not be lost when a mark names it
        except BaseException:
            os.close(handle)
            (self.path / name).unlink(missing_ok=True)
            raise
        self._data, self._file = handle, name
        self._size, self._crc, self._live = len(HEAD), zlib.crc32(HEAD), 0

    def _sync_data(self) -> None:
        assert self._data is not None
        try:
            os.fsync(self._data)
        except OSError as error:  # a second try would succeed, without the pages that are lost
            raise Broken(error.errno, f"{self._file} cannot be flushed: {error.strerror}") from error

    def _replace_mark(self, mark: FolderMark) -> None:
        text = msgspec.json.encode(mark)
        # The new mark is written beside the old one, flushed, and renamed over it: at any moment one of the two is
        # whole.
        new = self.path / _NEW_MARK
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600), "wb") as file:
            file.write(b"%08x " % zlib.crc32(text) + text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path / MARK)
        self.mark = mark
        # The rename is flushed, too. The data of the old mark is removed next, and a loss of power might bring that
        # mark back.
        self._sync_folder()

    def _sync_folder(self) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove_strays(self) -> None:
        """Remove data that does not count."""
        for path in self.path.glob("data-*"):
            if path.name == self._file:
                continue
            if path.is_dir() and not path.is_symlink():  # of a database
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    # -- the end -------------------------------------------------------------------------------------------------------

    def set_aside(self) -> Path:
        """Move the files away, into the one folder beside this one that is kept for looking at; go on as an empty one.
        Raises ``OSError``."""
        self._close_data()
        aside = self.path.with_name(self.path.name + _ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        data = sorted(path.name for path in self.path.glob("data-*"))
        for name in (MARK, *data):  # the mark first: without it none counts
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path / name, aside / name)
        self._sync_folder()
        self.mark, self._file = None, ""
        self._size = self._crc = self._live = 0
        return aside

    def close(self) -> None:
        """Free files and lock. Writes nothing."""
        for spare in self.spares:
            spare.close()
        self._close_data()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _close_data(self) -> None:
        if self._data is not None:
            os.close(self._data)
            self._data = None


def read_mark(path: Path) -> FolderMark | None:
    """Read the mark in a folder, also in one that another process has locked: it is replaced as a whole. ``None``:
    there is none. Raises ``Damaged`` and ``OSError``."""
    try:
        with open(path / MARK, "rb", opener=_no_link) as file:
            data = file.read(PIECE)
    except FileNotFoundError:
        return None
    checksum, _, text = data.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            raise Damaged("its mark has a wrong checksum")
        mark = msgspec.json.decode(text, type=FolderMark)
    except (ValueError, msgspec.DecodeError) as error:
        raise Damaged(f"its mark cannot be read ({error})") from error
    if not re.fullmatch(r"data-[\w-]+", mark.file):
        raise Damaged(f"its mark names the file {mark.file!r}")
    return mark


def partition_of_name(name: str) -> tuple[int, int] | None:
    """Return (partition, number among its folders) of a folder's name; ``None``: another file."""
    match = _NUMBERED.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def check_private(path: Path) -> None:
    """Raise ``OSError`` for a folder that is a link, belongs to another user, or can be written to by others: its
    content becomes state."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is a link or a file, not a folder")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to the user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o022:
        raise PermissionError(f"{path} can be written to by other users: chmod go-w {path}")


def lock_file(handle: int) -> bool:
    """Lock a file that is open until it is closed, by the kernel's hand after a kill -9; ``False``: it is taken. Raises
    ``OSError`` on a file system without locks."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, handle: int) -> bool:
    """Check that a file that is open is the one that has this name now."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write(handle: int | None, data: bytes, at: int) -> None:
    assert handle is not None
    while data:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
