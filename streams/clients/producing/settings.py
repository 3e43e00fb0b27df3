"""Settings of the wire producer, from the librdkafka settings of the event source: one set serves all clients.

A setting that only librdkafka's producer has is refused by name, never dropped. Batches are compressed by gzip of the
standard library, or by cramjam (extra ``compression``).
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from streams.clients import kafka_python_settings
from streams.clients.kafka_python_client import check_addresses
from streams.errors import ConfigError
from streams.records import DEFAULT_MESSAGE_LIMIT

OF_LIBRDKAFKA_S_PRODUCER: Final = {
    "linger.ms": "use PoolConfig.batch_delay_seconds",
    "queue.buffering.max.ms": "use PoolConfig.batch_delay_seconds",
    "queue.buffering.max.messages": "use PoolConfig.max_batch_size",
    "queue.buffering.max.kbytes": "use PoolConfig.max_batch_bytes",
    "queue.buffering.backpressure.threshold": "it has no counterpart",
    "batch.size": "a batch is as large as the topic takes",
    "batch.num.messages": "a batch is as large as the topic takes",
    "request.timeout.ms": "use the call_timeout_seconds setting",
    "retry.backoff.ms": "it has no counterpart",
    "retry.backoff.max.ms": "it has no counterpart",
    "max.in.flight": "one request of a broker is under way for each transaction",
    "max.in.flight.requests.per.connection": "one request of a broker is under way for each transaction",
    "sticky.partitioning.linger.ms": "records without a key of one transaction go to one partition",
}


class ProducerSettings(NamedTuple):
    """Settings that the slots of one event source share. ``security``: kafka-python's (``kafka_python_settings``)."""

    bootstrap_servers: str
    client_id: str
    security: Mapping[str, Any]
    message_limit: int
    compression: Compression | None

    @classmethod
    def of(cls, bootstrap_servers: str, client_id: str, client_settings: Mapping[str, object]) -> ProducerSettings:
        """Read the settings of an event source. Raises ``ConfigError``."""
        check_addresses(bootstrap_servers)
        for name, advice in OF_LIBRDKAFKA_S_PRODUCER.items():
            if name in client_settings:
                raise ConfigError(f"the kafka setting {name!r} has no effect on transactions: {advice}")
        return cls(
            bootstrap_servers,
            client_id,
            kafka_python_settings.security_of(client_settings),
            int(str(client_settings.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT))),
            compression_of(client_settings),
        )


class Compression(NamedTuple):
    """One codec. ``attribute``: its number in the attributes of a batch."""

    attribute: int
    compress: Callable[[bytes], bytes]


_ATTRIBUTES: Final = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_DEFAULT_LEVELS: Final = {"gzip": 6, "lz4": 1, "zstd": 3}  # those of librdkafka
_LZ4_HEAD: Final = bytes.fromhex("04224d18607073")  # independent blocks of at most 4 MiB, no checksums but the head's
_LZ4_BLOCK: Final = 4 * 1024 * 1024
_NAMES: Final = ("compression.type", "compression.codec")


def compression_of(settings: Mapping[str, object]) -> Compression | None:
    """Choose the codec of a producer's settings (``compression.type``, ``compression.level``); ``None``: none.

    Raises ``ConfigError`` for a codec that is not known, or needs the extra.
    """
    name = next((str(settings[setting]) for setting in _NAMES if setting in settings), "none")
    if name in ("none", "inherit"):
        return None
    if name not in _ATTRIBUTES:
        raise ConfigError(f"compression.type must be none, gzip, snappy, lz4 or zstd, not {name!r}")
    level = int(str(settings.get("compression.level", -1)))
    level = _DEFAULT_LEVELS.get(name, 0) if level < 0 else level
    if name == "gzip":
        return Compression(_ATTRIBUTES[name], lambda data: gzip.compress(data, compresslevel=level, mtime=0))
    try:
        codec = getattr(import_module("cramjam"), name)
    except ImportError:
        raise ConfigError(
            f"compression.type={name} needs pip install 'kafka-event-source[compression]'; gzip needs nothing"
        ) from None
    if name == "snappy":
        return Compression(_ATTRIBUTES[name], lambda data: bytes(codec.compress_raw(data)))
    if name == "lz4":
        return Compression(_ATTRIBUTES[name], lambda data: _lz4_frame(data, codec.compress_block))
    return Compression(_ATTRIBUTES[name], lambda data: bytes(codec.compress(data, level)))


def _lz4_frame(data: bytes, compress_block: Callable[..., bytes]) -> bytes:
    """Make a frame whose blocks do not depend on each other: Kafka's brokers read no others."""
    pieces = [_LZ4_HEAD]
    for start in range(0, len(data), _LZ4_BLOCK):
        block = data[start : start + _LZ4_BLOCK]
        packed = bytes(compress_block(block, store_size=False))
        is_smaller = len(packed) < len(block)
        pieces.append(struct.pack("<I", len(packed) if is_smaller else len(block) | 1 << 31))  # the bit: not compressed
        pieces.append(packed if is_smaller else block)
    return b"".join([*pieces, struct.pack("<I", 0)])
