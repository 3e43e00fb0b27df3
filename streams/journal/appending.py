"""Appends and checkpoints that are under way, as their callers hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, Final

from streams.core.journal import Payload
from streams.errors import NotLeading
from streams.records import record_size

_MARK_BYTES: Final = 50
"""Of the key of an entry, at most."""


class Appending:
    """An append that is under way. Await it as often as you like: it has the position behind the entries, or the error,
    also after a task that waited for it was cancelled."""

    def __init__(self, payloads: Sequence[Payload], expect: int | None, *, passes: bool = False) -> None:
        self.payloads, self.expect = payloads, expect
        self.passes = passes  # a checkpoint that holds the others back
        self.is_alone = False
        self.is_sent = False
        self.bytes = _bytes_of(payloads)
        self.answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """To be awaited by one that gives its append up with its task: cancelled, it is settled, and not sent any more.
        """

    def __await__(self) -> Generator[Any, None, int]:
        return asyncio.shield(self.answer).__await__()

    @property
    def is_settled(self) -> bool:
        """Check whether it has its answer."""
        return self.answer.done()

    @property
    def is_committed(self) -> bool:
        """Check whether its answer is a position."""
        return self.answer.done() and self.answer.exception() is None

    def withdraw(self) -> bool:
        """Take it back, if it was not sent yet: then it is not in the log, and never will be."""
        if self.is_sent or self.answer.done():
            return False
        self.fail(NotLeading("the append was withdrawn before it was sent; nothing is appended"))
        return True

    def succeed(self, position: int) -> None:
        """Give it its position; for the term."""
        if not self.answer.done():
            self.answer.set_result(position)

    def fail(self, error: BaseException) -> None:
        """Give it its error; for the term."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # it need not be awaited


def _bytes_of(payloads: Sequence[Payload]) -> int:
    size = overhead = 0
    of = None  # entries of one type share their headers
    for headers, value in payloads:
        if headers is not of:
            of, overhead = headers, record_size(None, None, headers) + _MARK_BYTES
        size += overhead + len(value)
    return size


class PendingCheckpoint:
    """A checkpoint that is being made: save a state of all that is before ``position``."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.entry_position = -1
        """Behind the entry of the checkpoint, once it is appended."""
