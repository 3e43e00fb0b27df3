"""The settings file of a broker: a whole Kafka on one node, or one of several, with timeouts fit for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streams.broker.probe import HOST
from streams.errors import ConfigError

CLUSTER_ID = "kafkaEventSource00000A"
NODE_ID = 1


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in a cluster. ``voters``: node number -> port of its controller, of all nodes; a node that is
    alone needs none."""

    node: int = NODE_ID
    voters: Mapping[int, int] | None = None

    @property
    def controller_port(self) -> int | None:
        """Controller port of this node, if it is settled."""
        return self.voters[self.node] if self.voters is not None else None


ALONE = Seat()

_OURS = {
    "process.roles": "broker,controller",
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
    # A transaction of a dead process ends when its time is over, not up to 10 s later.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # The controller takes a killed broker back when its session is over: 4 s with these, 13 s by default. With 1.5 s a
    # node on a busy machine fenced itself (load averages above 40).
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "300",
    "controlled.shutdown.enable": "true",  # a stop without it makes the next start take 12 s
    # Records have the times of their events, maybe of years ago: by default those are deleted within five minutes.
    "log.retention.ms": "-1",
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

_PLACES = ("node.id", "controller.quorum.voters", "listeners", "advertised.listeners", "log.dirs", "log.dir")


def cluster_defaults(nodes: int) -> dict[str, str]:
    """Return the settings of a cluster in place of a single node's: every record on up to three nodes, and
    acknowledged when two have it."""
    copies = str(min(nodes, 3))
    in_sync = str(min(nodes, 2))
    return {
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": in_sync,
        # So that every node has coordinators to lose.
        "offsets.topic.num.partitions": str(nodes),
        "transaction.state.log.num.partitions": str(nodes),
        # Several Java machines on few cores: a heartbeat may be late without a dead process.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # What a node has sent to one that froze it sends to the next leader after this time. Until then, with the 30 s
        # of the default, transactions that wait for their markers hold up every part that needs their producers.
        "request.timeout.ms": "6000",
    }


@dataclass(frozen=True, slots=True)
class GuardedListener:
    """A listener for clients beside the plain one: its name, port, protocol, and the properties that go with it."""

    name: str
    port: int
    protocol: str
    properties: Mapping[str, str]


def server_settings(
    folder: Path,
    port: int,
    controller_port: int,
    extra: Mapping[str, str],
    seat: Seat = ALONE,
    guarded: GuardedListener | None = None,
) -> str:
    """The text of ``server.properties``. ``extra`` wins over the defaults; what makes the node up cannot be set.

    ``port`` is that of the plain listener. Raises ``ConfigError``.
    """
    for name in extra:
        if name in _OURS or name in _PLACES:
            raise ConfigError(f"the server property {name} belongs to the embedded broker and cannot be set")
    listener = f"PLAINTEXT://{HOST}:{port}"
    voters = seat.voters or {seat.node: controller_port}
    places = {
        "node.id": str(seat.node),
        "controller.quorum.voters": ",".join(f"{node}@{HOST}:{number}" for node, number in voters.items()),
        "listeners": f"{listener},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": listener,
        "log.dirs": str(folder),
    }
    ours = {**_OURS, **places}
    if guarded is not None:
        for name in guarded.properties.keys() & extra.keys():
            raise ConfigError(f"the server property {name} follows from tls, sasl or acl and cannot be set beside them")
        ours |= guarded.properties
        for name in ("listeners", "advertised.listeners"):
            ours[name] += f",{guarded.name}://{HOST}:{guarded.port}"
        ours["listener.security.protocol.map"] += f",{guarded.name}:{guarded.protocol}"
    return "".join(f"{name}={_escaped(value)}\n" for name, value in {**_DEFAULTS, **extra, **ours}.items())


def _escaped(value: str) -> str:
    """A value as Java's property files want it, in ASCII."""
    special = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    text = "".join(special.get(c, c) if ord(c) < 127 else f"\\u{ord(c):04x}" for c in value)
    return "\\" + text if text.startswith(" ") else text
