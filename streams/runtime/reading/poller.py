"""The poll thread: takes records from the input consumer and hands them to the loop, a batch at a time.

Two bounds keep memory flat. The thread stops polling while ``room`` records (or bytes) are on their way to handlers;
and a partition whose own queue is full is paused, and no longer counts. When there is no room for a while although
no queue is full, the engine has to pause the partition that has most: so a slow partition holds up only itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial

from streams.core.admission import size_of_records
from streams.errors import OffsetError
from streams.records import IncomingRecord, PolledPartition
from streams.runtime.bridge import Inlet
from streams.runtime.ports import LogConsumer, Polled
from streams.runtime.reading.thread import POLL_SECONDS, ReadingThread

FEW = 100
"""Records of a poll, below which a pause is made in front of the next one."""

PAUSE_SECONDS = 0.002
"""So long. Live traffic comes a few records at a time, and each poll wakes this thread and the loop. A command ends the
pause."""

STARVED_POLLS = 5
"""After so many polls without room, of ``POLL_SECONDS`` each, the engine has to make some: slow partitions hold it."""


class Poller(ReadingThread[LogConsumer]):
    """``ports.Input`` (which documents the methods) over a consumer of its own."""

    def __init__(
        self, connect: Callable[[], LogConsumer], *, max_poll_records: int, room: int, room_bytes: int
    ) -> None:
        super().__init__(connect, "kes-poll", max_poll_records, None)
        self._room = room
        self._room_bytes = room_bytes
        self._batches: Inlet[Polled]
        self._starving: Inlet[None]
        self._failures: Inlet[Exception]
        self._gone: Inlet[tuple[int, int]] | None = None
        # Of the thread only:
        self._paused: frozenset[int] = frozenset()
        self._awaited: frozenset[int] = frozenset()
        self._starved_polls = 0
        self.received_bytes = 0  # read by the loop, too
        # Under the lock:
        self._outstanding = 0
        self._outstanding_bytes = 0
        self._is_starving = False
        self._has_room = threading.Event()
        self._has_room.set()

    def start(
        self,
        deliver: Callable[[Polled], None],
        make_room: Callable[[], None],
        fail: Callable[[Exception], None],
        gone: Callable[[tuple[int, int]], None] | None = None,
    ) -> None:
        def starving(_: None) -> None:
            self._is_starving = False  # on the loop: a loop that stands still has one such call waiting, not many
            make_room()

        self._batches, self._starving, self._failures = Inlet(deliver), Inlet(starving), Inlet(fail)
        self._gone = None if gone is None else Inlet(gone)
        self._commands.put(self._connect_early)
        self._launch()

    def expect(self, partitions: Collection[int]) -> None:
        self._commands.put(partial(setattr, self, "_awaited", frozenset(partitions)))

    def pause(self, partition: int) -> None:
        self._commands.put(partial(self._pause, partition))

    def resume(self, partition: int) -> None:
        self._commands.put(partial(self._resume, partition))

    def handled(self, records: int, size: int) -> None:
        with self._lock:
            self._outstanding -= records
            self._outstanding_bytes -= size
            # Looked at first: to set it wakes no thread, but takes two locks, for each slice of a handful of records.
            if (
                not self._has_room.is_set()
                and self._outstanding < self._room
                and self._outstanding_bytes < self._room_bytes
            ):
                self._has_room.set()

    def ends(self) -> Future[Mapping[int, int]]:
        answer: Future[Mapping[int, int]] = Future()
        self._commands.put(partial(self._answer_ends, answer))
        return answer

    def close(self) -> None:
        super().close()
        self._has_room.set()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if self._has_room.wait(POLL_SECONDS):
            self._starved_polls = 0
            super()._poll()
            return
        self._starved_polls += 1
        if self._starved_polls >= STARVED_POLLS and not self._is_starving:
            self._is_starving = True
            self._starving.put(None)

    def _poll_seconds(self) -> float:
        """Keep polls short while a command is sure to come: an ``add`` of an expected partition, a ``resume`` of a
        paused one, or because an event fails that is still queued."""
        if self._awaited or self._paused or self._outstanding:
            return POLL_SECONDS
        return super()._poll_seconds()

    def _received(self, news: Mapping[int, PolledPartition]) -> None:
        records: dict[int, list[IncomingRecord]] = {}
        sizes: dict[int, int] = {}
        at_end: list[int] = []
        count = size = 0
        for partition, progress in news.items():
            found = records[partition] = progress.records
            own = sizes[partition] = size_of_records(found)
            count += len(found)
            size += own
            if progress.at_end:
                at_end.append(partition)
        self.received_bytes += size
        if count < FEW:
            self._pause_seconds = PAUSE_SECONDS
        # The records are counted before they are handed over: the loop may give their room back at once.
        with self._lock:
            self._outstanding += count
            self._outstanding_bytes += size
            if self._outstanding >= self._room or self._outstanding_bytes >= self._room_bytes:
                self._has_room.clear()
        self._batches.put(Polled(records, sizes, self._epochs, frozenset(at_end)))

    def _failed(self, partition: int, epoch: int, error: Exception) -> None:
        if self._gone is not None and isinstance(error, OffsetError):
            self._gone.put((partition, epoch))
            return
        self._failures.put(error)
        self.close()  # no record of a topic that may be another one by now

    def _connect_early(self) -> None:
        """Connect before the first partition comes, which would have to wait for it."""
        try:
            self._connected()
        except Exception as error:
            self._failed(-1, -1, error)

    def _add(self, partition: int, offset: int, epoch: int) -> None:
        super()._add(partition, offset, epoch)
        self._awaited -= {partition}

    def _remove(self, partitions: Collection[int]) -> None:
        super()._remove(partitions)
        self._paused -= frozenset(partitions)

    def _answer_ends(self, answer: Future[Mapping[int, int]]) -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(self._connected().ends())
            except Exception:  # nothing depends on it: not a reason to start the consumer anew
                answer.set_result({})

    def _pause(self, partition: int) -> None:
        if partition in self._epochs:
            self._connected().pause([partition])
            self._paused |= {partition}

    def _resume(self, partition: int) -> None:
        if partition in self._paused:
            self._connected().resume([partition])
            self._paused -= {partition}
