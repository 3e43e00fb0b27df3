"""A real Kafka from ``pip`` alone, for development, tests and demos: ``with KafkaBroker() as kafka: ...``."""

from __future__ import annotations

from streams.broker.kafka_broker import KafkaBroker
from streams.broker.kafka_cluster import KafkaCluster, KafkaNode
from streams.broker.progress import Progress

__all__ = ["KafkaBroker", "KafkaCluster", "KafkaNode", "Progress"]
