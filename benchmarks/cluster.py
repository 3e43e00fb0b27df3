"""The broker of a run, and what is asked of it from outside of the systems under test."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from confluent_kafka import Consumer, ConsumerGroupState, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.systems import Failed, Progress, System
from benchmarks.workload import USUAL, Job, Shape, deposits, encoded, kind_of, kinds, note_of

Headers = Sequence[tuple[str, str | bytes | None]]

TYPE: list[tuple[str, str | bytes | None]] = [("__grt__", b"Deposited")]


def type_headers(types: int) -> list[list[tuple[str, str | bytes | None]]]:
    """The header of each type of events, by its number."""
    return [[("__grt__", kind.__name__.encode())] for kind in kinds(types)]


FILL_BYTES = 100_000_000
"""Of an input that is being written, at most so many wait in the client."""


class Cluster:
    """Topics and records of a run, by one thread. ``partitions``: another number than the shape's."""

    def __init__(
        self, bootstrap_servers: str, partitions: int | None = None, prefix: str = "run", shape: Shape = USUAL
    ) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.shape = shape if partitions is None else msgspec.structs.replace(shape, partitions=partitions)
        self.partitions = self.shape.partitions
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
        self._create(NewTopic(f"{name}-out", self.partitions, 1, config={"message.timestamp.type": "LogAppendTime"}))
        self._create(NewTopic(f"{name}-changelog", self.partitions, 1, config={"cleanup.policy": "compact"}))
        return Job(
            bootstrap_servers=self.bootstrap_servers,
            group=name,
            source=source,
            output=f"{name}-out",
            changelog=f"{name}-changelog",
            shape=self.shape,
        )

    def source(self, name: str) -> str:
        """An empty input topic."""
        self._create(NewTopic(name, self.partitions, 1))
        return name

    def forget(self, job: Job, *, source: bool) -> None:
        """Delete what a run wrote (and its input), the topics included that a system made for itself."""
        made = made_for(job.group, self._admin.list_topics(timeout=30).topics)
        self.delete(*{job.output, job.changelog, *made} - {job.source}, *([job.source] if source else []))

    def fill(self, source: str, seed: int, events: int) -> None:
        """Write the first ``events`` deposits of the seed."""
        producer = Producer(
            self._settings
            | {"partitioner": "murmur2_random", "linger.ms": 50, "queue.buffering.max.messages": 1_000_000}
        )
        shape = self.shape
        note, headers = note_of(shape.value_bytes), type_headers(shape.types)
        most = max(FILL_BYTES // shape.value_bytes, 1)
        for number, (account, cents) in zip(range(events), deposits(seed, shape), strict=False):
            if number % min(most, 5_000) == 0:
                producer.poll(0)
                while len(producer) >= most:
                    producer.poll(0.01)
            value = encoded(account, cents, 0.0, note)
            producer.produce(source, value, account, headers=headers[kind_of(cents, shape.types)])
        if producer.flush(60):
            raise Failed(f"the input {source} could not be written in a minute")

    def committed(self, job: Job) -> Committed:
        """Asks how far a group is."""
        return Committed(self._settings, job.group, job.source, self.partitions)

    def progress(self, system: System, job: Job) -> Progress:
        """Asks how far a system is, wherever it keeps its offsets."""
        return system.progress(self._settings, job) or self.committed(job)

    def shares(self, job: Job) -> list[int]:
        """How many partitions of its input each member of a group has; empty while there is no such group, or it is not
        stable."""
        try:
            found = self._admin.describe_consumer_groups([job.group], request_timeout=10)[job.group].result()
        except KafkaException:  # not there yet, or its coordinator is just beginning
            return []
        if found.state is not ConsumerGroupState.STABLE:
            return []
        # Of the input alone: quixstreams has its changelogs assigned as well.
        return [
            sum(place.topic == job.source for place in member.assignment.topic_partitions) for member in found.members
        ]

    def outputs(self, job: Job) -> Iterator[Message]:
        """Every committed output, partition by partition in order."""
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
        consumer.assign([TopicPartition(job.output, partition, 0) for partition in range(self.partitions)])
        ended = 0
        try:
            while ended < self.partitions:
                messages = consumer.consume(5_000, 0.2)
                for message in messages:
                    if message.error() is None:
                        yield message
                    else:
                        ended += 1
        finally:
            consumer.close()

    def create(self, name: str, partitions: int, config: dict[str, str] | None = None) -> None:
        """A topic of any shape."""
        self._create(NewTopic(name, partitions, 1, config=config or {}))

    def delete(self, *names: str) -> None:
        """Delete topics."""
        for future in self._admin.delete_topics(list(names), operation_timeout=30).values():
            future.result()

    def write(self, records: Iterable[tuple[str, bytes, bytes, int]], headers: Headers = ()) -> None:
        """Write records (topic, key, value, partition). Raises ``Failed``."""
        same = list(headers)
        producer = Producer(self._settings | {"linger.ms": 50, "enable.idempotence": True})
        for topic, key, value, partition in records:
            while True:
                try:
                    producer.produce(topic, value, key, partition, headers=same)
                    break
                except BufferError:
                    producer.poll(0.05)
        if producer.flush(120):
            raise Failed("records could not be written in two minutes")

    def _create(self, topic: NewTopic) -> None:
        for future in self._admin.create_topics([topic], operation_timeout=30).values():
            future.result()


def made_for(group: str, topics: Iterable[str]) -> set[str]:
    """Those of the topics whose name has the group's in it."""
    name = re.compile(rf"(?<![a-z0-9]){re.escape(group)}(?![0-9])")
    return {topic for topic in topics if name.search(topic)}


class Committed:
    """The sum of a group's committed offsets, as if there were no transaction under way."""

    def __init__(self, settings: dict[str, Any], group: str, source: str, partitions: int) -> None:
        self._consumer = Consumer(settings | {"group.id": group, "isolation.level": "read_uncommitted"})
        self._places = [TopicPartition(source, partition) for partition in range(partitions)]

    def __call__(self) -> int:
        return sum(self.by_partition().values())

    def by_partition(self) -> dict[int, int]:
        """Per partition."""
        return {place.partition: max(place.offset, 0) for place in self._consumer.committed(self._places, 10)}

    def close(self) -> None:
        """Free the client."""
        self._consumer.close()
