"""Locks that an open file holds: they end with the last process that has it open, however that one ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_SECONDS = 0.02


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
                    time.sleep(_POLL_SECONDS)
                    continue
                yield None
            else:
                yield descriptor
            break
    finally:
        os.close(descriptor)
