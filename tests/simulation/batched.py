"""Events that are handled in lists. Part of ``program``."""

from __future__ import annotations

from typing import Any

import msgspec

from streams.event_source import EventSource
from streams.events import event_type
from streams.outcomes import DEAD_LETTER
from streams.runtime.partition.batch_handlers import BatchContext

REFUSED, BROKEN = 8, 9
"""Amounts of events that send what the broker refuses, or fail."""


@event_type("Bulk")
class Bulk(msgspec.Struct, frozen=True):
    """Handled in lists, some of which fail although none of their events would."""

    key: str
    amount: int


def register(source: EventSource[Any], process: Any, out: str, refused: object, total: Any) -> None:
    """Register its handler: adds, like ``program.add``, and tells the totals to ``out``."""
    rng = process.rng

    def bulk(ctx: BatchContext[Any], events: list[Bulk]) -> None:
        process.note("list" if len(events) > 1 else "list of one", ctx.topic_partition.partition)
        for event, record in zip(events, ctx.records, strict=True):
            amount = ctx.store.get(event.key, 0) + event.amount
            ctx.store.write(ctx, event.key, amount)
            ctx.forward(out, total(amount, record.offset), key=event.key)
            if event.amount == REFUSED:
                ctx.forward(out, refused, key=event.key)
        in_company = len(events) > 1 and rng.random() < 0.1
        if in_company or any(event.amount == BROKEN for event in events):
            raise RuntimeError("not all of these")

    source.register_event_type(Bulk, bulk, on_error=DEAD_LETTER, batch=True)
