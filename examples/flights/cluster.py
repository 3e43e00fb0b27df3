"""What the demo asks the broker: topics made, how far everybody is, what a topic holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import msgspec
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

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
from examples.topics import create_topics, ends
from streams.errors import BrokerUnavailable

SECONDS = 20.0
BATCH = 2_000

TOPICS = {FLIGHTS_TOPIC: FLIGHTS_PARTITIONS, FACTS_TOPIC: FACTS_PARTITIONS, BOARDS_TOPIC: BOARDS_PARTITIONS}
"""The topics of the demo with their partitions. (Changelogs are the event sources' own business.)"""
SOURCES = {AIRCRAFT_GROUP: FLIGHTS_TOPIC, BOARDS_GROUP: FACTS_TOPIC}
"""Who reads what."""
CHANGELOGS = {group: f"{group}.{topic}.changelog" for group, topic in SOURCES.items()}
"""Where each event source keeps its state."""


class Reach(msgspec.Struct, frozen=True):
    """How far a group is in its topic, by offsets, which count the markers of transactions, too."""

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

    def up_to(self, last: Mapping[int, int]) -> Reach:
        """The same without the markers behind the last records. Where all was written in one transaction, and no marker
        is before them, that counts records."""
        ends = {partition: offset + 1 for partition, offset in last.items()}
        committed = {number: min(offset, ends.get(number, 0)) for number, offset in self.committed.items()}
        return Reach(committed=committed, stable=ends)


class Cluster:
    """Questions to one broker; close it. One thread at a time. Raises ``BrokerUnavailable`` when there is no answer."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._servers = bootstrap_servers
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
        self._groups = {group: self._consumer(group, "read_uncommitted") for group in SOURCES}

    def close(self) -> None:
        """Let go of all connections."""
        for consumer in self._groups.values():
            consumer.close()

    def create_topics(self) -> None:
        """Make the topics of the demo."""
        create_topics(self._servers, TOPICS)

    def ends(self, topic: str, *, committed_only: bool = True) -> dict[int, int]:
        """The end of each partition: where transactions are settled, or with everything that was written."""
        try:
            return ends(self._admin, topic, committed_only=committed_only)
        except KafkaException as error:
            raise BrokerUnavailable(f"no ends of topic {topic} from {self._servers}: {error}") from error

    def reach(self, group: str) -> Reach:
        """How far ``group`` is. A transaction that is just being committed does not count yet."""
        topic = SOURCES[group]
        wanted = [TopicPartition(topic, number) for number in range(TOPICS[topic])]
        try:
            found = self._groups[group].committed(wanted, SECONDS)
        except KafkaException as error:
            raise BrokerUnavailable(f"no offsets of group {group} from {self._servers}: {error}") from error
        committed = {each.partition: each.offset for each in found if each.offset >= 0}
        return Reach(committed=committed, stable=self.ends(topic))

    def last_records(self, topic: str) -> dict[int, int]:
        """The offset of the last committed record of each partition that has one.

        Not the end minus one: what stands at the end may be markers, or records of aborted transactions. So the tail is
        read, from further and further back until a record is found.
        """
        found: dict[int, int] = {}
        missing = {number: end for number, end in self.ends(topic).items() if end > 0}
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
        ends = {number: end for number, end in self.ends(topic).items() if end > 0}
        return self._read(topic, dict.fromkeys(ends, 0), ends)

    def _read(self, topic: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[Message]:
        with contextlib.closing(self._consumer("flights-demo-check", "read_committed")) as consumer:
            waiting = dict(ends)
            consumer.assign([TopicPartition(topic, number, start) for number, start in starts.items()])
            while waiting:
                messages = consumer.consume(BATCH, 0.2)
                yield from (message for message in messages if _checked(message))
                # Positions, not records: what stands at the end may be a marker, which no consumer ever returns.
                for place in consumer.position([TopicPartition(topic, number) for number in waiting]):
                    if place.offset >= waiting[place.partition]:
                        del waiting[place.partition]

    def _consumer(self, group: str, isolation: str) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": group,  # to ask for its offsets; nobody joins it
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "log_level": 0,
            }
        )


def _checked(message: Message) -> bool:
    error = message.error()
    if error is not None:
        raise BrokerUnavailable(f"reading {message.topic()}[{message.partition()}]: {error}")
    return True
