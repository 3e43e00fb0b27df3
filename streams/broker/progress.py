"""Progress of long work. The library calls back; the caller decides how to show it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, how many bytes of it are done, and how many there are (0: not known).

    Calls for one ``what`` never go back and end with ``done == total``. They may come from another thread than the
    caller's, one at a time. An exception of the callback ends the work and reaches the caller.
    """

    def __call__(self, what: str, done: int, total: int, /) -> None: ...


def silent(what: str, done: int, total: int, /) -> None:
    """A ``Progress`` that shows nothing."""
