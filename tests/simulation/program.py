"""The event source under test, and the same thing as a fold over a plain dict."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from streams import GroupConfig, QueryConfig, QueueConfig, TimeoutConfig
from streams.codecs import codec_for
from streams.disk import SQLite
from streams.events import event_type, event_type_of
from streams.outcomes import DEAD_LETTER, SKIP, ErrorResponse, ExecutionState, Retry
from streams.records import Change, IncomingRecord, TopicPartition
from streams.runtime.partition.batch_handlers import BatchContext
from streams.runtime.partition.event_context import EventContext
from streams.settings.config import EventSourceConfig
from streams.settings.groups import ParkingConfig, PoolConfig, StateConfig
from streams.settings.jobs import SchedulerConfig
from streams.source.event_source import EventSource
from streams.source.jobs import AsyncJobScheduler
from streams.stores import Heap, Index, NamedTable, Stores, Table, Window, Windows
from streams.stores.table import DiskTable
from streams.testing.simulation.virtual_time import elapse

from . import jobs_program, once_program, parked_program
from .plans import Plan

GROUP, TOPIC, OUT, TICKS, TOKENS, RINGS = "sim", "in", "out", "ticks", "tokens", "rings"
TICK_KEY, RING_KEY = "_ticks", "_rings"
REFUSED_VALUE = b"REFUSED"
"""A record whose value contains this is too large for its topic."""


class Keyed(msgspec.Struct, frozen=True):
    """The input."""

    key: str
    amount: int


PURPOSES = {
    "Add": "plain handler",
    "Slow": "async handler that takes its time",
    "Thread": "blocking handler",
    "Flaky": "fails `amount` times, then succeeds; two retries, then the dead letter",
    "Skip": "fails always, and is skipped",
    "Huge": "sends what the broker refuses: dead letter",
    "Drop": "deletes the key",
    "Alarm": "adds, and sets a timer that rings soon (amounts 6 and 7), sets its key's reminder for a day that never "
    "comes (8), or cancels that (9)",
    "Bulk": "handled in lists, some of which fail although none of their events would",
    "Fetch": "a job that is a task",
    "Crunch": "a job on a thread",
    "Chained": "a task, then a thread, of which there is one",
    "Turn": "a concurrent handler, slow before its turn and after it",
    "Wobbly": "a job that fails, then a finalizer that fails, `amount` times; two retries, then the dead letter",
    "Hopeless": "a job that fails for good: dead letter",
    "Parked": "parks its key, `amount` times, then succeeds",
    "ParkedTurn": "the same by a concurrent handler, ahead of its turn or in it",
    "ParkedFetch": "the same by a job, or its finalizer",
    "ParkedBulk": "the same in lists",
    "Single": "handled once by its key and amount; one in four fails for good: dead letter",
    "SingleTurn": "the same by a concurrent handler",
    "SingleBulk": "the same in lists",
    "Hire": "starts a job that fails `amount` times, in the order of its key; the end of some starts another one",
    "HireNamed": "starts a job by the name of its key, after `amount` seconds: it takes the place of the former one",
    "HireThread": "starts a job on a thread",
    "HireDeath": "starts a job that ends its process",
    "HireFails": "starts a job, and fails for good: dead letter",
    "Fire": "cancels the job by the name of its key",
    "ParkedDeath": "parks its key, then ends its process, `amount` times, then succeeds",
}
KINDS: dict[str, Any] = {
    name: event_type(name)(type(name, (Keyed,), {"__module__": __name__}, frozen=True)) for name in PURPOSES
}
REFUSED, BROKEN = 8, 9
"""Amounts of events in lists that send what the broker refuses, or fail."""


@event_type("Ring")
class AlarmRing(msgspec.Struct, frozen=True):
    """What timers fire; ``offset`` is the alarm's. Every third one fails once."""

    offset: int


@event_type("Total")
class ValueAt(msgspec.Struct, frozen=True):
    value: int
    offset: int


@event_type("Refused")
class _Refused(msgspec.Struct, frozen=True):
    text: str


TOO_LARGE = _Refused(REFUSED_VALUE.decode())


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


class OnDisk(DiskTable[str, int]):
    """The library's store on disk, with the same face."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(partition, SQLite(), codec_for(str), codec_for(int))

    write, contents = Journalled.write, Journalled.contents


class Structured(Stores):
    """The same table, bare and with an index, and two structures that go by the events' time. Windows are closed in a
    table, so that nothing but the store is different."""

    sums = NamedTable.of(str, int, bare=True, index={"total": Index(int, lambda total: total)})
    recent = NamedTable.of(str, int, expires=1.0)
    writes = Windows.tumbling(
        str, int, size=0.5, add=lambda old, _: (old or 0) + 1, on_close=lambda ctx, *closed: ctx.store.close(*closed)
    )
    closed = Heap.of(str, int, priority=Index(int, lambda total: total))

    def time_of(self, ctx: Any) -> int | None:
        """Each record has a time of its own, and an early one is late."""
        records = (ctx.input,) if ctx.input is not None else getattr(ctx, "records", ())
        offset = min((record.offset for record in records if record.offset >= 0), default=None)
        return None if offset is None else 1000 + 150 * (offset - 8 * (offset % 5 == 4))

    def close(self, key: str, window: Window, count: int) -> None:
        total = self.closed.get(key, 0) + count
        self.closed.put(key, total)
        assert self.closed.max() is not None

    def get(self, key: str, default: int) -> int:
        return self.sums.get(key, default)

    def write(self, ctx: EventContext[Any], key: str, value: int | None) -> None:
        if value is None:
            self.sums.delete(key)
        else:
            self.sums.put(key, value)
            if self.event_ms is not None:  # else scheduled: it goes on while stores are compared
                self.recent.put(key, value)
                self.writes.add(key, value)

    def contents(self) -> dict[str, int]:
        in_order = [(key, value) for key, value in self.sums.by_range("total")]
        assert sorted(in_order) == sorted(self.sums.items()), "the index and its table"
        return dict(in_order)


def _state(process: Any) -> StateConfig:
    world = process.world
    if not world.plan.snapshots:
        return StateConfig(folder=world.folder, checkpoint_seconds=0.2, checkpoint_bytes=200)
    return StateConfig(
        folder=world.folder_of(process.name),
        checkpoint_seconds=0.2,
        checkpoint_bytes=200,
        snapshots=f"{world.folder}/snapshots",
        snapshot_seconds=0.5,
        snapshots_kept=2,
        snapshot_bytes_per_second=0,
    )


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
        timeouts=TimeoutConfig(
            session_timeout_seconds=plan.session,
            transaction_timeout_seconds=plan.transaction_timeout,
            call_timeout_seconds=plan.call_timeout,
            drain_timeout_seconds=plan.drain_timeout,
        ),
        queues=QueueConfig(max_queued_records=plan.max_queued, max_poll_records=20),
        error_policy=Retry(attempts=1, then=ErrorResponse.FAIL_CONSUMER),
        group=GroupConfig(
            strategy=strategies,
            publish_status=False,
            num_standbys=plan.num_standbys,
            max_moves=plan.max_moves,
            preparation_timeout_seconds=plan.preparation_timeout,
            leave_timeout_seconds=plan.leave_timeout,
        ),
        state=_state(process),
        parking=parked_program.bounds(process.rng) if plan.parks else ParkingConfig(),
        queries=QueryConfig(operate=plan.struck),
        on_partition_activated=lambda partition: process.note("active", partition),
        metrics_handler=process.measured,
    )
    kind = OnDisk if plan.on_disk else PlainStore if plan.patient else Journalled
    structured = Structured.factory(engine=SQLite() if plan.on_disk else None)
    source: EventSource[Any] = EventSource(config, structured if plan.structures else kind)

    def register(kind: str, handler: Callable[..., Any], **more: Any) -> None:
        source.register_event_type(KINDS[kind], handler, **more)

    def add(ctx: EventContext[Any], event: Keyed, offset: int | None = None) -> None:
        total = ctx.store.get(event.key, 0) + event.amount
        ctx.store.write(ctx, event.key, total)
        ctx.forward(OUT, ValueAt(total, ctx.offset if offset is None else offset), key=event.key)

    async def slow(ctx: EventContext[Any], event: Keyed) -> None:
        before = ctx.store.get(event.key, 0)
        ctx.store.write(ctx, event.key, -1)  # nobody may ever see this
        await elapse(rng.choice(SECONDS))
        ctx.store.write(ctx, event.key, before)
        add(ctx, event)

    def thread(ctx: EventContext[Any], event: Keyed) -> None:
        pause(rng.choice((0.0, 0.001, 0.05, 0.5)))
        add(ctx, event)

    def flaky(ctx: EventContext[Any], event: Keyed) -> None:
        add(ctx, event)
        if ctx.attempt <= event.amount:
            raise RuntimeError("not yet")

    def skip(ctx: EventContext[Any], event: Keyed) -> ExecutionState:
        add(ctx, event)
        return ctx.fail(RuntimeError("never"))

    def huge(ctx: EventContext[Any], event: Keyed) -> None:
        add(ctx, event)
        ctx.forward(OUT, TOO_LARGE, key=event.key)

    def drop(ctx: EventContext[Any], event: Keyed) -> None:
        ctx.store.write(ctx, event.key, None)
        ctx.forward(OUT, ValueAt(0, ctx.offset), key=event.key)

    def bulk(ctx: BatchContext[Any], events: list[Keyed]) -> None:
        process.note("list" if len(events) > 1 else "list of one", ctx.topic_partition.partition)
        for event, record in zip(events, ctx.records, strict=True):
            add(ctx, event, record.offset)
            if event.amount == REFUSED:
                ctx.forward(OUT, TOO_LARGE, key=event.key)
        in_company = len(events) > 1 and rng.random() < 0.1
        if in_company or any(event.amount == BROKEN for event in events):
            raise RuntimeError("not all of these")

    def alarm(ctx: EventContext[Any], event: Keyed) -> None:
        add(ctx, event)
        if event.amount < 8:
            ctx.schedule_in(0.7 * (event.amount - 5), AlarmRing(ctx.offset))
        elif event.amount == 8:
            ctx.schedule_in(1e6, AlarmRing(ctx.offset), name=event.key)
        else:
            ctx.cancel_timer(event.key)

    async def ring(ctx: EventContext[Any], event: AlarmRing) -> None:
        number = ctx.store.get(RING_KEY, 0) + 1
        ctx.store.write(ctx, RING_KEY, number)
        is_early = ctx.timer is None or ctx.now < ctx.timer.due
        ctx.forward(RINGS, ValueAt(-1 if is_early else number, event.offset), key=str(ctx.topic_partition.partition))
        if plan.smooth:
            return
        await elapse(rng.choice((0.0, 0.0, 0.01, 0.3)))
        if event.offset % 3 == 0 and ctx.attempt == 1:
            raise RuntimeError("not yet")

    register("Add", add)
    register("Slow", slow)
    register("Thread", thread, blocking=True)
    register("Flaky", flaky, on_error=RETRIES)
    register("Skip", skip, on_error=SKIP)
    register("Huge", huge, on_error=DEAD_LETTER)
    register("Drop", drop)
    register("Bulk", bulk, on_error=DEAD_LETTER, batch=True)
    register("Alarm", alarm)
    source.register_event_type(AlarmRing, ring, on_error=RETRIES)
    if plan.ahead:
        _register_ahead(source, process, add)
    if plan.once:
        once_program.register(source, process, KINDS, add)
    if plan.jobs:
        jobs_program.register(source, process, KINDS, add)
    if plan.parks:
        parked_program.register(source, process, KINDS, add)
    if plan.interjections:
        source.schedule_interjection(tick, every=0.7, jitter=0.2)
    return source


SECONDS = (0.0, 0.001, 0.01, 0.1, 0.1, 0.5, 2.0)
RETRIES = Retry(attempts=3, backoff_seconds=0.05, then=ErrorResponse.DEAD_LETTER)


def _register_ahead(source: EventSource[Any], process: Any, add: Callable[[EventContext[Any], Any], None]) -> None:
    """Events whose work runs ahead of their turn; ``add`` is what they do at their turn."""
    rng, pause = process.rng, process.pause
    tried: set[tuple[int, int]] = set()

    def plan(record: IncomingRecord, event: Keyed) -> tuple[str, tuple[IncomingRecord, Keyed]]:
        return event.key, (record, event)

    async def fetch(item: Any) -> Any:
        record, _ = item
        await elapse(rng.choice(SECONDS))
        if record.record_type == "Hopeless":
            raise RuntimeError("never")
        if record.record_type == "Wobbly" and (record.partition, record.offset) not in tried:
            tried.add((record.partition, record.offset))
            raise RuntimeError("not yet")
        return item

    def crunch(item: Any) -> Any:
        pause(rng.choice((0.0, 0.001, 0.05, 0.5)))
        return item

    def finalize(ctx: EventContext[Any], item: Any, result: Any) -> None:
        assert item == result
        record, event = result
        add(ctx, event)
        if record.record_type == "Wobbly" and ctx.attempt <= event.amount:
            raise RuntimeError("not yet")

    async def turn(ctx: EventContext[Any], event: Keyed) -> None:
        await elapse(rng.choice(SECONDS))
        await ctx.turn()
        await elapse(rng.choice((0.0, 0.0, 0.01, 0.3)))
        add(ctx, event)

    retry = Retry(attempts=2, backoff_seconds=0.05, jitter=0, timeout_seconds=None)
    few = SchedulerConfig(concurrency=3, worker_queue_depth=1, max_concurrent_keys=3, retry=retry)
    fetches: Any = AsyncJobScheduler(source, fetch, finalize, config=few)
    fetches.register_event_type(KINDS["Fetch"], plan)
    fetches.register_event_type(KINDS["Wobbly"], plan, on_error=RETRIES)
    fetches.register_event_type(KINDS["Hopeless"], plan, on_error=DEAD_LETTER)
    crunches: Any = AsyncJobScheduler(source, crunch, finalize, config=SchedulerConfig(concurrency=1))
    crunches.register_event_type(KINDS["Crunch"], plan)
    AsyncJobScheduler(source, fetch, config=few, then=crunches).register_event_type(KINDS["Chained"], plan)
    two = SchedulerConfig(concurrency=2, worker_queue_depth=1, max_concurrent_keys=2)
    source.register_event_type(KINDS["Turn"], turn, concurrency=two)


def tick(ctx: EventContext[Any]) -> None:
    """Counts its own runs: exactly once, or the numbers have gaps or repeat themselves."""
    number = ctx.store.get(TICK_KEY, 0) + 1
    ctx.store.write(ctx, TICK_KEY, number)
    ctx.forward(TICKS, ValueAt(number, ctx.offset), key=str(ctx.topic_partition.partition))


def inputs(plan: Plan, rng: random.Random) -> Iterator[tuple[int, bytes | None, bytes, Any]]:
    """(partition, key, value, headers) of each input record."""
    for place in range(plan.records):
        kind = rng.choice(plan.kinds)
        number = rng.randrange(plan.keys)
        fails = kind in ("Flaky", "Wobbly") or kind.startswith(("Parked", "Hire"))
        amount = rng.choice((0, 1, 2, 3)) if fails else rng.randint(1, 9)
        if plan.timers and kind == "Add" and amount > 5:
            kind = "Alarm"
        is_alone = plan.struck and kind.startswith("Parked") and rng.random() < 0.1
        event = KINDS[kind](f"alone{place}" if is_alone else f"k{number}", amount)
        described, key = event_type_of(KINDS[kind]), None if is_alone else event.key.encode()
        yield number % plan.partitions, key, described.encode(event), described.headers


def fold(state: dict[str, int], seen: set[str], record: IncomingRecord) -> tuple[list[tuple[bytes, bytes]], bool]:
    """(outputs as (key, value), whether there is a dead letter) of one input record. ``seen``: ids of the partition."""
    kind = record.record_type or ""
    event = event_type_of(KINDS[kind]).decode(record.value)
    if kind.startswith("Single"):
        if (id_ := once_program.id_of(event)) in seen:
            return [], False
        if once_program.fails(record.offset):
            return [], True
        seen.add(id_)
    match kind:
        case "Skip":
            return [], False
        case "Huge" | "Hopeless" | "HireFails":
            return [], True
        case "Flaky" | "Wobbly" if event.amount > 2:
            return [], True
        case "Bulk" if event.amount in (REFUSED, BROKEN):
            return [], True
        case "Drop":
            state.pop(event.key, None)
            total = 0
        case _:
            total = state[event.key] = state.get(event.key, 0) + event.amount
    return [(event.key.encode(), event_type_of(ValueAt).encode(ValueAt(total, record.offset)))], False
