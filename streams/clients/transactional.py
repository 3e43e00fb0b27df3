"""One slot of the transaction pool: a producer with a stable transactional id."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from streams.clients.settings import ClientSettings
from streams.records import Headers, Record


class RefusedDelivery(NamedTuple):
    """A record that the broker (or the client) will not take, whatever is tried: the fault of the record or its topic."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    code: str
    reason: str


class TransactionalProducer:
    """See the methods for who may call them."""

    def __init__(self, settings: ClientSettings, transactional_id: str, *, transaction_timeout_ms: int) -> None:
        self.transactional_id = transactional_id
        self.refused: list[RefusedDelivery] = []

    def init(self, timeout_seconds: float) -> None:
        """Settle what an earlier producer with this id left open, and fence it. Blocks."""
        raise NotImplementedError

    def warm_up(self, topics: Collection[str], timeout_seconds: float) -> None:
        """Take the first-time costs now, so that the first real transaction does not stall. Blocks."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start a transaction. Local."""
        raise NotImplementedError

    def produce(self, record: Record) -> bool:
        """Queue a record; ``False``: the local queue is full, try again after ``poll``. Never blocks."""
        raise NotImplementedError

    def produce_raw(
        self, topic: str, value: bytes | None, key: bytes | None, partition: int, headers: Headers | None
    ) -> bool:
        """``produce`` without the ``Record``; ``partition=-1`` lets the key decide."""
        raise NotImplementedError

    def poll(self) -> None:
        """Serve callbacks. Never blocks."""
        raise NotImplementedError

    def flush(self, timeout_seconds: float) -> None:
        """Wait until every record is acknowledged. Blocks."""
        raise NotImplementedError

    def send_offsets(self, topic: str, offsets: Mapping[int, int], metadata: bytes, timeout_seconds: float) -> None:
        """Add offsets, fenced by the group metadata. Blocks, perhaps for longer than the timeout."""
        raise NotImplementedError

    def commit(self, timeout_seconds: float) -> None:
        """End the transaction. Blocks."""
        raise NotImplementedError

    def abort(self, timeout_seconds: float) -> None:
        """Abort the transaction. Blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the producer: never raises, never flushes, never blocks for long."""
        raise NotImplementedError
