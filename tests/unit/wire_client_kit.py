"""Our client of a cluster and the one that it follows, for tests of both: how each is made and asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from streams.kafka.wire import codes, kafka_python_client
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.kafka_python import MetadataRequest as TheirMetadata
from streams.kafka.wire.kafka_python_client import KafkaPythonClient
from streams.kafka.wire.kafka_python_settings import security_of
from streams.kafka.wire.schemas.metadata import MetadataRequest
from streams.kafka.wire.security import Security

NOBODY = "127.0.0.1:1"
SECRET = "planted-secret"


class Ours:
    """How our client is made and asked. ``made`` are closed at the end of a test."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def client(self, servers: str, settings: dict[str, Any] | None = None) -> Any:
        client = WireClient(servers, "me", Security.of(settings or {}))
        self.made.append(client)
        client.start()
        return client

    def topics(self, *names: str) -> Any:
        named = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
        return MetadataRequest(topics=named, allow_auto_topic_creation=False)

    raise_for: Callable[..., None] = staticmethod(codes.raise_for)

    def close(self) -> None:
        for client in self.made:
            client.close(2.0)


class Theirs(Ours):
    """How the one over kafka-python is."""

    def client(self, servers: str, settings: dict[str, Any] | None = None) -> Any:
        client = KafkaPythonClient(servers, "me", security_of(settings or {}))
        self.made.append(client)
        client.start()
        return client

    def topics(self, *names: str) -> Any:
        named = [TheirMetadata.MetadataRequestTopic(name=name) for name in names]
        flags = {"include_cluster_authorized_operations": False, "include_topic_authorized_operations": False}
        return TheirMetadata(topics=named, allow_auto_topic_creation=False, min_version=10, **flags)

    raise_for: Callable[..., None] = staticmethod(kafka_python_client.raise_for)


async def asked(
    stack: Ours, client: Any, *topics: str, seconds: float = 20.0, node: int | None = None, **options: Any
) -> Any:
    """The metadata of topics, asked for on a thread."""
    deadline = time.monotonic() + seconds

    async def attempt() -> Any:
        answer = await client.send(stack.topics(*topics), node, deadline)
        for topic in answer.topics:
            stack.raise_for(topic.error_code)
        return answer

    return await asyncio.to_thread(client.ask, "asking for topics", deadline, attempt, **options)
