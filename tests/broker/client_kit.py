"""A topic on a real broker: transactions into it, and what a consumer of logs gets from it."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from streams.clients.admin import TopicAdmin
from streams.clients.consumer import LogConsumer
from streams.clients.settings import ClientSettings
from streams.clients.transactional import TransactionalProducer
from streams.errors import StreamsError
from streams.records import Headers, IncomingRecord, Output
from streams.topics import TopicSpec

PATIENCE = 60.0
Row = tuple[int, str, str | None]
"""Partition, key, value."""


def output(
    topic: str,
    value: bytes | None,
    key: bytes | None,
    partition: int = -1,
    headers: Headers | None = None,
    timestamp_ms: int = 0,
) -> Output:
    """A record as the transaction pool hands it to a producer, from nowhere in particular."""
    return Output(topic, value, key, headers, partition, timestamp_ms, 0, 0)


def rows(partition: int, *values: str) -> list[Row]:
    return [(partition, "k", value) for value in values]


def numbers(first: int, end: int) -> list[str]:
    return [str(number) for number in range(first, end)]


def group_metadata(group: str, generation: int = -1, member: str = "") -> bytes:
    """librdkafka's serialised group metadata. Generation -1 with no member is what the broker does not fence."""
    return b"CGMDv2:" + struct.pack("=i", generation) + group.encode() + b"\0" + member.encode() + b"\0\1"


class Writer:
    """Transactions into one topic. Every call blocks."""

    def __init__(self, settings: ClientSettings, topic: str, name: str = "writer") -> None:
        self.topic = topic
        self.producer = TransactionalProducer(settings, f"{topic}.{name}", transaction_timeout_ms=60_000)
        self.producer.init(PATIENCE)

    def begin(self, *records: Row) -> None:
        """Open a transaction with these records, all acknowledged."""
        self.producer.begin()
        for partition, key, value in records:
            data = None if value is None else value.encode()
            assert self.producer.produce(output(self.topic, data, key.encode(), partition, [("h", b"x")]))
        self.producer.flush(PATIENCE)

    def commit(self, *records: Row) -> None:
        """End the open transaction, or make one of these records."""
        if records:
            self.begin(*records)
        self.producer.commit(PATIENCE)

    def abort(self, *records: Row) -> None:
        if records:
            self.begin(*records)
        self.producer.abort(PATIENCE)


@contextlib.contextmanager
def writing(settings: ClientSettings, topic: str, name: str = "writer") -> Iterator[Writer]:
    writer = Writer(settings, topic, name)
    try:
        yield writer
    finally:
        writer.producer.close()


def create(admin: TopicAdmin, name: str, partitions: int = 3, **configs: str) -> None:
    configs = {key.replace("_", "."): value for key, value in configs.items()}
    admin.create([TopicSpec(name=name, partitions=partitions, replication_factor=1, configs=configs)])


def truncate(settings: ClientSettings, topic: str, partition: int, offset: int) -> None:
    """As retention does it."""
    client = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    for future in client.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(PATIENCE)


class Received:
    """What a consumer has returned so far, by partition; each record once, in order, at positions that only grow."""

    def __init__(self, consumer: LogConsumer) -> None:
        self.consumer = consumer
        self.records: dict[int, list[IncomingRecord]] = {}
        self.position: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.at_end: set[int] = set()
        self.failures: dict[int, StreamsError] = {}

    def values(self, partition: int) -> list[str]:
        return [(record.value or b"").decode() for record in self.records.get(partition, [])]

    def poll(self, limit: int = 500) -> None:
        for partition, progress in self.consumer.poll_batch(0.05, limit).items():
            assert progress.position >= self.position.get(partition, 0)
            assert all(record.partition == partition for record in progress.records)
            self.records.setdefault(partition, []).extend(progress.records)
            self.position[partition], self.end[partition] = progress.position, progress.end
            (self.at_end.add if progress.at_end else self.at_end.discard)(partition)
        self.failures.update(self.consumer.take_failures())

    def until(self, condition: Callable[[], Any], limit: int = 500) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, vars(self)
            self.poll(limit)
