"""The program of ``test_battery_merged``: orders, payments, customers with an update handler, a loop, a visit, and a
lookup; out which one came as which, with the row and the rates it has met, and the keys that were visited. It dies or
freezes where ``KES_FAULT`` says; with ``MERGED_DIES`` it dies "before" or "after" it deletes from the loop. With
``MERGED_FOLDER`` store and rows are on disk. SIGUSR1 holds back the lookup for some seconds.

python merged_program.py BOOTSTRAP GROUP INSTANCE
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from streams import (
    EventContext,
    EventSource,
    EventSourceConfig,
    GroupConfig,
    StateConfig,
    Table,
    TimeoutConfig,
    Update,
    event_type,
)
from streams.disk import SQLite
from streams.errors import StreamsError
from streams.kafka.questions.takeover import WireTakeOver
from streams.records import Record
from streams.runtime.ownership import loop_purge
from streams.testing.faults import FaultPlan, consume_with_faults, settled_hook
from tests.vocabulary import Ordered, Paid

PARTITIONS = 2
COMPACTED = {"cleanup_policy": "compact", "segment_ms": "3600000"}
TOPICS: dict[str, dict[str, str]] = {
    "orders": {}, "payments": {}, "customers": COMPACTED, "rates": COMPACTED, "said": {}, "visited": {},
}  # fmt: skip
"""Those that the source does not make, by what they are for."""
CUSTOMERS = [f"c{number}" for number in range(20)]
UPDATES_HOP = 5
"""An update to a multiple of this sends one event into the loop."""
CURRENCIES = ("EUR", "USD")
"""The keys of the lookup, one in each of its partitions."""
KEYS = 500
"""Keys of a partition's store that orders put there, beside the count: so many are visited."""
VISIT_SECONDS, SLOW_SECONDS = 0.002, 0.02
"""For each key, so that a run takes its time; one that is named ``slow`` takes longer than a member needs to join."""
HOLD_SECONDS = 6.0
"""The lookup is held back for so long: longer than the group waits for a member that is dead."""


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
    names = {name: f"{group}-{name}" for name in TOPICS}
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
        group=GroupConfig(num_standbys=1),
        timeouts=TimeoutConfig(session_timeout_seconds=session, transaction_timeout_seconds=session - 1.0),
        loop=True,
        visits=True,
        metrics_handler=settled_hook(plan),
        state=StateConfig(folder=folder, checkpoint_seconds=0.2),
    )
    source = EventSource(config, Table.factory(key=str, value=int, ordered=True, engine=engine))
    source.input(topics["payments"], event=Paid)
    customers = source.join(topics["customers"], key=str, value=int, engine=engine)
    rates = source.lookup(topics["rates"], key=str, value=int)

    def witness(ctx: EventContext[Any], *facts: object) -> Told:
        record = ctx.input
        assert record is not None
        plan.hit("handler.before")
        count = ctx.store.get("count", 0) + 1
        plan.hit("store.before")
        ctx.store.put("count", count)
        plan.hit("store.after")
        looked = [ctx.lookup(rates).get(currency, 0) for currency in CURRENCIES]
        value = msgspec.json.encode([looked, [count, record.topic, record.offset, *facts]])
        ctx.forward(Record(topics["said"], value, b"%d" % record.partition, partition=record.partition))
        return Told(f"{record.topic}-{record.partition}-{record.offset}", record.offset)

    def hop(ctx: EventContext[Any], chain: str, left: int, step: int) -> None:
        key = CUSTOMERS[step % len(CUSTOMERS)]
        ctx.loop(Hop(key, chain, left), key=key)

    @source.on
    def ordered(ctx: EventContext[Any], event: Ordered) -> None:
        seen = witness(ctx, event.customer, ctx.joined(customers).get(event.customer))
        key = f"key-{seen.offset % KEYS}"
        ctx.store.put(key, ctx.store.get(key, 0))
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
        witness(ctx, event.name, ctx.joined(customers).get(event.name))

    source.register_event_type(Paid, paid)

    @source.register_visit("look")
    async def look(ctx: EventContext[Any], key: str, value: int) -> None:
        if key == "count":
            return
        visited: Any = ctx.timer
        partition = ctx.topic_partition.partition
        ctx.store.put(key, value + 1)
        looked = [ctx.lookup(rates).get(currency, 0) for currency in CURRENCIES]
        text = msgspec.json.encode([looked, [ctx.store.get("count", 0), visited.run, key, value, instance]])
        ctx.forward(Record(topics["visited"], text, key.encode(), partition=partition))
        await asyncio.sleep(SLOW_SECONDS if visited.run.startswith("slow") else VISIT_SECONDS)

    return source


def named() -> EventSource[Any]:
    """The source for the command line."""
    return build("", os.environ["MERGED_GROUP"], "", FaultPlan())


def hold_back(source: EventSource[Any]) -> None:
    """Hold back the lookup."""
    engine = source._run.engine
    for reading in () if engine is None else engine.lookups._readings.values():
        with suppress(StreamsError):  # it does not read any more
            following = reading.reader.running()
            following.pause(None)
            time.sleep(HOLD_SECONDS)
            following.resume(None, None)


def die_at_a_purge(when: str) -> None:
    """Have this process killed "before" or "after" its first request to delete from the loop."""
    delete: Any = WireTakeOver.delete_records

    def struck(*arguments: Any) -> None:
        if when == "after":
            delete(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    WireTakeOver.delete_records = struck  # type: ignore[method-assign]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(module)s %(message)s")
    loop_purge.PURGE_SECONDS = 0.5  # type: ignore[misc]
    if "MERGED_DIES" in os.environ:
        die_at_a_purge(os.environ["MERGED_DIES"])
    plan = FaultPlan.from_environment()
    source = build(*sys.argv[1:4], plan, float(os.environ.get("MERGED_SESSION") or "6"))
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=hold_back, args=(source,), daemon=True).start())
    if plan.point:
        asyncio.run(consume_with_faults(source, plan))
    else:
        source.run()
