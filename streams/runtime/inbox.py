"""What waits for one partition's worker: batches of records in order and within bounds, and interjections."""

from __future__ import annotations

from collections import deque

from streams.config import EventSourceConfig
from streams.records import IncomingRecord
from streams.runtime.interjections import Interjection
from streams.runtime.ports import Input
from streams.runtime.signal import Signal


class Inbox:
    """The queue of one partition. ``records`` and ``size`` (bytes) wait; ``paused``: it is not read meanwhile.

    What waits counts against the poll thread's room until it is handled, or until the partition is paused: then it only
    counts against the partition's own bounds.
    """

    def __init__(self, config: EventSourceConfig, source: Input, partition: int, wake: Signal) -> None:
        self.records = 0
        self.size = 0
        self.counted = 0
        self.counted_size = 0
        self.paused = False
        self._most_records = config.max_queued_records
        self._most_bytes = config.max_queued_bytes
        self._resume_at = (0, 0)
        self._input = source
        self._partition = partition
        self._batches: deque[list[IncomingRecord]] = deque()
        self._unhandled: deque[tuple[int, int]] = deque()  # (records, bytes) of each batch, less what is handled of it
        self._asked: deque[Interjection] = deque()
        self._wake = wake

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, records: list[IncomingRecord], size: int) -> None:
        """Queue records of so many bytes; pauses the partition when its queue is full."""
        self._batches.append(records)
        self._unhandled.append((len(records), size))
        self.records += len(records)
        self.size += size
        self.counted += len(records)
        self.counted_size += size
        if self.records >= self._most_records or self.size >= self._most_bytes:
            self.hold()
        elif self.paused:
            self._uncount(self.counted, self.counted_size)
        self._wake.notify()

    def hold(self) -> None:
        """Pause until half of what is queued now is handled."""
        if not self.paused:
            self.paused = True
            self._resume_at = (self.records // 2, self.size // 2)
            self._input.pause(self._partition)
        self._uncount(self.counted, self.counted_size)

    def put(self, interjection: Interjection) -> None:
        """Queue an interjection. It does not wait for the records: it takes its place between two of them."""
        self._asked.append(interjection)
        self._wake.notify()

    def take(self) -> list[IncomingRecord]:
        """The next batch. Its records stay counted until ``handled``."""
        return self._batches.popleft()

    def put_back(self, interjection: Interjection) -> None:
        """It did not come to its end: it is the next one again."""
        self._asked.appendleft(interjection)

    @property
    def is_asked(self) -> bool:
        """Whether an interjection waits."""
        return bool(self._asked)

    def take_interjection(self) -> Interjection | None:
        """The next one, if there is one."""
        while self._asked:
            interjection = self._asked.popleft()
            if not interjection.is_unwanted:
                return interjection
        return None

    def inherit(self, other: Inbox) -> None:
        """The interjections of ``other``, which is of the same partition before its restart, wait here now."""
        self._asked.extendleft(reversed(other._asked))
        other._asked.clear()
        self._wake.notify()

    def handled(self, records: int) -> None:
        """The first so many are done."""
        size = self._size_of_first(records)
        self.records -= records
        self.size -= size
        self._uncount(min(records, self.counted), min(size, self.counted_size))
        if self.paused and self.records <= self._resume_at[0] and self.size <= self._resume_at[1]:
            self.paused = False
            self._input.resume(self._partition)

    def refuse(self, reason: Exception) -> None:
        """No interjection has its turn any more; whoever waits for one is told why."""
        asked, self._asked = self._asked, deque()
        for interjection in asked:
            interjection.done(reason)

    def drop(self) -> None:
        """Forget all records."""
        self._batches.clear()
        self._unhandled.clear()
        self._uncount(self.counted, self.counted_size)
        self.records = self.size = 0
        self._wake.notify()

    def _size_of_first(self, records: int) -> int:
        """Their bytes, and forgets them. Within a batch all records count alike: nobody measures them one by one."""
        total = 0
        while records:
            count, size = self._unhandled.popleft()
            if count > records:
                part = size * records // count
                self._unhandled.appendleft((count - records, size - part))
                return total + part
            records -= count
            total += size
        return total

    def _uncount(self, records: int, size: int) -> None:
        if records or size:
            self.counted -= records
            self.counted_size -= size
            self._input.handled(records, size)
