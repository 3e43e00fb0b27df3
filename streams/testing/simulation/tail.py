"""``ports.Tail`` over the simulated broker: follows partitions, read committed, on a thread of its own.

The thread does one thing at a time: it takes up requests, polls one batch, and hands that over, which may
take its time: records of a partition that was removed meanwhile still come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from streams.errors import OffsetError
from streams.records import IncomingRecord
from streams.testing.simulation.broker import Log
from streams.testing.simulation.process import Process

Receive = Callable[[int, int, list[IncomingRecord], int, int], None]
Fail = Callable[[int, int, Exception], None]


class _SimFollowed:
    """One partition. ``at_end``: the receiver knows that nothing is left at this position."""

    def __init__(self, offset: int, epoch: int) -> None:
        self.position, self.epoch = max(offset, 0), epoch
        self.at_end = False
        self.resumed = offset >= 0


class SimTail:
    """``ports.Tail``."""

    def __init__(self, process: Process, topic: str) -> None:
        self._process, self._topic = process, topic
        self._followed: dict[int, _SimFollowed] = {}
        self._asked: list[tuple[int, _SimFollowed | None]] = []
        self._closed = self._busy = False
        process.broker.on_stable.append(self._grown)

    def start(self, receive: Receive, fail: Fail) -> None:
        self._receive, self._fail = receive, fail

    def add(self, partition: int, offset: int, epoch: int) -> None:
        self._asked.append((partition, _SimFollowed(offset, epoch)))
        self._wake()

    def remove(self, partitions: Collection[int]) -> None:
        self._asked += [(partition, None) for partition in partitions]
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._process.broker.on_stable.remove(self._grown)

    def _grown(self, log: Log) -> None:
        if log.topic == self._topic and log.partition in self._followed:
            self._wake()

    def _wake(self) -> None:
        if not self._busy and not self._closed:
            self._busy = True
            self._later(self._process.faults.one_way(), self._poll)

    def _later(self, seconds: float, step: Callable[..., None], *args: Any) -> None:
        self._process.loop.call_later(seconds, self._awake, step, *args)

    def _awake(self, step: Callable[..., None], *args: Any) -> None:
        """Goes on, once the process does."""
        process = self._process
        if self._closed or process.dead:
            return
        wait = process.frozen()
        if wait > 0:
            self._later(wait, step, *args)
        else:
            step(*args)

    def _poll(self) -> None:
        process = self._process
        wait = process.broker.down_until - process.loop.time()
        if wait > 0:
            self._later(wait + process.faults.one_way(), self._poll)
            return
        for partition, followed in self._asked:
            if followed is None:
                self._followed.pop(partition, None)
            else:
                self._followed[partition] = followed
        self._asked.clear()
        numbers = [number for number in self._followed if self._has_news(number)]
        if not numbers:
            self._busy = False
            return
        number = process.rng.choice(numbers)
        followed, log = self._followed[number], process.broker.log(self._topic, number)
        if followed.resumed and process.strike("tail") is not None:
            del self._followed[number]
            error = OffsetError(f"{self._topic}[{number}]: {followed.position} is not in the log any more")
            self._later(process.faults.poll(), self._hand_over, self._fail, number, followed.epoch, error)
            return
        start = followed.position
        reached = min(log.stable, start + process.rng.randint(1, process.faults.plan.tail_batch))
        records = list(log.committed(start, reached))
        followed.position = reached
        # The position goes over markers and aborted records with the news of the end, which may come by itself.
        reported = records[-1].offset + 1 if records and process.rng.random() < 0.5 else reached
        end = -1 if start == 0 and process.rng.random() < 0.2 else log.end
        if records or reached == log.stable:
            followed.at_end = reported == end or not records
            pause = process.faults.poll() + process.faults.plan.tail_pause
            self._later(pause, self._hand_over, self._receive, number, followed.epoch, records, reported, end)
        else:
            self._later(process.faults.one_way(), self._poll)

    def _has_news(self, number: int) -> bool:
        followed = self._followed[number]
        return not followed.at_end or followed.position < self._process.broker.log(self._topic, number).stable

    def _hand_over(self, give: Callable[..., None], number: int, epoch: int, *rest: Any) -> None:
        self._process.passes("tail.received", number)
        try:
            give(number, epoch, *rest)
        except Exception as error:
            self._followed.pop(number, None)
            self._fail(number, epoch, error)
        self._later(self._process.faults.one_way(), self._poll)
