"""A real Kafka from ``pip`` alone, for development, tests and demos: ``with KafkaBroker() as kafka: ...``."""

from __future__ import annotations

from streams.broker.jars import Progress
from streams.broker.kafka_broker import KafkaBroker
from streams.broker.kafka_cluster import KafkaCluster, KafkaNode

__all__ = ["KafkaBroker", "KafkaCluster", "KafkaNode", "Progress"]
