"""All kinds of work that run ahead of their turn, in the real engine: jobs, chains, concurrent handlers, batches,
records beside the transactions.

What must be true is looked at while it happens (work of a key one after the other, bounds) and at the end (outputs and
state are a fold of the input, in order, each event once).
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from streams import (
    AsyncBatcher,
    BatcherConfig,
    BatchItem,
    BatchProducer,
    Delivery,
    EventContext,
    EventSource,
    EventSourceConfig,
    QueueConfig,
    Record,
    Table,
    event_type,
)
from streams.outcomes import DEAD_LETTER, ErrorResponse, Retry
from streams.records import IncomingRecord
from streams.settings.groups import PoolConfig
from streams.settings.jobs import SchedulerConfig
from streams.source.jobs import AsyncJobScheduler
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse

OUT, SIDE = "out", "side"
JOB_KINDS = (
    *("Job", "Chain", "Ahead", "Swift", "Plain", "Slow", "Later", "Nothing", "BadPlan", "Broken", "Flaky", "FlakyEnd"),
    *("Near", "NearBroken"),
)
BATCH_KINDS = ("Batched", "Batched", "Batched", "InTurn", "Sent", "Plain")

Item = tuple[int, float, bool]
"""Of a batch: key, seconds that its call takes, whether it fails."""
Event = tuple[int, str, int, float, Sequence[Item]]
"""Partition, kind, key, seconds, items."""


class Work(msgspec.Struct, frozen=True):
    """The input."""

    key: str
    seconds: float
    items: Sequence[Item] = ()


TYPES: dict[str, Any] = {
    name: event_type(name)(type(name, (Work,), {"__module__": __name__}, frozen=True))
    for name in dict.fromkeys((*JOB_KINDS, *BATCH_KINDS))
}


@event_type("Done")
class Done(msgspec.Struct, frozen=True):
    """What an event led to. ``total``: how many of its key were done in its partition by then; ``sent``: places."""

    partition: int
    offset: int
    total: int
    sent: list[tuple[int, int]]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One world. ``faults``: (number of events that were sent before, seconds that pass before, what happens)."""

    partitions: int = 1
    members: int = 1
    concurrency: int = 2
    depth: int = 0
    max_keys: int = 1
    queued: int = 4
    poll: int = 3
    room: int = 5
    pool_seconds: float = 0.1
    max_sent: int = 3
    batcher: BatcherConfig = BatcherConfig()
    events: Sequence[Event] = ()
    faults: Sequence[tuple[int, float, str]] = ()
    seed: int = 0


class World:
    """A source for each process, and what its work meets."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.wrong: list[str] = []

    def process(self) -> EventSource[Any]:
        """A new process."""
        return Process(self).source

    def judge(self, driver: TestDriver[Any]) -> None:
        """Outputs and state are a fold of the input."""
        assert not self.wrong, self.wrong
        driver.check()
        settings = self.settings
        side = {(record.partition, record.offset): record.value for record in driver.outputs(SIDE)}
        done: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for one in driver.outputs(OUT, Done):
            done[one.partition].append((one.offset, one.total, len(one.sent)))
            told = [side[place] for place in one.sent]
            assert told == [b"%d@%d:%d" % (one.partition, one.offset, at) for at in range(len(told))]
        letters = [(record.partition, record.value) for record in driver.dead_letters()]
        ends: Counter[int] = Counter()
        totals: dict[int, Counter[str]] = defaultdict(Counter)
        expected: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        dead: dict[int, list[bytes]] = defaultdict(list)
        for partition, kind, key, seconds, items in settings.events:
            offset, total = ends[partition], totals[partition]
            ends[partition] += 1
            fails = kind in ("Batched", "InTurn") and any(item[2] for item in items)
            if fails or kind in ("BadPlan", "Broken", "NearBroken"):
                dead[partition].append(msgspec.json.encode(TYPES[kind](f"k{key}", seconds, items)))
            elif kind == "FlakyEnd":
                total.pop(f"k{key}", None)
            elif kind != "Nothing":
                total[f"k{key}"] += 1
                expected[partition].append((offset, total[f"k{key}"], len(items) if kind == "Sent" else 0))
        for partition in range(settings.partitions):
            assert done[partition] == expected[partition], "each once, in the order of the partition"
            assert [value for number, value in letters if number == partition] == dead[partition]
            assert dict(driver.restored_store(partition).items()) == totals[partition]
        offsets = {partition: offset for partition, offset in driver.committed_offsets().items() if offset}
        assert offsets == ends
        for number in driver.members:
            engine: Any = driver._world.members[number].engine
            assert not any(stage.running or stage.waiting or stage.keys for stage in engine.stages.statistics())
            assert engine.input._outstanding == 0, "some are still counted"


class Process:
    """A source, and a watch over its work."""

    def __init__(self, world: World) -> None:
        settings = self.settings = world.settings
        self._world = world
        self.running: Counter[Any] = Counter()
        self.last: dict[Any, int] = {}
        self.failed: dict[Any, int] = {}  # the last job of its key that failed for good
        self.source: EventSource[Any] = EventSource(
            EventSourceConfig(
                group_id="g",
                topic="in",
                num_partitions=settings.partitions,
                queues=QueueConfig(max_queued_records=settings.queued, max_poll_records=settings.poll),
                error_policy=DEAD_LETTER,
                pool=PoolConfig(
                    target_batch_size=settings.room,
                    max_batch_size=settings.room,
                    batch_delay_seconds=settings.pool_seconds,
                ),
            ),
            Table.factory(key=str, value=int),
        )
        self.retries = Retry(attempts=4, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)
        self.register_jobs()
        self.register_handlers()
        self.register_batches()

    # -- what is registered --------------------------------------------------------------------------------------------

    def count(self, ctx: EventContext[Any], key: str, sent: Sequence[tuple[int, int]] = ()) -> None:
        total = ctx.store.get(key, 0) + 1
        ctx.store.put(key, total)
        partition = ctx.topic_partition.partition
        ctx.forward(OUT, Done(partition, ctx.offset, total, list(sent)), partition=partition)

    def scheduler(self, **more: Any) -> SchedulerConfig:
        settings = self.settings
        given = {
            "concurrency": settings.concurrency,
            "worker_queue_depth": settings.depth,
            "max_concurrent_keys": settings.max_keys,
        }
        return SchedulerConfig(**{**given, **more})

    def register_jobs(self) -> None:
        async def job(item: Any) -> Any:
            record, event, epoch = item
            with self.busy("first" if record.record_type == "Chain" else "job", record, epoch):
                await elapse(event.seconds)
            if record.record_type == "Broken":
                self.failed["job", epoch, record.partition, record.key] = record.offset
                raise RuntimeError("broken")
            if record.record_type == "Flaky":
                self.running["tries", record.partition, record.offset] += 1
                if self.running["tries", record.partition, record.offset] % 3:
                    raise RuntimeError("not yet")
            return item

        async def second(item: Any) -> Any:
            record, event, epoch = item
            with self.busy("second", record, epoch):
                await elapse(event.seconds / 2)
            if record.record_type == "NearBroken":
                self.failed["second", epoch, record.partition, record.key] = record.offset
                raise RuntimeError("broken")
            return item

        def finalize(ctx: EventContext[Any], item: Any, result: Any) -> None:
            record, event, _ = item
            if item != result or record.offset != ctx.offset:
                self.say(f"{item}, {result} at {ctx.offset}")
            if record.record_type != "FlakyEnd":
                self.count(ctx, event.key)
                return
            ctx.store.put(event.key, -7)
            if ctx.attempt < 3:
                raise RuntimeError("not yet")
            ctx.store.delete(event.key)

        def plan(record: IncomingRecord, event: Any) -> Any:
            if record.record_type == "Nothing":
                return None
            return "no tuple" if record.record_type == "BadPlan" else (event.key, self.item(record, event))

        config = self.scheduler(retry=Retry(attempts=3, backoff_seconds=0.01, jitter=0))
        last = AsyncJobScheduler(self.source, second, finalize, config=msgspec.structs.replace(config, concurrency=1))
        chain = AsyncJobScheduler(self.source, job, config=config, then=last)
        single = AsyncJobScheduler(self.source, job, finalize, config=config)
        for kind in ("Job", "Nothing", "BadPlan", "Broken", "Flaky", "FlakyEnd"):
            single.register_event_type(TYPES[kind], plan, on_error=self.retries)
        chain.register_event_type(TYPES["Chain"], plan)
        for kind in ("Near", "NearBroken"):  # as the chain's, but they need not wait for its first stage
            last.register_event_type(TYPES[kind], plan, on_error=self.retries)

        @self.source.register_event_type(TYPES["Later"])
        async def later(ctx: EventContext[Any], event: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                rest = last.schedule(ctx, self.item(ctx.input, event))
            return await rest

    def register_handlers(self) -> None:
        source = self.source

        @source.register_event_type(TYPES["Ahead"], concurrency=self.scheduler(retry=None))
        async def ahead(ctx: EventContext[Any], event: Any) -> None:
            with self.busy("ahead", ctx.input):
                await elapse(event.seconds)
            await ctx.turn()
            await elapse(event.seconds / 4)
            self.count(ctx, event.key)

        @source.register_event_type(TYPES["Swift"], concurrency=self.scheduler(retry=None), on_error=self.retries)
        async def swift(ctx: EventContext[Any], event: Any) -> None:
            if ctx.attempt == 1:  # further ones are made in the turn, and the next of its key may run
                with self.busy("swift", ctx.input):
                    await elapse(event.seconds)
            await ctx.turn()
            if ctx.offset % 5 == 0 and event.seconds:
                await elapse(event.seconds)  # the others behind it are there already
            if ctx.offset % 7 == 0 and ctx.attempt < 3:
                ctx.store.put(event.key, -7)
                raise RuntimeError("not yet")
            self.count(ctx, event.key)

        @source.register_event_type(TYPES["Slow"])
        async def slow(ctx: EventContext[Any], event: Any) -> None:
            await elapse(event.seconds)
            self.count(ctx, event.key)

        source.register_event_type(TYPES["Plain"], lambda ctx, event: self.count(ctx, event.key))

    def register_batches(self) -> None:
        async def execute(items: list[BatchItem[Any]]) -> list[Any]:
            assert 1 <= len(items) <= self.settings.batcher.max_batch_size
            places = {(*item.value[:2], item.key) for item in items}
            for place in places:
                if self.running[place]:
                    self.say(f"{place} is in two calls at a time")
            for item in items:
                self.in_order((*item.value[:2], item.key), item.value[2])
            self.running.update(places)
            try:
                await elapse(max(item.value[4] for item in items))
            finally:
                self.running.subtract(places)
            return [RuntimeError("told to fail") if item.value[5] else None for item in items]

        def items(partition: int, offset: int, event: Work, epoch: Any) -> list[BatchItem[Any]]:
            return [BatchItem(item[0], (epoch, partition, offset, *item)) for item in event.items]

        def done(ctx: EventContext[Any], _: Any) -> None:
            self.count(ctx, "k0")

        def sent(ctx: EventContext[Any], deliveries: list[Delivery]) -> None:
            self.count(ctx, "k0", [(delivery.partition, delivery.offset) for delivery in deliveries])

        batcher: AsyncBatcher[Any, Any] = AsyncBatcher(self.source, execute, done, config=self.settings.batcher)
        batcher.register_event_type(
            TYPES["Batched"],
            lambda record, event: items(record.partition, record.offset, event, self.epoch(record.partition)),
        )
        producer: BatchProducer[Any] = BatchProducer(self.source, sent, max_queued_records=self.settings.max_sent)
        producer.register_event_type(
            TYPES["Sent"],
            lambda record, event: [
                Record(SIDE, b"%d@%d:%d" % (record.partition, record.offset, number), b"%d" % item[0])
                for number, item in enumerate(event.items)
            ],
        )

        @self.source.register_event_type(TYPES["InTurn"])
        async def in_turn(ctx: EventContext[Any], event: Work) -> None:
            partition = ctx.topic_partition.partition
            await batcher.submit(ctx, items(-1 - partition, ctx.offset, event, self.epoch(partition)))
            self.count(ctx, event.key)

    # -- what is looked at ---------------------------------------------------------------------------------------------

    def say(self, what: str) -> None:
        self._world.wrong.append(what)

    def worker(self, partition: int) -> Any:
        engine: Any = self.source._run.engine
        return engine.workers.get(partition)

    def epoch(self, partition: int) -> int:
        worker = self.worker(partition)
        return -1 if worker is None else worker.epoch

    def item(self, record: Any, event: Any) -> Any:
        return record, event, self.epoch(record.partition)

    def in_order(self, way: Any, offset: int) -> None:
        if self.last.get(way, -1) > offset:
            self.say(f"out of order: {way} at {offset}")
        self.last[way] = offset

    @contextmanager
    def busy(self, stage: str, record: Any, epoch: int | None = None) -> Iterator[None]:
        """While work on a record goes on that is in a stage."""
        partition, key, offset = record.partition, record.key, record.offset
        worker = self.worker(partition)
        epoch = self.epoch(partition) if epoch is None else epoch
        if worker is None or epoch != worker.epoch:
            self.say(f"{record.where} was given up before its job began")
        alone = stage == "second" and record.record_type == "Later"  # has its turn, and no order
        failed = self.failed.get((stage, epoch, partition, key), -1)
        if not alone and worker is not None and offset > failed >= max(worker.watermark, 0):
            self.say(f"{record.where} began before the failure of {failed} was dealt with")
        here = (stage, epoch, partition, key, offset if alone else -1)
        if self.running[here]:
            self.say(f"two jobs of one key: {here}")
        if not alone:
            self.in_order((*here, record.record_type == "Chain"), offset)
        most = 1 if stage == "second" else self.settings.concurrency
        self.running.update([here, stage])
        if self.running[stage] > most:
            self.say(f"{self.running[stage]} at once of {stage}")
        try:
            yield
        finally:
            self.running.subtract([here, stage])


def simulate(settings: Settings) -> float:
    """Live through a world, and judge it. Raises what is wrong; returns the time that it took."""
    world = World(settings)
    topics = {OUT: settings.partitions, SIDE: 2}
    with TestDriver(world.process, settings.members, settings.seed, topics=topics, patience=1_500.0) as driver:
        began, faults = driver.now, sorted(settings.faults)
        for number, (partition, kind, key, seconds, items) in enumerate(settings.events):
            while faults and faults[0][0] <= number:
                strike(driver, *faults.pop(0)[1:])
            driver.send(TYPES[kind](f"k{key}", seconds, items), key=f"k{key}", partition=partition, wait=False)
        for fault in faults:
            strike(driver, *fault[1:])
        driver.settle()
        ended = driver.now - began
        world.judge(driver)
        return ended


def strike(driver: TestDriver[Any], seconds: float, fault: str) -> None:
    """Something happens, so much later."""
    driver.advance(seconds)
    if fault == "rebalance":
        driver.rebalance()
    elif driver.members:
        member = driver.members[-1]
        getattr(driver, fault)(member)
        if fault == "crash":
            driver.restart(member)
