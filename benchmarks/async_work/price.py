"""What an event costs on the loop's thread: a plain handler, and the ways to work ahead of one's turn.

One partition's worker as in the engine, without a broker (``runtime.replay``): decoding, store, undo, ``forward`` and
the line are real, transactions and clients are not there. Jobs do nothing, or give way to the loop once, so what is
left is the toolkit's own price, and asyncio's.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec

from benchmarks.async_work.workload import Answered, Asked, Plan
from streams import AsyncJobScheduler, EventContext, EventSource, EventSourceConfig, SchedulerConfig, Table
from streams.records import IncomingRecord
from streams.runtime.replay import PartitionReplay

Counts = Table[str, int]
CONCURRENCY = 64


class Price(msgspec.Struct, frozen=True):
    """One run. Microseconds of the thread per event, with the garbage collector at work and switched off."""

    way: str
    round: int
    us: float
    us_without_gc: float
    load_average: float
    fault: str = ""


def finish(ctx: EventContext[Counts], event: Asked, _: Any = None) -> None:
    """What every way does at an event's turn."""
    count = (ctx.store.get(event.key) or 0) + 1
    ctx.store.put(event.key, count)
    ctx.forward("out", Answered(event.key, event.number, count, event.sent), key=event.key)


async def at_once(_: Asked) -> None:
    """Work that is there already."""


async def one_step(_: Asked) -> None:
    """Work that gives way to the loop once."""
    await asyncio.sleep(0)


def plain(source: EventSource[Counts]) -> None:
    """A plain function."""
    source.register_event_type(Asked, finish)


def turns(source: EventSource[Counts]) -> None:
    """``async def``, one event of a partition at a time."""

    async def handler(ctx: EventContext[Counts], event: Asked) -> None:
        await at_once(event)
        finish(ctx, event)

    source.register_event_type(Asked, handler)


def scheduler(work: Callable[[Asked], Awaitable[None]]) -> Callable[[EventSource[Counts]], None]:
    """``AsyncJobScheduler``."""

    def register(source: EventSource[Counts]) -> None:
        settings = SchedulerConfig(concurrency=CONCURRENCY)
        jobs: AsyncJobScheduler[Counts, Asked, None] = AsyncJobScheduler(source, work, finish, config=settings)
        jobs.register_event_type(Asked, key=lambda event: event.key)

    return register


def handler(work: Callable[[Asked], Awaitable[None]]) -> Callable[[EventSource[Counts]], None]:
    """``concurrency=``."""

    def register(source: EventSource[Counts]) -> None:
        async def handle(ctx: EventContext[Counts], event: Asked) -> None:
            await work(event)
            await ctx.turn()
            finish(ctx, event)

        source.register_event_type(Asked, handle, concurrency=CONCURRENCY)

    return register


WAYS: dict[str, Callable[[EventSource[Counts]], None]] = {
    "plain handler": plain,
    "async def handler": turns,
    "scheduler, done at once": scheduler(at_once),
    "scheduler, one step": scheduler(one_step),
    "concurrency=, done at once": handler(at_once),
    "concurrency=, one step": handler(one_step),
}
BARE = "asyncio alone: a task and a step per event"


def price(way: str, plan: Plan, events: int, queued: int, turn: int) -> Price:
    """Handle so many events, ``queued`` at a time (as many as an inbox holds)."""
    found = []
    for collects in (True, False):
        gc.collect()
        if not collects:
            gc.disable()
        try:
            found.append(asyncio.run(_bare(events, queued) if way == BARE else _handled(way, plan, events, queued)))
        finally:
            gc.enable()
    done = [count for _, count in found]
    fault = "" if done == [events, events] else f"{done} outputs for {events} events"
    with_gc, without = (seconds / events * 1e6 for seconds, _ in found)
    return Price(way, turn, with_gc, without, os.getloadavg()[0], fault)


async def _handled(way: str, plan: Plan, events: int, queued: int) -> tuple[float, int]:
    config = EventSourceConfig(group_id="g", topic="in", num_partitions=1, bootstrap_servers="nowhere")
    source = EventSource(config, store=Table.factory(key=str, value=int))
    WAYS[way](source)
    replay = PartitionReplay(source.program(), 0, wall_ms=0)
    done, seconds = 0, 0.0
    for first in range(0, events, queued):
        asks = islice(plan.asks(), first, min(first + queued, events))
        records = [
            IncomingRecord("in", 0, first + n, ask.key.encode(), ask.encoded(), [("__grt__", b"Asked")], -1)
            for n, ask in enumerate(asks)
        ]
        began = time.thread_time()
        completed = await replay.handle(records)
        seconds += time.thread_time() - began
        done += len(completed.outputs)
    replay.close()
    return seconds, done


async def _bare(events: int, queued: int) -> tuple[float, int]:
    done = 0

    async def work() -> None:
        nonlocal done
        await asyncio.sleep(0)
        done += 1

    began = time.thread_time()
    for first in range(0, events, queued):
        running = {asyncio.ensure_future(work()) for _ in range(min(queued, events - first))}
        await asyncio.wait(running)
    return time.thread_time() - began, done
