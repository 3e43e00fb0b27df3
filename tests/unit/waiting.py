"""Waiting for what other threads and tasks do: never by a sleep of a fixed length, and never for ever. And what a test
has open or begun itself: whatever the process has besides may come and go at any time."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from anyio.lowlevel import checkpoint

if TYPE_CHECKING:
    import pytest

PATIENCE = 30.0
"""Seconds until a condition that does not come true fails its test; on two busy cores a start takes some."""


def wait_until(condition: Callable[[], Any], what: Any = "it", seconds: float = PATIENCE, step: float = 0.002) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(step)


async def until(condition: Callable[[], Any], what: str = "it", seconds: float = PATIENCE) -> None:
    """The same on the loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        await asyncio.sleep(0.001)


def stays(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """For a time in which something wrong would show."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition(), what
        time.sleep(0.002)


async def turns(count: int = 10) -> None:
    """Let other tasks go on, for some turns of the loop."""
    for _ in range(count):
        await checkpoint()


def says_at_last(error: type[Exception], said: str, attempt: Callable[[float], object]) -> None:
    """What fails at a deadline names the last answer; a busy machine may have none within the first of these times."""
    found = ""
    for seconds in (0.5, 5.0, 25.0):
        try:
            attempt(seconds)
        except error as failed:
            found = str(failed)
            if re.search(said, found):
                return
    raise AssertionError(f"not {said!r}, but {found!r}")


def said_by(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """What was logged below a name: whatever runs besides may log, too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith(name)]


def give_own(monkeypatch: pytest.MonkeyPatch, name: str, *modules: ModuleType, **functions: Any) -> None:
    """Replace functions of ``time`` or of another module by ``name`` as these modules see it. By way of ``module.time``
    all threads of the process would get them: those of other tests spin, fail, or wait for ever."""
    for module in modules:
        own = SimpleNamespace(**{**vars(getattr(module, name)), **functions})
        monkeypatch.setattr(module, name, own)


def open_below(folder: Path) -> list[str]:
    """The files of this process that are open below ``folder``, those that are deleted included; needs Linux."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, or another thread's
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
    return sorted(path for path in found if path.startswith(f"{folder}/"))


def threads_since(before: Collection[threading.Thread]) -> list[str]:
    """The threads that have begun since then, and live."""
    return sorted(thread.name for thread in threading.enumerate() if thread not in before)


def only_new_garbage() -> None:
    """Have each ``gc.collect()`` look at what is made from here on alone: to go through all that a long run has took
    seconds, and what earlier tests left is not this one's."""
    gc.collect(1)
    gc.freeze()
