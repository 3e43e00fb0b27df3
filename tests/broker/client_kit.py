"""A topic on a real broker: transactions into it, and what a consumer of logs gets from it."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from streams.errors import StreamsError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.consumer import LogConsumer
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import raise_for
from streams.kafka.wire.schemas.init_producer_id import InitProducerIdRequest
from streams.kafka.wire.schemas.produce import ProduceRequest
from streams.kafka.writing.rows import Rows
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord
from tests.unit.waiting import wait_until

PATIENCE = 60.0
Row = tuple[int, str, str | None]
"""Partition, key, value."""


def rows(partition: int, *values: str) -> list[Row]:
    return [(partition, "k", value) for value in values]


def numbers(first: int, end: int) -> list[str]:
    return [str(number) for number in range(first, end)]


def as_librdkafka(group: str, generation: int = -1, member_id: str = "", instance: str | None = None) -> bytes:
    """Group metadata as librdkafka's producer takes it (``CGMDv2``); without a member, offsets are not fenced by it."""
    member = b"CGMDv2:" + struct.pack("=i", generation) + f"{group}\0{member_id}\0".encode()
    return member + (b"\1" if instance is None else f"\0{instance}\0".encode())


class Writer:
    """Transactions into one topic. Every call blocks."""

    def __init__(self, settings: ClientSettings, topic: str, name: str = "writer") -> None:
        self.topic = topic
        servers = {"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{topic}.{name}"}
        self.producer = Producer({**servers, "retry.backoff.ms": 5})
        self.producer.init_transactions(PATIENCE)

    def begin(self, *records: Row) -> None:
        """Open a transaction with these records, all acknowledged."""
        self.producer.begin_transaction()
        for partition, key, value in records:
            self.producer.produce(self.topic, value, key, partition, headers=[("h", b"x")])
        assert not self.producer.flush(PATIENCE)

    def commit(self, *records: Row) -> None:
        """End the open transaction, or make one of these records."""
        if records:
            self.begin(*records)
        self.producer.commit_transaction(PATIENCE)

    def abort(self, *records: Row) -> None:
        if records:
            self.begin(*records)
        self.producer.abort_transaction(PATIENCE)


@contextlib.contextmanager
def writing(settings: ClientSettings, topic: str, name: str = "writer") -> Iterator[Writer]:
    writer = Writer(settings, topic, name)
    try:
        yield writer
    finally:
        del writer.producer  # closes it


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

    def __init__(self, consumer: LogConsumer | LogFetcher) -> None:
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


def leave_hanging(client: WireClient, topic: str, partition: int = 0, producer: tuple[int, int] | None = None) -> int:
    """A produce request of which no coordinator hears, so that none writes a marker there: of a transaction that is
    open under this producer id and epoch elsewhere, or of none. Returns its offset."""
    deadline = time.monotonic() + PATIENCE

    async def work() -> int:
        await client.connected(deadline)
        request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1000, producer_id=-1)
        new = await client.send(request, None, deadline, most=4)
        producer_id, epoch = producer or (new.producer_id, new.producer_epoch)
        rows = Rows()
        rows.add(int(time.time() * 1000), b"late", b"1", b"\0", 0)
        [batch] = rows.batches()
        of = ProduceRequest.TopicProduceData
        records = b"".join(batch.encode(producer_id, epoch, 0, None))
        data = of(name=topic, partition_data=[of.PartitionProduceData(index=partition, records=records)])
        late = ProduceRequest(transactional_id="zombie", acks=-1, timeout_ms=5000, topic_data=[data])
        [answer] = (await client.send(late, None, deadline, most=11)).responses[0].partition_responses
        raise_for(answer.error_code)
        return answer.base_offset

    return client.call(work, deadline)


def read_topic(settings: ClientSettings, topic: str, *, stable: bool = False) -> dict[int, list[IncomingRecord]]:
    """Return all committed records, by partition. ``stable``: those below the first open transaction; else there is
    none."""
    with contextlib.closing(TopicAdmin(settings)) as admin, contextlib.closing(PartitionReader(settings)) as reader:
        marks = sorted(admin.watermarks(topic).items())
        ranges = {number: (mark.start, mark.stable if stable else mark.end) for number, mark in marks}
        found = reader.read_all(topic, ranges, stalled_after_seconds=60.0)
    return {number: found.get(number, []) for number in ranges}


def trim(admin: TopicAdmin, topic: str, before: Mapping[int, int] | None = None) -> None:
    """Delete the records of a compacted topic, those before these offsets or all. Brokers do so only where a topic may
    lose any, so its policy is another one meanwhile."""
    client = AdminClient({"bootstrap.servers": admin._settings.bootstrap_servers})

    def set_policy(policy: str) -> None:
        entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
        change = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        client.incremental_alter_configs([change])[change].result(30)

    if before is None:
        before = {number: mark.end for number, mark in admin.watermarks(topic).items()}
    ends = [TopicPartition(topic, number, offset) for number, offset in before.items()]

    def is_trimmed() -> bool:
        try:
            return all(future.result(30) for future in client.delete_records(ends).values())
        except KafkaException as error:
            if error.args[0].code() != KafkaError.POLICY_VIOLATION:  # the broker does not know of the change yet
                raise
            return False

    set_policy("compact,delete")
    wait_until(is_trimmed, "the records are deleted")
    set_policy("compact")
