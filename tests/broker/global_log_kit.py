"""What tests of global change logs need: a topic, somebody who writes transactions into it, and threads that end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from streams import GlobalChangeLog
from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.clients.transactional import TransactionalProducer
from streams.topics import TopicSpec
from tests.broker.outputs_kit import output

PATIENCE = 60.0
PARTITIONS = 3


class Writer:
    """Transactions into one topic. What blocks runs on a thread: the loop stays free."""

    def __init__(self, settings: ClientSettings, topic: str, name: str = "writer") -> None:
        self.topic = topic
        self.producer = TransactionalProducer(settings, f"{topic}.{name}", transaction_timeout_ms=60_000)
        self.producer.init(PATIENCE)

    def begin(self, *records: tuple[int, str, str | None]) -> None:
        """Open a transaction with (partition, key, value), all acknowledged."""
        self.producer.begin()
        for partition, key, value in records:
            data = None if value is None else value.encode()
            assert self.producer.produce(output(self.topic, data, key.encode(), partition, None))
        self.producer.flush(PATIENCE)

    def commit(self, *records: tuple[int, str, str | None]) -> None:
        if records:
            self.begin(*records)
        self.producer.commit(PATIENCE)

    def abort(self, *records: tuple[int, str, str | None]) -> None:
        if records:
            self.begin(*records)
        self.producer.abort(PATIENCE)


def create(admin: TopicAdmin, name: str, partitions: int = PARTITIONS, **configs: str) -> None:
    configs = {"cleanup.policy": "compact", **{key.replace("_", "."): value for key, value in configs.items()}}
    admin.create([TopicSpec(name=name, partitions=partitions, replication_factor=1, configs=configs)])


def log_over(settings: ClientSettings, topic: str, **more: Any) -> GlobalChangeLog:
    return GlobalChangeLog(topic, bootstrap_servers=settings.bootstrap_servers, **more)


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


def threads_end() -> None:
    """Wait until no thread of a global change log is left."""
    deadline = time.monotonic() + PATIENCE
    while any(thread.name in ("kes-tail", "kes-topic-questions") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
