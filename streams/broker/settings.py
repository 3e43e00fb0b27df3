"""The settings file of one broker: a whole Kafka on one node, with timeouts fit for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from streams.broker.probe import HOST
from streams.errors import ConfigError

CLUSTER_ID = "kafkaEventSource00000A"
NODE_ID = 1

_OURS = {
    "process.roles": "broker,controller",
    "node.id": str(NODE_ID),
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
}

_DEFAULTS = {
    # One node: nothing can be replicated.
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Fifty partitions each by default, made at first use: seconds, and files by the hundred.
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "num.partitions": "1",
    # A wrong topic name is to be an error.
    "auto.create.topics.enable": "false",
    # Groups that form at once, and members that may be declared dead within a second.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "transaction.max.timeout.ms": "900000",
    # The controller takes a killed broker back when its session is over: 3 s with these, 13 s by default.
    "broker.session.timeout.ms": "1500",
    "broker.heartbeat.interval.ms": "300",
    "controlled.shutdown.enable": "true",  # a stop without it makes the next start take 12 s
    # Small: 128 MB of heap for the log cleaner alone is the default.
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.cleaner.threads": "1",
    "log.segment.bytes": "104857600",
    "log.index.size.max.bytes": "1048576",
    "num.network.threads": "2",
    "num.io.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
    "background.threads": "2",
    "queued.max.requests": "100",
}

_PLACES = ("controller.quorum.voters", "listeners", "advertised.listeners", "log.dirs", "log.dir")


def server_settings(folder: Path, port: int, controller_port: int, extra: Mapping[str, str]) -> str:
    """The text of ``server.properties``. ``extra`` wins over the defaults; what makes the node up cannot be set.

    Raises ``ConfigError``.
    """
    for name in extra:
        if name in _OURS or name in _PLACES:
            raise ConfigError(f"the server property {name} belongs to the embedded broker and cannot be set")
    listener = f"PLAINTEXT://{HOST}:{port}"
    places = {
        "controller.quorum.voters": f"{NODE_ID}@{HOST}:{controller_port}",
        "listeners": f"{listener},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": listener,
        "log.dirs": str(folder),
    }
    return "".join(f"{name}={_escaped(value)}\n" for name, value in {**_DEFAULTS, **extra, **_OURS, **places}.items())


def _escaped(value: str) -> str:
    """A value as Java's property files want it, in ASCII."""
    special = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    text = "".join(special.get(c, c) if ord(c) < 127 else f"\\u{ord(c):04x}" for c in value)
    return "\\" + text if text.startswith(" ") else text
