"""A topic in memory for global change logs: the real threads, a consumer and answers of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import Any

from streams import Change, GlobalChangeLog
from streams.errors import BrokerUnavailable
from streams.kafka.questions.admin import TopicDescription, Watermarks
from streams.kafka.reading.consumer import LOG_START
from streams.records import Headers, IncomingRecord, PolledPartition
from streams.runtime.bridge import Worker
from streams.runtime.reading.log_follower import Tail
from tests.unit.runtime_kit import FakeConsumer
from tests.unit.waiting import PATIENCE


class Partition:
    """Committed records by offset; ``stable`` and ``end`` may be beyond them (markers, holes, open transactions)."""

    def __init__(self) -> None:
        self.records: list[IncomingRecord] = []
        self.stable = self.end = 0


class MemoryTopic:
    """What the cluster has. Tests change it; the log's threads read it."""

    def __init__(self, name: str = "rates", partitions: int = 2) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.logs = [Partition() for _ in range(partitions)]
        self.identity = "id-1"
        self.exists = True
        self.answers = True
        self.policy = "compact"
        self.settings: dict[str, str] = {}
        self.settings_hidden = 0
        """So many questions for the settings get no answer."""
        self.leaderless: set[int] = set()
        self.unknown = 0
        """So many questions for the topic are answered as if it were not there."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.failures: dict[int, list[Exception]] = {}
        """Errors that a partition meets, one for each time that it is read."""
        self.followed: list[tuple[int, int]] = []
        self.open_consumers = self.questions = 0

    def put(
        self,
        key: bytes | None,
        value: bytes | None,
        partition: int = 0,
        headers: Headers | None = None,
        *,
        offset: int | None = None,
    ) -> int:
        """Commit a record; its offset. ``offset`` leaves a hole before it."""
        with self.lock:
            log = self.logs[partition]
            at = log.end if offset is None else offset
            log.records.append(IncomingRecord(self.name, partition, at, key, value, headers, 1))
            log.stable = log.end = at + 1
            return at

    def pass_over(self, partition: int, offsets: int = 1) -> None:
        """Markers and aborted records."""
        with self.lock:
            log = self.logs[partition]
            log.end += offsets
            log.stable = log.end

    def open_transaction(self, partition: int, offsets: int = 1) -> None:
        """The high watermark moves, the last stable offset does not."""
        with self.lock:
            self.logs[partition].end += offsets

    def end_transaction(self, partition: int) -> None:
        """It is aborted."""
        with self.lock:
            self.logs[partition].stable = self.logs[partition].end


class MemoryConsumer(FakeConsumer):
    """The consumer of a ``MemoryTopic``."""

    def __init__(self, topic: MemoryTopic) -> None:
        super().__init__()
        self.topic = topic
        self.told_end: dict[int, int] = {}
        topic.open_consumers += 1

    def add(self, partition: int, offset: int) -> None:
        self.topic.followed.append((partition, offset))
        failures = self.topic.failures.get(partition)
        if failures:
            self.failures[partition] = failures.pop(0)
        self.positions[partition] = 0 if offset == LOG_START else offset

    def remove(self, partitions: Collection[int]) -> None:
        super().remove(partitions)
        for partition in partitions:
            self.told_end.pop(partition, None)

    def poll_batch(self, timeout_seconds: float, limit: int) -> dict[int, PolledPartition]:
        found = {}
        with self.topic.lock:
            for number, position in self.positions.items():
                log = self.topic.logs[number]
                failures = self.topic.failures.get(number)
                if failures:
                    self.failures[number] = failures.pop(0)
                if number in self.failures:
                    continue
                batch = [record for record in log.records if record.offset >= position][:limit]
                if batch and batch[-1] is not log.records[-1]:
                    self.positions[number] = batch[-1].offset + 1
                    found[number] = PolledPartition(batch, self.positions[number], log.end, False)
                elif batch or (log.stable >= position and self.told_end.get(number) != log.stable):
                    self.positions[number] = self.told_end[number] = log.stable
                    found[number] = PolledPartition(batch, log.stable, log.end, True)
        if not found:
            threading.Event().wait(0.001)  # nothing came, as a poll has it
        return found

    def take_failures(self) -> dict[int, Exception]:
        failed = super().take_failures()
        self.remove(failed)
        return failed

    def close(self) -> None:
        self.topic.open_consumers -= 1


class MemoryConnections:
    """``followed_topic.LogConnections``, and its ``TopicRequests``."""

    addresses = "memory:9092"

    def __init__(self, topic: MemoryTopic) -> None:
        self.topic = topic

    def worker(self) -> Worker:
        return Worker("kes-topic-questions")

    def topics(self) -> MemoryConnections:
        return self

    def tail(self) -> Tail:
        return Tail(lambda: MemoryConsumer(self.topic))

    def _check(self) -> None:
        self.topic.questions += 1
        if not self.topic.answers:
            raise BrokerUnavailable("nobody answers")

    def identity(self, name: str, timeout_seconds: float) -> tuple[str, int] | None:
        assert name == self.topic.name
        self._check()
        assert self.topic.may_answer.wait(PATIENCE)
        if self.topic.unknown:
            self.topic.unknown -= 1
            return None
        return (self.topic.identity, len(self.topic.logs)) if self.topic.exists else None

    def watermarks(
        self, topic: str, partitions: Collection[int] | None, timeout_seconds: float
    ) -> dict[int, Watermarks]:
        self._check()
        with self.topic.lock:
            wanted = range(len(self.topic.logs)) if partitions is None else partitions
            if not self.topic.leaderless.isdisjoint(wanted):
                raise BrokerUnavailable("no leader")
            logs = {number: self.topic.logs[number] for number in wanted}
            return {number: Watermarks(0, log.stable, log.end) for number, log in logs.items()}

    def describe(self, names: list[str], timeout_seconds: float) -> dict[str, TopicDescription | None]:
        self._check()
        if self.topic.settings_hidden:
            self.topic.settings_hidden -= 1
            raise BrokerUnavailable("no answer")
        described = TopicDescription(
            name=names[0],
            topic_id=self.topic.identity,
            partitions=len(self.topic.logs),
            replication_factor=1,
            configs={"cleanup.policy": self.topic.policy} | self.topic.settings,
        )
        return {names[0]: described}


def log_over(topic: MemoryTopic, *receivers: Any, **settings: Any) -> GlobalChangeLog:
    log = GlobalChangeLog(topic.name, bootstrap_servers=MemoryConnections.addresses, **settings)
    log._reader._connections = MemoryConnections(topic)  # type: ignore[assignment]
    for receiver in receivers:
        log.add_receiver(receiver)
    return log


async def caught_up(log: GlobalChangeLog) -> None:
    assert await log.wait_caught_up(PATIENCE)


class Heard:
    """A receiver of records that remembers them. It refuses those of the key ``refuse``; at the first one of the key
    ``hold`` it has ``entered``, and waits for ``go_on``."""

    def __init__(self, refuse: bytes | None = None, hold: bytes | None = None) -> None:
        self.records: list[IncomingRecord] = []
        self.refuse, self.hold = refuse, hold
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()

    def __call__(self, record: IncomingRecord) -> None:
        self.threads.add(threading.current_thread())
        if record.key == self.hold:
            self.entered.set()
            assert self.go_on.wait(PATIENCE)
        if record.key == self.refuse:
            raise KeyError("mine")
        self.records.append(record)

    @property
    def keys(self) -> list[bytes | None]:
        return [record.key for record in self.records]


class Changes:
    """A store of the user's."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.ends = 0

    def receive_change(self, change: Change) -> None:
        self.changes.append(change)

    def revoked(self) -> None:
        self.ends += 1


def memory_topic() -> Iterator[MemoryTopic]:
    """A topic for a fixture; after the test every thread that it began has ended."""
    before = set(threading.enumerate())
    yield MemoryTopic()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name
