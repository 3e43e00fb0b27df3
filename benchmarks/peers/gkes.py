"""The ancestor, go-kafka-event-source (GKES), with its own defaults.

Options, of its pool of producers: ``pool`` (3), ``pending`` (1), ``target`` (1,000), ``max`` (10,000), ``delay_ms``
(10). Its own store never reads its changelog back, so our program brings one that does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, ClassVar

from confluent_kafka import Consumer, TopicPartition

from benchmarks.peers.go_programs import GoProgram
from benchmarks.workload import Job


class Gkes(GoProgram):
    """An event source with a store."""

    name = "gkes"
    defaults = ("gkes",)
    options = ("pool", "pending", "target", "max", "delay_ms")
    modules: ClassVar = {
        "gkes": "github.com/aws/go-kafka-event-source/streams",
        "franz-go": "github.com/twmb/franz-go",
    }

    def progress(self, settings: Mapping[str, Any], job: Job) -> CommitLog:
        """It commits to a topic of its own."""
        return CommitLog(settings, f"gkes_commit_log_{job.group}")


class CommitLog:
    """How far a group of the ancestor is: its commit log has one record per partition and transaction, with the input's
    partition (8 bytes, then the topic) as key and the next offset (8 bytes) as value."""

    def __init__(self, settings: Mapping[str, Any], topic: str) -> None:
        own = {"group.id": topic, "isolation.level": "read_committed", "enable.auto.commit": False}
        self._consumer = Consumer({**settings, **own})
        self._topic = topic
        self._assigned = False
        self.offsets: dict[bytes, int] = {}

    def __call__(self) -> int:
        if not self._assigned:
            found = self._consumer.list_topics(timeout=10).topics.get(self._topic)
            if found is None:  # the program makes it
                return 0
            self._consumer.assign([TopicPartition(self._topic, partition, 0) for partition in found.partitions])
            self._assigned = True
        while messages := self._consumer.consume(1_000, 0.05):
            for message in messages:
                if message.error() is None:
                    self.hear(message.key() or b"", message.value() or b"")
        return sum(self.offsets.values())

    def hear(self, key: bytes, value: bytes) -> None:
        """One record; those that only mark a place (no offset in 8 bytes) say nothing."""
        if len(key) > 8 and len(value) == 8:
            (self.offsets[key],) = struct.unpack("<q", value)

    def close(self) -> None:
        """Free the client."""
        self._consumer.close()
