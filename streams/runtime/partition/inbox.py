"""Queue one partition's input: batches of records in order and within bounds, and interjections."""

from __future__ import annotations

from collections import deque

from streams.core.merging import run_length
from streams.records import IncomingRecord
from streams.runtime.partition.interjections import Interjection
from streams.runtime.ports import Input
from streams.runtime.signal import Signal
from streams.settings.config import EventSourceConfig


class Inbox:
    """The queue of one partition. ``records`` and ``size`` (bytes) wait; ``paused``: it is not read meanwhile.

    Queued records count against the poll thread's room until they are handled, or until the partition is paused: then
    they only count against the partition's own bounds.
    """

    def __init__(self, config: EventSourceConfig, source: Input, partition: int, wake: Signal) -> None:
        self.records = 0
        self.size = 0
        self.counted = 0
        self.counted_size = 0
        self.paused = False
        self._most_records = config.queues.max_queued_records
        self._most_bytes = config.queues.max_queued_bytes
        self._resume_at = (0, 0)
        self._input = source
        self._partition = partition
        self._batches: deque[list[IncomingRecord]] = deque()
        self._taken = 0  # of the first batch
        self._under_way: list[IncomingRecord] = []  # taken last
        self._unhandled: deque[tuple[int, int]] = deque()  # (records, bytes) of each batch, less what is handled of it
        self._interjections: deque[Interjection] = deque()
        self._wake = wake

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, records: list[IncomingRecord], size: int, short: int = 0) -> None:
        """Queue records of so many bytes, as a batch, or as part of the one before them if that has fewer than
        ``short``; pauses the partition when its queue is full."""
        if short and self._batches and len(self._batches[-1]) < short:
            self._batches[-1] += records
        else:
            self._batches.append(records)
        self._unhandled.append((len(records), size))
        self.records += len(records)
        self.size += size
        self.counted += len(records)
        self.counted_size += size
        if self.records >= self._most_records or self.size >= self._most_bytes:
            self.hold()
        elif self.paused:
            # Polled before the pause took effect. They must not keep the poll thread from reading other partitions.
            self._uncount(self.counted, self.counted_size)
        self._wake.notify()

    def hold(self) -> None:
        """Pause until half of what is queued now is handled."""
        if not self.paused:
            self.paused = True
            # Half of it: resumed at once, a partition at its bound would pause again with each batch.
            self._resume_at = (self.records // 2, self.size // 2)
            self._input.pause(self._partition)
        self._uncount(self.counted, self.counted_size)

    def put(self, interjection: Interjection) -> None:
        """Queue an interjection. It does not wait for the records: it takes its place between two of them."""
        self._interjections.append(interjection)
        self._wake.notify()

    @property
    def first(self) -> IncomingRecord | None:
        """Return the next record, if there is one."""
        return self._batches[0][self._taken] if self._batches else None

    def take(self) -> list[IncomingRecord]:
        """Take the next batch. Its records stay counted until ``handled``."""
        self._under_way = self._batches.popleft()
        return self._under_way

    @property
    def next_batch(self) -> tuple[list[IncomingRecord], int]:
        """Return the next batch, which there must be, and how many of its records are taken."""
        return self._batches[0], self._taken

    def take_run(self, until_ms: int | None) -> list[IncomingRecord]:
        """Take the first records of the next batch, as far as they go by ``merging.run_length``. As ``take``; with one
        inbox either this and ``skip``, or that is called."""
        batch, start = self.next_batch
        records = run_length(batch, start, len(batch), until_ms)
        self.skip(records)
        self._under_way = batch[start : start + records]
        return self._under_way

    def oldest(self, offset: int) -> IncomingRecord | None:
        """Return the first record from this offset on that is here, if there is one; it may be under way."""
        return next((record for record in self._under_way if record.offset >= offset), self.first)

    def skip(self, records: int) -> None:
        """Take so many records of the next batch, which were read there."""
        self._taken += records  # a mark: a copy of what is left would cost its length for each run
        if self._taken == len(self._batches[0]):
            self._batches.popleft()
            self._taken = 0

    def wake(self) -> None:
        """Have the partition look again: something is known now that was not."""
        self._wake.notify()

    def put_back(self, interjection: Interjection) -> None:
        """Put an interjection back that did not come to its end: it is the next one again."""
        self._interjections.appendleft(interjection)

    @property
    def has_interjection(self) -> bool:
        """Check for an interjection that waits."""
        return bool(self._interjections)

    def take_interjection(self) -> Interjection | None:
        """Take the next interjection, if there is one."""
        while self._interjections:
            interjection = self._interjections.popleft()
            if not interjection.is_unwanted:
                return interjection
        return None

    def inherit(self, other: Inbox) -> None:
        """Take over the interjections of ``other``, which is of the same partition before its restart."""
        # In front of those that were requested since the restart, and in their order.
        self._interjections.extendleft(reversed(other._interjections))
        other._interjections.clear()
        self._wake.notify()

    def handled(self, records: int) -> None:
        """Give back the room of the first ``records`` records."""
        size = self._size_of_first(records)
        self.records -= records
        if not self.records:
            self._under_way = []  # not kept for as long as nothing comes
        self.size -= size
        # Some may be counted no more: those that were queued when the partition was paused.
        self._uncount(min(records, self.counted), min(size, self.counted_size))
        if self.paused and self.records <= self._resume_at[0] and self.size <= self._resume_at[1]:
            self.paused = False
            self._input.resume(self._partition)

    def refuse(self, reason: Exception) -> None:
        """End all interjections with this reason: none has its turn any more."""
        interjections, self._interjections = self._interjections, deque()
        for interjection in interjections:
            interjection.done(reason)

    def drop(self) -> None:
        """Forget all records, and read no more."""
        self._input.remove([self._partition])
        self._batches.clear()
        self._taken = 0
        self._unhandled.clear()
        self._uncount(self.counted, self.counted_size)
        self.records = self.size = 0
        self._wake.notify()  # the task may wait for records: it has to see that the intake is closed

    def _size_of_first(self, records: int) -> int:
        """Return the bytes of the first records, and forget them. Within a batch all records count alike: they are not
        measured one by one."""
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
