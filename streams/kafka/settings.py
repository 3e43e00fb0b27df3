"""Configurations of librdkafka's clients, from the user's settings of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from confluent_kafka import KafkaException, Producer

from streams.errors import ConfigError
from streams.kafka.connection import ConnectionLog
from streams.kafka.translate import error_of
from streams.model.partitioners import NullKeys, PartitionerName
from streams.settings.sources import checked_addresses

C = TypeVar("C")

_EXACTLY_ONCE = "exactly-once rests on it"
_OWN = "the toolkit sets it"
RESERVED: Final[Mapping[str, str]] = {
    "bootstrap.servers": "use the bootstrap_servers setting",
    "metadata.broker.list": "use the bootstrap_servers setting",
    "client.id": _OWN,
    "group.id": "use the group_id setting",
    "group.instance.id": "the group is joined by another client",
    "group.protocol": "the group is joined by another client",
    "group.remote.assignor": "the group is joined by another client",
    "partition.assignment.strategy": "the group is joined by another client",
    "session.timeout.ms": "the group is joined by another client: use the session_timeout_seconds setting",
    "heartbeat.interval.ms": "the group is joined by another client",
    "max.poll.interval.ms": "the group is joined by another client",
    "transactional.id": "it names a slot of the transaction pool, and fencing rests on it",
    "transaction.timeout.ms": "use the transaction_timeout_seconds setting: it must stay below the session timeout",
    "message.timeout.ms": "it follows from the transaction_timeout_seconds setting",
    "delivery.timeout.ms": "it follows from the transaction_timeout_seconds setting",
    "enable.idempotence": _EXACTLY_ONCE,
    "enable.gapless.guarantee": _EXACTLY_ONCE,
    "acks": _EXACTLY_ONCE,
    "request.required.acks": _EXACTLY_ONCE,
    "retries": _EXACTLY_ONCE,
    "message.send.max.retries": _EXACTLY_ONCE,
    "isolation.level": _EXACTLY_ONCE,
    "enable.auto.commit": _EXACTLY_ONCE,
    "auto.commit.enable": _EXACTLY_ONCE,
    "auto.commit.interval.ms": _EXACTLY_ONCE,
    "enable.auto.offset.store": _EXACTLY_ONCE,
    "auto.offset.reset": "a lost position is an error; where a new partition starts is the auto_offset_reset setting",
    "enable.partition.eof": _OWN,
    "partitioner": "use that of EventProducer or source.output: keys go to the partitions where Java clients and Spark "
    "look for them (murmur2)",
    "partitioner_cb": "keys must go to the partitions where Java clients and Spark look for them (murmur2)",
    "delivery.report.only.error": _OWN,
    "allow.auto.create.topics": "topics are made by the toolkit, with the settings that they need",
    "on_delivery": _OWN,
    "on_commit": _OWN,
    "dr_cb": _OWN,
    "dr_msg_cb": _OWN,
    "error_cb": _OWN,
    "log_cb": _OWN,
    "logger": _OWN,
    "log.queue": _OWN,
    "test.mock.num.brokers": "a mock cluster knows no transactions: it shows aborted records",
}
"""Keys of librdkafka that overrides may not have, and why."""

_SECRET_PARTS: Final = ("pass", "secret", "token", ".key", "key.pem", "credential", "jaas")
_SHOWN: Final = frozenset(
    {
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.kerberos.service.name",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.crl.location",
        "ssl.endpoint.identification.algorithm",
    }
)
"""Settings of logins and TLS whose values are no secrets. Those of others are hidden: one may be a name misspelt."""

_COMMON: Final[Mapping[str, object]] = {
    "reconnect.backoff.ms": 50,  # 100 ms by default
    "reconnect.backoff.max.ms": 1_000,  # 10 s by default: the longest pause after a broker is back
    "socket.timeout.ms": 10_000,  # a minute by default, in which a dead connection holds up everything
    "socket.keepalive.enable": True,
    "socket.nagle.disable": True,
    "enable.metrics.push": False,  # else each client asks its broker which metrics it wants (KIP-714)
    "log.connection.close": False,  # brokers close idle connections, which is no news
}

_PARTITIONERS: Final[Mapping[str, str]] = {
    "murmur2": "murmur2_random",
    "crc32": "consistent_random",
    "fnv1a": "fnv1a_random",
}

_PRODUCER: Final[Mapping[str, object]] = {
    "retry.backoff.ms": 5,  # 100 ms by default
    "retry.backoff.max.ms": 250,  # 1 s by default
    "linger.ms": 0,  # 5 ms by default, which each record would wait
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 256 * 1024,  # 1 GB by default; bounds memory
    # How long a topic may be unknown before its records are refused: 30 s by default.
    "topic.metadata.propagation.max.ms": 2_000,
}

_CONSUMER: Final[Mapping[str, object]] = {
    "fetch.min.bytes": 1,
    "fetch.error.backoff.ms": 50,  # 500 ms by default: how long a partition waits after an error
    "fetch.queue.backoff.ms": 5,  # 1 s by default: how long a full local queue keeps a fetcher asleep
    "queued.min.messages": 20_000,  # 100,000 by default
    "queued.max.messages.kbytes": 32 * 1024,  # bounds memory, whatever the number of partitions
    "check.crcs": True,
    # How long a topic may be unknown before that is an error: 30 s by default.
    "topic.metadata.propagation.max.ms": 3_000,
}

_UNFIT: Final = (KafkaException, ValueError, TypeError, AttributeError)  # the last one: of a text for a map
_BEHIND_THE_LAST: Final = "kes.behind.the.last"
"""A setting that librdkafka does not know."""


class ClientSettings:
    """Built once per event source; a value that any thread may use. ``repr`` masks secrets.

    ``overrides`` are settings of librdkafka (``security.protocol``, ``sasl.*``, ``ssl.*``, ``compression.type`` ...);
    they win over the values here, except for the ``RESERVED`` ones: ``ConfigError``. Keys that librdkafka does not
    know, and values that it refuses, are found when the first client is built (``build``, ``check``), also as
    ``ConfigError``.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        overrides: Mapping[str, object] | None = None,
        *,
        client_id: str = "kes",
        group_id: str = "",
        partitioner: PartitionerName = "murmur2",
        null_keys: NullKeys = "sticky",
    ) -> None:
        self.bootstrap_servers = _addresses(bootstrap_servers)
        self.overrides: Mapping[str, object] = dict(overrides or {})
        self.client_id = client_id
        self.group_id = group_id
        self.partitioner: PartitionerName = partitioner
        self.null_keys: NullKeys = null_keys
        for key in self.overrides:
            if key in RESERVED:
                raise ConfigError(f"kafka setting {key!r} can not be overridden: {RESERVED[key]}")

    def __repr__(self) -> str:
        shown = {key: "***" if is_secret(key) else value for key, value in self.overrides.items()}
        return f"ClientSettings({self.bootstrap_servers!r}, {shown!r}, client_id={self.client_id!r})"

    def plain_producer(self, delivery_timeout_ms: int, *, batch_bytes: int | None = None) -> dict[str, object]:
        """Configuration of a producer without transactions: idempotent, acknowledged by all in-sync replicas. It stops
        at a batch that is refused. ``batch_bytes``: of a batch, the most, in place of the user's."""
        return {
            **self._base(f"{self.client_id}.plain"),
            **_PRODUCER,
            **self.overrides,
            **({} if batch_bytes is None else {"batch.size": batch_bytes}),
            "message.timeout.ms": delivery_timeout_ms,
            "enable.idempotence": True,
            "partitioner": _PARTITIONERS[self.partitioner],
            **({"sticky.partitioning.linger.ms": 0} if self.null_keys == "spread" else {}),
            "delivery.report.only.error": False,
            # What is behind a batch that is refused must not overtake it (``kafka.writing.plain_producer``).
            "enable.gapless.guarantee": True,
            # Else a connection that is closed with a request under way is no error for ``ConnectionLog.failed_at``.
            "log.connection.close": True,
            # The same: with several, a request behind it may be under way. And librdkafka would number those behind one
            # that failed anew: what had arrived may then be written twice (librdkafka issue 4953).
            "max.in.flight.requests.per.connection": 1,
        }

    def consumer(self, *, partition_eof: bool, fetch_wait_ms: int = 20, role: str = "consumer") -> dict[str, object]:
        """Configuration of a consumer with manual assignment, ``read_committed``, that never resets an offset itself.

        ``fetch_wait_ms``: how long the broker may hold an empty fetch. Switching between partitions costs up to that
        much, and an idle consumer asks that often.
        """
        return {
            **self._base(f"{self.client_id}.{role}"),
            **_CONSUMER,
            "fetch.wait.max.ms": fetch_wait_ms,
            **self.overrides,
            # Never joined and never committed to by this client; librdkafka wants a name, and looks its coordinator up.
            "group.id": self.group_id or self.client_id,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # a lost position must not become a silent jump over records
            "isolation.level": "read_committed",
            "enable.partition.eof": partition_eof,
            "allow.auto.create.topics": False,
        }

    def check(self) -> None:
        """Raise ``ConfigError`` for an override whose name or value librdkafka refuses. Makes no client."""
        # For clients that take security alone from here: a name that is misspelt is found before anything is done.
        # librdkafka takes the settings in order, and refuses the last one before it makes anything.
        try:
            Producer({**self.overrides, _BEHIND_THE_LAST: ""})
        except _UNFIT as error:
            refusal = _refused(error, self.overrides)
            if _BEHIND_THE_LAST not in str(refusal):
                raise refusal from None

    def _base(self, client_id: str) -> dict[str, object]:
        return {**_COMMON, "bootstrap.servers": self.bootstrap_servers, "client.id": client_id}


def build(factory: Callable[..., C], config: dict[str, object], connection: ConnectionLog) -> C:
    """Construct a client of confluent-kafka; a setting that librdkafka refuses becomes a ``ConfigError``.

    Takes 10 to 60 ms, holds the GIL meanwhile (longer with slow name look-up or TLS): not for an event loop's thread.
    """
    try:
        return factory({**config, "error_cb": connection.on_error}, logger=connection)
    except _UNFIT as error:
        raise _refused(error, config) from None


def _refused(error: Exception, config: Mapping[str, object]) -> ConfigError:
    text = error_of(error).str() if isinstance(error, KafkaException) else str(error)
    for key, value in config.items():  # librdkafka repeats the value that it could not parse
        if is_secret(key) and isinstance(value, str) and value:
            text = text.replace(value, "***")
    return ConfigError(f"kafka settings: {text}")


def is_secret(key: str) -> bool:
    """Check whether the value of a setting must not be shown."""
    name = key.lower()
    return any(part in name for part in _SECRET_PARTS) or (name.startswith(("sasl.", "ssl.")) and name not in _SHOWN)


def _addresses(text: str) -> str:
    return checked_addresses(",".join(part.strip() for part in text.split(",") if part.strip()))
