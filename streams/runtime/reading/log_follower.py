"""The tail thread: follows partitions of a log and gives what it reads to replicas or views.

News are handed over on this thread: applying a batch to a store takes time that the event loop does not have, and a
store that is only a copy has no other user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from streams.records import IncomingRecord, PolledPartition
from streams.runtime.ports import LogSource
from streams.runtime.reading.thread import ReadingThread

_log = logging.getLogger(__name__)

FROM_START = -1
"""This position stands for the start of the log: nothing was read yet."""

IDLE_SECONDS = 30.0
"""The consumer is closed after so many seconds without a partition. Until then the next ``add`` is quick."""

BATCH = 500
"""A poll returns so many records, at most: few enough that the event loop gets the interpreter back soon."""

Receive = Callable[[int, int, list[IncomingRecord], int, int], None]
Fail = Callable[[int, int, Exception], None]


class FollowedPartition:
    """One partition of a log, read under one epoch. Reading began at ``start``, everything below ``position`` was read
    (-1: nothing yet), and the log ends at ``end`` as far as is known (-1: not yet). ``caught_up``: it has met the end
    once. ``records`` and ``size`` (bytes of keys and values) were received."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.start = self.position = FROM_START
        self.end = -1
        self.caught_up = False
        self.records = self.size = 0

    @property
    def behind(self) -> int:
        """Return the offsets that are left, as far as is known (holes and markers count)."""
        return max(0, self.end - max(self.position, 0))

    def begin_at(self, offset: int) -> None:
        self.start = self.position = offset

    def advance(self, position: int, end: int, *, more: bool) -> bool:
        """Note that everything below ``position`` was read, of a log that ends at ``end`` as far as is known; ``more``
        records came. Returns whether it has met the end, for the first time."""
        self.position = max(self.position, position)
        self.end = max(self.end, end, self.position)
        # A call without records means the end as well: an open transaction keeps the position below it, maybe for
        # long.
        first = not self.caught_up and (not more or position >= end >= 0)
        self.caught_up = self.caught_up or first
        return first


class Tail(ReadingThread[LogSource]):
    """``ports.Tail`` over a consumer of its own.

    Once ``remove`` or a newer ``add`` of a partition has returned, at most the call of ``receive`` that is under way
    still belongs to the old epoch, and none does on the thread that ``receive`` is called on. After ``close`` the same
    holds for all partitions.
    """

    def __init__(self, connect: Callable[[], LogSource]) -> None:
        super().__init__(connect, "kes-tail", BATCH, IDLE_SECONDS)
        self._receive: Receive
        self._fail: Fail

    def start(self, receive: Receive, fail: Fail) -> None:
        """Set the receivers of news and of failures, before the first ``add`` (else ``RuntimeError``). Both run on the
        tail's thread, one at a time. An error of ``receive`` ends its partition, by ``fail``; one of ``fail`` is only
        logged."""
        self._receive, self._fail = receive, fail

    def _launch(self) -> None:
        if not hasattr(self, "_receive"):
            raise RuntimeError("the tail was not started")
        super()._launch()

    def _received(self, news: Mapping[int, PolledPartition]) -> None:
        for partition, (records, position, end, at_end) in news.items():
            epoch = self._epochs.get(partition)
            try:
                # The partition was taken back, or added again, since the poll began: these records have no receiver
                # any more.
                if epoch is None or self._wanted.get(partition) != epoch:
                    continue
                self._receive(partition, epoch, records, position, end)
                if records and at_end and position != end and self._wanted.get(partition) == epoch:
                    self._receive(partition, epoch, [], position, end)  # an open transaction keeps the end away
            except Exception as error:
                # The error ends this partition only. The other ones of the poll have no part in it.
                self._give_up(partition, error)
                self._connected().remove([partition])

    def _failed(self, partition: int, epoch: int, error: Exception) -> None:
        try:
            self._fail(partition, epoch, error)
        except Exception:
            _log.exception("the tail's failure of partition %d (%s) could not be reported", partition, error)
