"""Stands in for confluent-kafka's consumer in tests of what is built on it."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition


class ScriptedConsumer:
    """Returns what the test put into ``messages``, and remembers what it was told."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.assigned: list[tuple[int, int]] = []
        self.unassigned: list[int] = []
        self.asked: list[str] = []
        self.answers = True

    def list_topics(self, topic: str, _timeout: float) -> None:
        self.asked.append(topic)
        if not self.answers:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def poll(self, _timeout: float) -> Any:
        return self.messages.pop(0) if self.messages else None

    def consume(self, limit: int, _timeout: float) -> list[Any]:
        taken, self.messages = self.messages[:limit], self.messages[limit:]
        return taken

    def incremental_assign(self, positions: list[TopicPartition]) -> None:
        self.assigned += [(position.partition, position.offset) for position in positions]

    def incremental_unassign(self, positions: list[TopicPartition]) -> None:
        self.unassigned += [position.partition for position in positions]

    def close(self) -> None: ...
