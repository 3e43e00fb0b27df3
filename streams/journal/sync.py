"""Journals for programs without an event loop: the same calls, blocking, over a loop on a thread of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from typing import Self

from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from streams.journal.appending import PendingCheckpoint
from streams.journal.entries import JournalItem
from streams.journal.journal import Journal
from streams.journal.reader import JournalReader
from streams.journal.term import JournalTerm


class SyncJournal:
    """A journal in a ``with`` block. Its calls may come from any thread but that of an event loop.

    with SyncJournal(journal) as log, log.lead() as term:
        position = term.append(b"an entry")
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._portal: BlockingPortal = self._opened.enter_context(start_blocking_portal())
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    @contextmanager
    def lead(self) -> Iterator[SyncJournalTerm]:
        """As ``Journal.lead``. A thread cannot be cancelled: when the term ends, appends raise ``NotLeading``, and so
        does the end of the block; a long block looks at ``term.is_over``."""
        released = self._portal.call(asyncio.Event)

        async def hold(*, task_status: TaskStatus[JournalTerm]) -> None:
            async with self.journal.lead() as term:
                task_status.started(term)
                await released.wait()

        future, term = self._portal.start_task(hold)
        try:
            yield SyncJournalTerm(self._portal, term)
        except BaseException:
            self._portal.call(released.set)
            wait([future])
            raise
        self._portal.call(released.set)
        future.result()

    @contextmanager
    def reader(self, *, after: int | None = None, topic_id: str = "") -> Iterator[SyncJournalReader]:
        """As ``Journal.reader``."""
        with self._portal.wrap_async_context_manager(self.journal.reader(after=after, topic_id=topic_id)) as reader:
            yield SyncJournalReader(self._portal, reader)


class SyncJournalTerm:
    """A ``JournalTerm`` whose calls block."""

    def __init__(self, portal: BlockingPortal, term: JournalTerm) -> None:
        self._portal, self._term = portal, term
        self.token = term.token

    @property
    def is_over(self) -> bool:
        """Check whether nothing can be appended any more."""
        return self._term.is_over

    @property
    def position(self) -> int:
        """Behind the last entry that is committed."""
        return self._term.position

    def append(self, *events: object, expect: int | None = None) -> int:
        """As ``JournalTerm.append``; several threads share a commit."""
        return self._portal.call(lambda: self._term.append(*events, expect=expect))

    def barrier(self) -> None:
        """As ``JournalTerm.barrier``."""
        self._portal.call(self._term.barrier)

    @contextmanager
    def checkpoint(self, name: str = "", *, at: int | None = None) -> Iterator[PendingCheckpoint]:
        """As ``JournalTerm.checkpoint``. An append within the block would wait for its end."""
        with self._portal.wrap_async_context_manager(self._term.checkpoint(name, at=at)) as pending:
            yield pending


class SyncJournalReader:
    """A ``JournalReader`` whose calls block. One thread at a time."""

    def __init__(self, portal: BlockingPortal, reader: JournalReader) -> None:
        self._portal, self._reader = portal, reader

    @property
    def position(self) -> int:
        """Everything before it was returned."""
        return self._reader.position

    def catch_up(self) -> Iterator[JournalItem]:
        """As ``JournalReader.catch_up``."""
        return self._each(self._portal.call(self._reader.end))

    def follow(self) -> Iterator[JournalItem]:
        """As ``JournalReader.follow``."""
        return self._each(sys.maxsize)

    def _each(self, end: int) -> Iterator[JournalItem]:
        while True:
            while (item := self._reader.ready(end)) is not None:  # here: the loop adds nothing but within ``more``
                yield item
            if not self._portal.call(self._reader.more, end):
                return
