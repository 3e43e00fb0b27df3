"""The start of a process of a run: its job on the command line, and its end when the run is gone."""

from __future__ import annotations

import os
import sys
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")


def job_of(kind: type[T]) -> T:
    """Decode the job in the last argument. From now on the process ends with the one that started it."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    return msgspec.json.decode(sys.argv[-1], type=kind)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin: its lock would be held at the interpreter's end
        pass
    os._exit(3)
