"""Members to play with, and a producer that shows group metadata to the broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from streams.clients.kafka_python_settings import translate
from streams.clients.membership import connect_group
from streams.core.assignor import sticky_plan
from streams.group import Assigned, Fatal, GroupEvent, Lost, Revoked
from tests.unit.waiting import PATIENCE, wait_until

PARTITIONS = 10
until = wait_until
E = TypeVar("E")
STEADY_MS = 30_000
"""Session of a member that no test wants to lose: a machine that stands still for some seconds does not end it."""


class Seat:
    """A member in a test: everything it heard, with the snapshot at that moment."""

    def __init__(
        self, servers: str, group: str, topic: str, name: str, *, release: bool = True, **settings: Any
    ) -> None:
        self.membership, self.take_over = self._connect(servers, group, topic, name, settings)
        self.name, self.release = name, release
        self.heard: list[tuple[GroupEvent, Any]] = []
        self.changed = threading.Condition()
        self.membership.start(self._hear)

    def _connect(self, servers: str, group: str, topic: str, name: str, settings: dict[str, Any]) -> Any:
        settings.setdefault("security", translate({}))
        settings.setdefault("assignors", {"cooperative-sticky": sticky_plan})
        settings.setdefault("session_timeout_ms", STEADY_MS)
        return connect_group(servers, group, topic, PARTITIONS, name, **settings)

    def _hear(self, event: GroupEvent) -> None:
        if isinstance(event, Revoked) and self.release:
            self.membership.released(event.partitions, event.incarnation, event.generation)
        with self.changed:
            self.heard.append((event, self.membership.snapshot))
            self.changed.notify_all()

    def freeze(self) -> Callable[[], None]:
        """No heartbeats until what is returned is called."""
        thawed = threading.Event()
        self.membership._client.post(lambda: thawed.wait(60.0))
        return thawed.set

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


@contextmanager
def seats() -> Iterator[Callable[..., Seat]]:
    """Makes members and closes them all."""
    made: list[Seat] = []

    def make(*arguments: Any, **settings: Any) -> Seat:
        made.append(Seat(*arguments, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for seat in made:
            seat.membership.close(3.0)


class Table(NamedTuple):
    """A group with a topic of its own."""

    servers: str
    group: str
    topic: str
    make: Callable[..., Seat]

    def seat(self, name: str, **settings: Any) -> Seat:
        return self.make(self.servers, self.group, self.topic, name, **settings)


@contextmanager
def laid_table(servers: str, prefix: str) -> Iterator[Table]:
    """A new topic and a group without members."""
    topic = make_topic(servers, f"{prefix}in")
    with seats() as make:
        yield Table(servers, f"{prefix}group", topic, make)


def everything(*members: Seat) -> bool:
    """All partitions are owned, none twice, no two counts differ by more than one."""
    owned = [last.owned for member in members for last in member.assigned()[-1:]]
    numbers = sorted(number for numbers in owned for number in numbers)
    counts = [len(numbers) for numbers in owned]
    return numbers == list(range(PARTITIONS)) and max(counts) - min(counts) <= 1 and len(owned) == len(members)


def settled(*members: Seat, patience: float = PATIENCE) -> None:
    """Wait until these share everything, and all have heard the plan of the generation that they are in."""

    def done() -> bool:
        snapshots = [member.membership.snapshot.generation for member in members]
        heard = [event.generation for member in members for event in member.assigned()[-1:]]
        return everything(*members) and heard == snapshots and len(set(heard)) == 1

    until(done, "the group does not settle", patience)


def in_time(seconds: float, *deeds: Callable[[], object]) -> bool:
    """Whether one of these, which are all the same, takes less than ``seconds``; what comes after it is not done. A
    machine may stand still once, but not each time."""
    for deed in deeds:
        before = time.monotonic()
        deed()
        if time.monotonic() - before < seconds:
            return True
    return False


def make_topic(servers: str, name: str, partitions: int = PARTITIONS, **config: str) -> str:
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(name, partitions, 1, config=config)]).values():
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
