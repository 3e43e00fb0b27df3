"""Records as the transaction pool hands them to a producer."""

from __future__ import annotations

from streams.records import Headers, Output


def output(
    topic: str,
    value: bytes | None,
    key: bytes | None,
    partition: int = -1,
    headers: Headers | None = None,
    timestamp_ms: int = 0,
) -> Output:
    """One that comes from nowhere in particular."""
    return Output(topic, value, key, headers, partition, timestamp_ms, 0, 0)
