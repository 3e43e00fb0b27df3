"""Settings of the producer, from the librdkafka settings of the event source: one set serves all clients.

A setting that only librdkafka's producer has is refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from streams.errors import ConfigError
from streams.kafka.wire.compression import Compression, compression_of
from streams.kafka.wire.security import Security
from streams.records import DEFAULT_MESSAGE_LIMIT
from streams.settings.sources import checked_addresses

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
    """Settings that the slots of one event source share."""

    bootstrap_servers: str
    client_id: str
    security: Security
    message_limit: int
    compression: Compression | None

    @classmethod
    def of(cls, bootstrap_servers: str, client_id: str, client_settings: Mapping[str, object]) -> ProducerSettings:
        """Read the settings of an event source. Raises ``ConfigError``."""
        checked_addresses(bootstrap_servers)
        for name, advice in OF_LIBRDKAFKA_S_PRODUCER.items():
            if name in client_settings:
                raise ConfigError(f"the kafka setting {name!r} has no effect on transactions: {advice}")
        return cls(
            bootstrap_servers,
            client_id,
            Security.of(client_settings),
            int(str(client_settings.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT))),
            compression_of(client_settings),
        )
