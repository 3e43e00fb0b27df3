"""The part of the event source under test whose events are parked."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streams.outcomes import PARK, ErrorResponse, Retry
from streams.runtime.partition.batch_handlers import BatchContext
from streams.runtime.partition.event_context import EventContext
from streams.settings.groups import ParkingConfig
from streams.settings.jobs import SchedulerConfig
from streams.source.event_source import EventSource
from streams.source.jobs import AsyncJobScheduler
from streams.testing.simulation.process import FOREVER
from streams.testing.simulation.virtual_time import elapse

from .parked_operator import FIRST_PAUSE

SECONDS = (0.0, 0.001, 0.1, 0.5)


def bounds(rng: random.Random) -> ParkingConfig:
    """Queues that are short, or a few, and soon tried again."""
    most = rng.choice((4, 100))
    return ParkingConfig(first_retry_seconds=FIRST_PAUSE, max_retry_seconds=1.0, max_keys=3, max_key_events=most)


def register(source: EventSource[Any], process: Any, kinds: Mapping[str, Any], add: Callable[..., None]) -> None:
    """Register handlers of events that fail in their first attempts, as many as their amount says. ``add`` is what each
    does."""
    rng = process.rng

    def fail(attempt: int, event: Any) -> None:
        if attempt <= event.amount:
            raise RuntimeError("not yet")

    def parked(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        fail(ctx.attempt, event)

    async def turn(ctx: EventContext[Any], event: Any) -> None:
        await elapse(rng.choice(SECONDS))
        if rng.random() < 0.5:
            fail(ctx.attempt, event)
        await ctx.turn()
        parked(ctx, event)

    async def fetch(event: Any) -> Any:
        await elapse(rng.choice(SECONDS))
        return event

    def finalize(ctx: EventContext[Any], _: Any, event: Any) -> None:
        parked(ctx, event)

    def bulk(ctx: BatchContext[Any], events: list[Any]) -> None:
        for event, record in zip(events, ctx.records, strict=True):
            add(ctx, event, record.offset)
            fail(ctx.attempt, event)

    async def death(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        fail(ctx.attempt, msgspec.structs.replace(event, amount=1))
        if process.world.ends(process, (ctx.topic_partition.partition, ctx.offset), event.amount):
            await elapse(FOREVER)

    waits = Retry(attempts=2, backoff_seconds=0.05, waits="key", then=ErrorResponse.PARK)
    source.register_event_type(kinds["Parked"], parked, on_error=rng.choice((PARK, waits)))
    source.register_event_type(kinds["ParkedBulk"], bulk, batch=True, on_error=rng.choice((PARK, waits)))
    source.register_event_type(kinds["ParkedDeath"], death, on_error=PARK)
    few = SchedulerConfig(concurrency=2, worker_queue_depth=1, max_concurrent_keys=2)
    source.register_event_type(kinds["ParkedTurn"], turn, concurrency=few, on_error=rng.choice((PARK, waits)))
    jobs: Any = AsyncJobScheduler(source, fetch, finalize, config=few)
    jobs.register_event_type(kinds["ParkedFetch"], key=lambda event: event.key, on_error=waits)
