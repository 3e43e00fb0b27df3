"""A shop that joins orders with their customers; and the witness of a joined table: what a program has said of its
events is folded again, in the order of its counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from streams import BatchContext, EventContext, EventSource, Retry, Table, Update
from streams.records import IncomingRecord, Record
from streams.testing import TestDriver
from streams.testing.driven_tables import committed_rows
from tests.vocabulary import Named, Ordered, config_of


def folded(
    where: object, lines: Sequence[Sequence[Any]], table: str, sent: Mapping[str, Sequence[IncomingRecord]]
) -> dict[str, int]:
    """Return the rows of a partition after ``lines``: of a row ``[count, topic, offset, key, old, new]``, of an event
    ``[count, topic, offset, key, row]``. ``sent``: the committed records of each topic. Fails for a count or an offset
    with a gap or twice, and for a row that was another one at that place."""
    assert [line[0] for line in lines] == list(range(1, len(lines) + 1)), f"{where}: counts, in their order"
    rows: dict[str, int] = {}
    offsets: dict[str, list[int]] = {topic: [] for topic in sent}
    records = {record.offset: record for record in sent[table]}
    for count, topic, offset, key, *facts in lines:
        offsets[topic].append(offset)
        assert facts[0] == rows.get(key), f"{where}, {count}: the row of {key} was {rows.get(key)}, said was {facts[0]}"
        if topic == table:
            record, new = records[offset], facts[1]
            assert (record.key, record.value is None) == (key.encode(), new is None), f"{where}: the row at {offset}"
            if new is None:
                rows.pop(key, None)
            else:
                rows[key] = new
    for topic, found in offsets.items():
        assert found == [record.offset for record in sent[topic]], f"{where}: the records of {topic}, once, in order"
    return rows


CUSTOMERS, SEEN = "customers", "seen"


class Customer(msgspec.Struct):
    name: str


class Shop:
    """A source that joins orders with their customers. ``updates``: its update handler, if there is one."""

    def __init__(
        self,
        updates: Callable[[EventContext[Any], Update[str, Customer]], Any] | None = None,
        *,
        store: Any = None,
        joins: bool = True,
        on_update: Retry | None = None,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        config = config_of(group_id="shop", topic="orders", num_partitions=2, **settings)
        self.source: EventSource[Any] = EventSource(config, store or Table.factory(key=str, value=int))
        if joins:
            self.customers = self.source.join(CUSTOMERS, key=str, value=Customer, **(options or {}))
            if updates is not None:
                self.source.register_update(self.customers, updates, on_error=on_update)
        self.source.register_event_type(Ordered, self.placed)
        self.source.register_event_type(Named, self.many, batch=True)

    def name_of(self, ctx: EventContext[Any], key: str) -> str:
        found = ctx.joined(self.customers).get(key) if hasattr(self, "customers") else None
        return "-" if found is None else found.name

    def placed(self, ctx: EventContext[Any], event: Ordered) -> None:
        say(ctx, f"{event.customer} is {self.name_of(ctx, event.customer)}")

    def many(self, ctx: BatchContext[Any], events: list[Named]) -> None:
        for event in events:
            say(ctx, f"{event.name} is {self.name_of(ctx, event.name)}")


def say(ctx: EventContext[Any], text: str) -> None:
    ctx.forward(Record(SEEN, text.encode(), b"k", partition=0))


def update(ctx: EventContext[Any], row: Update[str, Customer]) -> None:
    say(ctx, f"{row.key}: {'-' if row.old is None else row.old.name} to {'-' if row.new is None else row.new.name}")


def seen(driver: TestDriver[Any]) -> list[str]:
    return [(record.value or b"").decode() for record in driver.outputs(SEEN)]


def place(driver: TestDriver[Any], *customers: str, wait: bool = True) -> None:
    for customer in customers:
        driver.send(Ordered(customer), key=customer, wait=wait)


def row(driver: TestDriver[Any], key: bytes | None, value: bytes | None, partition: int = 0) -> None:
    driver.send_record(Record(CUSTOMERS, value, key, None, partition))


def rows(driver: TestDriver[Any], partition: int = 0) -> dict[bytes, bytes]:
    return committed_rows(driver._world.broker.log("shop.orders.changelog", partition), CUSTOMERS)
