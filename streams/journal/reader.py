"""Readers of a journal: any number, in no group, each from a position on. Nothing is skipped, and nothing guessed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from anyio import CancelScope

from streams.core.journal import LogOrder
from streams.errors import BrokerUnavailable, ConfigError, OffsetError
from streams.journal.entries import EntryTypes, JournalItem
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.settings import ClientSettings
from streams.records import PolledPartition
from streams.runtime.bridge import Worker

_POLL_SECONDS: Final = 0.2
_BATCH: Final = 2_000
_STALLED_SECONDS: Final = 30.0


class JournalReader:
    """Reads the committed entries of a journal in their order. On one event loop, one task at a time; made by
    ``Journal.reader``.

    ``position``: everything before it was returned. Both ways of reading raise ``JournalError`` (the log is out of
    order, or holds foreign records), ``OffsetError`` (entries were deleted), ``TopicError``, ``DecodeError``.
    """

    def __init__(self, settings: ClientSettings, topic: str, types: EntryTypes, position: int) -> None:
        self.topic, self.position = topic, position
        self._settings, self._types = settings, types
        self._order = LogOrder(is_start=position == 0)
        self._items: deque[JournalItem] = deque()
        self._read = position  # everything before it is in ``_items``, or was returned
        self._polling: asyncio.Task[PolledPartition | None] | None = None
        self._worker = Worker(f"kes-{topic}-reader")
        self._consumer: LogFetcher | None = None
        self._admin: TopicAdmin | None = None
        self._is_busy = self._is_closed = False
        self._moved = time.monotonic()  # when something was read the last time
        self._failure: Exception | None = None

    async def follow(self) -> AsyncIterator[JournalItem]:
        """Iterate over the entries, without an end: waits for those that are yet to come."""
        while True:
            while (item := self.ready()) is not None:
                yield item
            await self.more()

    async def catch_up(self) -> AsyncIterator[JournalItem]:
        """Iterate over all that was committed when this is called, then end: also where the log ends with markers, or
        with aborted entries. Raises ``BrokerUnavailable`` when nothing moves for 30 seconds."""
        end = await self.end()
        while True:
            while (item := self.ready(end)) is not None:
                yield item
            if not await self.more(end):
                return

    async def end(self) -> int:
        """Return the end of the log now. Raises ``BrokerUnavailable``."""
        end = await self._worker.call(self._end)
        self._moved = time.monotonic()
        return end

    def ready(self, end: int = sys.maxsize) -> JournalItem | None:
        """Return the next item below ``end``, if it is here already; else ``None``, and ``more`` is to be awaited."""
        items = self._items
        if not items:
            self.position = self._read
            return None
        if items[0].offset >= end:
            return None
        item = items.popleft()
        self.position = item.offset + 1
        return item

    async def more(self, end: int = sys.maxsize) -> bool:
        """Wait for more items, or for a moment; ``False``: everything below ``end`` was read. Raises as the two ways of
        reading do."""
        if self._read >= end:
            return False
        read = self._read
        await self._next_batch()
        if self._read > read:
            self._moved = time.monotonic()
        elif end < sys.maxsize and time.monotonic() - self._moved > _STALLED_SECONDS:
            raise BrokerUnavailable(
                f"{self.topic}[0]: no progress at {self._read} of {end} for {_STALLED_SECONDS:g} s: no broker "
                "answers, or an open transaction holds the end of the log back"
            )
        return True

    async def close(self) -> None:
        """Let go of everything; reading raises ``Stopped`` then. Repeating is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        with CancelScope(shield=True):
            if self._polling is not None:
                await asyncio.wait([self._polling])
                self._polling = None
            await self._worker.call(self._close)
        self._worker.abandon()

    async def _next_batch(self) -> None:
        """Wait for a batch, or for a moment. A batch that is on its way when the task is cancelled is not lost: the
        next call has it."""
        if self._is_busy:
            raise ConfigError(f"a reader of {self.topic} is read by two tasks: make another one")
        if self._failure is not None:
            raise self._failure
        self._is_busy = True
        try:
            if self._polling is None:
                self._polling = asyncio.create_task(self._worker.call(self._poll))
                self._polling.add_done_callback(
                    lambda done: done.cancelled() or done.exception()
                )  # seen below, or late
            progress = await asyncio.shield(self._polling)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._is_busy = False
        self._polling = None
        if progress is not None:
            self._take(progress)

    def _take(self, progress: PolledPartition) -> None:
        """Decode a batch. What cannot be read is raised behind what is before it, and again by each later call."""
        item_of, see, add = self._types.item, self._order.see, self._items.append
        try:
            for record in progress.records:
                if (item := item_of(record, see(record))) is not None:
                    add(item)
                self._read = record.offset + 1
        except Exception as error:
            self._failure = error
        else:
            self._read = progress.position

    # -- on the worker -------------------------------------------------------------------------------------------------

    def _poll(self) -> PolledPartition | None:
        if self._consumer is None:
            self._consumer = LogFetcher(self._settings, self.topic, FOLLOWING)
            self._consumer.add(0, self.position)
        news = self._consumer.poll_batch(_POLL_SECONDS, _BATCH).get(0)
        if news is None:
            for failure in self._consumer.take_failures().values():
                raise failure
        return news

    def _end(self) -> int:
        if self._admin is None:
            self._admin = TopicAdmin(self._settings)
        end = self._admin.watermarks(self.topic, [0])[0].end
        if end < self._read:
            raise OffsetError(f"{self.topic}[0] ends at {end}, and was read up to {self._read}: entries are lost")
        return end

    def _close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        if self._admin is not None:
            self._admin.close()
