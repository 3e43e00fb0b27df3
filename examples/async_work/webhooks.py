"""Webhooks: paid orders are told to the address of their shop, however long that takes; nothing waits for it.

kes topics apply examples.async_work.webhooks:source
kes run examples.async_work.webhooks:source
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx
import msgspec

from streams import AsyncJobScheduler, EventContext, EventSource, EventSourceConfig, JobRun, Retry, Table, event_type
from streams.settings import SchedulerConfig

TOLD = "webhooks-told"


@event_type("ShopRegistered")
class ShopRegistered(msgspec.Struct, frozen=True):
    """An input: where a shop wants to be told. Its record's key is the shop."""

    shop: str
    url: str


@event_type("OrderPaid")
class OrderPaid(msgspec.Struct, frozen=True):
    """The other input. Its record's key is the shop."""

    shop: str
    order: str
    cents: int


@event_type("WebhookDelivered")
class WebhookDelivered(msgspec.Struct, frozen=True):
    """The shop has answered."""

    order: str
    status: int


@event_type("WebhookGivenUp")
class WebhookGivenUp(msgspec.Struct, frozen=True):
    """The error record: three days were not enough, the shop does not want it, or an operator has cancelled it."""

    order: str
    reason: str


class Webhook(msgspec.Struct, frozen=True):
    """What a call needs: it is kept until it is delivered."""

    url: str
    order: OrderPaid


class Unavailable(Exception):
    """The shop has no time for us just now."""


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[None]:
    """One client for as long as the event source runs."""
    global client
    async with httpx.AsyncClient() as client:
        yield


client: httpx.AsyncClient
source = EventSource(
    EventSourceConfig(group_id="webhooks", topic="orders", num_partitions=4),
    store=Table.factory(key=str, value=str),  # shop -> address
    lifespan=connected,
)
source.output(TOLD)
Context = EventContext[Table[str, str]]


async def deliver(hook: Webhook, run: JobRun) -> int:
    """The job: at least once, with one id, by which the shop can know it again."""
    order = {"order": hook.order.order, "cents": hook.order.cents}
    answer = await client.post(hook.url, json=order, headers={"Idempotency-Key": run.id})
    if answer.status_code == 429 or answer.status_code >= 500:
        raise Unavailable(f"{answer.status_code} from {hook.url}")
    answer.raise_for_status()  # any other no is final
    return answer.status_code


def delivered(ctx: Context, hook: Webhook, status: int) -> None:
    """The finalizer: an event of the partition, exactly once."""
    ctx.forward(TOLD, WebhookDelivered(hook.order.order, status), key=hook.order.shop)


def given_up(ctx: Context, hook: Webhook, error: Exception) -> None:
    """In the finalizer's place when the last attempt has failed, or an operator has cancelled the job."""
    ctx.forward(TOLD, WebhookGivenUp(hook.order.order, type(error).__name__), key=hook.order.shop)


hooks = AsyncJobScheduler(
    source,
    deliver,
    delivered,
    on_failure=given_up,
    config=SchedulerConfig(
        concurrency=64,
        rate_per_second=200,
        timeout_seconds=10,  # of one attempt
        retry=Retry(
            attempts=40,
            on=(Unavailable, TimeoutError, httpx.TransportError),
            backoff_seconds=5,
            max_backoff_seconds=6 * 3600,
            timeout_seconds=3 * 86400,  # of all of them
        ),
    ),
)


@source.on
def on_shop(ctx: Context, event: ShopRegistered) -> None:
    ctx.store.put(event.shop, event.url)


@source.on
def on_paid(ctx: Context, event: OrderPaid) -> None:
    url = ctx.store.get(event.shop)
    if url is not None:
        ctx.start_job(hooks, Webhook(url, event), name=event.order, order=url)  # a shop that is down waits alone


if __name__ == "__main__":
    source.run()
