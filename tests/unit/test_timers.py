"""Durable timers over a broker in memory: set, fired, removed, and what is left of them after everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from streams import EventContext, EventSource, event_type
from streams.runtime.changelog import TIMER_PREFIX
from streams.runtime.environment import Environment
from tests.unit.runtime_kit import CHANGELOG, OUT, PATIENCE, TABLE, Bench, Connections, Named, count

pytestmark = pytest.mark.asyncio


@event_type("Ring")
class Ring(msgspec.Struct, frozen=True):
    """What timers fire."""

    name: str


class Clock:
    """The time of day, which is what a test says."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


class Clocked(Bench):
    """Its sources have this clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def run(self) -> asyncio.Task[None]:
        self.connections = Connections(self.broker, self.source.config.num_partitions)
        environment = Environment(wall_seconds=self.clock)
        self.tasks.append(asyncio.create_task(self.source._consume(lambda _: self.connections, environment)))  # type: ignore[arg-type,return-value]
        return self.tasks[-1]

    async def again(self) -> None:
        """Stop in good order, and start."""
        await asyncio.wait_for(self.source.stop(), PATIENCE)
        await self.tasks[-1]
        self.run()
        await self.until_active()

    def timers(self, partition: int = 0) -> list[str]:
        """The names of those that the changelog holds."""
        last = {record.key: record.value for record in self.broker.logs[CHANGELOG, partition] if record.key}
        found = [key for key, value in last.items() if key.startswith(TIMER_PREFIX) and value is not None]
        return sorted(key[len(TIMER_PREFIX) :].decode() for key in found)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Clocked]:
    made = Clocked()
    yield made
    if made.tasks and not made.tasks[-1].done():
        await asyncio.wait_for(made.source.stop(), PATIENCE)
        await made.tasks[-1]


def ring(ctx: EventContext[Any], event: Ring) -> None:
    count(ctx, event.name)
    ctx.forward(OUT, Named(event.name), key=event.name)


def alarmed(bench: Clocked, store: Any = TABLE, handler: Any = ring, **settings: Any) -> EventSource[Any]:
    """An event "a+10" sets the timer a, to ring in 10 seconds; "a-" cancels it; other events do nothing."""

    def on_named(ctx: EventContext[Any], event: Named) -> None:
        name, sign, seconds = event.name.partition("+")
        if sign:
            ctx.schedule_in(float(seconds), Ring(name), name=name)
        elif event.name.endswith("-"):
            ctx.cancel_timer(event.name[:-1])

    source = bench.make(on_named, store=store)
    source.register_event_type(Ring, handler, **settings)
    return source


async def test_a_timer_fires_once_when_it_is_due(bench: Clocked) -> None:
    alarmed(bench)
    bench.broker.send("a+10", "b+5")
    bench.run()
    await bench.until(lambda: bench.timers() == ["a", "b"], "set")
    bench.clock.seconds += 9.9
    await bench.until(lambda: bench.broker.outputs() == ["b"], "the first")
    assert bench.timers() == ["a"]
    bench.clock.seconds += 0.1
    await bench.until(lambda: bench.broker.outputs() == ["b", "a"], "the second")
    assert bench.timers() == []
    bench.clock.seconds += 100
    await bench.again()
    assert bench.broker.outputs() == ["b", "a"]


async def test_late_ones_fire_after_the_start_in_due_order(bench: Clocked) -> None:
    alarmed(bench)
    bench.broker.send("c+30", "a+10", "b+20")
    bench.run()
    await bench.until(lambda: bench.broker.reached() == 3, "set")
    await asyncio.wait_for(bench.source.stop(), PATIENCE)
    await bench.tasks[-1]
    bench.clock.seconds += 1000
    bench.run()
    await bench.until(lambda: bench.broker.outputs() == ["a", "b", "c"], "all")
