"""What the tests of state on disk need: a folder that remembers what it was told, and the loss of a machine's power."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from streams.core.checkpoints import LogIdentity
from streams.records import Change
from streams.runtime.keeping.folders import folder as folder_module
from streams.runtime.keeping.folders.folder import StateFolder
from tests.unit.steps_kit import At, no_step, steps_of_folders

IDENTITY = LogIdentity("cluster", "g.in.changelog", "topic-id", 0, "Table(StrCodec, IntCodec)")
DAY_MS = 86_400_000
State = dict[bytes, bytes]


def now_ms() -> int:
    return int(time.time() * 1000)


def put(key: bytes, value: bytes | None) -> Change:
    return Change(key, value)


def contents(folder: StateFolder, identity: LogIdentity = IDENTITY, **more: int) -> tuple[int, State]:
    """Offset of the mark, and the state up to it; (-1, nothing) of an empty folder."""
    if not folder.check(identity, **{"now_ms": now_ms(), "tombstones_ms": DAY_MS, **more}):
        return -1, {}
    state: State = {}
    for changes in folder.load():
        for change in changes:
            if change.value is None:
                state.pop(change.key, None)
            else:
                state[change.key] = change.value
    assert folder.mark is not None
    return folder.mark.offset, state


def reopened(parent: Path, **more: Any) -> tuple[int, State]:
    """The same of the folder of partition 0, as the next process sees it."""
    folder = StateFolder.find(parent, 0)
    try:
        return contents(folder, **more)
    finally:
        folder.close()


class Script:
    """The same checkpoints every time: keys that are new, changed and deleted, and files that are rewritten."""

    def __init__(self, parent: Path, seed: int = 0) -> None:
        self.parent, self.rng = parent, random.Random(seed)
        self.states: dict[int, State] = {-1: {}}
        """What the folder must hold, by the offset of its mark."""
        self.done = -1
        """The offset of the last checkpoint that has returned."""

    def run(self, at: At = no_step, rounds: int = 8) -> None:
        with steps_of_folders(at):
            self._run(rounds)

    def _run(self, rounds: int) -> None:
        folder = StateFolder.find(self.parent, 0)
        state: State = {}
        try:
            for number in range(rounds):
                changes = {}
                for _ in range(self.rng.randint(0, 40)):
                    key = b"key %d" % self.rng.randrange(30)
                    gone = self.rng.random() < 0.3
                    changes[key] = put(key, None if gone else self.rng.randbytes(self.rng.randint(0, 50)))
                for key, change in changes.items():
                    if change.value is None:
                        state.pop(key, None)
                    else:
                        state[key] = change.value
                offset = 10 * number
                self.states[offset] = dict(state)
                folder.append(changes.values(), pause=False)
                folder.commit(IDENTITY, offset, b"{}", now_ms())
                self.done = offset
                folder.rewrite_if_due(pause=False)
        finally:
            folder.close()

    def check(self, parent: Path | None = None) -> None:
        """The folder is at a checkpoint that was begun, and at no older one than the last that had returned."""
        offset, state = reopened(parent or self.parent)
        assert offset >= self.done, f"it is back at {offset}, and {self.done} was safe"
        assert state == self.states[offset], f"not the state at {offset}"


class Cut(BaseException):
    """The machine stops here."""


def cut(step: str) -> NoReturn:
    raise Cut(step)


def kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_at(number: int, stop: Callable[[str], None] = cut) -> Callable[[str], None]:
    """Stop at the step with this number."""
    left = [number]

    def at(step: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            stop(step)

    return at


def kill_at_each(numbers: Iterable[int], run: Callable[[int, Callable[[str], None]], None]) -> None:
    """Fork a process for each of these steps, which runs and is killed there. For a process of its own."""
    for number in numbers:
        process = os.fork()
        if not process:
            run(number, stop_at(number, kill))
            os._exit(0)  # it was not killed
        assert os.waitpid(process, 0)[1] == signal.SIGKILL, number


def steps_of(parent: Path) -> list[str]:
    """The names of all steps of the script, in their order."""
    found: list[str] = []
    Script(parent).run(found.append)
    return found


class Power:
    """A disk that keeps what was flushed, and of the rest whatever it likes: bytes and names, each by itself."""

    def __init__(self, patch: pytest.MonkeyPatch, parent: Path, rng: random.Random) -> None:
        self._path, self._rng = parent / "0", rng
        self._files: dict[int, int] = {}  # numbers of files by their inodes, which are used again
        self._synced: dict[int, bytes] = {}
        self._names: dict[str, int] = {}  # as they were flushed
        self._open = os.open
        patch.setattr(folder_module.os, "open", self._opened)
        patch.setattr(folder_module.os, "fsync", self._flushed)

    def _opened(self, path: Any, flags: int, *mode: int) -> int:
        handle = self._open(path, flags, *mode)
        if flags & os.O_CREAT and Path(path).name != "lock":
            self._files[os.fstat(handle).st_ino] = len(self._files) + 1_000 * (len(self._synced) + 1)
        return handle

    def _flushed(self, handle: int) -> None:
        inode = os.fstat(handle).st_ino
        if inode == self._path.stat().st_ino:
            self._names = self._now()
        else:
            self._synced[self._files[inode]] = Path(f"/proc/self/fd/{handle}").read_bytes()

    def _now(self) -> dict[str, int]:
        return {path.name: self._files[path.stat().st_ino] for path in self._path.iterdir() if path.name != "lock"}

    def after_loss(self, where: Path) -> Path:
        """The parent of the folder as the machine finds it when it has power again."""
        names, now = self._names, self._now()
        contents = {number: (self._path / name).read_bytes() for name, number in now.items()}
        found = where / "0"
        found.mkdir(parents=True)
        for name in sorted(names.keys() | now.keys()):
            number = self._rng.choice((names.get(name), now.get(name)))
            if number is not None:
                synced = self._synced.get(number, b"")
                (found / name).write_bytes(self._left(synced, contents.get(number, synced)))
        return where

    def _left(self, synced: bytes, written: bytes) -> bytes:
        assert written.startswith(synced), "bytes that were flushed were written over"
        data = bytearray(written)
        for at in range(len(synced), len(data), 16):  # by small pages, in no order
            if self._rng.random() < 0.5:
                data[at : at + 16] = bytes(len(data[at : at + 16]))
        return bytes(data[: self._rng.choice((len(data), self._rng.randint(len(synced), len(data))))])


def lose_power(folder: Path, patch: pytest.MonkeyPatch, number: int, seed: int) -> None:
    """At the step with this number, and see what is left."""
    script = Script(folder / "disk", seed)
    with patch.context() as here:
        power = Power(here, script.parent, random.Random(number))
        with pytest.raises(Cut):
            script.run(stop_at(number))
        left = power.after_loss(folder / "left")
    script.check(left)


class FullDisk:
    """Takes so many bytes, then none, until there is room again."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._real = os.pwrite
        patch.setattr(folder_module.os, "pwrite", self._pwrite)

    def _pwrite(self, handle: int, data: bytes, at: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._real(handle, data[: self.room], at)
        self.room -= written
        return written
