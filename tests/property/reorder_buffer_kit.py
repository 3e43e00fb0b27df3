"""Partition workers in virtual time, over a pool and an input made of lists: every kind of work at any settings.

What must be true is looked at while it happens (jobs of a key one after the other, slots, what the input is told) and
at the end (outputs and state are a fold of the input, in order, each event once).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import anyio
import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, TopicPartition, event_type
from streams.async_jobs import AsyncJobScheduler
from streams.core.partition import PartitionState
from streams.core.router import Route
from streams.events import event_type_of
from streams.job_settings import JobRetry, SchedulerConfig
from streams.outcomes import DEAD_LETTER, ErrorPolicy, ErrorResponse
from streams.records import Change, IncomingRecord, Output
from streams.runtime.async_work.async_stage import Stages
from streams.runtime.ownership.replicas import Replica
from streams.runtime.partition.handler_threads import HandlerThreads
from streams.runtime.partition.interjections import Interjection
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.signal import Broadcast
from streams.testing.simulation.virtual_time import VirtualTimeLoop, elapse, run
from tests.property.reorder_buffer_parts import Input, Pool

TOPIC, OUT = "in", "out"
KINDS: tuple[str, ...] = ("Job", "Chain", "Ahead", "Swift", "Plain", "Slow", "Later")
KINDS += ("Nothing", "BadPlan", "Broken", "Flaky", "FlakyEnd", "Near", "NearBroken")


class _Work(msgspec.Struct, frozen=True):
    key: str
    seconds: float


TYPES: dict[str, type[_Work]] = {
    name: event_type(name)(type(name, (_Work,), {"__module__": __name__}, frozen=True)) for name in KINDS
}


@event_type("Done")
class Done(msgspec.Struct, frozen=True):
    """What an event led to: how many of its key were done by then."""

    offset: int
    total: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One world. ``events``: (partition, kind, key, seconds). ``ends``: (time, partition, in good order or not)."""

    partitions: int = 1
    concurrency: int = 2
    depth: int = 0
    max_keys: int = 1
    queued: int = 4
    batch: int = 3
    pool_room: int = 5
    pool_seconds: float = 0.1
    events: Sequence[tuple[int, str, int, float]] = ()
    ends: Sequence[tuple[float, int, bool]] = ()
    asks: Sequence[tuple[float, int]] = ()


class LineWorld:
    """``host.Host``, and all that happens."""

    fires_timers = True

    def __init__(self, settings: Settings, loop: VirtualTimeLoop) -> None:
        self.settings, self._loop = settings, loop
        self.config = EventSourceConfig(
            group_id="g",
            topic=TOPIC,
            num_partitions=settings.partitions,
            bootstrap_servers="nowhere",
            instance_id="me",
            max_queued_records=settings.queued,
            error_policy=DEAD_LETTER,
        )
        self.running: Counter[Any] = Counter()
        self.last: dict[Any, int] = {}
        self.failed: dict[Any, int] = {}  # the last job of its key that failed for good
        self.source = self._source()
        self.router, self.schedules = self.source._router, ()
        self.rng, self.now, self.message_limit = random.Random(1), loop.time, 1_000_000
        self.handler_threads: HandlerThreads = HandlerThreads(_no_threads)
        self.stages = Stages(self)  # type: ignore[arg-type]
        self.progress = Broadcast()
        self.pool, self.input = Pool(self), Input(self)
        self.workers: dict[int, PartitionWorker] = {}
        self.epoch = 0
        self.state: dict[int, dict[bytes, bytes | None]] = defaultdict(dict)
        self.offsets: Counter[int] = Counter()
        self.outputs: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        self.logs: list[list[IncomingRecord]] = [[] for _ in range(settings.partitions)]
        self.tasks: list[asyncio.Task[None]] = []
        self.failures: list[Exception] = []
        self.ended = 0.0
        for partition, kind, key, seconds in settings.events:
            log, made = self.logs[partition], event_type_of(TYPES[kind])
            value = made.encode(TYPES[kind](f"k{key}", seconds))
            log.append(IncomingRecord(TOPIC, partition, len(log), b"k%d" % key, value, made.headers))

    # -- what is registered --------------------------------------------------------------------------------------------

    def _source(self) -> EventSource[Any]:
        source: EventSource[Any] = EventSource(self.config, Table.factory(key=str, value=int))
        settings = self.settings
        config = SchedulerConfig(
            concurrency=settings.concurrency,
            worker_queue_depth=settings.depth,
            max_concurrent_keys=settings.max_keys,
            retry=JobRetry(attempts=3, wait_initial_seconds=0.01, wait_jitter_seconds=0.0),
        )

        def count(ctx: EventContext[Any], key: str) -> None:
            total = ctx.store.get(key, 0) + 1
            ctx.store.put(key, total)
            ctx.forward(OUT, Done(ctx.offset, total), key=key)

        def epoch_of(record: IncomingRecord) -> int:
            return self.workers[record.partition].epoch

        async def job(item: Any) -> Any:
            record, event, epoch = item
            stage = "first" if record.record_type == "Chain" else "job"
            with self._busy(stage, record, config.concurrency, epoch):
                await elapse(event.seconds)
            if record.record_type == "Broken":
                self.failed["job", epoch, record.partition, record.key] = record.offset
                raise RuntimeError("broken")
            if record.record_type == "Flaky":
                self.last[record.partition, record.offset] = tries = (
                    self.last.get((record.partition, record.offset), 0) + 1
                )
                if tries % 3:
                    raise RuntimeError("not yet")
            return item

        async def second(item: Any) -> Any:
            record, event, epoch = item
            with self._busy("second", record, 1, epoch):
                await elapse(event.seconds / 2)
            if record.record_type == "NearBroken":
                self.failed["second", epoch, record.partition, record.key] = record.offset
                raise RuntimeError("broken")
            return item

        def finalize(ctx: EventContext[Any], item: Any, result: Any) -> None:
            if item != result or item[0].offset != ctx.offset:
                self.failures.append(AssertionError(f"{item}, {result} at {ctx.offset}"))
            if item[0].record_type == "FlakyEnd":
                ctx.store.put(item[1].key, -7)
                if ctx.attempt < 3:
                    raise RuntimeError("not yet")
                ctx.store.put(item[1].key, ctx.store.get(item[1].key, 0) - 1)
                ctx.store.delete(item[1].key)
                return
            count(ctx, item[1].key)

        def plan(record: IncomingRecord, event: Any) -> Any:
            if record.record_type == "Nothing":
                return None
            return "no tuple" if record.record_type == "BadPlan" else (event.key, (record, event, epoch_of(record)))

        last = AsyncJobScheduler(source, second, finalize, config=msgspec.structs.replace(config, concurrency=1))
        chain = AsyncJobScheduler(source, job, config=config, then=last)
        single = AsyncJobScheduler(source, job, finalize, config=config)
        retries = ErrorPolicy(retries=3, backoff_seconds=0.01, then=ErrorResponse.DEAD_LETTER)
        for kind in ("Job", "Nothing", "BadPlan", "Broken", "Flaky", "FlakyEnd"):
            single.register_event_type(TYPES[kind], plan, on_error=retries)
        chain.register_event_type(TYPES["Chain"], plan)
        for kind in ("Near", "NearBroken"):  # as the chain's, but they need not wait for its first stage
            last.register_event_type(TYPES[kind], plan, on_error=retries)

        @source.register_event_type(TYPES["Ahead"], concurrency=config_without_retry(config))
        async def ahead(ctx: EventContext[Any], event: Any) -> None:
            assert ctx.input is not None
            with self._busy("ahead", ctx.input, config.concurrency, epoch_of(ctx.input)):
                await elapse(event.seconds)
            await ctx.turn()
            await elapse(event.seconds / 4)
            count(ctx, event.key)

        @source.register_event_type(TYPES["Swift"], concurrency=config_without_retry(config), on_error=retries)
        async def swift(ctx: EventContext[Any], event: Any) -> None:
            assert ctx.input is not None
            if ctx.attempt == 1:  # further ones are made in the turn, and the next of its key may run
                with self._busy("swift", ctx.input, config.concurrency, epoch_of(ctx.input)):
                    await elapse(event.seconds)
            await ctx.turn()
            if ctx.offset % 5 == 0 and event.seconds:
                await elapse(event.seconds)  # the others behind it are there already
            if ctx.offset % 7 == 0 and ctx.attempt < 3:
                ctx.store.put(event.key, -7)
                raise RuntimeError("not yet")
            count(ctx, event.key)

        @source.register_event_type(TYPES["Slow"])
        async def slow(ctx: EventContext[Any], event: Any) -> None:
            await elapse(event.seconds)
            count(ctx, event.key)

        @source.register_event_type(TYPES["Later"])
        async def later(ctx: EventContext[Any], event: Any) -> Any:
            assert ctx.input is not None
            return await last.schedule(ctx, (ctx.input, event, epoch_of(ctx.input)))

        source.register_event_type(TYPES["Plain"], lambda ctx, event: count(ctx, event.key))
        return source

    @contextmanager
    def _busy(self, stage: str, record: IncomingRecord, most: int, epoch: int) -> Any:
        if epoch != self.workers[record.partition].epoch:
            self.failures.append(AssertionError(f"{record.where} was given up before its job began"))
        alone = stage == "second" and record.record_type == "Later"  # has its turn, and no order
        failed = self.failed.get((stage, epoch, record.partition, record.key), -1)
        is_behind = record.offset > failed >= max(self.workers[record.partition].watermark, 0)
        if is_behind and not alone:
            self.failures.append(AssertionError(f"{record.where} began before the failure of {failed} was dealt with"))
        here = (stage, epoch, record.partition, record.key, record.offset if alone else -1)
        if self.running[here]:
            self.failures.append(AssertionError(f"two jobs of one key: {here}"))
        way = (*here, record.record_type == "Chain")
        if not alone and self.last.get(way, -1) > record.offset:
            self.failures.append(AssertionError(f"out of order: {here}"))
        self.last[way] = record.offset
        self.running[here] += 1
        self.running[stage] += 1
        if self.running[stage] > most:
            self.failures.append(AssertionError(f"{self.running[stage]} at once of {stage}"))
        try:
            yield
        finally:
            self.running[here] -= 1
            self.running[stage] -= 1

    # -- what happens --------------------------------------------------------------------------------------------------

    def start(self, partition: int) -> None:
        """Work on a partition, from what is committed."""
        self.epoch += 1
        worker = self.workers[partition] = PartitionWorker(self, partition, self.epoch)  # type: ignore[arg-type]
        store: Any = Table.factory(key=str, value=int)(TopicPartition(TOPIC, partition))
        for key, value in self.state[partition].items():
            store.receive_change(Change(key, value))
        worker.adopt(Replica(partition, self.epoch, store, 0.0))
        worker.state = worker.state.to(PartitionState.ACTIVE)
        worker.watermark = self.offsets[partition]
        self.input.add(partition, self.offsets[partition])

        async def work() -> None:
            try:
                with worker.scope:
                    await worker.run()
            except Exception as error:
                self.failures.append(error)
            finally:
                worker.finished.set()
                self.progress.notify()

        self.tasks.append(self._loop.create_task(work()))

    def lose(self, partition: int) -> None:
        """The partition is lost, and comes back at once."""
        worker = self.workers[partition]
        if worker.state is not PartitionState.ACTIVE:
            return
        self.pool.drop(partition)
        worker.state = worker.state.to(PartitionState.VOID)
        worker.close_intake()
        self.input.remove([partition])
        worker.scope.cancel()
        worker.drop_store()
        self.start(partition)

    async def give_up(self, partition: int) -> None:
        """The partition is given up in good order, and comes back."""
        worker = self.workers[partition]
        if worker.state is not PartitionState.ACTIVE:
            return
        worker.state = worker.state.to(PartitionState.DRAINING)
        worker.close_intake()
        self.input.remove([partition])
        with anyio.move_on_after(1.0):
            await worker.finished.wait()
        if not worker.finished.is_set():
            worker.scope.cancel()
            await worker.finished.wait()
        self.pool.commit()
        worker.state = worker.state.to(PartitionState.RELEASED)
        worker.drop_store()
        self.start(partition)

    async def ask(self, partition: int) -> None:
        """An interjection; it is not held up by jobs."""
        if self.workers[partition].state is not PartitionState.ACTIVE:
            return
        answered = self._loop.create_future()
        route = Route(
            "ask", None, lambda ctx: ctx.forward(OUT, Done(-1, 0), key="ask"), blocking=False, policy=DEAD_LETTER
        )
        waiter: Callable[[Any], None] = lambda error: answered.done() or answered.set_result(error)  # noqa: E731
        self.workers[partition].inbox.put(Interjection(route, waiter))
        await answered

    def committed(self, partition: int, offset: int, outputs: list[Output], changes: list[Change]) -> None:
        """Part of a transaction."""
        assert offset >= self.offsets[partition], "committed backwards"
        self.offsets[partition] = offset
        for change in changes:
            self.state[partition][change.key] = change.value
        for output in outputs:
            if output.topic != OUT:
                self.outputs[partition].append(("dead", output.origin, 0))
            elif output.origin >= 0:
                done = event_type_of(Done).decode(output.value)
                self.outputs[partition].append(("done", done.offset, done.total))

    async def live(self) -> None:
        """From the first record to the last."""
        try:
            for partition in range(self.settings.partitions):
                self.start(partition)
            happens: list[tuple[float, Callable[[int], Any], int]] = [
                (at, self.give_up if orderly else self.lose, partition) for at, partition, orderly in self.settings.ends
            ]
            happens += [(at, self.ask, partition) for at, partition in self.settings.asks]
            acts = []
            for at, act, partition in sorted(happens, key=lambda one: one[0]):
                await elapse(max(at - self._loop.time(), 0))
                doing = act(partition)
                acts += [] if doing is None else [self._loop.create_task(doing)]
            await asyncio.gather(*acts)
            while any(self.offsets[number] < len(log) for number, log in enumerate(self.logs)):
                await self.progress.wait()
                assert not self.failures, self.failures
            assert not self.failures, self.failures
            self.ended = self._loop.time()
            assert self.input.outstanding == 0, f"{self.input.outstanding} are still counted"
            assert not any(stage.running or stage.waiting or stage.keys for stage in self.stages.statistics())
        finally:
            for worker in self.workers.values():
                worker.scope.cancel()
            await asyncio.gather(*self.tasks, *self.stages.close(), return_exceptions=True)

    def judge(self) -> None:
        """Outputs and state are a fold of the input."""
        for partition, log in enumerate(self.logs):
            totals: dict[str, int] = {}
            expected = []
            for record in log:
                kind, key = record.record_type or "", (record.key or b"").decode()
                if kind in ("BadPlan", "Broken", "NearBroken"):
                    expected.append(("dead", record.offset, 0))
                elif kind == "FlakyEnd":
                    totals.pop(key, None)
                elif kind != "Nothing":
                    totals[key] = totals.get(key, 0) + 1
                    expected.append(("done", record.offset, totals[key]))
            assert self.outputs[partition] == expected
            store: Any = Table.factory(key=str, value=int)(TopicPartition(TOPIC, partition))
            for name, value in self.state[partition].items():
                store.receive_change(Change(name, value))
            assert dict(store.items()) == totals

    # -- the rest of the host ------------------------------------------------------------------------------------------

    async def in_process(self, function: Callable[..., Any], *args: Any) -> NoReturn:
        raise NotImplementedError

    def measure(self, measurement: Any) -> None: ...

    def exit_now(self, text: str) -> NoReturn:
        raise AssertionError(text)

    def wall_ms(self) -> int:
        return 0

    def revoke_store(self, store: Any, partition: int) -> None:
        store.revoked()


def config_without_retry(config: SchedulerConfig) -> SchedulerConfig:
    """For handlers, whose retries are their policy's."""
    return msgspec.structs.replace(config, retry=None)


def _no_threads(name: str) -> NoReturn:
    raise NotImplementedError


def simulate(settings: Settings) -> LineWorld:
    """Live through a world, and judge it. Raises what is wrong."""
    made: list[LineWorld] = []

    async def main(loop: VirtualTimeLoop) -> None:
        made.append(LineWorld(settings, loop))
        await made[0].live()

    run(main, limit_seconds=5_000.0)
    made[0].judge()
    return made[0]
