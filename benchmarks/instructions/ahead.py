"""The account workload with work ahead of an event's turn: a job that gives way to the loop once, then the same as the
plain handler. For counting only: jobs that wait for nothing leave the toolkit's own price."""

from __future__ import annotations

import asyncio

from benchmarks.engine import without_handlers
from benchmarks.workload import Account, Balance, Deposited, Job
from streams import AsyncJobScheduler, EventContext, EventSource, SchedulerConfig, Table

Accounts = Table[str, Account]
CONCURRENCY = 64


async def one_step(_: Deposited) -> None:
    """The job."""
    await asyncio.sleep(0)


def by_scheduler(job: Job) -> EventSource[Accounts]:
    """The event source with ``AsyncJobScheduler``."""
    source, output = without_handlers(job), job.output

    def finish(ctx: EventContext[Accounts], event: Deposited, _: None) -> None:
        _deposited(ctx, event, output)

    settings = SchedulerConfig(concurrency=CONCURRENCY)
    jobs: AsyncJobScheduler[Accounts, Deposited, None] = AsyncJobScheduler(source, one_step, finish, config=settings)
    jobs.register_event_type(Deposited, key=lambda event: event.account)
    return source


def by_handler(job: Job) -> EventSource[Accounts]:
    """The event source with ``concurrency=``."""
    source, output = without_handlers(job), job.output

    async def deposited(ctx: EventContext[Accounts], event: Deposited) -> None:
        await one_step(event)
        await ctx.turn()
        _deposited(ctx, event, output)

    source.register_event_type(Deposited, deposited, concurrency=CONCURRENCY)
    return source


def _deposited(ctx: EventContext[Accounts], event: Deposited, output: str) -> None:
    key = event.account
    account = ctx.store.get(key) or Account()
    account.count += 1
    account.cents += event.cents
    ctx.store.put(key, account)
    ctx.forward(output, Balance(key, account.count, account.cents, event.sent), key=key)
