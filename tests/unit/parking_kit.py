"""A source whose handler fails for chosen numbers, for the tests of parked keys."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from streams import (
    PARK,
    AsyncBatcher,
    AsyncJobScheduler,
    BatchContext,
    BatchItem,
    EventContext,
    EventSource,
    EventSourceConfig,
    Table,
    event_type,
)
from streams.outcomes import ErrorPolicy
from streams.runtime.partition.parked_events import QUEUES
from streams.settings import BatcherConfig, Once, SchedulerConfig
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse

AHEAD: Final = ("concurrent", "jobs", "batcher")


@event_type("Add")
class Add(msgspec.Struct, frozen=True):
    """Adds a number to its key's list."""

    number: int
    key: str = "a"


@event_type("Remind")
class Remind(msgspec.Struct, frozen=True):
    """A timer's event."""

    number: int
    key: str = "a"


class Bank:
    """A source whose handler fails for ``broken`` numbers, and what its handlers did.

    ``way``: how the handler of ``Add`` is registered; ahead of its turn (``AHEAD``) it takes ``seconds`` by number, and
    fails there for ``broken_ahead``. ``calls``: what began ahead; ``cancelled``: what was cancelled there.
    """

    def __init__(
        self, policy: ErrorPolicy = PARK, way: str = "plain", *, concurrency: int = 4, keys: int = 1000, **settings: Any
    ) -> None:
        self.broken: set[int] = set()
        self.attempts: list[tuple[int, int]] = []
        self.policy = policy
        self.way = way
        self.limits = SchedulerConfig(concurrency=concurrency, max_concurrent_keys=keys)
        self.settings = settings
        self.engine: Any = None
        self.once: Once | None = None  # of the handler of ``Add``
        self.inputs: dict[str, dict[str, Any]] = {}
        self.places: list[str] = []  # of the attempts
        self.broken_ahead: set[int] = set()
        self.seconds: dict[int, float] = {}
        self.lists: list[list[int]] = []  # of each call of the batch handler
        self.calls: list[int] = []
        self.cancelled: list[int] = []

    async def work(self, number: int) -> None:
        """The work of an event ahead of its turn."""
        self.calls.append(number)
        try:
            await elapse(self.seconds.get(number, 0.0))
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if number in self.broken_ahead:
            raise RuntimeError(f"no call for {number}")

    def source(self) -> EventSource[Table[str, tuple[int, ...]]]:
        config = EventSourceConfig(**{"group_id": "bank", "topic": "adds", "num_partitions": 1} | self.settings)
        source = EventSource(config, store=Table.factory(key=str, value=tuple[int, ...], engine=self.engine))

        for topic, more in self.inputs.items():
            source.input(topic, **more)

        def on_add(ctx: EventContext[Table[str, tuple[int, ...]]], event: Add, *, is_alone: bool = True) -> None:
            if is_alone:
                self.attempts.append((event.number, ctx.attempt))
                self.places.append(ctx.where)
            ctx.store.put(event.key, (*(ctx.store.get(event.key) or ()), event.number))
            if event.number in self.broken:
                raise RuntimeError(f"no {event.number}")
            ctx.forward("out", event, key=event.key)
            if event.number > 1000:
                ctx.loop(Add(event.number - 1000, event.key), key=event.key)
            if event.number == 100:
                ctx.schedule_in(5, Remind(101, event.key), name="t", key=event.key)
            if event.number == 99:
                ctx.cancel_timer("t")

        def on_adds(ctx: BatchContext[Table[str, tuple[int, ...]]], events: list[Add]) -> None:
            self.lists.append([event.number for event in events])
            for event in events:
                on_add(ctx, event, is_alone=len(events) == 1)

        async def concurrent(ctx: EventContext[Table[str, tuple[int, ...]]], event: Add) -> None:
            await self.work(event.number)
            await ctx.turn()
            on_add(ctx, event)

        async def job(event: Add) -> Add:
            await self.work(event.number)
            return event

        def finalizer(ctx: EventContext[Table[str, tuple[int, ...]]], _: Add, event: Add) -> None:
            on_add(ctx, event)

        async def call(items: list[BatchItem[Add]]) -> list[Add | Exception]:
            answers: list[Add | Exception] = []
            for item in items:
                try:
                    await self.work(item.value.number)
                    answers.append(item.value)
                except RuntimeError as error:
                    answers.append(error)
            return answers

        def called(ctx: EventContext[Table[str, tuple[int, ...]]], items: list[BatchItem[Add]]) -> None:
            on_add(ctx, items[0].value)

        if self.way == "batcher":
            limits = BatcherConfig(max_batch_size=1, max_concurrent_batches=4)
            batcher = AsyncBatcher(source, call, called, config=limits)
            batcher.register_event_type(Add, key=lambda event: event.key, on_error=self.policy, once=self.once)
        elif self.way == "batch":
            source.register_event_type(Add, on_adds, batch=True, on_error=self.policy, once=self.once)
        elif self.way == "jobs":
            jobs = AsyncJobScheduler(source, job, finalizer, config=self.limits)
            jobs.register_event_type(Add, key=lambda event: event.key, on_error=self.policy, once=self.once)
        elif self.way == "concurrent":
            limits = self.limits
            source.register_event_type(Add, concurrent, concurrency=limits, on_error=self.policy, once=self.once)
        elif self.way == "async":

            async def awaited(ctx: EventContext[Table[str, tuple[int, ...]]], event: Add) -> None:
                await self.work(event.number)
                on_add(ctx, event)

            source.register_event_type(Add, awaited, on_error=self.policy, once=self.once)
        else:
            blocking = self.way == "blocking"
            source.register_event_type(Add, on_add, on_error=self.policy, once=self.once, blocking=blocking)

        @source.on(on_error=self.policy)
        def on_remind(ctx: EventContext[Table[str, tuple[int, ...]]], event: Remind) -> None:
            if event.number in self.broken:
                raise RuntimeError(f"no {event.number}")
            ctx.store.put(event.key, (*(ctx.store.get(event.key) or ()), event.number))

        return source

    def driver(self, **options: Any) -> TestDriver[Table[str, tuple[int, ...]]]:
        return TestDriver(self.source, **options)


def add(driver: TestDriver[Any], *numbers: int, key: str = "a", topic: str = "") -> None:
    send(driver, *numbers, key=key, topic=topic)
    driver.settle()


def send(driver: TestDriver[Any], *numbers: int, key: str = "a", topic: str = "") -> None:
    for number in numbers:
        driver.send(Add(number, key), key=key, topic=topic, wait=False)


def redeploy(driver: TestDriver[Any]) -> None:
    """Stop the only member in good order, and start it as a new process."""
    driver.leave()
    driver.restart()
    driver.settle()


def parked_records(driver: TestDriver[Any], partition: int = 0) -> dict[bytes, bytes]:
    """The records of all queues, as they are committed in the changelog."""
    world, found = driver._world, dict[bytes, bytes]()
    log = world.broker.log(world.config.changelog, partition)
    for record in log.committed(0, log.end):
        if record.key is not None and record.key.startswith(QUEUES):
            found.pop(record.key, None)
            if record.value is not None:
                found[record.key] = record.value
    return found
