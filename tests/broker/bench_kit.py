"""What the tests of one program on a real broker need: the topics of a group, what is in them, and its processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Producer

from streams.errors import BrokerUnavailable
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.records import TYPE_HEADER, IncomingRecord
from tests.broker.battery_kit import Worker
from tests.broker.client_kit import read_topic


class Bench:
    """The topics of one test, and what is in them. ``worker``: a process of its program. Those that were started are
    killed at the end."""

    worker: type[Worker]
    inputs: Sequence[str] = ()

    def __init__(self, bootstrap: str, group: str, folder: Path) -> None:
        self.bootstrap, self.group = bootstrap, group
        self._folder = folder
        self._started: list[Worker] = []
        self.settings = ClientSettings(bootstrap, {}, client_id="bench")
        self.admin = TopicAdmin(self.settings)
        options = {"enable.idempotence": True, "queue.buffering.max.messages": 200_000, "log_level": 0}
        self._producer = Producer({"bootstrap.servers": bootstrap, **options})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._started:
            worker.kill()
        self.admin.close()

    def make(self, *names: str, partitions: int, **configs: str) -> None:
        """Create topics. ``configs``: with ``_`` for each dot."""
        given = {name.replace("_", "."): value for name, value in configs.items()}
        specs = [TopicSpec(name=name, partitions=partitions, replication_factor=1, configs=given) for name in names]
        self.admin.create(specs, 30.0)

    def produce(self, topic: str, value: bytes | None, key: str, partition: int, event: bytes | None = None) -> None:
        """Hand a record to the producer. ``event``: its name."""
        headers: Any = None if event is None else [(TYPE_HEADER, event)]
        self._producer.produce(topic, value, key, partition, headers=headers)

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    def handled(self) -> int:
        """Records of the inputs below the group's offsets, -1 while a transaction hides them."""
        try:
            return sum(sum(self.admin.committed(self.group, topic, 5.0).values()) for topic in self.inputs)
        except BrokerUnavailable:
            return -1

    def read(self, topic: str, *, stable: bool = False) -> dict[int, list[IncomingRecord]]:
        return read_topic(self.settings, topic, stable=stable)

    def start(self, name: str, **environment: str) -> Worker:
        self._started.append(self.worker(self.bootstrap, self.group, name, self._folder, **environment))
        return self._started[-1]
