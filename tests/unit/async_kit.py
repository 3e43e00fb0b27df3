"""Work ahead of its turn in virtual time: a source of each kind of stage, and the trace of what it did when.

An event is a list of words, ``a1:3 b1!``: items with their first letters as keys, whose call takes three seconds, and
fails. Its trace ``0 a1+b1!; 3 (b1! is bad) @1``: one call at 0, three seconds later the end, offset 1 committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from streams import (
    AsyncBatcher,
    AsyncJobScheduler,
    BatcherConfig,
    BatchItem,
    BatchProducer,
    Delivery,
    EventContext,
    EventSource,
    Record,
    SchedulerConfig,
)
from streams.errors import StoreError
from streams.outcomes import DEAD_LETTER
from streams.testing import TestDriver
from tests.unit.runtime_kit import OUT
from tests.vocabulary import TOTALS, Named, config_of, touch

INHERITED: contextvars.ContextVar[str] = contextvars.ContextVar("inherited", default="")
"""What a call would inherit from whichever ended before it, and shows in the trace."""

STAGES = ("jobs", "concurrent", "batches")


def row(line: str) -> tuple[str, dict[str, Any], list[str], str]:
    """Kind of the stage with its settings | events | trace."""
    head, events, trace = (part.strip() for part in line.split("|"))
    kind, *settings = head.split()
    stage = {name: int(value) for name, _, value in (setting.partition("=") for setting in settings)}
    return kind, stage, [event.strip() for event in events.split(",")], trace


def outcome(word: str) -> Any:
    """The result of a call with this word, or its error."""
    name = word.partition(":")[0]
    return RuntimeError(f"{name} is bad") if "!" in name else name.upper()


def new_source(*, store: Any = TOTALS, **settings: Any) -> EventSource[Any]:
    config: Any = {"group_id": "g", "topic": "in", "num_partitions": 1, "error_policy": DEAD_LETTER, **settings}
    return EventSource(config_of(**config), store)


class World:
    """What a stage calls, and its trace.

    ``late``: it has an ``on_failure``; ``ahead``: events go to it; ``fault``: what the call of ``bad`` does."""

    def __init__(
        self,
        kind: str,
        stage: dict[str, Any] | None = None,
        *,
        late: bool = False,
        ahead: bool = True,
        fault: Callable[[], Awaitable[Any]] | None = None,
        **settings: Any,
    ) -> None:
        self.source = new_source(**settings)
        self._ahead, self._fault = ahead, fault
        self.start = 0.0
        self.now: Callable[[], float]
        self._trace: defaultdict[int, list[str]] = defaultdict(list)
        self.stage: Any = getattr(self, f"_{kind}")(stage or {}, self.failed if late else None)

    def note(self, what: str) -> None:
        self._trace[round(self.now() - self.start)].append(what)

    @property
    def trace(self) -> str:
        return "; ".join(f"{second} {' '.join(notes)}" for second, notes in sorted(self._trace.items()))

    async def work(self, *words: str) -> list[Any]:
        """Take as long as the longest of these says."""
        called = "+".join(word.partition(":")[0] for word in words)
        inherited = INHERITED.get() or called
        self.note(called if inherited == called else f"{called}-after-{inherited}")
        INHERITED.set(called)
        try:
            if self._fault is not None and called == "bad":
                await self._fault()
            await asyncio.sleep(max(float(word.partition(":")[2] or 0) for word in words))
        except asyncio.CancelledError:
            self.note(f"no-{called}")
            raise
        return [outcome(word) for word in words]

    def done(self, ctx: EventContext[Any], *results: str) -> None:
        self.note("+".join(results) or "()")
        touch(ctx, "all")
        ctx.forward(OUT, Named("+".join(results)))
        if "?" in "".join(results) and "@" not in "".join(results):
            raise RuntimeError("the finalizer fails")

    def failed(self, ctx: EventContext[Any], *given: Any) -> None:
        """``on_failure``: of a job, or of a list of items."""
        errors = [item.error for item in given[0]] if len(given) == 1 else given[1:]
        self.note(f"({', '.join(str(error) for error in errors if error)})")

    def _jobs(self, stage: dict[str, Any], on_failure: Any) -> Any:
        async def job(event: Named) -> str:
            (result,) = await self.work(event.name)
            if isinstance(result, Exception):
                raise result
            return str(result)

        config = SchedulerConfig(**{"concurrency": 4, **stage})
        scheduler: AsyncJobScheduler[Any, Any, str] = AsyncJobScheduler(
            self.source, job, lambda ctx, event, result: self.done(ctx, result), config=config, on_failure=on_failure
        )
        self._plan(scheduler, lambda event: (event.name[0], event))
        return scheduler

    def _concurrent(self, stage: dict[str, Any], on_failure: Any) -> Any:
        async def handler(ctx: EventContext[Any], event: Named) -> None:
            with pytest.raises(StoreError, match="ahead of the event's turn"):
                ctx.store.get("a")
            (result,) = await self.work(event.name)
            if isinstance(result, Exception):
                raise result
            await ctx.turn()
            self.done(ctx, result)

        self.source.register_event_type(Named, handler, concurrency=stage.get("concurrency", 4))

    def _batches(self, stage: dict[str, Any], on_failure: Any) -> Any:
        async def call(items: list[BatchItem[str]]) -> list[Any]:
            return await self.work(*(item.value for item in items))

        def finalize(ctx: EventContext[Any], items: list[BatchItem[str]]) -> None:
            self.done(ctx, *(item.result for item in items))

        config = BatcherConfig(**{"max_delay_seconds": 0.0, **stage})
        batcher: AsyncBatcher[Any, str] = AsyncBatcher(
            self.source, call, finalize, config=config, on_failure=on_failure
        )
        self._plan(batcher, items_of)
        return batcher

    def _producer(self, stage: dict[str, Any], on_failure: Any) -> Any:
        def finalize(ctx: EventContext[Any], deliveries: list[Delivery]) -> None:
            self.done(ctx, *(f"{name_of(delivery.record)}@{delivery.offset}" for delivery in deliveries))

        producer: BatchProducer[Any] = BatchProducer(self.source, finalize, on_failure=on_failure, **stage)
        self._plan(producer, records_of)
        return producer

    def _plan(self, stage: Any, plan: Callable[[Named], Any]) -> None:
        if self._ahead:
            stage.register_event_type(Named, lambda record, event: None if event.name == "None" else plan(event))


def name_of(record: Record) -> str:
    return (record.key or b"").decode().partition(":")[0]


def items_of(event: Named) -> list[tuple[str, str]]:
    return [(word[0], word) for word in event.name.split()]


def records_of(event: Named) -> list[Record]:
    return [Record("far", b"", word.encode(), partition=0) for word in event.name.split()]


@contextlib.contextmanager
def driven(world: World) -> Iterator[TestDriver[Any]]:
    with TestDriver(world.source, patience=600) as driver:
        world.start, world.now = driver.now, lambda: driver.now
        yield driver


def send(driver: TestDriver[Any], *names: str, partition: int = 0) -> None:
    """All of them, before any is handled."""
    for name in names:
        driver.send(Named(name), key=name[:1], partition=partition, wait=False)


def watch(driver: TestDriver[Any], world: World, seconds: int = 60) -> str:
    """The trace of so many seconds, with the commits of partition 0."""
    for _ in range(seconds):
        committed = driver.committed_offsets().get(0, 0)
        second = int(driver.now - world.start + 0.51)
        driver.advance(world.start + second + 0.5 - driver.now)
        if (reached := driver.committed_offsets().get(0, 0)) != committed:
            world._trace[second].append(f"@{reached}")
    driver.check()
    return world.trace


def names(driver: TestDriver[Any]) -> list[str]:
    return [event.name for event in driver.outputs(OUT, Named)]


def reasons(driver: TestDriver[Any]) -> list[str]:
    return [(letter.header("__kes_dlq_message") or b"").decode() for letter in driver.dead_letters()]
