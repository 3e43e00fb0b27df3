"""The consumer of a source's input: some partitions of one topic, assigned by hand."""

from __future__ import annotations

from collections.abc import Collection

from streams.clients.settings import ClientSettings
from streams.records import IncomingRecord


class InputConsumer:
    """``read_committed``; owned by one thread."""

    def __init__(self, settings: ClientSettings, topic: str, *, fetch_wait_ms: int = 20) -> None:
        self.topic = topic

    def add(self, partition: int, offset: int) -> None:
        """Start reading ``partition`` at ``offset``."""
        raise NotImplementedError

    def remove(self, partitions: Collection[int]) -> None:
        """Stop reading; no record of these partitions is returned any more."""
        raise NotImplementedError

    def pause(self, partitions: Collection[int]) -> None:
        """Fetch nothing for these partitions until ``resume``."""
        raise NotImplementedError

    def resume(self, partitions: Collection[int]) -> None:
        """Undo ``pause``."""
        raise NotImplementedError

    def poll_batch(self, timeout_seconds: float, limit: int = 500) -> dict[int, list[IncomingRecord]] | None:
        """Wait for one record, take what else is there; ``None``: nothing came in time."""
        raise NotImplementedError

    def close(self) -> None:
        """Free everything. Does not raise."""
        raise NotImplementedError
