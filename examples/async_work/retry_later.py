"""Events that fail wait in the store, as error records, and are tried again later; what comes behind them waits too.

kes topics apply examples.async_work.retry_later:source
SCORES_URL=http://127.0.0.1:8000 kes run examples.async_work.retry_later:source
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import httpx
import msgspec

from streams import AsyncJobScheduler, EventContext, EventSource, EventSourceConfig, Table, event_type
from streams.settings import SchedulerConfig

SCORED = "scored"
FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=1), timedelta(minutes=10)
MOST_ATTEMPTS = 4
ACCOUNTS_AT_A_TIME = 20


@event_type("Transfer")
class Transfer(msgspec.Struct, frozen=True):
    """The input. Its record's key is the account."""

    transfer: str
    account: str
    cents: int


@event_type("Scored")
class Scored(msgspec.Struct, frozen=True):
    """The output: how risky a transfer is. In the order of the account's transfers."""

    transfer: str
    account: str
    score: int


@event_type("GivenUp")
class GivenUp(msgspec.Struct, frozen=True):
    """The other output: a transfer that could not be scored, for people to look at."""

    transfer: Transfer
    attempts: int
    reason: str


class Parked(msgspec.Struct):
    """The error record of an account: the transfer that failed, and behind it those that came since."""

    transfers: list[Transfer]
    attempts: int
    reason: str
    retry_at: datetime


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[None]:
    """One client for as long as the event source runs."""
    global client
    async with httpx.AsyncClient(base_url=os.environ.get("SCORES_URL", "http://127.0.0.1:8000")) as client:
        yield


client: httpx.AsyncClient
source = EventSource(
    EventSourceConfig(group_id="scoring", topic="transfers", num_partitions=4),
    store=Table.factory(key=str, value=Parked),  # by account
    lifespan=connected,
)
source.output(SCORED)
Context = EventContext[Table[str, Parked]]


async def score(transfer: Transfer) -> int:
    """The job: a question, so it does no harm when it is asked again."""
    answer = await client.get(f"/scores/{transfer.transfer}")
    answer.raise_for_status()
    return int(answer.json()["score"])


# -- as the transfers come: one attempt, ahead


def scored(ctx: Context, transfer: Transfer, score: int) -> None:
    if not has_to_queue(ctx, transfer):
        ctx.forward(SCORED, Scored(transfer.transfer, transfer.account, score), key=transfer.account)


def failed(ctx: Context, transfer: Transfer, error: Exception) -> None:
    if not has_to_queue(ctx, transfer):
        ctx.store.put(transfer.account, Parked([transfer], 1, repr(error), ctx.now + FIRST_WAIT))


def has_to_queue(ctx: Context, transfer: Transfer) -> bool:
    """Put it behind an earlier transfer of the account, if one is parked."""
    parked = ctx.store.get(transfer.account)
    if parked is None:
        return False
    parked.transfers.append(transfer)
    ctx.store.put(transfer.account, parked)
    return True


limits = SchedulerConfig(concurrency=32, timeout_seconds=2.0)
scores = AsyncJobScheduler(source, score, scored, on_failure=failed, config=limits, name="score")
scores.register_event_type(Transfer, key=lambda transfer: transfer.account)


# -- again, later: in the order and the transactions of the partition


@source.schedule_interjection(every=0.5, jitter=0.1)
async def retry(ctx: Context) -> None:
    due = [account for account, parked in ctx.store.items() if parked.retry_at <= ctx.now]
    await asyncio.gather(*(score_again(ctx, account) for account in due[:ACCOUNTS_AT_A_TIME]))


async def score_again(ctx: Context, account: str) -> None:
    """Work off what is parked for the account, until something fails again or nothing is left."""
    while (parked := ctx.store.get(account)) is not None and parked.retry_at <= ctx.now:
        await retries.schedule(ctx, parked)


async def score_first(parked: Parked) -> int:
    return await score(parked.transfers[0])


def scored_at_last(ctx: Context, parked: Parked, score: int) -> None:
    transfer = parked.transfers[0]
    ctx.forward(SCORED, Scored(transfer.transfer, transfer.account, score), key=transfer.account)
    go_on_behind(ctx, parked)


def failed_again(ctx: Context, parked: Parked, error: Exception) -> None:
    transfer = parked.transfers[0]
    parked.attempts += 1
    parked.reason = repr(error)
    if parked.attempts < MOST_ATTEMPTS:
        parked.retry_at = ctx.now + min(FIRST_WAIT * 2 ** (parked.attempts - 1), LONGEST_WAIT)
        ctx.store.put(transfer.account, parked)
    else:
        ctx.forward(SCORED, GivenUp(transfer, parked.attempts, parked.reason), key=transfer.account)
        go_on_behind(ctx, parked)


def go_on_behind(ctx: Context, parked: Parked) -> None:
    """The first transfer is done with; the next one is due at once."""
    account = parked.transfers[0].account
    if parked.transfers[1:]:
        ctx.store.put(account, Parked(parked.transfers[1:], 0, "", ctx.now))
    else:
        ctx.store.delete(account)


retries = AsyncJobScheduler(source, score_first, scored_at_last, on_failure=failed_again, config=limits)

if __name__ == "__main__":
    source.run()
