"""A source with several structures and timers, which gets more partitions; and ``kes topics regrow`` for it, as a
process that is killed at a step.

python regrow_program.py BOOTSTRAP GROUP TOPIC OUTPUT PARTITIONS STEP OPTIONS
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from streams import EventContext, EventSource, EventSourceConfig, Heap, Index, NamedTable, Stores, Windows
from streams.cli import main
from tests.broker.start_program import die_at
from tests.vocabulary import Added, Ring, Total, config_of

MINUTE_MS = 60_000


def summed(total: int | None, item: int) -> int:
    """Add to what there is."""
    return (total or 0) + item


def build(config: EventSourceConfig, output: str) -> EventSource[Any]:
    """A source that keeps totals, counts by the minute and the last amounts, and sets a timer where an event says so
    (``deed``: its due time, in milliseconds)."""

    def report(ctx: EventContext[Any], key: str, window: Any, value: int) -> None:
        ctx.forward(output, Total(f"{key}@{window.start_ms // MINUTE_MS}", value), key=key)

    class Kept(Stores):
        totals = NamedTable.of(str, int)
        minutes = Windows.tumbling(str, int, size=60, add=summed, on_close=report)
        latest = Heap.of(str, int, priority=Index(int, lambda amount: amount))

    source = EventSource(config, Kept.factory())

    @source.on
    def on_added(ctx: EventContext[Any], event: Added) -> None:
        store = ctx.store
        store.totals.put(event.name, total := store.totals.get(event.name, 0) + event.amount)
        store.minutes.add(event.name, event.amount)
        store.latest.put(event.name, event.amount)
        ctx.forward(output, Total(event.name, total), key=event.name)
        if event.deed:
            ctx.schedule_at(int(event.deed) / 1000, Ring(event.name), name=f"ring/{event.name}")

    @source.on
    def on_ring(ctx: EventContext[Any], event: Ring) -> None:
        total = ctx.store.totals.get(event.name, 0)
        assert total, f"the timer of {event.name} has come without its row"
        ctx.forward(output, Total(f"{event.name}!", 1), key=event.name)

    return source


if __name__ == "__main__":
    bootstrap, group, topic, output, partitions, step, *words = sys.argv[1:]
    if step:
        die_at(step)
    settings = {"group_id": group, "topic": topic, "num_partitions": int(partitions), "bootstrap_servers": bootstrap}
    sys.modules["shop"] = ModuleType("shop")
    vars(sys.modules["shop"]).update(source=build(config_of(**settings), output))
    sys.exit(main.main(["topics", "regrow", "shop:source", *words, "--yes", "--json"]))
