"""Events whose work runs ahead of their turn: jobs of all kinds, chains, concurrent handlers. Part of ``program``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from streams.async_jobs import AsyncJobScheduler
from streams.event_source import EventSource
from streams.events import event_type
from streams.job_settings import JobRetry, SchedulerConfig
from streams.outcomes import DEAD_LETTER, ErrorPolicy, ErrorResponse
from streams.records import IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.testing.simulation.virtual_time import elapse

SECONDS = (0.0, 0.001, 0.01, 0.1, 0.1, 0.5, 2.0)


class _Keyed(msgspec.Struct, frozen=True):
    key: str
    amount: int


@event_type("Fetch")
class Fetch(_Keyed, frozen=True):
    """A job that is a task."""


@event_type("Crunch")
class Crunch(_Keyed, frozen=True):
    """A job on a thread."""


@event_type("Chained")
class Chained(_Keyed, frozen=True):
    """A task, then a thread, of which there is one."""


@event_type("Turn")
class Turn(_Keyed, frozen=True):
    """A concurrent handler, slow before its turn and after it."""


@event_type("Wobbly")
class Wobbly(_Keyed, frozen=True):
    """A job that fails, then a finalizer that fails, ``amount`` times; two retries, then the dead letter."""


@event_type("Hopeless")
class Hopeless(_Keyed, frozen=True):
    """A job that fails for good: dead letter."""


KINDS = {cls.__name__: cls for cls in (Fetch, Crunch, Chained, Turn, Wobbly, Hopeless)}


def register(source: EventSource[Any], process: Any, add: Callable[[EventContext[Any], Any], None]) -> None:
    """Register all of them; ``add`` is what they do at their turn."""
    rng, pause = process.rng, process.pause
    retry = JobRetry(attempts=2, wait_initial_seconds=0.05, wait_jitter_seconds=0.0, timeout_seconds=None)
    few = SchedulerConfig(concurrency=3, worker_queue_depth=1, max_concurrent_keys=3, retry=retry)
    retries = ErrorPolicy(retries=2, backoff_seconds=0.05, then=ErrorResponse.DEAD_LETTER)
    tried: set[tuple[int, int]] = set()

    def plan(record: IncomingRecord, event: _Keyed) -> tuple[str, tuple[IncomingRecord, _Keyed]]:
        return event.key, (record, event)

    async def fetch(item: Any) -> Any:
        record, event = item
        await elapse(rng.choice(SECONDS))
        if isinstance(event, Hopeless):
            raise RuntimeError("never")
        if isinstance(event, Wobbly) and (record.partition, record.offset) not in tried:
            tried.add((record.partition, record.offset))
            raise RuntimeError("not yet")
        return item

    def crunch(item: Any) -> Any:
        pause(rng.choice((0.0, 0.001, 0.05, 0.5)))
        return item

    def finalize(ctx: EventContext[Any], item: Any, result: Any) -> None:
        assert item == result
        add(ctx, result[1])

    def wobble(ctx: EventContext[Any], item: Any, result: Any) -> None:
        finalize(ctx, item, result)
        if isinstance(result[1], Wobbly) and ctx.attempt <= result[1].amount:
            raise RuntimeError("not yet")

    async def turn(ctx: EventContext[Any], event: Turn) -> None:
        await elapse(rng.choice(SECONDS))
        await ctx.turn()
        await elapse(rng.choice((0.0, 0.0, 0.01, 0.3)))
        add(ctx, event)

    fetches: Any = AsyncJobScheduler(source, fetch, wobble, config=few)
    fetches.register_event_type(Fetch, plan)
    fetches.register_event_type(Wobbly, plan, on_error=retries)
    fetches.register_event_type(Hopeless, plan, on_error=DEAD_LETTER)
    alone = SchedulerConfig(concurrency=1)
    crunches: Any = AsyncJobScheduler(source, crunch, finalize, config=alone)
    crunches.register_event_type(Crunch, plan)
    AsyncJobScheduler(source, fetch, config=few, then=crunches).register_event_type(Chained, plan)
    ahead = SchedulerConfig(concurrency=2, worker_queue_depth=1, max_concurrent_keys=2)
    source.register_event_type(Turn, turn, concurrency=ahead)
