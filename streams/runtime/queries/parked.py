"""Operators' requests about the parked keys of a partition, as they travel, and the owner's answers to them."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, get_args

import msgspec

from streams.core.parking import PREFIX, ParkedKeys, Queue, Queued, decode_queued, encode_queued
from streams.core.parking_rules import Action, Seen
from streams.core.timers import Timer
from streams.errors import ConfigError
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import LastTraces
from streams.runtime.partition.parking_acts import act
from streams.runtime.partition.timers import PartitionTimers
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.queries.operating import PAGE, Named, OperatorReply, OperatorRequest
from streams.runtime.queries.questions import MOST_BYTES_OUT

_KEY_BYTES: Final = 256
"""Bytes of a key that are shown."""
_QUEUE: Final = re.compile(r"[0-9a-f]{32}")


class ParkedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as an operator sees it. ``queue``: the 32 digits of its name. ``key``: its beginning, of ``key_bytes``;
    ``None``: its event has none. ``size``: bytes of its events. ``due_ms``: of the next attempt
    (``core.parking.NEVER_MS``: none by time). ``head`` and ``next``: for acts. ``trace``: of the last failure through
    the user's code, if the queue is listed alone, and its owner has made that attempt."""

    queue: str
    key: bytes | None
    key_bytes: int
    head: int
    next: int
    size: int
    since_ms: int
    attempts: int
    due_ms: int
    error: str
    handler: str
    trace: str = ""

    @classmethod
    def of(cls, queue: Queue, longest: int | None = None, trace: str = "") -> ParkedQueue:
        """Describe a queue; ``longest``: bytes of its key that are shown."""
        state, key = queue.state, queue.key
        return cls(
            queue=queue.name.removeprefix(PREFIX),
            key=None if key is None else key[:longest],
            key_bytes=len(key or b""),
            head=state.head,
            next=state.next,
            size=state.bytes,
            since_ms=state.since_ms,
            attempts=state.attempts,
            due_ms=queue.record.due_ms,
            error=state.error,
            handler=state.handler,
            trace=trace,
        )

    @property
    def place(self) -> str:
        """Return its place in a list: those that wait longest come first."""
        return f"{self.since_ms:020d}{self.queue}"

    @property
    def named(self) -> Named:
        """Return what an act on it names."""
        return self.queue, self.head, self.next


class ParkedEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event in a queue. ``data``: as it is in the changelog. ``is_set``: it is a timer, which is still set."""

    number: int
    data: bytes
    is_set: bool

    @property
    def queued(self) -> Queued:
        """Return the event. Raises ``msgspec.DecodeError``."""
        return decode_queued(self.data)


class ParkedReply(OperatorReply, frozen=True, kw_only=True, omit_defaults=True):
    """``keys``, ``events`` and ``size`` (bytes): all that were parked in the partition before an act. ``queues``: of a
    list; ``events_of_it``: of the one that was named."""

    keys: int = 0
    events: int = 0
    size: int = 0
    queues: tuple[ParkedQueue, ...] = ()
    events_of_it: tuple[ParkedEvent, ...] = ()

    @property
    def found(self) -> tuple[ParkedQueue, ...]:
        """Return the entries of a list."""
        return self.queues


class ParkedRequest(
    OperatorRequest[ParkedReply], frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """``queue``: list this one alone. ``first``: with the events of the one that is named, from this number on.
    ``as_letters``: what goes is kept as letters."""

    path: ClassVar[str] = "/api/v1/parked"
    noun: ClassVar[str] = "queue"
    actions: ClassVar[tuple[str, ...]] = get_args(Action)

    queue: str = ""
    first: int = -1
    as_letters: bool = False

    @property
    def title(self) -> str:
        return f"{self.action} as dead letters" if self.as_letters else self.action

    def check_own(self, names: list[str]) -> None:
        if self.as_letters and self.action not in ("skip-head", "drop"):
            raise ConfigError(f"as_letters is for what goes, and {self.action} lets nothing go")
        for name in (self.queue, *names):
            if name and not _QUEUE.fullmatch(name):
                raise ConfigError(f"a queue is named by 32 hexadecimal digits, not {name[:64]!r}")

    def carry_out(self, ctx: EventContext[Any], worker: PartitionWorker) -> ParkedReply:
        timers, action = worker.timers, self.action
        keys, events, size = len(timers.parked.by_name), timers.parked.events, timers.parked.size
        done: list[str] = []
        for name, head, behind in self.seen:
            if act(ctx, action, Seen(PREFIX + name, head, behind), as_letters=self.as_letters):  # type: ignore[arg-type]
                done.append(name)
        found = _listed(timers.parked, worker.traces, self) if action == "list" else []
        of_it, more = _page(timers, self)
        return ParkedReply(
            partition=self.partition,
            served_by=timers.config.instance_id,
            keys=keys,
            events=events,
            size=size,
            queues=tuple(found[:PAGE]),
            events_of_it=of_it,
            more=more or len(found) > PAGE,
            done=tuple(done),
        )


def _listed(parked: ParkedKeys, traces: LastTraces, request: ParkedRequest) -> list[ParkedQueue]:
    """Return the queues of a list, and one more if there are more."""
    if request.queue:
        queue = parked.by_name.get(PREFIX + request.queue)
        return [] if queue is None else [ParkedQueue.of(queue, _KEY_BYTES, traces.of(queue))]
    found = (ParkedQueue.of(queue, _KEY_BYTES) for queue in parked.by_name.values())
    behind = (queue for queue in found if queue.place > request.after)
    return heapq.nsmallest(PAGE + 1, behind, key=lambda queue: queue.place)


def events_of(queue: Queue, timer_of: Callable[[str], Timer | None], first: int = -1) -> list[ParkedEvent]:
    """Return the events of a queue, from this number on. ``timer_of``: a timer, by its name, while it is set."""

    def is_set(queued: Queued) -> bool:
        timer = timer_of(queued.topic) if queued.is_timer else None
        return timer is not None and timer.due_ms == queued.timestamp_ms

    numbers = (number for number in sorted(queue.events) if number >= first)
    events = ((number, queue.events[number]) for number in numbers)
    return [ParkedEvent(number, encode_queued(queued), is_set(queued)) for number, queued in events]


def _page(timers: PartitionTimers, request: ParkedRequest) -> tuple[tuple[ParkedEvent, ...], bool]:
    """Return as many events of the queue that is named as an answer may have, one at least; and whether there are
    more."""
    queue = timers.parked.by_name.get(PREFIX + request.queue) if request.first >= 0 else None
    if queue is None:
        return (), False
    events, size, count = events_of(queue, timers.get, request.first), 0, 0
    for event in events:
        size += len(event.data)
        if count and size > MOST_BYTES_OUT // 2:  # it travels as text
            break
        count += 1
    return tuple(events[:count]), count < len(events)
