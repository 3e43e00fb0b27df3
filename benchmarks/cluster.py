"""The broker of a run, seen from outside of the systems under test: topics, records, offsets of groups."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.systems import KINDS, Failed, Progress, System
from benchmarks.workload import PARTITIONS, Balance, Job, Judge, deposits, encoded

Headers = list[tuple[str, str | bytes | None]]
TYPE: Headers = [("__grt__", b"Deposited")]


class Cluster:
    """Topics and records of a run, by one thread. ``partitions`` of input, output and changelog."""

    def __init__(self, bootstrap_servers: str, partitions: int = PARTITIONS, prefix: str = "run") -> None:
        self.bootstrap_servers, self.partitions = bootstrap_servers, partitions
        self._prefix = prefix
        self._settings: dict[str, Any] = {"bootstrap.servers": bootstrap_servers, "log_level": 2}
        self._admin = AdminClient(self._settings)
        self._jobs = 0

    def job(self, source: str = "") -> Job:
        """Topics for one run of one system, with a group of its own; ``source`` names input that is there already."""
        self._jobs += 1
        name = f"{self._prefix}{self._jobs:03d}"
        if not source:
            source = self.source(f"{name}-in")
        self._create(NewTopic(f"{name}-out", self.partitions, -1, config={"message.timestamp.type": "LogAppendTime"}))
        self._create(NewTopic(f"{name}-changelog", self.partitions, -1, config={"cleanup.policy": "compact"}))
        return Job(
            bootstrap_servers=self.bootstrap_servers,
            group=name,
            source=source,
            output=f"{name}-out",
            changelog=f"{name}-changelog",
            partitions=self.partitions,
        )

    def source(self, name: str, partitions: int = 0) -> str:
        """Create an empty input topic."""
        self._create(NewTopic(name, partitions or self.partitions, -1))
        return name

    def forget(self, job: Job, *, source: bool) -> None:
        """Delete what a run wrote (and its input), the topics included that a system made for itself."""
        made = made_for(job.group, self._admin.list_topics(timeout=30).topics)
        self.delete(*{job.output, job.changelog, *made} - {job.source}, *([job.source] if source else []))

    def fill(self, source: str, seed: int, events: int) -> None:
        """Write the first ``events`` deposits of the seed. Raises ``Failed``."""
        self.write(source, islice(deposits(seed), events))

    def write(self, source: str, events: Iterable[tuple[str, int]]) -> None:
        """Write these deposits, as account and cents. Raises ``Failed``."""
        producer = Producer(
            self._settings | {"partitioner": "murmur2_random", "linger.ms": 50, "queue.buffering.max.messages": 0}
        )
        for number, (account, cents) in enumerate(events):
            if number % 5_000 == 0:
                producer.poll(0)
            producer.produce(source, encoded(account, cents, 0.0), account, headers=TYPE)
        if producer.flush(60):
            raise Failed("the input could not be written in a minute")

    def progress(self, job: Job, system: System | None = None) -> Progress:
        """Open a view of the events that a group (or a system, wherever it keeps its offsets) has committed."""
        own = KINDS[system.name].progress(self._settings, job) if system else None
        return own or Committed(self._settings, job.group, job.source, self.partitions)

    def wait_committed(
        self, job: Job, events: int, check: Callable[[], object], seconds: float, system: System | None = None
    ) -> None:
        """Wait until so many events are committed, calling ``check`` meanwhile. Raises ``Failed``."""
        committed, deadline = self.progress(job, system), time.monotonic() + seconds
        try:
            while (done := committed()) < events:
                check()
                if time.monotonic() > deadline:
                    raise Failed(f"{done} of {events} events are committed after {seconds:g} s")
                time.sleep(0.1)
        finally:
            committed.close()

    def judged(self, job: Job) -> tuple[Judge, list[int]]:
        """Read every output: the judge of them, and their log-append times."""
        judge, appended, decode = Judge(), [], msgspec.json.Decoder(Balance).decode
        for message in self.records(job.output, self.partitions):
            judge.add((message.key() or b"").decode(), decode(message.value() or b""))
            appended.append(message.timestamp()[1])
        return judge, appended

    def records(self, topic: str, partitions: int) -> Iterator[Message]:
        """Read every committed record of a topic, partition by partition in order."""
        consumer = Consumer(
            self._settings
            | {
                "group.id": "judge",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        ended = 0
        try:
            while ended < partitions:
                for message in consumer.consume(5_000, 0.2):
                    if message.error() is None:
                        yield message
                    else:
                        ended += 1
        finally:
            consumer.close()

    def delete(self, *names: str) -> None:
        """Delete topics."""
        for future in self._admin.delete_topics(list(names), operation_timeout=30).values():
            future.result()

    def _create(self, topic: NewTopic) -> None:
        for future in self._admin.create_topics([topic], operation_timeout=30).values():
            future.result()


def made_for(group: str, topics: Iterable[str]) -> set[str]:
    """Select the topics whose name has the group's in it."""
    name = re.compile(rf"(?<![a-z0-9]){re.escape(group)}(?![0-9])")
    return {topic for topic in topics if name.search(topic)}


class Committed:
    """The sum of a group's committed offsets, as if there were no transaction under way."""

    def __init__(self, settings: dict[str, Any], group: str, topic: str, partitions: int) -> None:
        self._consumer = Consumer(settings | {"group.id": group, "isolation.level": "read_uncommitted"})
        self._places = [TopicPartition(topic, partition) for partition in range(partitions)]

    def __call__(self) -> int:
        return sum(max(place.offset, 0) for place in self._consumer.committed(self._places, 10))

    def close(self) -> None:
        """Free the client."""
        self._consumer.close()
