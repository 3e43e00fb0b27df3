"""What the clients do while nothing answers, and afterwards. Each test has a broker of its own, to be killed."""

from __future__ import annotations

import logging
import time

import pytest

from streams.broker import KafkaBroker
from streams.clients.admin import TopicAdmin
from streams.clients.consumer import INPUT, LogConsumer
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.clients.transactional import TransactionalProducer
from streams.errors import BrokerUnavailable, TransactionFailed
from streams.records import IncomingRecord
from streams.testing.fixtures import OwnBroker
from streams.topics import TopicSpec
from tests.broker.outputs_kit import output

pytestmark = [pytest.mark.broker, pytest.mark.slow]

SECONDS = 40.0
SOON = 15.0
"""Far below the time limits of the clients' own (a minute and more), and more than a busy machine stands still for."""
TOPIC = TopicSpec(name="t", partitions=1, replication_factor=1)


def write(producer: TransactionalProducer, value: bytes) -> None:
    producer.begin()
    assert producer.produce(output("t", value, b"k", 0, None))
    producer.flush(SECONDS)
    producer.commit(SECONDS)


def poll_until(consumer: LogConsumer, count: int) -> list[bytes | None]:
    got: list[bytes | None] = []
    deadline = time.monotonic() + SECONDS
    while len(got) < count:
        assert time.monotonic() < deadline, f"{got}, wanted {count} records"
        for progress in consumer.poll_batch(0.1).values():
            got += [record.value for record in progress.records]
    return got


@pytest.mark.timeout(480)
@pytest.mark.nightly
def test_killed_and_restarted(own_broker: OwnBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streams.clients")
    kafka: KafkaBroker = own_broker(start_timeout=150.0)
    settings = ClientSettings(kafka.bootstrap_servers)
    admin = TopicAdmin(settings)
    admin.create([TOPIC])
    producer = TransactionalProducer(settings, "writer", transaction_timeout_ms=6_000)
    producer.init(SECONDS)
    write(producer, b"before")
    consumer = LogConsumer(settings, "t", INPUT)
    consumer.add(0, 0)
    assert poll_until(consumer, 1) == [b"before"]

    producer.begin()
    producer.produce(output("t", b"unsettled", b"k", 0, None))
    producer.flush(SECONDS)
    kafka.kill()

    began = time.monotonic()
    with pytest.raises(TransactionFailed) as caught:
        producer.commit(2)
    assert caught.value.kind == "unknown"
    assert time.monotonic() - began < SOON
    with pytest.raises(BrokerUnavailable, match=kafka.bootstrap_servers):
        admin.watermarks("t", timeout_seconds=1)
    late = TransactionalProducer(settings, "late", transaction_timeout_ms=6_000)
    began = time.monotonic()
    with pytest.raises(TransactionFailed) as caught:
        late.init(1)
    assert caught.value.kind == "unknown"
    assert time.monotonic() - began < SOON
    reader = PartitionReader(settings)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=kafka.bootstrap_servers):
        reader.read("t", {0: (0, 5)}, lambda *_: None, stalled_after_seconds=1, cancelled=lambda: False)
    assert time.monotonic() - began < SOON

    def warned() -> int:
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        return sum("input t" in text for text in warnings)

    deadline = time.monotonic() + SECONDS
    while not warned():
        assert time.monotonic() < deadline
        assert not consumer.poll_batch(0.05)
    for _ in range(20):
        assert not consumer.poll_batch(0.05)
    assert warned() == 1  # once, not once per attempt

    took = []
    for each in (producer, late):
        began = time.monotonic()
        each.close()
        took.append(time.monotonic() - began)
    assert min(took) < 0.5, took  # a machine that stands still does so for one of them

    kafka.restart()
    successor = TransactionalProducer(settings, "writer", transaction_timeout_ms=6_000)
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            successor.init(10)
            break
        except TransactionFailed:
            assert time.monotonic() < deadline
            successor.close()
            successor = TransactionalProducer(settings, "writer", transaction_timeout_ms=6_000)
    write(successor, b"after")
    # Unsettled when the broker died: the successor's init has decided it, one way for everybody.
    end = admin.watermarks("t", timeout_seconds=SECONDS)[0].end
    found: list[bytes | None] = []

    def receive(_partition: int, records: list[IncomingRecord]) -> None:
        found.extend(record.value for record in records)

    reader.read("t", {0: (0, end)}, receive, stalled_after_seconds=SECONDS, cancelled=lambda: False)
    assert found in ([b"before", b"after"], [b"before", b"unsettled", b"after"])
    assert poll_until(consumer, len(found) - 1) == found[1:]
    infos = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert sum("input t" in text and "answers again" in text for text in infos) == 1
    for client in (successor, consumer, reader, admin):
        client.close()
