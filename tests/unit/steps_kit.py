"""Steps of what is written to disk, seen from outside of the code that takes them: a test stops or kills it at each."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from streams.disk.blobs import Blob, Blobs
from streams.disk.sqlite import SQLiteDatabase
from streams.runtime.keeping.folders import folder as folder_module

At = Callable[[str], None]
"""Called with the name of a step before it is taken."""


def no_step(name: str) -> None: ...


class _Os:
    """The module ``os`` as a folder of state sees it."""

    def __init__(self, at: At) -> None:
        self._at = at

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and Path(path).name != "lock":
            self._at(f"create {_kind(path)}")
        return os.open(path, flags, *mode)

    def pwrite(self, handle: int, data: bytes, at: int) -> int:
        self._at("write data")
        return os.pwrite(handle, data, at)

    def fsync(self, handle: int) -> None:
        self._at(f"flush {_kind(os.readlink(f'/proc/self/fd/{handle}'))}")
        os.fsync(handle)

    def replace(self, source: Any, target: Any) -> None:
        self._at(f"rename {_kind(source)}")
        os.replace(source, target)


def _kind(path: Any) -> str:
    """``data``, ``mark``, ``mark.new``, or ``folder``."""
    return re.sub(r"-\d+$", "", re.sub(r"^\d+$", "folder", Path(path).name))


@contextmanager
def steps_of_folders(at: At) -> Iterator[None]:
    """Call ``at`` before each step of the folders of this process."""
    before = folder_module.os
    folder_module.os = _Os(at)  # type: ignore[assignment]
    try:
        yield
    finally:
        folder_module.os = before


class StepsOfBlobs:
    """A place of snapshots that calls ``at`` before each of its steps."""

    def __init__(self, blobs: Blobs, at: At = no_step) -> None:
        self._blobs, self.at = blobs, at

    def put(self, name: str, data: bytes, /) -> None:
        self.at(f"put {_object(name)}")
        self._blobs.put(name, data)

    def get(self, name: str, most: int, /) -> bytes:
        self.at(f"get {_object(name)}")
        return self._blobs.get(name, most)

    def list(self, folder: str, /) -> list[Blob]:
        self.at(f"list {'blocks' if folder.endswith('/blocks') else 'snapshots'}")
        return self._blobs.list(folder)

    def delete(self, name: str, /) -> None:
        self.at(f"delete {_object(name)}")
        self._blobs.delete(name)


def _object(name: str) -> str:
    return "block" if "/blocks/" in name else name.rpartition("/")[2].partition("-")[0]


class _Watched:
    """A connection to a database: calls ``at`` before each of these methods that changes something."""

    def __init__(self, real: Any, at: At, *methods: str) -> None:
        self._real, self._at, self._methods = real, at, methods

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        if name not in self._methods:
            return method

        def call(*of: Any) -> Any:
            step = of[0].split()[0] if of and isinstance(of[0], str) else name
            if step != "SELECT":
                self._at(f"database {step}")
            return method(*of)

        return call


def watch_database(database: Any, at: At) -> None:
    """Call ``at`` before each step of the writes of a database."""
    if isinstance(database, SQLiteDatabase):
        database._writer = _Watched(database._writer, at, "execute", "executemany")  # type: ignore[assignment]
    else:
        database._db = _Watched(database._db, at, "write", "flush")


def kill_in_last_write(database: Any, writes: list[Any], step: str) -> NoReturn:
    """Write these changes, marked by their numbers, and kill this process at a step of the last one: within its
    ``batch``, before the ``mark`` or the ``commit``, or when it is ``done``. For writes of equally many steps."""
    taken: list[str] = []
    last = -1

    def at(name: str) -> None:
        if len(taken) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        taken.append(name)

    watch_database(database, at)
    for number, changes in enumerate(writes, 1):
        if number == len(writes):
            last = {"batch": 1, "mark": len(taken) - 2, "commit": len(taken) - 1, "done": -1}[step]
        taken.clear()
        database.write(changes, b"%d" % number)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it was not killed")
