"""Ctrl-C while modules are imported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within it Ctrl-C ends the process on the spot: nothing has begun, and an exception in the middle of an import is
    a stack trace of the import system, or is lost in it. On another thread than the main one, which Ctrl-C does not
    reach, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
