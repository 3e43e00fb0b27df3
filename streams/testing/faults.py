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
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from streams.errors import ConfigError
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.model.group import GroupMetadata, TakeOver
from streams.records import IncomingRecord
from streams.runtime.connections import KafkaConnections
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource
from streams.testing.proxy import KafkaProxy as KafkaProxy
from streams.testing.proxy_rules import ArmedRule as ArmedRule
from streams.testing.proxy_rules import Rule as Rule

FAULT_VARIABLE: Final = "KES_FAULT"

POINTS: Final = (
    "poll.before",
    "poll.after",
    "handler.before",
    "handler.after",
    "flush.before",
    "send_offsets.before",
    "flush.after",
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
    await source._run.consume(lambda config: FaultyConnections(config, plan))


class FaultyConnections(KafkaConnections):
    """The real connections, with points around the calls of some of their clients."""

    def __init__(self, config: EventSourceConfig, plan: FaultPlan) -> None:
        super().__init__(config)
        self.plan = plan

    def slot(self, transactional_id: str) -> Any:
        """Add points around every step of a transaction."""
        return FaultySlot(super().slot(transactional_id), self.plan)

    def consumer(self) -> Any:
        """Add points around the poll."""
        return _FaultyConsumer(super().consumer(), self.plan)

    def tail(self) -> Any:
        """Add a point before records are handed over."""
        return _FaultyTail(super().tail(), self.plan)

    def group(self, alive: Callable[[], bool]) -> tuple[Any, TakeOver]:
        """Add points around the reports of the member."""
        membership, takeover = super().group(alive)
        return _FaultyMembership(membership, self.plan), takeover  # a TakeOver only asks: no point in it


class _Faulty:
    """Delegates to a client, and passes ``x.before`` and ``x.after`` around the calls that ``around`` names."""

    around: ClassVar[Mapping[str, str]] = {}

    def __init__(self, real: Any, plan: FaultPlan) -> None:
        self._real, self._hit = real, plan.hit

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._real, name)
        point = self.around.get(name)
        if point is None:
            return call

        def struck(*args: Any) -> Any:
            self._hit(f"{point}.before")
            answer = call(*args)
            self._hit(f"{point}.after")
            return answer

        return struck


class FaultySlot(_Faulty):
    """A slot, with points around every step of a transaction."""

    async def flush(
        self, records: EncodedTransaction, offsets: Mapping[str, Mapping[int, int]], fence: Callable[[], GroupMetadata]
    ) -> None:
        """Pass the points around records and offsets."""

        def before_offsets() -> GroupMetadata:
            self._hit("send_offsets.before")
            return fence()

        self._hit("flush.before")
        await self._real.flush(records, offsets, before_offsets)
        self._hit("flush.after")

    async def commit(self, requested: Callable[[], None]) -> None:
        """Pass the points around the commit."""

        def before_commit() -> None:
            requested()
            self._hit("commit.before")

        await self._real.commit(before_commit)
        self._hit("commit.after")


class _FaultyConsumer(_Faulty):
    def poll_batch(self, timeout_seconds: float, limit: int) -> Any:
        self._hit("poll.before")
        news = self._real.poll_batch(timeout_seconds, limit)
        if news:
            self._hit("poll.after")
        return news


class _FaultyTail(_Faulty):
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


class _FaultyMembership(_Faulty):
    around: ClassVar = {"released": "revoke", "handed_over": "handed_over", "took": "took"}


def settled_hook(plan: FaultPlan) -> Callable[[msgspec.Struct], None]:
    """A metrics handler that passes ``settle.after`` at each settled transaction."""

    def handler(measurement: msgspec.Struct) -> None:
        if type(measurement).__name__ == "TransactionSettled":
            plan.hit("settle.after")

    return handler
