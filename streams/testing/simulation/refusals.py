"""Refusals of clients and brokers and their texts: as librdkafka and Kafka with their defaults."""

from __future__ import annotations

import re
from typing import Any, Final

from streams.errors import RecordRefused
from streams.records import HEADER_OVERHEAD, RECORD_OVERHEAD, Headers, shown_key

TOPIC_LIMIT: Final = 1_048_588
"""``max.message.bytes`` of topics, by default."""
_AHEAD_MS: Final = 3_600_000
"""``message.timestamp.after.max.ms``, by default."""
_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")


def is_name(topic: str) -> bool:
    """Check whether a topic may be called so."""
    return _NAME.fullmatch(topic) is not None


def check_record(
    topic: str, partition: int, count: int, key: Any, value: Any, headers: Headers | None, limit: int, timestamp_ms: Any
) -> None:
    """Refuse a record as a client does, for a topic with ``count`` partitions. Raises ``RecordRefused``,
    ``TypeError``."""
    if not isinstance(timestamp_ms, int):
        raise TypeError(f"'{type(timestamp_ms).__name__}' object cannot be interpreted as an integer")
    size = RECORD_OVERHEAD
    for data in (value, key):
        if data is not None and not isinstance(data, (bytes, bytearray, memoryview, str)):
            raise TypeError(f"a bytes-like object is required, not '{type(data).__name__}'")
        size += 0 if data is None else len(data)
    for name, data in headers or ():
        if data is not None and not isinstance(data, (bytes, str)):
            raise TypeError(f"expected header value to be None, binary, or unicode string, not {type(data).__name__}")
        size += HEADER_OVERHEAD + len(name) + len(data or b"")
    if size > limit:
        raise _refusal(topic, partition, key, "MSG_SIZE_TOO_LARGE", "Broker: Message size too large")
    if partition >= count and is_name(topic):
        raise _refusal(topic, partition, key, "_UNKNOWN_PARTITION", "Local: Unknown partition")


def _refusal(topic: str, partition: int, key: bytes | None, name: str, text: str) -> RecordRefused:
    where = topic if partition < 0 else f"{topic}[{partition}]"
    return RecordRefused(f"{where}, key {shown_key(key)}: {name}: Unable to produce message: {text}")


def broker_refusal(topic: str, partition: int, size: int, timestamp_ms: int, now_ms: int, limit: int) -> str | None:
    """Return the error name for a record of so many bytes in a topic with this limit; ``None``: it is written.
    ``timestamp_ms`` 0: now."""
    if not is_name(topic):
        return "Broker: Invalid topic"
    if partition < 0:
        return "Local: Unknown partition"
    if size > limit:
        return "Broker: Message size too large"
    if timestamp_ms > now_ms + _AHEAD_MS and now_ms > 0:
        return "Broker: Invalid timestamp"
    return None
