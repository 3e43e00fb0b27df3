"""Create topics, and ask where their partitions end: with Kafka's own client, as any program can."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

SECONDS = 30.0

kafka_log = logging.getLogger("kafka")
"""Takes what Kafka's client would print on stderr itself (that a broker which has just started is still loading, say).
It is seen where logging is configured."""
kafka_log.addHandler(logging.NullHandler())


def create_topics(servers: str, partitions: Mapping[str, int], config: Mapping[str, str] | None = None) -> None:
    """Make topics of one replica each, and wait until they can be used. Those that exist stay as they are."""
    client = AdminClient({"bootstrap.servers": servers}, logger=kafka_log)
    wanted = [NewTopic(name, number, 1, config=dict(config or {})) for name, number in partitions.items()]
    for made in client.create_topics(wanted).values():
        error = made.exception(SECONDS)
        exists = isinstance(error, KafkaException) and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
        if error is not None and not exists:
            raise error
    deadline = time.monotonic() + SECONDS
    while missing := [name for name in partitions if not _serves(client, name)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Kafka at {servers}: topic {', '.join(missing)} cannot be used after {SECONDS:.0f} s")
        time.sleep(0.05)


def ends(client: AdminClient, topic: str, *, committed_only: bool = True) -> dict[int, int]:
    """The end of each partition: where transactions are settled, or with everything that was written."""
    isolation = IsolationLevel.READ_COMMITTED if committed_only else IsolationLevel.READ_UNCOMMITTED
    numbers = client.list_topics(timeout=SECONDS).topics[topic].partitions
    latest = {TopicPartition(topic, number): OffsetSpec.latest() for number in sorted(numbers)}
    asked = client.list_offsets(latest, isolation_level=isolation, request_timeout=SECONDS)
    return {place.partition: found.result(SECONDS).offset for place, found in asked.items()}


def _serves(client: AdminClient, topic: str) -> bool:
    """Whether every partition answers: a leader that was just elected may not know it yet."""
    try:
        return bool(ends(client, topic))
    except (KafkaException, KeyError):
        return False
