"""Structures in the engine: with all kinds of handlers, failures, interjections, and in a replay."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from anyio.lowlevel import checkpoint

from streams import (
    DEAD_LETTER,
    BatchContext,
    EventContext,
    EventSource,
    EventSourceConfig,
    Record,
    event_type,
    to_record,
)
from streams.errors import StoreError
from streams.records import IncomingRecord
from streams.runtime.replay import PartitionReplay
from streams.stores import Index, NamedTable, Stores, Window, Windows
from streams.testing import TestDriver
from tests.unit.windows_kit import count
from tests.vocabulary import Flaky

OUT = "minutes"


@event_type("Minute")
class Minute(msgspec.Struct, frozen=True):
    user: str
    start_ms: int
    clicks: int


def report(ctx: EventContext[Any], user: str, window: Window, clicks: int) -> None:
    ctx.forward(OUT, Minute(user, window.start_ms, clicks), key=user)


class Site(Stores):
    minutes = Windows.tumbling(str, int, size=60, grace=5, add=count, on_close=report, late="fail")
    users = NamedTable.of(str, int, expires=300, index={"clicks": Index(int, lambda clicks: clicks)})


def clicked(ctx: EventContext[Site], event: Flaky) -> None:
    ctx.store.users.put(event.name, ctx.store.users.get(event.name, 0) + 1)
    ctx.store.minutes.add(event.name, event)
    if ctx.attempt <= event.times:
        raise ValueError("once more")


def site(kind: str = "plain", partitions: int = 2) -> EventSource[Site]:
    source = EventSource(
        EventSourceConfig(group_id="site", topic="clicks", num_partitions=partitions, error_policy=DEAD_LETTER),
        store=Site.factory(),
    )

    async def concurrent(ctx: EventContext[Site], event: Flaky) -> None:
        await ctx.turn()
        clicked(ctx, event)

    async def waiting(ctx: EventContext[Site], event: Flaky) -> None:
        await checkpoint()
        clicked(ctx, event)

    def batch(ctx: BatchContext[Site], events: list[Flaky]) -> None:
        for event, record in zip(events, ctx.records, strict=True):
            if event.times:
                raise ValueError("not this one")
            ctx.store.users.put(event.name, ctx.store.users.get(event.name, 0) + 1)
            ctx.store.minutes.add(event.name, event, at_ms=record.timestamp_ms)

    if kind == "batch":
        source.register_event_type(Flaky, batch, batch=True)
    elif kind == "concurrent":
        source.register_event_type(Flaky, concurrent, concurrency=4)
    elif kind == "blocking":
        source.register_event_type(Flaky, clicked, blocking=True)
    else:
        source.register_event_type(Flaky, waiting if kind == "async" else clicked)
    return source


def click(user: str, seconds: float, fails: int = 0) -> Record:
    record = to_record("clicks", Flaky(user, fails), key=user, partition=0)
    return msgspec.structs.replace(record, timestamp_ms=round(seconds * 1000))


@pytest.mark.parametrize("kind", ["plain", "async", "blocking", "concurrent", "batch"])
def test_in_the_engine(kind: str) -> None:
    """Windows close in front of the event that brings the time, in order, once, whatever dies in between."""
    with TestDriver(site(kind), topics={OUT: 1}) as driver:
        driver.send_record(click("ann", 60))
        driver.send_record(click("bob", 61))
        driver.send_record(click("bob", 119))
        driver.send_record(click("ann", 124.999))
        assert driver.outputs(OUT, Minute) == []
        driver.crash()
        driver.restart()
        driver.send_record(click("ann", 125))
        minutes = [Minute("ann", 60_000, 1), Minute("bob", 60_000, 2)]
        assert driver.outputs(OUT, Minute) == minutes
        driver.send_record(click("cid", 119))  # is late: its own failure
        assert len(driver.dead_letters()) == 1
        driver.send_record(click("ann", 185, fails=9))  # fails, and its time with it
        assert driver.outputs(OUT, Minute) == minutes
        assert len(driver.dead_letters()) == 2
        driver.send_record(click("bob", 185))
        assert driver.outputs(OUT, Minute) == [*minutes, Minute("ann", 120_000, 2)]
        store = driver.store(0)
        assert dict(store.users.items()) == {"ann": 3, "bob": 3}
        assert {key for key, _ in store.users.by("clicks", 3)} == {"ann", "bob"}
        driver.send_record(click("bob", 425))
        assert dict(driver.store(0).users.items()) == {"bob": 4}
        driver.abort()
        driver.rebalance()
        driver.compact()
        assert driver.restored_store(0).time_ms == 425_000
        assert dict(driver.restored_store(0).dump()) == dict(driver.store(0).dump())
        assert driver.changelog(0) == dict(driver.store(0).dump())
        driver.check()


def test_a_partition_at_rest_is_moved_on_by_an_interjection() -> None:
    with TestDriver(site(), topics={OUT: 1}) as driver:
        driver.send_record(click("ann", 60))
        driver.interject(0, lambda ctx: ctx.store.advance(124_000))
        assert driver.outputs(OUT, Minute) == []
        driver.interject(0, lambda ctx: ctx.store.advance(125_000))
        assert driver.outputs(OUT, Minute) == [Minute("ann", 60_000, 1)]
        with pytest.raises(StoreError, match="without a time"):
            driver.interject(0, lambda ctx: ctx.store.minutes.add("ann", Flaky("ann")))
        driver.check()


def test_a_replay_comes_to_the_same_state_and_outputs() -> None:
    """In any cut of the records: nothing depends on a clock."""
    times = [60, 61, 90, 126, 119, 130, 250, 185, 1000]
    made = [click("ann" if number % 2 else "bob", at) for number, at in enumerate(times)]
    with TestDriver(site(), topics={OUT: 1}) as driver:
        for record in made:
            driver.send_record(record)
        outputs = [record.value for record in driver.outputs(OUT)]
        state = dict(driver.store(0).dump())
    assert len(outputs) == 4

    def records() -> list[IncomingRecord]:
        return [
            IncomingRecord(
                "clicks", 0, number, record.key, record.value, tuple(record.headers or ()), record.timestamp_ms or 0
            )
            for number, record in enumerate(made)
        ]

    async def replay(size: int) -> None:
        replayed = PartitionReplay(site().program(), 0, wall_ms=0)
        sent: list[Any] = []
        for start in range(0, len(made), size):
            sent += (await replayed.handle(records()[start : start + size])).outputs
        assert [output.value for output in sent if output.topic == OUT] == outputs
        assert {change.key: change.value for change in replayed.contents()} == state
        replayed.close()

    for size in (1, 2, len(made)):
        asyncio.run(replay(size))


def test_a_late_item_goes_where_its_function_sends_it() -> None:
    def aside(ctx: EventContext[Any], user: str, item: Flaky, at_ms: int) -> None:
        ctx.forward(OUT, Minute(user, at_ms, -1), key=user)

    class Aside(Stores):
        minutes = Windows.tumbling(str, int, size=60, add=count, late=aside)

    source = EventSource(EventSourceConfig(group_id="site", topic="clicks", num_partitions=1), store=Aside.factory())

    @source.register_event_type(Flaky)
    def handle(ctx: EventContext[Aside], event: Flaky) -> None:
        ctx.store.minutes.add(event.name, event)

    with TestDriver(source, topics={OUT: 1}) as driver:
        for seconds in (60, 120, 119.999):
            driver.send_record(click("ann", seconds))
        assert driver.outputs(OUT, Minute) == [Minute("ann", 119_999, -1)]
