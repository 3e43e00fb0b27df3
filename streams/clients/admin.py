"""Topics and offsets, asked of and changed on the cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from streams.clients.settings import ClientSettings
from streams.topics import TopicSpec


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as it is. ``topic_id`` changes when a topic is deleted and made again."""

    name: str
    topic_id: str
    partitions: int
    replication_factor: int
    configs: dict[str, str]


class Watermarks(msgspec.Struct, frozen=True):
    """Offsets of one partition: first record that is left, last stable offset + 1 (LSO), end of the log (HW)."""

    start: int
    stable: int
    end: int


class PartitionLag(msgspec.Struct, frozen=True):
    """What a group has still to read: ``committed`` is ``None`` where the group has no offset."""

    partition: int
    committed: int | None
    start: int
    stable: int
    end: int
    lag: int


class TopicAdmin:
    """May be used by any thread. Every call is bounded by its timeout and raises ``BrokerUnavailable`` after it."""

    def __init__(self, settings: ClientSettings) -> None: ...

    def describe(self, names: Collection[str], timeout_seconds: float = 10.0) -> dict[str, TopicDescription | None]:
        """What is there; ``None`` for a topic that does not exist. Never creates one."""
        raise NotImplementedError

    def create(self, specs: Sequence[TopicSpec], timeout_seconds: float = 30.0) -> list[str]:
        """Create what is missing, wait until it can be used; the names of the new topics."""
        raise NotImplementedError

    def differences(self, specs: Sequence[TopicSpec], timeout_seconds: float = 10.0) -> list[str]:
        """How the cluster differs from ``specs``, one sentence per difference."""
        raise NotImplementedError

    def delete(self, names: Collection[str], timeout_seconds: float = 30.0) -> None:
        """Delete topics, wait until they are gone. Missing ones are no error."""
        raise NotImplementedError

    def watermarks(
        self, topic: str, partitions: Collection[int] | None = None, timeout_seconds: float = 10.0
    ) -> dict[int, Watermarks]:
        """Start, LSO and end of partitions (default: all)."""
        raise NotImplementedError

    def committed(self, group: str, topic: str, timeout_seconds: float = 10.0) -> dict[int, int]:
        """The group's committed offsets, stable ones; partitions without one are left out."""
        raise NotImplementedError

    def lag(self, group: str, topic: str, timeout_seconds: float = 10.0) -> list[PartitionLag]:
        """Committed offset, LSO and end of every partition of ``topic``."""
        raise NotImplementedError

    def close(self) -> None:
        """Free everything. Does not raise."""
        raise NotImplementedError
