"""``ports.PlainProducer`` over the simulated broker."""

from __future__ import annotations

from collections import deque

from streams.errors import RecordRefused
from streams.records import Acknowledgement, Record
from streams.testing.simulation.broker import LogEntry
from streams.testing.simulation.process import Process

STEP = 0.002
"""Seconds between two looks of a poll that waits."""


class SimPlainProducer:
    """A record is in its topic after the way to the broker, and reported after the way back."""

    is_broken = False

    def __init__(self, process: Process) -> None:
        self._process = process
        self._queue: deque[tuple[Record, object]] = deque()
        self._sending = self._closed = False
        self._reports: list[Acknowledgement] = []

    def produce(self, record: Record, token: object) -> bool:
        """See ``kafka.writing.plain_producer``."""
        if len(self._queue) >= self._process.faults.queue_limit:
            return False
        self._process.passes("plain.produce")
        self._queue.append((record, token))
        self._schedule(self._process.faults.one_way())
        return True

    def poll(self, timeout_seconds: float) -> list[Acknowledgement]:
        """See ``kafka.writing.plain_producer``."""
        process = self._process
        deadline = process.loop.time() + timeout_seconds
        while not self._reports and process.loop.time() < deadline:
            process.pause(STEP)
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """See ``kafka.writing.plain_producer``."""
        self._closed = True
        self._queue.clear()

    def _schedule(self, seconds: float) -> None:
        if not self._sending:
            self._sending = True
            self._process.loop.call_later(seconds, self._send)

    def _reported(self, report: Acknowledgement) -> None:
        self._reports.append(report)

    def _send(self) -> None:
        self._sending = False
        process = self._process
        if self._closed or process.dead:
            return
        wait = process.away()
        if wait > 0:
            self._schedule(wait + process.faults.one_way())
            return
        while self._queue:
            record, token = self._queue.popleft()
            partition = -1 if record.partition is None else record.partition
            if partition < 0:
                partition = process.broker.partition_of(record.topic, record.key)
            headers = None if record.headers is None else [*record.headers]
            if process.broker.refuses(record.topic, LogEntry(record.key, record.value, headers, None)):
                error = RecordRefused(f"{record.topic}[{partition}]: MSG_SIZE_TOO_LARGE")
                report = Acknowledgement(token, partition, -1, error)
            else:
                offset = process.broker.append(record.topic, partition, record.key, record.value, headers)
                report = Acknowledgement(token, partition, offset, None)
            process.loop.call_later(process.faults.one_way(), self._reported, report)
