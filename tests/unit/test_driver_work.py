"""Everything that a source can have at once (jobs, batches, threads, timers), searched by the driver."""

from __future__ import annotations

import os

import anyio
import msgspec
import pytest

from streams import AsyncBatcher, AsyncJobScheduler, BatchItem, EventContext, EventSource
from streams.events import event_type
from streams.testing import FAULTS, TestDriver, search
from tests.vocabulary import TOTALS, Totals

from .driver_kit import OUT, Added, Slow, Total, add, config

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = int(os.environ.get("SIM_SEEDS", "40"))


class Named(msgspec.Struct, frozen=True):
    name: str
    seconds: float = 0.0


@event_type("work.Called")
class Called(Named, frozen=True):
    """A job on the loop."""


@event_type("work.Computed")
class Computed(Named, frozen=True):
    """A job on a thread."""


@event_type("work.Batched")
class Batched(Named, frozen=True):
    """An item of a batch."""


@event_type("work.Concurrent")
class Concurrent(Named, frozen=True):
    """For a concurrent handler."""


@event_type("work.Remind")
class Remind(Named, frozen=True):
    """Sets a timer."""


@event_type("work.Due")
class Due(Named, frozen=True):
    """What the timer fires."""


ALL = (Called, Computed, Batched, Concurrent, Remind, Slow)


def build() -> EventSource[Totals]:
    source = EventSource(config(), TOTALS)

    async def call(event: Called) -> str:
        await anyio.sleep(event.seconds)
        return event.name

    def compute(event: Computed) -> str:
        return event.name

    async def write(items: list[BatchItem[Batched]]) -> None:
        await anyio.sleep(0.05)

    async def slowly(ctx: EventContext[Totals], event: Slow | Concurrent) -> None:
        await anyio.sleep(event.seconds)
        await ctx.turn()
        add(ctx, event)

    def remind(ctx: EventContext[Totals], event: Remind) -> None:
        ctx.schedule_in(5.0, Due(event.name), name=f"{event.name} {ctx.offset}")
        add(ctx, event)

    calls = AsyncJobScheduler(source, call, lambda ctx, event, name: add(ctx, event))
    calls.register_event_type(Called, key=lambda event: event.name)
    computing = AsyncJobScheduler(source, compute, lambda ctx, event, name: add(ctx, event))
    computing.register_event_type(Computed, key=lambda event: event.name)
    batcher = AsyncBatcher(source, write, lambda ctx, items: add(ctx, items[0].value))
    batcher.register_event_type(Batched, lambda record, event: (event.name, event))
    source.register_event_type(Concurrent, slowly, concurrency=8)
    source.register_event_type(Slow, slowly)
    source.register_event_type(Remind, remind)
    source.register_event_type(Due, lambda ctx, event: add(ctx, Added(f"{event.name} due")))
    return source


def scenario(driver: TestDriver[Totals]) -> None:
    for number in range(42):
        kind, key = ALL[number % 6], f"k{number % 4}"
        driver.send(kind(key, (0.5, 0.01, 0.1)[number % 3]), key=key, wait=False)
        if number % 10 == 9:
            driver.settle()
    driver.advance(10.0)
    driver.settle()


def everything_is_there(driver: TestDriver[Totals]) -> None:
    driver.advance(60.0)
    driver.settle()
    found = driver.outputs(OUT, Total)
    assert (sum(total.name.endswith(" due") for total in found), len(found)) == (7, 49)
    driver.check()


@pytest.mark.timeout(400)
def test_the_engine_is_right_whatever_happens_and_everything_did_go_wrong() -> None:
    report = search(build, scenario, seeds=SEEDS, invariant=everything_is_there)
    assert report.seeds == tuple(range(SEEDS)) or "SEED" in os.environ
    if len(report.seeds) >= 40:
        assert set(report.happened) == set(FAULTS)


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
