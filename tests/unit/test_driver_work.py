"""Everything that a source can have at once (jobs, batches, threads, timers), searched by the driver."""

from __future__ import annotations

import os

import anyio
import msgspec
import pytest

from streams import AsyncBatcher, AsyncJobScheduler, BatchItem, EventContext, EventSource, IncomingRecord, Table
from streams.events import event_type
from streams.testing import TestDriver, search

from .driver_kit import OUT, Total, config

pytestmark = pytest.mark.usefixtures("quiet")

Store = Table[str, int]
SEEDS = int(os.environ.get("SIM_SEEDS", "30"))


@event_type("work.Called")
class Called(msgspec.Struct, frozen=True):
    """A job: half of them on the loop, half on threads."""

    key: str
    seconds: float


@event_type("work.Computed")
class Computed(msgspec.Struct, frozen=True):
    key: str


@event_type("work.Batched")
class Batched(msgspec.Struct, frozen=True):
    key: str


@event_type("work.Concurrent")
class Concurrent(msgspec.Struct, frozen=True):
    key: str
    seconds: float


@event_type("work.Remind")
class Remind(msgspec.Struct, frozen=True):
    key: str


@event_type("work.Due")
class Due(msgspec.Struct, frozen=True):
    key: str


ALL = (Called, Computed, Batched, Concurrent, Remind)


def build() -> EventSource[Store]:
    source = EventSource(config(), Table.factory(key=str, value=int))

    def count(ctx: EventContext[Store], key: str) -> None:
        total = (ctx.store.get(key) or 0) + 1
        ctx.store.put(key, total)
        ctx.forward(OUT, Total(key, total), key=key)

    async def call(event: Called) -> str:
        await anyio.sleep(event.seconds)
        return event.key

    def compute(event: Computed) -> str:
        return event.key

    async def write(items: list[BatchItem[str]]) -> None:
        await anyio.sleep(0.05)

    calls = AsyncJobScheduler(source, call, lambda ctx, event, key: count(ctx, key))
    calls.register_event_type(Called, key=lambda event: event.key)
    computing = AsyncJobScheduler(source, compute, lambda ctx, event, key: count(ctx, key))
    computing.register_event_type(Computed, key=lambda event: event.key)

    def written(ctx: EventContext[Store], items: list[BatchItem[str]]) -> None:
        count(ctx, items[0].value)

    batcher = AsyncBatcher(source, write, written)

    @batcher.register_event_type(Batched)
    def plan(record: IncomingRecord, event: Batched) -> tuple[str, str]:
        return event.key, event.key

    @source.register_event_type(Concurrent, concurrency=8)
    async def concurrently(ctx: EventContext[Store], event: Concurrent) -> None:
        await anyio.sleep(event.seconds)
        await ctx.turn()
        count(ctx, event.key)

    @source.register_event_type(Remind)
    def remind(ctx: EventContext[Store], event: Remind) -> None:
        ctx.schedule_in(5.0, Due(event.key), name=f"{event.key} {ctx.offset}")
        count(ctx, event.key)

    @source.register_event_type(Due)
    def due(ctx: EventContext[Store], event: Due) -> None:
        count(ctx, f"{event.key} due")

    return source


def scenario(driver: TestDriver[Store]) -> None:
    for number in range(40):
        kind, key = ALL[number % 5], f"k{number % 4}"
        slow = {"seconds": (0.5, 0.01, 0.1)[number % 3]} if kind in (Called, Concurrent) else {}
        driver.send(kind(key, **slow), key=key, wait=False)
        if number % 10 == 9:
            driver.settle()
    driver.advance(10.0)
    driver.settle()


def all_timers_rang(driver: TestDriver[Store]) -> None:
    driver.advance(60.0)
    driver.settle()
    found = driver.outputs(OUT, Total)
    assert sum(total.key.endswith(" due") for total in found) == 8
    assert sum(not total.key.endswith(" due") for total in found) == 40
    driver.check()


@pytest.mark.timeout(400)
def test_all_kinds_of_work_are_exactly_once_whatever_happens() -> None:
    report = search(build, scenario, seeds=SEEDS, invariant=all_timers_rang)
    if len(report.seeds) >= 30:
        assert len(report.happened) >= 10


def test_work_takes_simulated_time_and_its_turn() -> None:
    with TestDriver(build()) as driver:
        driver.send(Called("ann", 30.0), key="ann", partition=0, wait=False)
        driver.send(Batched("bob"), key="bob", partition=0, wait=False)
        driver.advance(10.0)
        assert driver.outputs(OUT) == []  # the second is done, and waits for its turn
        trap = driver.at("commit.before", driver.crash)
        driver.settle()
        assert trap.sprung == 1
        driver.restart()
        assert driver.now > 60.0  # the job was done again
        assert driver.outputs(OUT, Total) == [Total("ann", 1), Total("bob", 1)]


def test_points_around_a_concurrent_handler() -> None:
    with TestDriver(build()) as driver:
        traps = [driver.at(point, lambda member: None) for point in ("handler.before", "handler.after")]  # type: ignore[arg-type]
        driver.send(Concurrent("ann", 1.0), key="ann")
        assert [trap.sprung for trap in traps] == [1, 1]
