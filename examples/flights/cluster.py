"""What the demo asks the broker: topics made, how far everybody is, what a topic holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import msgspec
from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from examples.flights.events import (
    AIRCRAFT_GROUP,
    BOARDS_GROUP,
    BOARDS_PARTITIONS,
    BOARDS_TOPIC,
    FACTS_PARTITIONS,
    FACTS_TOPIC,
    FLIGHTS_PARTITIONS,
    FLIGHTS_TOPIC,
)
from streams.errors import BrokerUnavailable

SECONDS = 20.0
BATCH = 2_000

TOPICS = {FLIGHTS_TOPIC: FLIGHTS_PARTITIONS, FACTS_TOPIC: FACTS_PARTITIONS, BOARDS_TOPIC: BOARDS_PARTITIONS}
"""The topics of the demo with their partitions. (Changelogs are the event sources' own business.)"""
SOURCES = {AIRCRAFT_GROUP: FLIGHTS_TOPIC, BOARDS_GROUP: FACTS_TOPIC}
"""Who reads what."""


class Reach(msgspec.Struct, frozen=True):
    """How far a group is in its topic. Offsets count markers of transactions too, so the lag is rounded up a little."""

    committed: dict[int, int]
    stable: dict[int, int]

    @property
    def done(self) -> int:
        return sum(self.committed.values())

    @property
    def total(self) -> int:
        return sum(self.stable.values())

    @property
    def lag(self) -> int:
        return sum(max(0, end - self.committed.get(partition, 0)) for partition, end in self.stable.items())


class Cluster:
    """Questions to one broker. Used by one thread. Raises ``BrokerUnavailable`` when there is no answer."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._servers = bootstrap_servers
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})

    def create_topics(self) -> None:
        """Make the topics of the demo, on a broker that has none of them."""
        made = self._admin.create_topics(
            [NewTopic(name, partitions, 1) for name, partitions in TOPICS.items()], operation_timeout=SECONDS
        )
        for future in made.values():
            future.result(SECONDS)

    def ends(self, topic: str, partitions: int, *, committed_only: bool = True) -> dict[int, int]:
        """The end of each partition: where transactions are settled, or with everything that was written."""
        isolation = IsolationLevel.READ_COMMITTED if committed_only else IsolationLevel.READ_UNCOMMITTED
        wanted = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(partitions)}
        answers = self._admin.list_offsets(wanted, isolation_level=isolation, request_timeout=SECONDS)
        return {partition.partition: answer.result(SECONDS).offset for partition, answer in answers.items()}

    def reach(self, group: str) -> Reach:
        """How far ``group`` is."""
        topic = SOURCES[group]
        wanted = [TopicPartition(topic, number) for number in range(TOPICS[topic])]
        answer = self._admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, wanted)], request_timeout=SECONDS
        )
        found = answer[group].result(SECONDS).topic_partitions or []
        committed = {each.partition: each.offset for each in found if each.offset != OFFSET_INVALID}
        return Reach(committed=committed, stable=self.ends(topic, TOPICS[topic]))

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0 if it does not exist."""
        found = self._admin.list_topics(timeout=SECONDS).topics.get(topic)
        return len(found.partitions) if found is not None else 0

    def last_records(self, topic: str, partitions: int) -> dict[int, int]:
        """The offset of the last committed record of each partition that has one.

        Not the end minus one: what stands at the end may be markers, or records of aborted transactions. So the tail is
        read, from further and further back until a record is found.
        """
        found: dict[int, int] = {}
        missing = {number: end for number, end in self.ends(topic, partitions).items() if end > 0}
        back = 10
        while missing:
            starts = {number: max(0, end - back) for number, end in missing.items()}
            for message in self._read(topic, starts, missing):
                number, offset = message.partition(), message.offset()
                if number is None or offset is None:
                    continue
                found[number] = max(found.get(number, 0), offset)
            missing = {number: end for number, end in missing.items() if number not in found and starts[number] > 0}
            back *= 20
        return found

    def read(self, topic: str) -> Iterator[Message]:
        """Every committed record of ``topic`` from the start to the present end; in order within a partition."""
        ends = {number: end for number, end in self.ends(topic, self.partitions(topic)).items() if end > 0}
        return self._read(topic, dict.fromkeys(ends, 0), ends)

    def _read(self, topic: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[Message]:
        consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "flights-demo-check",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )
        with contextlib.closing(consumer):
            waiting = dict(ends)
            consumer.assign([TopicPartition(topic, number, start) for number, start in starts.items()])
            while waiting:
                messages = consumer.consume(BATCH, 0.2)
                yield from (message for message in messages if _checked(message))
                # Positions, not records: what stands at the end may be a marker, which no consumer ever returns.
                for place in consumer.position([TopicPartition(topic, number) for number in waiting]):
                    if place.offset >= waiting[place.partition]:
                        del waiting[place.partition]


def _checked(message: Message) -> bool:
    error = message.error()
    if error is not None:
        raise BrokerUnavailable(f"reading {message.topic()}[{message.partition()}]: {error}")
    return True
