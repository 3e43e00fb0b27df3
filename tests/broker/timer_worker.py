"""A source whose events set timers, as a process that a test may kill.

python timer_worker.py BOOTSTRAP GROUP TOPIC OUTPUT PARTITIONS INSTANCE
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, event_type
from tests.vocabulary import TOTALS, Added, Total


@event_type("Rang")
class Rang(msgspec.Struct, frozen=True):
    """What timers fire."""

    name: str


def register(source: EventSource[Any], output: str) -> None:
    """An event sets the timer of its name, ``amount`` milliseconds from then. What rings tells the name, and by how
    many milliseconds it is late; the store counts."""

    def set_timer(ctx: EventContext[Any], event: Added) -> None:
        ctx.schedule_in(event.amount / 1000, Rang(event.name), name=event.name)

    def rang(ctx: EventContext[Any], event: Rang) -> None:
        assert ctx.timer is not None
        late_ms = round((ctx.now - ctx.timer.due).total_seconds() * 1000)
        ctx.store.put(event.name, ctx.store.get(event.name, 0) + 1)
        ctx.forward(output, Total(event.name, late_ms), key=event.name)

    source.register_event_type(Added, set_timer)
    source.register_event_type(Rang, rang)


if __name__ == "__main__":
    bootstrap, group, topic, output, partitions, instance = sys.argv[1:]
    made: EventSource[Any] = EventSource(
        EventSourceConfig(
            group_id=group,
            topic=topic,
            num_partitions=int(partitions),
            bootstrap_servers=bootstrap,
            instance_id=instance,
            num_standbys=1,
        ),
        TOTALS,
    )
    register(made, output)
    made.run()
