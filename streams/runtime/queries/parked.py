"""Operators' requests about the parked keys of a partition, as they travel, and the owner's answers to them."""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

import msgspec

from streams.core.parking import PREFIX, ParkedKeys, Queue, Queued, decode_queued, encode_queued
from streams.core.parking_rules import Action, Seen
from streams.core.timers import Timer
from streams.errors import ConfigError, NotOwned
from streams.runtime.engine import Engine
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import LastTraces
from streams.runtime.partition.interjections import Proof
from streams.runtime.partition.parking_acts import act
from streams.runtime.partition.timers import PartitionTimers
from streams.runtime.queries.questions import MOST_BYTES_OUT

_log = logging.getLogger(__name__)

PAGE: Final = 200
"""Queues of one answer, or of one act, at most."""
_KEY_BYTES: Final = 256
"""Bytes of a key that are shown."""
_QUEUE: Final = re.compile(r"[0-9a-f]{32}")


class ParkedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as an operator sees it. ``queue``: the 32 digits of its name. ``key``: its beginning, of ``key_bytes``;
    ``None``: its event has none. ``size``: bytes of its events. ``due_ms``: of the next attempt
    (``core.parking.NEVER_MS``: none by time). ``head`` and ``next``: for acts. ``trace``: of the last failure through
    the user's code, if the queue is listed alone, and its owner has made that
    attempt."""

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
    def named(self) -> tuple[str, int, int]:
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


class ParkedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``action``: ``list``, or that of ``core.parking_rules``. ``queue``: list this one alone; ``after``: list those
    behind this place. ``first``: with the events of the one that is named, from this number on. ``seen``: the queues
    that an act is meant for. ``as_letters``: what goes is kept as letters."""

    path: ClassVar[str] = "/api/v1/parked"
    max_staleness: ClassVar[None] = None  # a copy has no queues to act on

    group: str
    partition: int
    action: Action | str = "list"
    queue: str = ""
    after: str = ""
    first: int = -1
    seen: tuple[tuple[str, int, int], ...] = ()
    as_letters: bool = False
    timeout_seconds: float = 5.0


class ParkedReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``keys``, ``events`` and ``size`` (bytes): all that were parked in the partition before an act. ``queues``: of a
    list; ``events_of_it``: of the one that was named; ``more`` come behind the last. ``done``: the queues on which an
    act was carried out; the others are other ones by now."""

    partition: int
    served_by: str
    keys: int = 0
    events: int = 0
    size: int = 0
    queues: tuple[ParkedQueue, ...] = ()
    events_of_it: tuple[ParkedEvent, ...] = ()
    more: bool = False
    done: tuple[str, ...] = ()


def checked_request(request: ParkedRequest, group: str, partitions: int) -> ParkedRequest:
    """Check a request from outside. Raises ``ConfigError``."""
    if request.group != group:
        raise ConfigError(f"the request is for the group {request.group!r}, and this is {group!r}")
    if request.action not in ("list", "retry", "skip-head", "drop"):
        raise ConfigError(f"the action is {request.action!r}; there are list, retry, skip-head and drop")
    if not 0 <= request.partition < partitions:
        raise ConfigError(f"partition {request.partition}: there are 0 to {partitions - 1}")
    if (request.action == "list") is not (not request.seen) or len(request.seen) > PAGE:
        raise ConfigError(f"an act names the queues that it is meant for, {PAGE} at most, and a list names none")
    if request.as_letters and request.action not in ("skip-head", "drop"):
        raise ConfigError(f"as_letters is for what goes, and {request.action} lets nothing go")
    names = [name for name, _, _ in request.seen]
    if len(set(names)) < len(names):  # its letters would be written twice
        raise ConfigError("an act names each queue once")
    for name in (request.queue, *names):
        if name and not _QUEUE.fullmatch(name):
            raise ConfigError(f"a queue is named by 32 hexadecimal digits, not {name[:64]!r}")
    return request


async def answered(engine: Engine, request: ParkedRequest) -> ParkedReply:
    """Answer a request that was checked, on the loop of the source: a list by the lease or a commit, an act when its
    transaction is committed. Raises ``NotOwned``, ``MembershipLost``, ``Stopped``, and ``ConfigError`` where acts are
    not allowed."""
    number, config = request.partition, engine.config
    worker = engine.workers.get(number)
    if worker is None or not worker.takes_interjections:  # before the right: another member may have it
        raise NotOwned(f"{config.topic}[{number}] is not active on this member")
    is_list = request.action == "list"
    if not (is_list or config.queries.operate):
        raise ConfigError("this member does not take operators' acts: QueryConfig.operate is not set")

    def parked_keys(ctx: EventContext[Any]) -> ParkedReply:
        timers = ctx._timers
        assert timers is not None  # an interjection has its turn
        done: list[str] = []
        for name, head, behind in request.seen:
            action: Any = request.action
            if act(ctx, action, Seen(PREFIX + name, head, behind), as_letters=request.as_letters):
                done.append(name)
        found = _listed(timers.parked, worker.traces, request) if is_list else []
        events, more = _page(timers, request)
        return ParkedReply(
            partition=number,
            served_by=config.instance_id,
            keys=len(timers.parked.by_name),
            events=timers.parked.events,
            size=timers.parked.size,
            queues=tuple(found[:PAGE]),
            events_of_it=events,
            more=more or len(found) > PAGE,
            done=tuple(done),
        )

    # An act that changes nothing is proven as well: only the owner may say that a queue is another one by now.
    reply: ParkedReply = await engine.ad_hoc.interject(
        number, parked_keys, blocking=False, proof=Proof.LEASE if is_list else Proof.HEARTBEAT
    )
    if not is_list:
        kept = " as dead letters" if request.as_letters else ""
        text = "%s[%d]: an operator's %s%s is committed for %d of %d queue(s): %s"
        names = ", ".join(reply.done[:10]) or "they are other ones by now"
        _log.warning(text, config.topic, number, request.action, kept, len(reply.done), len(request.seen), names)
    return reply


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
