"""Everything around the hot path, scripted: clients of confluent-kafka that do nothing, a group of one, and a clock
that jumps.

What is real: the engine with its tasks, the poll thread's code, consumer and producer of ``streams.kafka``, codecs
and stores. What is not: librdkafka, the broker, the threads. All of it runs one step at a time and in virtual time, so
two runs do the same steps, and what is counted in them is the same to the last one.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import msgspec
from confluent_kafka import Message, TopicPartition

from benchmarks.instructions.turns import Turns
from benchmarks.workload import Deposited
from streams.kafka.reading.consumer import LogConsumer
from streams.kafka.wire import messages as wire
from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.connection import BrokerConnection
from streams.kafka.wire.settings import ProducerSettings
from streams.model.group import Assigned, Assignment, GroupEvent, GroupMetadata
from streams.model.topics import TopicIdentity
from streams.runtime.connections import KafkaConnections
from streams.runtime.reading.poller import Poller
from streams.runtime.reading.thread import POLL_SECONDS
from streams.testing.simulation.virtual_time import Fibers, elapse

KEYS = 1_000
US_PER_EVENT = 10
"""Virtual time that fetching takes: 100,000 events/s."""
FLUSH_SECONDS, COMMIT_SECONDS, CALL_SECONDS = 0.002, 0.008, 0.001
"""Virtual time that a call on another thread takes: transactions of about a thousand events come of it."""
_SEED = 20_130_101


class Traffic(NamedTuple):
    """How events come: a backlog, or by a pace. ``run``: records of one partition in a row, as they lie in the answer
    to a fetch."""

    partitions: int
    run: int
    together: int = 0
    """Records that come at one time; 0: all are there."""
    pause: float = 0.0
    """Virtual seconds between two such times."""


BACKLOG: Final = Traffic(4, 250)
LIVE: Final = Traffic(10, 2, together=4, pause=0.002)
"""2,000 events/s. Measured (Kafka 4.1.1): a poll brings 4.3 records of 2.3 partitions, 480 times a second."""

TOPICS = ("in", "second")
"""Of the source itself, and of a further input."""
TOGETHER = 5
"""Records of one partition within a millisecond of event time, over all its inputs."""


def messages(
    count: int, trace: Sequence[tuple[str, bytes]] = (), inputs: int = 1, traffic: Traffic = BACKLOG
) -> dict[str, list[Message]]:
    """Deposits as consumers get them, by topic: 150 bytes each, a type header (and those of a trace), runs of each
    partition in turn. With several inputs every topic has its share of each partition's events, in turn."""
    rng = random.Random(_SEED)
    note = "n" * 70
    events = [0] * traffic.partitions
    found: dict[str, list[Message]] = {topic: [] for topic in TOPICS[:inputs]}
    for number in range(count):
        partition = number // traffic.run % traffic.partitions
        offset, place = divmod(events[partition], inputs)
        at_ms = 1_700_000_000_000 + (events[partition] // TOGETHER if inputs > 1 else 0)
        account = f"account-{rng.randrange(KEYS) * traffic.partitions + partition:05d}"
        event = Deposited(account, rng.randrange(1_000, 10_000), 1_700_000_000.125, note)
        found[TOPICS[place]].append(
            Message(
                topic=TOPICS[place],
                partition=partition,
                offset=offset,
                key=account.encode(),
                value=msgspec.json.encode(event),
                headers=[("__grt__", b"Deposited"), *trace],
                timestamp=(1, at_ms),
            )
        )
        events[partition] += 1
    return found


class Feed:
    """The messages of the consumers, by topic: of all topics nothing beyond ``allowed`` messages yet."""

    def __init__(self, found: dict[str, list[Message]]) -> None:
        self.allowed = 0
        self.window = False
        self._sizes = {topic: len(messages) for topic, messages in found.items()}
        self._messages = {topic: iter(messages) for topic, messages in found.items()}
        self._given = dict.fromkeys(found, 0)
        self._ends: dict[tuple[str, int], int] = {}

    def take(self, topic: str, limit: int) -> list[Message]:
        """The next ones, without waiting; of all topics in proportion."""
        limit = max(1, round(limit * self.part(topic)))
        taken = list(islice(self._messages[topic], min(limit, self._share(topic) - self._given[topic])))
        self._given[topic] += len(taken)
        self._ends.update(((topic, message.partition()), message.offset() + 1) for message in taken)
        return taken

    def allow(self, count: int) -> None:
        """Let messages go up to this number of all."""
        self.allowed = count

    def end(self, topic: str, partition: int) -> int:
        """The end of a partition as it is known: behind what was given, unless more is allowed."""
        more = self._given[topic] < self._share(topic)
        return self._ends.get((topic, partition), 0) + more

    def part(self, topic: str) -> float:
        """Return the size of this topic, as part of the largest one's."""
        return self._sizes[topic] / max(self._sizes.values())

    def _share(self, topic: str) -> int:
        """Return this topic's part of what is allowed, rounded up."""
        return -(-self.allowed * self._sizes[topic] // sum(self._sizes.values()))


class PacedFeed(Feed):
    """The messages as live traffic: so many at a time. ``now``: virtual seconds."""

    def __init__(self, found: dict[str, list[Message]], traffic: Traffic, now: Callable[[], float]) -> None:
        super().__init__(found)
        self._traffic, self._now = traffic, now
        self._goal, self._due_at = 0, math.inf

    def allow(self, count: int) -> None:
        """Let messages come up to this number, from now on."""
        self._goal, self._due_at = count, self._now()

    def wait_seconds(self) -> float:
        """Let come what is due, and return how long the next ones take: infinite if none do."""
        while self.allowed < self._goal and self._due_at <= self._now():
            self.allowed = min(self.allowed + self._traffic.together, self._goal)
            self._due_at += self._traffic.pause
        return self._due_at - self._now() if self.allowed < self._goal else math.inf


class ScriptedConsumer:
    """In the place of ``confluent_kafka.Consumer``. ``pause`` is called when time is to pass."""

    feed: Feed
    pause: Callable[[float], None]
    topic = TOPICS[0]

    def __init__(self, *_: object, **__: object) -> None: ...

    def poll(self, timeout: float) -> Message | None:
        taken = self.feed.take(self.topic, 1)
        self.pause(0 if taken else timeout)
        return taken[0] if taken else None

    def consume(self, limit: int, _timeout: float) -> list[Message]:
        taken = self.feed.take(self.topic, limit)
        self.pause(len(taken) * US_PER_EVENT / 1e6 / self.feed.part(self.topic))
        return taken

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.topic = partitions[0].topic

    def get_watermark_offsets(self, where: TopicPartition, cached: bool) -> tuple[int, int]:
        return 0, self.feed.end(where.topic, where.partition)

    subscribe: Any = "".format
    incremental_unassign = list_topics = consumer_group_metadata = close = subscribe


class PacedConsumer(ScriptedConsumer):
    """The same for live traffic: a record ends a poll."""

    feed: PacedFeed
    turns: Turns

    def poll(self, timeout: float) -> Message | None:
        self.turns.count("polls")
        wait = self.feed.wait_seconds()
        taken = self.feed.take(self.topic, 1)
        if not taken:
            self.pause(min(timeout, wait))
            self.feed.wait_seconds()
            taken = self.feed.take(self.topic, 1)
        return taken[0] if taken else None

    def consume(self, limit: int, _timeout: float) -> list[Message]:
        self.feed.wait_seconds()
        return self.feed.take(self.topic, limit)


class ScriptedProducer:
    """In the place of ``confluent_kafka.Producer``: every method is a function of C that takes anything and does next
    to nothing, so that it executes no bytecode of its own."""

    def __init__(self, *_: object, **__: object) -> None: ...

    produce: Any = "".format
    init_transactions = list_topics = begin_transaction = send_offsets_to_transaction = produce
    commit_transaction = abort_transaction = produce

    def flush(self, _timeout: float = 0) -> int:
        return 0

    def poll(self, _timeout: float = 0) -> int:
        return 0


class ScriptedConnection(BrokerConnection):
    """A connection to the only broker, which takes everything: the real one, over a transport that answers."""

    def __init__(self, partitions: int, turns: Turns) -> None:
        super().__init__("broker:1", "client")
        self._partitions, self._turns = partitions, turns
        self._transport = cast(asyncio.Transport, self)
        self.versions = dict.fromkeys(wire.LEAST_VERSIONS, (0, 99))
        self.features = {"transaction.version": 2}

    async def ask(self, request: Any, most: int) -> Any:
        known = {"node_id": 0, "host": "broker", "port": 1, "error_code": 0}
        led: dict[str, Any] = {"leader_id": 0, "leader_epoch": 0}
        partitions = [SimpleNamespace(partition_index=number, **led) for number in range(self._partitions)]
        topics = [SimpleNamespace(name=topic.name, topic_id=None, error_code=0, partitions=partitions)
                  for topic in getattr(request, "topics", None) or ()]  # fmt: skip
        return SimpleNamespace(
            error_code=0,
            producer_id=7,
            producer_epoch=0,
            API_VERSION=most,
            coordinators=[SimpleNamespace(**known)],
            brokers=[SimpleNamespace(**known)],
            topics=topics,
        )

    def writelines(self, parts: list[bytes]) -> None:
        """Answer requests. Each has its length in front of its own parts."""
        self._turns.count("writes")
        while parts:
            left, end = int.from_bytes(parts[0], "big"), 1
            while left:
                left, end = left - len(parts[end]), end + 1
            self._answer(*parts[1:end])
            parts = parts[end:]

    def _answer(self, head: bytes, *body: bytes) -> None:
        """Answer a request: its head begins with the key and has the correlation id from the fifth byte on."""
        self._turns.count("requests")
        seconds, answer = _ANSWERS[int.from_bytes(head[:2], "big")]
        frame = head[4:8] + b"\0" + answer([*body])
        self._loop.call_later(seconds, self.data_received, len(frame).to_bytes(4, "big") + frame)

    def abort(self) -> None: ...


def _produced(body: list[bytes]) -> bytes:
    """Answer Produce: no partition has failed. A batch is five parts: partition, head, tail, records, tags."""
    answer, at = [body[2]], 3
    for _ in range(body[2][0] - 1):
        batches = body[at + 1][0] - 1
        answer += body[at : at + 2]
        answer += [part[:4] + bytes(26) + b"\1\1\0" for part in body[at + 2 : at + 2 + 5 * batches : 5]]
        answer.append(b"\0")
        at += 3 + 5 * batches
    return b"".join(answer) + bytes(5)


def _offsets_committed(body: list[bytes]) -> bytes:
    topics, *left = body[5:-1]
    answer = [bytes(4), topics]
    while left:
        end = 1 + left[1][0]  # behind the partitions
        answer += [*left[:2], *(part[:4] + bytes(3) for part in left[2:end]), b"\0"]
        left = left[end + 1 :]
    return b"".join(answer) + b"\0"


_ANSWERS: dict[int, tuple[float, Callable[[list[bytes]], bytes]]] = {
    wire.PRODUCE: (FLUSH_SECONDS, _produced),
    wire.COMMIT_OFFSETS: (COMMIT_SECONDS / 2, _offsets_committed),
    wire.END: (COMMIT_SECONDS / 2, lambda _: bytes(6) + (7).to_bytes(8, "big") + bytes(2)),
}
"""By the request's key: virtual time, and an answer without errors."""


async def connected(partitions: int, turns: Turns, *_: object, **__: object) -> ScriptedConnection:
    """In the place of ``kafka.wire.connection.connect``."""
    return ScriptedConnection(partitions, turns)


class Inline:
    """``ports.Blocking`` without a thread: the call takes its virtual time, and then happens."""

    def __init__(self, name: str) -> None:
        self._seconds = CALL_SECONDS

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        await elapse(CALL_SECONDS)
        return function(*args)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        function(*args)

    def abandon(self) -> None: ...


class FiberPoller(Poller):
    """The poll thread's code, in a fiber: it runs while the loop stands still."""

    fibers: Fibers

    def _launch(self) -> None:
        if self._thread is None:
            self._thread = threading.current_thread()
            self.fibers.run(self._run)

    def _next_command(self) -> Callable[[], None] | None:
        while not self._epochs and self._commands.empty():  # it would wait for one, for real
            self.fibers.pause(POLL_SECONDS)
        if self._pause_seconds:  # as well
            self.fibers.pause(self._pause_seconds)
            self._pause_seconds = 0.0
        return super()._next_command()


class Nothing:
    """Methods that do nothing."""

    def nothing(self, *_: object, **__: object) -> None: ...

    released = handed_over = took = report = leave = close = read = publish = remove = delete = nothing


class Group(Nothing):
    """``group.Membership`` and ``group.TakeOver``: one member, which has everything from the start."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self.group_metadata = GroupMetadata(0, 1, "m")

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        everything = frozenset(range(self._partitions))
        deliver(Assigned(0, 1, everything, everything, Assignment(own=everything, members=("me",))))

    def stable_offsets(self, partitions: Collection[int], deadline: float, topic: str = "") -> dict[int, int | None]:
        return dict.fromkeys(partitions)

    def notes(self, _partitions: Collection[int], _deadline: float) -> dict[int, str]:
        return {}

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        return dict.fromkeys(partitions, (0, 0))

    def identity(self, topic: str, deadline: float) -> TopicIdentity:
        return TopicIdentity(f"id-{topic}", self._partitions)

    def log_sizes(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, int]:
        return {}

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        return []


class EmptyLog(Nothing):
    """``ports.Tail``, ``Reader``, ``Topics`` and ``StatusBoard`` of a cluster on which nothing was written yet."""

    def start(self, receive: Callable[..., None], fail: Callable[..., None]) -> None:
        self._receive = receive

    def add(self, partition: int, offset: int, epoch: int) -> None:
        asyncio.get_running_loop().call_soon(self._receive, partition, epoch, [], 0, 0)

    def create(self, *_: object) -> list[str]:
        return []

    differences = create


class ScriptedConnections(KafkaConnections):
    """The real ones, but for threads, group and the logs beside the source topic."""

    def __init__(self, config: Any, fibers: Fibers, partitions: int) -> None:
        super().__init__(config)
        self._fibers, self._partitions = fibers, partitions
        self._cluster = Cluster(ProducerSettings.of(config.bootstrap_servers, "client", {}), partial(float, 1.7e9))

    def worker(self, name: str) -> Any:
        return Inline(name)

    def _poller(self, connect: Callable[[], LogConsumer]) -> Poller:
        config = self._config
        poller = FiberPoller(
            connect, max_poll_records=config.queues.max_poll_records, room=1 << 40, room_bytes=1 << 40
        )  # never without room: it would wait for it, for real
        poller.fibers = self._fibers
        return poller

    def group(self, alive: Callable[[], bool]) -> Any:
        group = Group(self._partitions)
        return group, group

    def tail(self) -> Any:
        return EmptyLog()

    reader = topics = status_board = tail


class NoWatch:
    """``system.LoopWatch`` of a loop whose time stands still while it works."""

    def __init__(self, _seconds: float) -> None: ...

    def alive(self) -> bool:
        return True

    async def run(self, _blocked: object) -> None: ...
    def stop(self) -> None: ...
