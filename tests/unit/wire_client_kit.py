"""Clients of a cluster, for their tests: how they are made and asked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from streams.kafka.wire.client import WireClient
from streams.kafka.wire.codes import raise_for
from streams.kafka.wire.schemas.metadata import MetadataRequest
from streams.kafka.wire.security import Security

NOBODY = "127.0.0.1:1"
SECRET = "planted-secret"


class Ours:
    """How a client is made and asked. ``made`` are closed at the end of a test."""

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

    def close(self) -> None:
        for client in self.made:
            client.close(2.0)


async def asked(ours: Ours, client: Any, *topics: str, seconds: float = 20.0, node: int | None = None) -> Any:
    """The metadata of topics, asked for on a thread."""
    deadline = time.monotonic() + seconds

    async def attempt() -> Any:
        answer = await client.send(ours.topics(*topics), node, deadline)
        for topic in answer.topics:
            raise_for(topic.error_code)
        return answer

    return await asyncio.to_thread(client.ask, "asking for topics", deadline, attempt)
