"""The part of the event source under test whose events are handled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streams.outcomes import DEAD_LETTER
from streams.runtime.partition.batch_handlers import BatchContext
from streams.runtime.partition.event_context import EventContext
from streams.settings.jobs import SchedulerConfig
from streams.settings.once import Once
from streams.source.event_source import EventSource
from streams.testing.simulation.virtual_time import elapse

SCOPE = "single"
SECONDS = (0.0, 0.001, 0.1, 0.5)


def id_of(event: Any) -> str:
    """Return the id of an event: of each key there are nine, and all further ones are copies."""
    return f"{event.key} {event.amount}"


def fails(offset: int) -> bool:
    """Whether the event of this offset fails for good: no id is recorded, and the next copy is handled."""
    return offset % 4 == 0


def register(source: EventSource[Any], process: Any, kinds: Mapping[str, Any], add: Callable[..., None]) -> None:
    """Register handlers of events that are handled once; ``add`` is what each does."""
    rng, once = process.rng, Once(lambda record, event: id_of(event), within=86_400, scope=SCOPE)

    def single(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        if fails(ctx.offset):
            raise RuntimeError("never")

    async def turn(ctx: EventContext[Any], event: Any) -> None:
        await elapse(rng.choice(SECONDS))
        await ctx.turn()
        single(ctx, event)

    def bulk(ctx: BatchContext[Any], events: list[Any]) -> None:
        for event, record in zip(events, ctx.records, strict=True):
            add(ctx, event, record.offset)
            if fails(record.offset):
                raise RuntimeError("never")

    few = SchedulerConfig(concurrency=3, worker_queue_depth=1, max_concurrent_keys=3)
    source.register_event_type(kinds["Single"], single, once=once, on_error=DEAD_LETTER)
    source.register_event_type(kinds["SingleBulk"], bulk, batch=True, once=once, on_error=DEAD_LETTER)
    source.register_event_type(kinds["SingleTurn"], turn, concurrency=few, once=once, on_error=DEAD_LETTER)
