"""Questions about the source topic when it lives on another cluster than the group, the state and the outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from streams.clients.kafka_python_client import KafkaPythonClient
from streams.clients.takeover import KafkaPythonTakeOver
from streams.topics import TopicIdentity

_CLOSE_SECONDS = 2.0


class SourceLog:
    """``runtime.ports.SourceLog`` on a connection of its own. ``security`` are kafka-python settings. Making one starts
    a thread and does no I/O; the methods block, and any thread may call them. Raises ``ConfigError`` for
    addresses that are none."""

    def __init__(self, bootstrap_servers: str, client_id: str, security: Mapping[str, Any]) -> None:
        self._client = KafkaPythonClient(bootstrap_servers, client_id, security)
        self._client.start()
        self._questions = KafkaPythonTakeOver(self._client, "", "")

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        return self._questions.log_range(topic, partitions, deadline)

    def identity(self, topic: str, deadline: float) -> TopicIdentity:
        return self._questions.identity(topic, deadline)

    def close(self) -> None:
        """End the thread and the connection; blocks for a moment."""
        self._client.close(_CLOSE_SECONDS)
