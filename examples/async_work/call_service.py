"""One HTTP call per event: many at once, in order per customer, safe to be made twice.

kes topics apply examples.async_work.call_service:source
PAYMENTS_URL=http://127.0.0.1:8000 kes run examples.async_work.call_service:source
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import httpx
import msgspec

from streams import (
    AsyncJobScheduler,
    EventContext,
    EventSource,
    EventSourceConfig,
    IncomingRecord,
    Retry,
    Table,
    event_type,
)
from streams.settings import SchedulerConfig

RESULTS = "payment-results"


@event_type("PaymentRequested")
class PaymentRequested(msgspec.Struct, frozen=True):
    """The input. Its record's key is the customer."""

    payment: str
    customer: str
    cents: int


@event_type("PaymentMade")
class PaymentMade(msgspec.Struct, frozen=True):
    """The service took it. ``total_cents``: all that this customer has paid so far."""

    payment: str
    receipt: str
    total_cents: int


@event_type("PaymentFailed")
class PaymentFailed(msgspec.Struct, frozen=True):
    """The error record: the service said no, or could not be reached."""

    payment: str
    reason: str


class Charge(msgspec.Struct, frozen=True):
    """What a call needs."""

    request: PaymentRequested
    idempotency_key: str


class Unavailable(Exception):
    """The service has no time for us just now."""


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[None]:
    """One client for as long as the event source runs."""
    global client
    async with httpx.AsyncClient(base_url=os.environ.get("PAYMENTS_URL", "http://127.0.0.1:8000")) as client:
        yield


client: httpx.AsyncClient
source = EventSource(
    EventSourceConfig(group_id="payments", topic="payment-requests", num_partitions=4),
    store=Table.factory(key=str, value=int),
    lifespan=connected,
)
source.output(RESULTS)
Context = EventContext[Table[str, int]]


async def charge(item: Charge) -> str:
    """The job: at least once, so the service must know the call again by its key."""
    answer = await client.post(
        "/charges",
        json={"customer": item.request.customer, "cents": item.request.cents},
        headers={"Idempotency-Key": item.idempotency_key},
    )
    if answer.status_code in (429, 503):
        raise Unavailable(f"{answer.status_code} from {answer.url.path}")
    answer.raise_for_status()  # any other no is final
    receipt: str = answer.json()["receipt"]
    return receipt


def paid(ctx: Context, item: Charge, receipt: str) -> None:
    """The finalizer: in the order of the partition, exactly once."""
    request = item.request
    total = ctx.store.get(request.customer, 0) + request.cents
    ctx.store.put(request.customer, total)
    ctx.forward(RESULTS, PaymentMade(request.payment, receipt, total), key=request.customer)


def not_paid(ctx: Context, item: Charge, error: Exception) -> None:
    """In the finalizer's place when the last attempt has failed."""
    if not isinstance(error, Unavailable | TimeoutError | httpx.HTTPError):
        raise error  # a mistake in this file, not the service's: the event source stops, and nothing is lost
    ctx.forward(RESULTS, PaymentFailed(item.request.payment, type(error).__name__), key=item.request.customer)


charges = AsyncJobScheduler(
    source,
    charge,
    paid,
    on_failure=not_paid,
    config=SchedulerConfig(
        concurrency=64,
        timeout_seconds=2.0,  # of one attempt
        retry=Retry(attempts=6, on=(Unavailable, TimeoutError, httpx.TransportError)),
    ),
)


@charges.register_event_type(PaymentRequested)
def plan(record: IncomingRecord, request: PaymentRequested) -> tuple[str, Charge]:
    return request.customer, Charge(request, idempotency_key=record.where)


if __name__ == "__main__":
    source.run()
