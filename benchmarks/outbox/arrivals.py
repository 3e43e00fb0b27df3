"""The records that a relay has sent: read as they come, or afterwards, and judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from confluent_kafka import Consumer, Message, TopicPartition

from benchmarks.outbox.work import PARTITIONS, OutboxJob
from benchmarks.systems import Failed


class Judged(NamedTuple):
    """``rows`` that are there, those that are there once more, and those that came behind a later one of their key."""

    rows: int
    doubled: int
    inverted: int

    def fault(self, rows: int, *, once: bool = True) -> str:
        """Name what is wrong; ``once``: a row must not be there twice."""
        if self.rows != rows:
            return f"{self.rows:,} of {rows:,} rows are there"
        if self.inverted:
            return f"{self.inverted:,} rows are behind a later one of their key"
        return f"{self.doubled:,} rows are there twice" if self.doubled and once else ""


def judged(records: Iterable[tuple[bytes, float]]) -> Judged:
    """Judge records by key and number, which grows with the rows of a key."""
    last: dict[bytes, float] = {}
    seen: set[tuple[bytes, float]] = set()
    doubled = inverted = 0
    for record in records:
        key, number = record
        if record in seen:  # also behind a later one: a batch that was sent again
            doubled += 1
            continue
        seen.add(record)
        inverted += number < last.get(key, number)
        last[key] = max(number, last.get(key, number))
    return Judged(len(seen), doubled, inverted)


def parts(message: Message) -> tuple[bytes, float]:
    """Return key and number of a record."""
    return message.key() or b"", float(message.value() or b"0")


class Arrivals:
    """Reads the topic of a job on a thread, and notes when each record came, and the time that is its value."""

    def __init__(self, job: OutboxJob) -> None:
        self.at: list[float] = []
        self._parts: list[tuple[bytes, float]] = []
        self._stopped = threading.Event()
        settings = {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": "none",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
            "log_level": 2,
        }
        self._consumer = Consumer(settings)
        self._consumer.assign([TopicPartition(job.topic, number, 0) for number in range(PARTITIONS)])
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._consumer.close()

    def delays(self) -> list[float]:
        """Return milliseconds from value to arrival."""
        return [max(0.0, at - sent) * 1e3 for at, (_, sent) in zip(self.at, self._parts, strict=True)]

    def judged(self) -> Judged:
        """Judge what has come so far."""
        return judged(self._parts)

    def wait_for(self, count: int) -> None:
        """Wait until so many have come. Raises ``Failed``."""
        until = time.monotonic() + 60
        while len(self.at) < count:
            if time.monotonic() > until:
                raise Failed(f"{len(self.at)} of {count} records within a minute")
            time.sleep(0.001)

    def gap_since(self, moment: float) -> float:
        """Return the longest time without a record that ended after a moment; 0: none has come since."""
        at = list(self.at)
        gaps = [later - earlier for earlier, later in pairwise(at) if later > moment]
        return max(gaps, default=0.0)

    def _read(self) -> None:
        while not self._stopped.is_set():
            # One by one: ``consume`` keeps what has come until it has so many, or its time is over.
            message = self._consumer.poll(0.05)
            if message is not None and message.error() is None:
                self._parts.append(parts(message))
                self.at.append(time.time())
