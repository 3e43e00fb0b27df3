"""What lives as long as the event source runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streams import EventContext, EventSource
from streams.errors import StreamsError
from tests.unit.runtime_kit import OUT, TABLE, Bench, Named
from tests.unit.waiting import PATIENCE


def with_lifespan(bench: Bench, lifespan: Any) -> EventSource[Any]:
    config = bench.make(None).config
    source = bench.source = EventSource(config, TABLE, lifespan=lifespan)

    @source.register_event_type(Named)
    def handler(ctx: EventContext[Any], event: Named) -> None:
        ctx.forward(OUT, event, key=event.name)

    return source


async def test_it_is_entered_before_the_first_event_and_left_after_the_last() -> None:
    bench = Bench()
    happened: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        happened.append(f"in after {len(bench.broker.outputs())}")
        yield
        happened.append(f"out after {len(bench.broker.outputs())}")

    with_lifespan(bench, lifespan)
    bench.begin("a", "b")
    await bench.until(lambda: bench.broker.outputs() == ["a", "b"], "it works")
    await bench.stop()
    assert happened == ["in after 0", "out after 2"]


async def test_it_is_left_when_the_source_is_cancelled() -> None:
    bench = Bench()
    left = asyncio.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            left.set()

    with_lifespan(bench, lifespan)
    await bench.start()
    await bench.cancel()
    assert left.is_set()


async def test_a_failure_on_the_way_in_stops_the_source() -> None:
    bench = Bench()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        raise OSError("no database")
        yield

    with_lifespan(bench, lifespan)
    with pytest.raises(StreamsError, match=r"group g does not start.*no database"):
        await bench.run()
    assert not hasattr(bench.connections.membership, "_deliver"), "nobody joined the group"


async def test_a_stop_does_not_wait_until_it_is_entered() -> None:
    bench = Bench()
    entering, left = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        entering.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            left.set()

    with_lifespan(bench, lifespan)
    running = bench.run()
    await asyncio.wait_for(entering.wait(), PATIENCE)
    await bench.stop()
    await asyncio.wait_for(running, PATIENCE)
    assert left.is_set()
    assert not hasattr(bench.connections.membership, "_deliver"), "nobody joined the group"
