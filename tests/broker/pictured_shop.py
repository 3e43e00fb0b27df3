"""The shop of the guide's pictures: ``kes run tests.broker.pictured_shop:source``."""

from __future__ import annotations

import asyncio

import msgspec

from streams import DEAD_LETTER, EventContext, EventSource, EventSourceConfig, GroupConfig, Table
from streams.web import ActionRun, Monitor
from tests.vocabulary import Ordered, Reminded, Reserved

GROUP, TOPIC, INVOICES = "shop", "orders", "invoices"
PARTITIONS = 6


class Account(msgspec.Struct, frozen=True):
    orders: int = 0
    cents: int = 0


config = EventSourceConfig(group_id=GROUP, topic=TOPIC, num_partitions=PARTITIONS, group=GroupConfig(num_standbys=1))
source = EventSource(config, Table.factory(key=str, value=Account))
source.output(INVOICES, num_partitions=PARTITIONS)
Context = EventContext[Table[str, Account]]


@source.register_event_type(Ordered, on_error=DEAD_LETTER)
def ordered(ctx: Context, event: Ordered) -> None:
    if event.cents < 0:
        raise ValueError(f"an order of {event.cents} cents")
    known = ctx.store.get(event.customer, Account())
    ctx.store.put(event.customer, Account(known.orders + 1, known.cents + event.cents))
    ctx.forward(INVOICES, event, key=event.customer)
    ctx.schedule_in(1800, Reminded(event.customer), name=event.customer)


@source.register_event_type(Reserved, concurrency=4)
async def reserved(ctx: Context, event: Reserved) -> None:
    await asyncio.sleep(1.0)


@source.register_event_type(Reminded)
def reminded(ctx: Context, event: Reminded) -> None:
    ctx.forward(INVOICES, event, key=event.customer)


class Rebuild(msgspec.Struct, frozen=True):
    index: str
    rows: int = 10_000


monitor = Monitor(source)


@monitor.action("rebuild-index")
async def rebuild(order: Rebuild, run: ActionRun) -> str:
    """Write an index anew, from the state."""
    for row in range(order.rows):
        run.progress(row, order.rows, order.index)
        await asyncio.sleep(0.01)
    return "done"
