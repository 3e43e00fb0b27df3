"""Refuse what was made before a fork: its threads are not in the child, and a call would wait for them forever."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final
from weakref import WeakSet


class MadeHere:
    """Belongs to a client, and knows whether this process has made it. ``on_fork`` is called in a child."""

    __slots__ = ("__weakref__", "_error", "_on_fork", "is_foreign", "why")

    def __init__(self, what: str, error: Callable[[str], Exception], on_fork: Callable[[], None] | None = None) -> None:
        self.is_foreign = False
        self._error, self._on_fork = error, on_fork
        self.why = (
            f"{what} was made before a fork, and its threads and connections are not in this process: make it in "
            "the child, after the fork (with gunicorn without --preload or in post_fork, with Celery in "
            "worker_process_init)"
        )
        _all.add(self)

    def check(self) -> None:
        """Raise ``error`` in a child of the process that made it. Any thread."""
        if self.is_foreign:
            raise self._error(self.why)

    def forked(self) -> None:
        """Take note of a fork, in the child."""
        self.is_foreign = True
        if self._on_fork is not None:
            self._on_fork()


_all: Final[WeakSet[MadeHere]] = WeakSet()


def never_freed(thing: object) -> None:
    """Keep a thing to the end of the process: freeing it would wait for its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _in_child() -> None:
    for one in list(_all):
        one.forked()


os.register_at_fork(after_in_child=_in_child)
