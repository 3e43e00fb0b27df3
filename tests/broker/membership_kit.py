"""Members of all kinds that look the same to a test, and a producer that shows group metadata to the broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka import admin as _admin

from streams.core.assignor import sticky_plan
from streams.kafka.group.broker_membership import connect_broker_group
from streams.kafka.group.connect import connect_group
from streams.kafka.wire.security import Security
from streams.model.group import Assigned, Fatal, GroupEvent, Lost, Revoked
from tests.broker.client_kit import as_librdkafka
from tests.unit.waiting import PATIENCE, wait_until

PARTITIONS = 10
KINDS = ("streams", "broker")
SESSION_MS, HEARTBEAT_MS = 2000, 200
STEADY_MS = 12_000
"""Session of members that no test wants to lose: a machine that stands still for some seconds does not end it."""

until = wait_until
E = TypeVar("E")
untyped: Any = _admin  # whose types leave many names out


def set_broker_session(servers: str, group: str, session_ms: int, heartbeat_ms: int = HEARTBEAT_MS) -> None:
    """Session and heartbeat of a group of the broker-side protocol: they are settings of the broker."""
    kind, operation = untyped.ResourceType.GROUP, untyped.AlterConfigOpType.SET
    values = {"consumer.session.timeout.ms": session_ms, "consumer.heartbeat.interval.ms": heartbeat_ms}
    entries = [untyped.ConfigEntry(name, str(value), incremental_operation=operation) for name, value in values.items()]
    client = _admin.AdminClient({"bootstrap.servers": servers, "log_level": 0})
    resource = untyped.ConfigResource(kind, group, incremental_configs=entries)
    for future in client.incremental_alter_configs([resource]).values():
        future.result(PATIENCE)

    def told() -> str:
        (future,) = client.describe_configs([untyped.ConfigResource(kind, group)]).values()
        return str(future.result(PATIENCE)["consumer.session.timeout.ms"].value)

    until(lambda: told() == str(session_ms), "the controller has the settings, the broker does not hear of them")


class Seat:
    """A member of one of the ``KINDS``: everything it heard, with the group metadata at that moment."""

    def __init__(
        self, kind: str, servers: str, group: str, topic: str, name: str, *, release: bool = True, **settings: Any
    ) -> None:
        settings = {
            "session_timeout_ms": SESSION_MS,
            "heartbeat_interval_ms": HEARTBEAT_MS,
            "security": Security.of({}),
            **settings,
        }
        place = servers, group, topic, PARTITIONS, name
        self.group = group
        if kind == "streams":
            settings.setdefault("assignors", {"cooperative-sticky": sticky_plan})
            connected: Any = connect_group(*place, **settings)
        else:
            settings.setdefault("transaction_timeout_ms", SESSION_MS // 2)
            strategies = settings.pop("strategies", ("cooperative-sticky",))
            connected = connect_broker_group(*place, strategies, **settings)
        self.membership, self.take_over = connected
        self.kind, self.name, self.release = kind, name, release
        self.heard: list[tuple[GroupEvent, Any]] = []
        self.changed = threading.Condition()
        self.membership.start(self._hear)

    def _hear(self, event: GroupEvent) -> None:
        if isinstance(event, Revoked) and self.release:
            self.membership.released(event.partitions, event.incarnation, event.generation)
        with self.changed:
            self.heard.append((event, self.membership.group_metadata))
            self.changed.notify_all()

    def close(self) -> None:
        self.membership.close(3.0)

    def die(self) -> None:
        """Say nothing to the group, as if killed: the session has to expire. A member of ``streams``."""

        async def leave(*_: Any) -> None: ...

        self.membership._protocol.leave = leave
        self.close()

    def freeze(self) -> Callable[[], None]:
        """No heartbeats until what is returned is called."""
        thawed = threading.Event()
        line = self.membership._protocol._line  # its thread is that of all members of the process
        ready = line.ready

        async def ready_later() -> Any:
            while not thawed.is_set():
                await asyncio.sleep(0.01)
            return await ready()

        line.ready = ready_later
        return thawed.set

    @property
    def metadata(self) -> bytes:
        """The newest that it published."""
        published = self.membership.group_metadata
        assert published.generation >= 0
        return as_librdkafka(self.group, published.generation, published.member_id, published.instance_id)

    @property
    def events(self) -> list[GroupEvent]:
        with self.changed:
            return [event for event, _ in self.heard]

    def wait(self, what: Callable[[GroupEvent], bool], since: int = 0, patience: float = PATIENCE) -> GroupEvent:
        """The first event after the first ``since`` ones that fits."""
        deadline = time.monotonic() + patience
        with self.changed:
            while True:
                for event, _ in self.heard[since:]:
                    if what(event):
                        return event
                left = deadline - time.monotonic()
                assert left > 0, f"{self.name} heard only {self.heard[since:]}"
                self.changed.wait(left)

    def owning(self, number: int, since: int = 0, patience: float = PATIENCE) -> Assigned:
        event = self.wait(lambda e: isinstance(e, Assigned) and len(e.owned) == number, since, patience)
        assert isinstance(event, Assigned)
        return event

    def heard_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[E], since: int = 0, patience: float = PATIENCE) -> E:
        """The first of this kind after the first ``since`` events; waits for it."""
        event = self.wait(lambda e: isinstance(e, kind), since, patience)
        assert isinstance(event, kind)
        return event

    def assigned(self) -> list[Assigned]:
        return self.heard_of(Assigned)

    def fatal(self, patience: float = PATIENCE) -> Exception:
        return self.first(Fatal, 0, patience).error

    def lost(self) -> Lost:
        return self.first(Lost)


class Desk:
    """A topic, and a group of one kind on it, with a session timeout for all of its members."""

    def __init__(self, kind: str, servers: str, prefix: str, session_ms: int) -> None:
        self.kind, self.servers, self.group, self.session_ms = kind, servers, f"{prefix}group", session_ms
        self.topic = make_topic(servers, f"{prefix}in")
        self.made: list[Seat] = []
        if kind == "broker":
            set_broker_session(servers, self.group, session_ms)

    def seat(self, name: str, **settings: Any) -> Seat:
        """A member."""
        kind = settings.pop("kind", self.kind)
        settings.setdefault("session_timeout_ms", self.session_ms)
        self.made.append(Seat(kind, self.servers, self.group, self.topic, name, **settings))
        return self.made[-1]


@contextmanager
def laid_desk(kind: str, servers: str, prefix: str, session_ms: int) -> Iterator[Desk]:
    """A new topic and a group without members; closes whoever joined."""
    desk = Desk(kind, servers, prefix, session_ms)
    try:
        yield desk
    finally:
        for member in desk.made:
            member.close()


def everything(*members: Seat) -> bool:
    """All partitions are owned, none twice, no two counts differ by more than one."""
    owned = [last.owned for member in members for last in member.assigned()[-1:]]
    numbers = sorted(number for numbers in owned for number in numbers)
    counts = [len(numbers) for numbers in owned]
    return numbers == list(range(PARTITIONS)) and max(counts) - min(counts) <= 1 and len(owned) == len(members)


def settled(*members: Seat, patience: float = PATIENCE) -> None:
    """Wait until these share everything, and all have heard the plan of the generation that they are in."""

    def done() -> bool:
        generations = [member.membership.group_metadata.generation for member in members]
        heard = [event.generation for member in members for event in member.assigned()[-1:]]
        return everything(*members) and (
            members[0].kind != "streams" or (heard == generations and len(set(heard)) == 1)
        )

    until(done, "the group does not settle", patience)


def make_topic(servers: str, name: str, partitions: int = PARTITIONS, **config: str) -> str:
    admin = untyped.AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([untyped.NewTopic(name, partitions, 1, config=config)]).values():
        future.result(2 * PATIENCE)  # a broker that stood still is let in by its controller first
    return name


class Transactor:
    """A transactional producer that commits an offset under given group metadata, and says what came of it."""

    def __init__(self, servers: str, transactional_id: str, topic: str) -> None:
        self.topic, self.count = topic, 0
        settings = {"transactional.id": transactional_id, "transaction.timeout.ms": 60_000, "retry.backoff.ms": 5}
        self.producer = Producer({"bootstrap.servers": servers, "log_level": 0, **settings})
        self.producer.init_transactions(PATIENCE)

    def open(self, metadata: bytes, partition: int = 0) -> None:
        """A transaction with a record and an offset, left open."""
        self.count += 1
        self.producer.begin_transaction()
        self.producer.produce(self.topic, str(self.count), partition=partition)
        assert self.producer.flush(PATIENCE) == 0
        offsets = [TopicPartition(self.topic, partition, self.count)]
        self.producer.send_offsets_to_transaction(offsets, metadata, PATIENCE)

    def commit(self, metadata: bytes, partition: int = 0) -> str:
        """``"ok"``, or the broker's name of the refusal; the transaction is aborted then."""
        try:
            self.open(metadata, partition)
            self.producer.commit_transaction(PATIENCE)
        except KafkaException as refusal:
            self.producer.abort_transaction(PATIENCE)
            return str(refusal.args[0].name())
        return "ok"
