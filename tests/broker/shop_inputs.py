"""The program of ``test_inputs``: orders and payments in, and out which event came as which one in its partition.

python shop_inputs.py BOOTSTRAP GROUP INSTANCE
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams import EventContext, EventSource, Table, event_type
from streams.records import Record
from tests.broker.program_kit import config_of, main

PARTITIONS = 2


@event_type("Ordered")
class Ordered(msgspec.Struct, frozen=True):
    number: int


class Paid(msgspec.Struct, frozen=True):
    number: int


def orders_of(group: str) -> str:
    return f"{group}-orders"


def payments_of(group: str) -> str:
    return f"{group}-payments"


def output_of(group: str) -> str:
    return f"{group}-seen"


def build(bootstrap: str, group: str, instance: str) -> EventSource[Any]:
    config = config_of(bootstrap, group, instance, orders_of(group), PARTITIONS)
    source = EventSource(config, Table.factory(key=str, value=int))
    source.input(payments_of(group), event=Paid)
    output = output_of(group)

    def witness(ctx: EventContext[Any], event: Ordered | Paid) -> None:
        record = ctx.input
        assert record is not None
        count = ctx.store.get("count", 0) + 1
        ctx.store.put("count", count)
        text = f"{count} {record.topic} {record.offset}"
        ctx.forward(Record(output, text.encode(), b"%d" % record.partition, partition=record.partition))

    source.register_event_type(Ordered, witness)
    source.register_event_type(Paid, witness)
    return source


if __name__ == "__main__":
    main(build)
