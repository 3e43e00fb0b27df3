"""An order that nobody pays within half an hour is cancelled: a durable timer, called off by the payment.

kes topics apply examples.async_work.payment_timeout:source
kes run examples.async_work.payment_timeout:source
"""

from __future__ import annotations

import os

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type

OUTCOMES = "order-outcomes"
TIME_TO_PAY_SECONDS = float(os.environ.get("TIME_TO_PAY_SECONDS", "1800"))


@event_type("OrderPlaced")
class OrderPlaced(msgspec.Struct, frozen=True):
    """The input. The key of all records is the order."""

    order: str
    cents: int


@event_type("OrderPaid")
class OrderPaid(msgspec.Struct, frozen=True):
    """The other input."""

    order: str


@event_type("PaymentOverdue")
class PaymentOverdue(msgspec.Struct, frozen=True):
    """What the timer brings."""

    order: str


@event_type("OrderClosed")
class OrderClosed(msgspec.Struct, frozen=True):
    """The output, once per order: ``paid``, ``cancelled``, or ``refund`` for a payment that came too late."""

    order: str
    outcome: str


source = EventSource(
    EventSourceConfig(group_id="orders", topic="order-events", num_partitions=4),
    store=Table.factory(key=str, value=int),  # orders that are open: what they cost
)
source.output(OUTCOMES)
Context = EventContext[Table[str, int]]


@source.on
def place(ctx: Context, event: OrderPlaced) -> None:
    ctx.store.put(event.order, event.cents)
    ctx.schedule_in(TIME_TO_PAY_SECONDS, PaymentOverdue(event.order), name=f"unpaid {event.order}")


@source.on
def pay(ctx: Context, event: OrderPaid) -> None:
    is_open = ctx.store.delete(event.order)
    ctx.cancel_timer(f"unpaid {event.order}")
    ctx.forward(OUTCOMES, OrderClosed(event.order, "paid" if is_open else "refund"), key=event.order)


@source.on
def cancel(ctx: Context, event: PaymentOverdue) -> None:
    ctx.store.delete(event.order)
    ctx.forward(OUTCOMES, OrderClosed(event.order, "cancelled"), key=event.order)


if __name__ == "__main__":
    source.run()
