"""Faults at named points: a process that kills itself with SIGKILL, or stops for a while, in the middle of its work.

    plan = FaultPlan.from_environment()         # KES_FAULT="commit.before:3" or "flush.after:1:freeze"
    await consume_with_faults(source, plan)     # instead of source.consume_events()

The points lie around every call that the engine makes to the outside; ``POINTS`` lists them. SIGKILL leaves no time
to tidy up, as a power cut or an out-of-memory kill would; SIGSTOP freezes the process until SIGCONT.

Faults on the line to the broker are made by ``KafkaProxy`` and ``Rule``, at home in ``streams.testing.proxy``.
"""

from __future__ import annotations

import os
import signal
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from streams.clients.consumer import LogConsumer
from streams.config import EventSourceConfig
from streams.errors import ConfigError
from streams.event_source import EventSource
from streams.group import Copies, GroupEvent, Membership, Order, Snapshot, TakeOver
from streams.records import IncomingRecord, Output, Progress
from streams.runtime.connections import ROOM_POLLS, KafkaConnections
from streams.runtime.ports import (
    Blocking,
    Connections,
    PlainProducer,
    Producer,
    Reader,
    Refusal,
    SourceLog,
    StatusBoard,
    Tail,
    Topics,
    TransactionSlot,
)
from streams.runtime.reading.poller import Poller
from streams.testing.proxy import KafkaProxy as KafkaProxy
from streams.testing.proxy_rules import ArmedRule as ArmedRule
from streams.testing.proxy_rules import Rule as Rule

FAULT_VARIABLE: Final = "KES_FAULT"

POINTS: Final = (
    "poll.before",
    "poll.after",
    "handler.before",
    "handler.after",
    "produce.before",
    "produce.after",
    "flush.before",
    "flush.after",
    "send_offsets.before",
    "send_offsets.after",
    "commit.before",
    "commit.after",
    "settle.after",
    "store.before",
    "store.after",
    "revoke.before",
    "revoke.after",
    "restore.half",
)
"""Every point. ``handler`` and ``store`` are hit by the program under test itself, with ``FaultPlan.hit``."""

MOVE_POINTS: Final = (
    "handed_over.before",
    "handed_over.after",
    "took.before",
    "took.after",
    "tail.received",
)
"""Points of a planned move: only groups that move partitions warm, or keep standbys, pass these."""

T = TypeVar("T")


class FaultPlan:
    """Strikes at the ``count``-th time that ``point`` is passed. Threads: any."""

    def __init__(self, point: str = "", count: int = 1, action: str = "kill") -> None:
        known = POINTS + MOVE_POINTS
        if point and point not in known:
            raise ConfigError(f"{FAULT_VARIABLE}: there is no point {point!r}; one of {', '.join(known)}")
        if action not in ("kill", "freeze"):
            raise ConfigError(f"{FAULT_VARIABLE}: the action is {action!r}; use 'kill' or 'freeze'")
        self.point, self.action = point, action
        self._left = count
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls) -> FaultPlan:
        """The plan in ``KES_FAULT``: ``point[:count[:action]]``; nothing happens when it is not set."""
        point, _, rest = os.environ.get(FAULT_VARIABLE, "").partition(":")
        count, _, action = rest.partition(":")
        return cls(point, int(count or 1), action or "kill")

    def hit(self, point: str) -> None:
        """Passing this point."""
        if point != self.point:
            return
        with self._lock:
            self._left -= 1
            strike = self._left == 0
        if strike:
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


async def consume_with_faults(source: EventSource[Any], plan: FaultPlan) -> None:
    """``source.consume_events()`` over connections that pass the points of the plan."""
    await source._consume(lambda config: FaultyConnections(KafkaConnections(config), config, plan))


class _RealConnections(Connections, Protocol):
    """The part of ``KafkaConnections`` that is used here."""

    @property
    def message_limit(self) -> int: ...
    def consumer(self) -> LogConsumer: ...


class FaultyConnections:
    """``ports.Connections`` around the real ones."""

    def __init__(self, real: _RealConnections, config: EventSourceConfig, plan: FaultPlan) -> None:
        self._real, self._config, self._plan = real, config, plan
        self.message_limit = real.message_limit

    def plain_producer(
        self,
        bootstrap_servers: str,
        client_settings: Mapping[str, object],
        delivery_timeout_seconds: float,
        *,
        one_by_one: bool = False,
    ) -> PlainProducer:
        """Pass through."""
        return self._real.plain_producer(
            bootstrap_servers, client_settings, delivery_timeout_seconds, one_by_one=one_by_one
        )

    def wait_for(
        self, loop: AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None
    ) -> T:
        """Pass through."""
        return self._real.wait_for(loop, start, timeout_seconds)

    def worker(self, name: str) -> Blocking:
        """Pass through."""
        return self._real.worker(name)

    async def in_process(self, function: Callable[..., T], *args: Any) -> T:
        """Pass through."""
        return await self._real.in_process(function, *args)

    def producer(self, transactional_id: str, *, one_by_one: bool = False) -> Producer:
        """Add points around every call of a transaction."""
        return _FaultyProducer(self._real.producer(transactional_id, one_by_one=one_by_one), self._plan)

    def slot(self, transactional_id: str) -> TransactionSlot | None:
        """Add points around every step of a transaction."""
        slot = self._real.slot(transactional_id)
        return None if slot is None else cast(TransactionSlot, _FaultySlot(slot, self._plan))

    def input(self) -> Poller:
        """Add points around the poll."""
        return Poller(
            lambda: _FaultyConsumer(self._real.consumer(), self._plan),
            max_poll_records=self._config.queues.max_poll_records,
            room=ROOM_POLLS * self._config.queues.max_poll_records,
            room_bytes=min(self._config.queues.max_queued_bytes, (self._config.queues.max_queued_bytes_total + 1) // 2),
        )

    def reader(self) -> Reader:
        """Pass through: it only looks up."""
        return self._real.reader()

    def tail(self) -> Tail:
        """Add a point before records are handed over."""
        return _FaultyTail(self._real.tail(), self._plan)

    def topics(self) -> Topics:
        """Pass through."""
        return self._real.topics()

    def status_board(self) -> StatusBoard:
        """Pass through."""
        return self._real.status_board()

    def source_topics(self) -> Topics:
        """Pass through."""
        return self._real.source_topics()

    def source_log(self) -> SourceLog:
        """Pass through."""
        return self._real.source_log()

    def group(self, alive: Callable[[], bool]) -> tuple[Membership, TakeOver]:
        """Add points around the answer to a revocation."""
        membership, takeover = self._real.group(alive)
        return _FaultyMembership(membership, self._plan), takeover  # a TakeOver only asks: no point in it


class _FaultyProducer:
    def __init__(self, real: Producer, plan: FaultPlan) -> None:
        self._real, self._hit = real, plan.hit

    @property
    def refused(self) -> Sequence[Refusal]:
        return self._real.refused

    def init(self, timeout_seconds: float) -> None:
        self._real.init(timeout_seconds)

    def warm_up(self, topics: Collection[str], timeout_seconds: float) -> None:
        self._real.warm_up(topics, timeout_seconds)

    def begin(self) -> None:
        self._real.begin()

    def produce_many(self, outputs: Sequence[Output], start: int) -> int:
        return start  # one at a time, each with its points

    def produce(self, output: Output) -> bool:
        self._hit("produce.before")
        queued = self._real.produce(output)
        self._hit("produce.after")
        return queued

    def poll(self) -> None:
        self._real.poll()

    def flush(self, timeout_seconds: float) -> None:
        self._hit("flush.before")
        self._real.flush(timeout_seconds)
        self._hit("flush.after")

    def send_offsets(self, topic: str, offsets: Mapping[int, int], metadata: bytes, timeout_seconds: float) -> None:
        self._hit("send_offsets.before")
        self._real.send_offsets(topic, offsets, metadata, timeout_seconds)
        self._hit("send_offsets.after")

    def commit(self, timeout_seconds: float) -> None:
        self._hit("commit.before")
        self._real.commit(timeout_seconds)
        self._hit("commit.after")

    def abort(self, timeout_seconds: float) -> None:
        self._real.abort(timeout_seconds)

    def close(self) -> None:
        self._real.close()


class _FaultySlot:
    def __init__(self, real: TransactionSlot, plan: FaultPlan) -> None:
        self._real, self._hit = real, plan.hit
        self.transactional_id = real.transactional_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def produce_many(self, outputs: Sequence[Output], start: int) -> int:
        return start  # one at a time, each with its points

    def produce(self, output: Output) -> bool:
        self._hit("produce.before")
        taken = self._real.produce(output)
        self._hit("produce.after")
        return taken

    async def flush(self) -> None:
        self._hit("flush.before")
        await self._real.flush()
        self._hit("flush.after")

    async def commit(
        self, topic: str, offsets: Mapping[int, int], fence: Callable[[], Snapshot], requested: Callable[[], None]
    ) -> None:
        def before_commit() -> None:
            self._hit("send_offsets.after")
            requested()
            self._hit("commit.before")

        self._hit("send_offsets.before")
        await self._real.commit(topic, offsets, fence, before_commit)
        self._hit("commit.after")


class _FaultyConsumer:
    def __init__(self, real: Any, plan: FaultPlan) -> None:
        self._real, self._hit = real, plan.hit

    def add(self, partition: int, offset: int) -> None:
        self._real.add(partition, offset)

    def remove(self, partitions: Collection[int]) -> None:
        self._real.remove(partitions)

    def pause(self, partitions: Collection[int]) -> None:
        self._real.pause(partitions)

    def resume(self, partitions: Collection[int]) -> None:
        self._real.resume(partitions)

    def poll_batch(self, timeout_seconds: float, limit: int) -> dict[int, Progress]:
        self._hit("poll.before")
        news: dict[int, Progress] = self._real.poll_batch(timeout_seconds, limit)
        if news:
            self._hit("poll.after")
        return news

    def take_failures(self) -> Mapping[int, Exception]:
        failures: Mapping[int, Exception] = self._real.take_failures()
        return failures

    def close(self) -> None:
        self._real.close()


class _FaultyTail:
    def __init__(self, real: Tail, plan: FaultPlan) -> None:
        self._real, self._hit = real, plan.hit

    def start(
        self,
        receive: Callable[[int, int, list[IncomingRecord], int, int], None],
        fail: Callable[[int, int, Exception], None],
    ) -> None:
        def received(partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
            half = len(records) // 2
            if half:  # the position moves with the second half
                receive(partition, epoch, records[:half], records[half].offset, end)
                self._hit("restore.half")
            if records:
                self._hit("tail.received")
            receive(partition, epoch, records[half:], position, end)

        self._real.start(received, fail)

    def add(self, partition: int, offset: int, epoch: int) -> None:
        self._real.add(partition, offset, epoch)

    def remove(self, partitions: Collection[int]) -> None:
        self._real.remove(partitions)

    def close(self) -> None:
        self._real.close()


class _FaultyMembership:
    def __init__(self, real: Membership, plan: FaultPlan) -> None:
        self._real, self._hit = real, plan.hit

    @property
    def snapshot(self) -> Snapshot:
        return self._real.snapshot

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        self._real.start(deliver)

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        self._hit("revoke.before")
        self._real.released(partitions, incarnation, generation)
        self._hit("revoke.after")

    def handed_over(self, partition: int, order: Order) -> None:
        self._hit("handed_over.before")
        self._real.handed_over(partition, order)
        self._hit("handed_over.after")

    def took(self, partition: int, incarnation: int) -> None:
        self._hit("took.before")
        self._real.took(partition, incarnation)
        self._hit("took.after")

    def report(self, copies: Copies, *, announce: bool) -> None:
        self._real.report(copies, announce=announce)

    def leave(self) -> None:
        self._real.leave()

    def close(self, timeout_seconds: float) -> None:
        self._real.close(timeout_seconds)


def settled_hook(plan: FaultPlan) -> Callable[[msgspec.Struct], None]:
    """A metrics handler that passes ``settle.after`` at each settled transaction."""

    def handler(measurement: msgspec.Struct) -> None:
        if type(measurement).__name__ == "TransactionSettled":
            plan.hit("settle.after")

    return handler
