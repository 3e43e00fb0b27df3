"""The program of ``test_joins``: orders and customers in, and out which one came as which, with the row it has met.

python join_program.py BOOTSTRAP GROUP INSTANCE
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams import EventContext, EventSource, Table, Update, event_type
from streams.records import Record
from tests.broker.program_kit import config_of, main

PARTITIONS = 2


@event_type("joined.Ordered")
class Ordered(msgspec.Struct, frozen=True):
    customer: str


def topics_of(group: str) -> tuple[str, str, str]:
    """Return the names of orders, customers, and of what is said."""
    return f"{group}-orders", f"{group}-customers", f"{group}-said"


def build(bootstrap: str, group: str, instance: str) -> EventSource[Any]:
    orders, table, said = topics_of(group)
    config = config_of(bootstrap, group, instance, orders, PARTITIONS)
    source = EventSource(config, Table.factory(key=str, value=int))
    customers = source.join(table, key=str, value=int)

    def witness(ctx: EventContext[Any], *facts: object) -> None:
        record = ctx.input
        assert record is not None
        count = ctx.store.get("count", 0) + 1
        ctx.store.put("count", count)
        value = msgspec.json.encode([count, record.topic, record.offset, *facts])
        ctx.forward(Record(said, value, b"%d" % record.partition, partition=record.partition))

    @source.on
    def ordered(ctx: EventContext[Any], event: Ordered) -> None:
        witness(ctx, event.customer, ctx.joined(customers).get(event.customer))

    @source.register_update(customers)
    def updated(ctx: EventContext[Any], row: Update[str, int]) -> None:
        witness(ctx, row.key, row.old, row.new)

    return source


if __name__ == "__main__":
    main(build)
