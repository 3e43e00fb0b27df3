"""The program of ``test_battery_merged``: orders, payments, customers with an update handler, and a loop; out which one
came as which, with the row it has met. It dies or freezes where ``KES_FAULT`` says. With ``MERGED_FOLDER`` store and
rows are on disk.

python merged_program.py BOOTSTRAP GROUP INSTANCE
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any, NamedTuple

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, StateConfig, Table, Update, event_type
from streams.disk import SQLite
from streams.records import Record
from streams.runtime.ownership import loop_purge
from streams.testing.faults import FaultPlan, consume_with_faults, settled_hook

PARTITIONS = 2
CUSTOMERS = [f"c{number}" for number in range(20)]
UPDATES_HOP = 5
"""An update to a multiple of this sends one event into the loop."""


@event_type("merged.Ordered")
class Ordered(msgspec.Struct, frozen=True):
    customer: str
    hops: int


class Paid(msgspec.Struct, frozen=True):
    customer: str


@event_type("merged.Hop")
class Hop(msgspec.Struct, frozen=True):
    """``chain``: the record that it began with. ``left``: hops that it still has to go."""

    customer: str
    chain: str
    left: int


class Told(NamedTuple):
    """A record that was told of: ``chain`` names it."""

    chain: str
    offset: int


def topics_of(group: str) -> dict[str, str]:
    """Return the topics by what they are for; ``loop`` is the source's own."""
    names = {name: f"{group}-{name}" for name in ("orders", "payments", "customers", "said")}
    return names | {"loop": f"{group}.{names['orders']}.loop"}


def build(bootstrap: str, group: str, instance: str, plan: FaultPlan, session: float = 6.0) -> EventSource[Any]:
    topics, folder = topics_of(group), os.environ.get("MERGED_FOLDER", "")
    engine = SQLite() if folder else None
    config = EventSourceConfig(
        group_id=group,
        topic=topics["orders"],
        num_partitions=PARTITIONS,
        bootstrap_servers=bootstrap,
        instance_id=instance,
        loop=True,
        num_standbys=1,
        session_timeout_seconds=session,
        transaction_timeout_seconds=session - 1.0,
        metrics_handler=settled_hook(plan),
        state=StateConfig(folder=folder, checkpoint_seconds=0.2),
    )
    source = EventSource(config, Table.factory(key=str, value=int, engine=engine))
    source.input(topics["payments"], event=Paid)
    customers = source.join(topics["customers"], key=str, value=int, engine=engine)

    def witness(ctx: EventContext[Any], *facts: object) -> Told:
        record = ctx.input
        assert record is not None
        plan.hit("handler.before")
        count = ctx.store.get("count", 0) + 1
        plan.hit("store.before")
        ctx.store.put("count", count)
        plan.hit("store.after")
        value = msgspec.json.encode([count, record.topic, record.offset, *facts])
        ctx.forward(Record(topics["said"], value, b"%d" % record.partition, partition=record.partition))
        return Told(f"{record.topic}-{record.partition}-{record.offset}", record.offset)

    def hop(ctx: EventContext[Any], chain: str, left: int, step: int) -> None:
        key = CUSTOMERS[step % len(CUSTOMERS)]
        ctx.loop(Hop(key, chain, left), key=key)

    @source.on
    def ordered(ctx: EventContext[Any], event: Ordered) -> None:
        seen = witness(ctx, event.customer, ctx.joined(customers).get(event.customer))
        if event.hops:
            hop(ctx, seen.chain, event.hops - 1, seen.offset)
        plan.hit("handler.after")

    @source.on
    def hopped(ctx: EventContext[Any], event: Hop) -> None:
        seen = witness(ctx, event.customer, ctx.joined(customers).get(event.customer), event.chain, event.left)
        if event.left:
            hop(ctx, event.chain, event.left - 1, seen.offset + event.left)
        plan.hit("handler.after")

    @source.register_update(customers)
    def updated(ctx: EventContext[Any], row: Update[str, int]) -> None:
        seen = witness(ctx, row.key, row.old, row.new)
        assert ctx.joined(customers).get(row.key) == row.new
        if row.new is not None and row.new % UPDATES_HOP == 0:
            hop(ctx, seen.chain, 0, seen.offset)

    def paid(ctx: EventContext[Any], event: Paid) -> None:
        witness(ctx, event.customer, ctx.joined(customers).get(event.customer))

    source.register_event_type(Paid, paid)
    return source


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(module)s %(message)s")
    loop_purge.PURGE_SECONDS = 0.5  # type: ignore[misc]
    plan = FaultPlan.from_environment()
    source = build(*sys.argv[1:4], plan, float(os.environ.get("MERGED_SESSION") or "6"))
    if plan.point:
        asyncio.run(consume_with_faults(source, plan))
    else:
        source.run()
