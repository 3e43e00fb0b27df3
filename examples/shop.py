"""Orders, payments and customers: two inputs with one order of events, and a joined table.

An invoice goes to the address of the customer. An order of a customer who is not known yet waits for the row; a
customer who moves gets the unpaid invoices again, at the new address.

kes broker start
kes topics apply examples.shop:source
kes run examples.shop:source
kes topology examples.shop:source
"""

from __future__ import annotations

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type
from streams.stores import Update


@event_type("OrderPlaced")
class OrderPlaced(msgspec.Struct, frozen=True):
    """A customer has ordered."""

    order: str
    customer: str
    cents: int


@event_type("Paid")
class Paid(msgspec.Struct, frozen=True):
    """An order is paid. These events are in a topic of another program, without type headers."""

    order: str
    customer: str


@event_type("Invoice")
class Invoice(msgspec.Struct, frozen=True):
    """What a customer has to pay for an order, with the address it goes to."""

    order: str
    customer: str
    address: str
    cents: int


class Customer(msgspec.Struct, frozen=True):
    """A row of the joined table."""

    address: str


class Account(msgspec.Struct):
    """State of a customer: the cents of each unpaid order."""

    unpaid: dict[str, int] = {}


source = EventSource(
    EventSourceConfig(group_id="shop", topic="orders", num_partitions=4),
    store=Table.factory(key=str, value=Account),
)
payments = source.input("payments", event=Paid)
customers = source.join("customers", key=str, value=Customer)
invoices = source.output("invoices")
Context = EventContext[Table[str, Account]]


@source.on
def order_placed(ctx: Context, event: OrderPlaced) -> None:
    account = ctx.store.get(event.customer) or Account()
    account.unpaid[event.order] = event.cents
    ctx.store.put(event.customer, account)
    customer = ctx.joined(customers).get(event.customer)
    if customer is not None:
        ctx.forward(invoices, Invoice(event.order, event.customer, customer.address, event.cents), key=event.customer)


@source.on
def paid(ctx: Context, event: Paid) -> None:
    account = ctx.store.get(event.customer) or Account()
    account.unpaid.pop(event.order, None)
    ctx.store.put(event.customer, account)


@source.register_update(customers)
def customer_changed(ctx: Context, row: Update[str, Customer]) -> None:
    if row.new is None or row.new == row.old:
        return
    account = ctx.store.get(row.key) or Account()
    for order, cents in account.unpaid.items():
        ctx.forward(invoices, Invoice(order, row.key, row.new.address, cents), key=row.key)


if __name__ == "__main__":
    source.run()
