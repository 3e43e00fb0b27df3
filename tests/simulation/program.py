"""The event source under test, and the same thing as a fold over a plain dict."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from streams.codecs import codec_for
from streams.config import EventSourceConfig, PoolConfig
from streams.event_source import EventSource
from streams.events import event_type, event_type_of
from streams.outcomes import DEAD_LETTER, SKIP, ErrorPolicy, ErrorResponse, ExecutionState
from streams.records import Change, IncomingRecord, TopicPartition
from streams.runtime.partition.event_context import EventContext
from streams.stores import Table
from streams.testing.simulation.virtual_time import elapse

from . import ahead, batched
from .plans import Plan

GROUP, TOPIC, OUT, TICKS, TOKENS, RINGS = "sim", "in", "out", "ticks", "tokens", "rings"
TICK_KEY, RING_KEY = "_ticks", "_rings"
REFUSED_VALUE = b"REFUSED"
"""A record whose value contains this is too large for its topic."""


class _Keyed(msgspec.Struct, frozen=True):
    key: str
    amount: int


@event_type("Add")
class Add(_Keyed, frozen=True):
    """Plain handler."""


@event_type("Slow")
class Slow(_Keyed, frozen=True):
    """Async handler that takes its time."""


@event_type("Thread")
class Thread(_Keyed, frozen=True):
    """Blocking handler."""


@event_type("Flaky")
class Flaky(_Keyed, frozen=True):
    """Fails ``amount`` times, then succeeds; two retries, then the dead letter."""


@event_type("Skip")
class Skip(_Keyed, frozen=True):
    """Fails always, and is skipped."""


@event_type("Huge")
class Huge(_Keyed, frozen=True):
    """Sends what the broker refuses: dead letter."""


@event_type("Drop")
class Drop(_Keyed, frozen=True):
    """Deletes the key."""


@event_type("Alarm")
class Alarm(_Keyed, frozen=True):
    """Adds, and sets a timer that rings soon (``amount`` 6 and 7), sets its key's reminder for a day that never comes
    (8), or cancels that (9)."""


@event_type("Ring")
class Ring(msgspec.Struct, frozen=True):
    """What timers fire; ``offset`` is the alarm's. Every third one fails once."""

    offset: int


_OWN = (Add, Slow, Thread, Flaky, Skip, Huge, Drop, Alarm, batched.Bulk)
KINDS: dict[str, Any] = {cls.__name__: cls for cls in _OWN} | ahead.KINDS


@event_type("Total")
class Total(msgspec.Struct, frozen=True):
    value: int
    offset: int


class PlainStore:
    """A ``StateStore`` that cannot undo: an event that fails costs a restart of its partition."""

    def __init__(self, _: TopicPartition) -> None:
        self._values: dict[bytes, bytes] | None = {}

    def receive_change(self, change: Change, /) -> None:
        assert self._values is not None
        if change.value is None:
            self._values.pop(change.key, None)
        else:
            self._values[change.key] = change.value

    def revoked(self) -> None:
        assert self._values is not None, "revoked twice"
        self._values = None

    def get(self, key: str, default: int) -> int:
        assert self._values is not None, "used after it was revoked"
        data = self._values.get(key.encode())
        return default if data is None else int(data)

    def write(self, ctx: EventContext[Any], key: str, value: int | None) -> None:
        change = Change(key.encode(), None if value is None else b"%d" % value)
        self.receive_change(change)
        ctx.record_change(change)

    def contents(self) -> dict[str, int]:
        assert self._values is not None, "looked at after it was revoked"
        return {key.decode(): int(value) for key, value in self._values.items()}


class Journalled(Table[str, int]):
    """The library's own store, with the same face."""

    def __init__(self, partition: TopicPartition) -> None:
        made: Table[str, int] = Table.factory(key=str, value=int)(partition)
        super().__init__(partition, made._engine, codec_for(str), codec_for(int))

    def write(self, ctx: EventContext[Any], key: str, value: int | None) -> None:
        if value is None:
            self.delete(key)
        else:
            self.put(key, value)

    def contents(self) -> dict[str, int]:
        return dict(self.items())


def build(plan: Plan, instance: str, strategies: tuple[str, ...], process: Any) -> EventSource[Any]:
    """An event source of this plan, for a member's process."""
    rng, pause = process.rng, process.pause
    config = EventSourceConfig(
        group_id=GROUP,
        topic=TOPIC,
        num_partitions=plan.partitions,
        bootstrap_servers="simulated",
        instance_id=instance,
        pool=PoolConfig(
            pool_size=plan.pending + 2,
            pending_transactions=plan.pending,
            target_batch_size=plan.target_batch,
            max_batch_size=plan.max_batch,
        ),
        session_timeout_seconds=plan.session,
        transaction_timeout_seconds=plan.transaction_timeout,
        call_timeout_seconds=plan.call_timeout,
        max_queued_records=plan.max_queued,
        max_poll_records=20,
        error_policy=ErrorPolicy(then=ErrorResponse.FAIL_CONSUMER),
        strategy=strategies,
        publish_status=False,
        num_standbys=plan.num_standbys,
        max_moves=plan.max_moves,
        preparation_timeout_seconds=plan.preparation_timeout,
        leave_timeout_seconds=plan.leave_timeout,
        drain_timeout_seconds=plan.drain_timeout,
        on_partition_activated=lambda partition: process.note("active", partition),
        metrics_handler=process.measured,
    )
    source: EventSource[Any] = EventSource(config, PlainStore if plan.patient else Journalled)

    def add(ctx: EventContext[Any], event: _Keyed) -> None:
        total = ctx.store.get(event.key, 0) + event.amount
        ctx.store.write(ctx, event.key, total)
        ctx.forward(OUT, Total(total, ctx.offset), key=event.key)

    async def slow(ctx: EventContext[Any], event: Slow) -> None:
        before = ctx.store.get(event.key, 0)
        ctx.store.write(ctx, event.key, -1)  # nobody may ever see this
        await elapse(rng.choice((0.0, 0.001, 0.01, 0.1, 0.1, 0.5, 2.0)))
        ctx.store.write(ctx, event.key, before)
        add(ctx, event)

    def thread(ctx: EventContext[Any], event: Thread) -> None:
        pause(rng.choice((0.0, 0.001, 0.05, 0.5)))
        add(ctx, event)

    def flaky(ctx: EventContext[Any], event: Flaky) -> None:
        add(ctx, event)
        if ctx.attempt <= event.amount:
            raise RuntimeError("not yet")

    def skip(ctx: EventContext[Any], event: Skip) -> ExecutionState:
        add(ctx, event)
        return ctx.fail(RuntimeError("never"))

    def huge(ctx: EventContext[Any], event: Huge) -> None:
        add(ctx, event)
        ctx.forward(OUT, REFUSED, key=event.key)

    def drop(ctx: EventContext[Any], event: Drop) -> None:
        ctx.store.write(ctx, event.key, None)
        ctx.forward(OUT, Total(0, ctx.offset), key=event.key)

    def alarm(ctx: EventContext[Any], event: Alarm) -> None:
        add(ctx, event)
        if event.amount < 8:
            ctx.schedule_in(0.7 * (event.amount - 5), Ring(ctx.offset))
        elif event.amount == 8:
            ctx.schedule_in(1e6, Ring(ctx.offset), name=event.key)
        else:
            ctx.cancel_timer(event.key)

    async def ring(ctx: EventContext[Any], event: Ring) -> None:
        number = ctx.store.get(RING_KEY, 0) + 1
        ctx.store.write(ctx, RING_KEY, number)
        is_early = ctx.timer is None or ctx.now < ctx.timer.due
        ctx.forward(RINGS, Total(-1 if is_early else number, event.offset), key=str(ctx.topic_partition.partition))
        if plan.smooth:
            return
        await elapse(rng.choice((0.0, 0.0, 0.01, 0.3)))
        if event.offset % 3 == 0 and ctx.attempt == 1:
            raise RuntimeError("not yet")

    retries = ErrorPolicy(retries=2, backoff_seconds=0.05, then=ErrorResponse.DEAD_LETTER)
    source.register_event_type(Add, add)
    source.register_event_type(Slow, slow)
    source.register_event_type(Thread, thread, blocking=True)
    source.register_event_type(Flaky, flaky, on_error=retries)
    source.register_event_type(Skip, skip, on_error=SKIP)
    source.register_event_type(Huge, huge, on_error=DEAD_LETTER)
    source.register_event_type(Drop, drop)
    ahead.register(source, process, add)
    batched.register(source, process, OUT, REFUSED, Total)
    source.register_event_type(Alarm, alarm)
    source.register_event_type(Ring, ring, on_error=retries)
    if plan.interjections:
        source.schedule_interjection(tick, every=0.7, jitter=0.2)
    return source


@event_type("Refused")
class _Refused(msgspec.Struct, frozen=True):
    text: str


REFUSED = _Refused(REFUSED_VALUE.decode())


def tick(ctx: EventContext[Any]) -> None:
    """Counts its own runs: exactly once, or the numbers have gaps or repeat themselves."""
    number = ctx.store.get(TICK_KEY, 0) + 1
    ctx.store.write(ctx, TICK_KEY, number)
    ctx.forward(TICKS, Total(number, ctx.offset), key=str(ctx.topic_partition.partition))


def inputs(plan: Plan, rng: random.Random) -> Iterator[tuple[int, bytes, bytes, Any]]:
    """(partition, key, value, headers) of each input record."""
    for _ in itertools.repeat(None, plan.records):
        kind = KINDS[rng.choice(plan.kinds)]
        number = rng.randrange(plan.keys)
        amount = rng.choice((0, 1, 2, 3)) if kind in (Flaky, ahead.Wobbly) else rng.randint(1, 9)
        if plan.timers and kind is Add and amount > 5:
            kind = Alarm
        event = kind(f"k{number}", amount)
        described = event_type_of(kind)
        yield number % plan.partitions, event.key.encode(), described.encode(event), described.headers


def fold(state: dict[str, int], record: IncomingRecord) -> tuple[list[tuple[bytes, bytes]], bool]:
    """(outputs as (key, value), whether there is a dead letter) of one input record."""
    described = event_type_of(KINDS[record.record_type or ""])
    event = described.decode(record.value)
    match event:
        case Skip():
            return [], False
        case Huge() | ahead.Hopeless():
            return [], True
        case Flaky() | ahead.Wobbly() if event.amount > 2:
            return [], True
        case batched.Bulk() if event.amount in (batched.REFUSED, batched.BROKEN):
            return [], True
        case Drop():
            state.pop(event.key, None)
            total = 0
        case _:
            total = state[event.key] = state.get(event.key, 0) + event.amount
    return [(event.key.encode(), event_type_of(Total).encode(Total(total, record.offset)))], False
