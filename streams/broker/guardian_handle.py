"""The owner's side of the guardian process: commands to it, reports of the broker from it; and the locks that the two
hold: they end with the last process that has the file open, however that one ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streams.errors import EmbeddedBrokerError

_SCRIPT = Path(__file__).with_name("_guardian.py")
_ANSWER_SECONDS = 20.0
GRACE_SECONDS = 15.0
_LOCK_CHECK_SECONDS = 0.02


class GuardianHandle:
    """A running keeper. Orders and questions may come from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        throw_away: Sequence[Path],
        files: Sequence[Path],
        *,
        held: Sequence[int],
        lent: Sequence[int],
    ) -> None:
        """Start the keeper. At the end it removes ``throw_away`` and ``files``. It inherits the descriptors ``held``
        and ``lent``; its broker inherits ``lent``."""
        settings: dict[str, Any] = {
            "command": list(command),
            "log": str(log),
            "grace": GRACE_SECONDS,
            "throw_away": [str(folder) for folder in throw_away],
            "files": [str(file) for file in files],
            "lent": list(lent),
        }
        self._lock = threading.Lock()
        self._rest = b""
        self._pid: int | None = None
        self._error = ""
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SCRIPT), json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    pass_fds=(*held, *lent),
                    start_new_session=True,  # Ctrl-C in a terminal is the owner's business
                )
        except OSError as error:
            raise EmbeddedBrokerError(f"the broker's keeper process cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()

    @property
    def keeper_pid(self) -> int:
        """Process number of the keeper; a SIGTERM to it ends the broker."""
        return self._process.pid

    @property
    def pid(self) -> int | None:
        """Process number of the broker while it lives."""
        self._receive(0.0)
        return self._pid

    def start(self) -> int:
        """Start the broker's process; returns its number. Raises ``EmbeddedBrokerError``."""
        self._error = ""
        self.order("s")
        until = time.monotonic() + _ANSWER_SECONDS
        while self._pid is None and not self._error and time.monotonic() < until and self._receive(0.1):
            pass
        if self._pid is None:
            raise EmbeddedBrokerError(f"the broker's process cannot be started: {self._error or 'its keeper is gone'}")
        return self._pid

    def order(self, letter: str) -> None:
        """Send the keeper an order; one that comes too late does nothing."""
        with contextlib.suppress(OSError):
            os.write(self._orders, letter.encode())

    def wait_exit(self, seconds: float) -> bool:
        """Wait until the broker's process has ended; return whether it did within the time."""
        until = time.monotonic() + seconds
        while self._pid is not None:
            if not self._receive(0.1):
                return True
            if time.monotonic() > until:
                return self._pid is None
        return True

    def close(self) -> None:
        """End the broker and the keeper, and wait for both. Safe to repeat."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(2 * GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pid = None

    def leave(self) -> None:
        """Let the broker outlive this process: only its keeper's number ends it now."""
        self.order("d")
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.returncode = 0  # it is not waited for here; without this, a ResourceWarning at the end

    def _receive(self, seconds: float) -> bool:
        """Read the keeper's reports. ``False`` when it is gone, and the broker with it."""
        with self._lock:
            if not select.select([self._answers], [], [], seconds)[0]:
                return True
            data = os.read(self._answers, 4096)
            if not data:
                self._pid = None
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                word, _, value = line.decode(errors="replace").partition(" ")
                if word == "pid":
                    self._pid = int(value)
                elif word == "exit":
                    self._pid = None
                else:
                    self._error = value
            return True


@contextlib.contextmanager
def held_lock(path: Path, patience: float = 0.0) -> Iterator[int | None]:
    """The file's lock as a descriptor, or nothing when another process holds it all the ``patience`` (seconds).

    At the end of the block this process gives it up; a process that inherited the descriptor goes on holding it.
    """
    import fcntl  # not on Windows, where the keeper does not run either

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(_LOCK_CHECK_SECONDS)
                    continue
                yield None
            else:
                yield descriptor
            break
    finally:
        os.close(descriptor)
