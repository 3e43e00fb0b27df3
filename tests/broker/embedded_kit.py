"""Records through an embedded broker or cluster, and whether its processes are there."""

from __future__ import annotations

import time

import psutil
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def make_topic(servers: str, name: str, partitions: int = 1) -> None:
    """Create a topic, replicated as the broker does by default."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    for done in admin.create_topics([NewTopic(name, partitions)]).values():
        done.result(30)


def produce(servers: str, topic: str, values: list[str], partitions: int = 1) -> None:
    """Produce to the partitions in turn, and wait for all acknowledgements."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
    for number, value in enumerate(values):
        producer.produce(topic, value.encode(), partition=number % partitions)
    assert producer.flush(60) == 0


def consume(servers: str, topic: str, count: int) -> list[str]:
    """Read so many records from the start."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"{topic}-{time.monotonic_ns()}",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    try:
        return [(message.value() or b"").decode() for message in consumer.consume(count, 60)]
    finally:
        consumer.close()
