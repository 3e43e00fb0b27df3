"""Appends and checkpoints that are under way, as their callers hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, Final

from streams.core.journal import Payload
from streams.errors import NotLeading
from streams.records import record_size

_MARK_BYTES: Final = 60
"""Of the header with the mark of an entry, at most."""


class Appending:
    """An append that is under way. Await it as often as you like: it has the position behind the entries, or the error,
    also after a task that waited for it was cancelled."""

    def __init__(self, payloads: Sequence[Payload], expect: int | None, *, passes: bool = False) -> None:
        self.payloads, self.expect = payloads, expect
        self.passes = passes  # a checkpoint that holds the others back
        self.is_alone = False
        self.is_sent = False
        self.bytes = sum(record_size(None, one.value, one.headers) + _MARK_BYTES for one in payloads)
        self._future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it need not be awaited

    def __await__(self) -> Generator[Any, None, int]:
        return asyncio.shield(self._future).__await__()

    @property
    def is_settled(self) -> bool:
        """Check whether it has its answer."""
        return self._future.done()

    @property
    def is_committed(self) -> bool:
        """Check whether its answer is a position."""
        return self._future.done() and self._future.exception() is None

    def withdraw(self) -> bool:
        """Take it back, if it was not sent yet: then it is not in the log, and never will be."""
        if self.is_sent or self._future.done():
            return False
        self.fail(NotLeading("the append was withdrawn before it was sent; nothing is appended"))
        return True

    def succeed(self, position: int) -> None:
        """Give it its position; for the term."""
        if not self._future.done():
            self._future.set_result(position)

    def fail(self, error: BaseException) -> None:
        """Give it its error; for the term."""
        if not self._future.done():
            self._future.set_exception(error)


class PendingCheckpoint:
    """A checkpoint that is being made: save a state of all that is before ``position``."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.entry_position = -1
        """Behind the entry of the checkpoint, once it is appended."""
