"""The bank's deposits as work that runs ahead of its turn (``BANK_HANDLER``): jobs of all kinds, concurrent handlers.

``BANK_JOB_MS``: how long a job takes, at most (at random); ``BANK_SLOW_KEY`` takes ``BANK_SLOW_MS`` instead.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from typing import Any

from streams import EventContext, EventSource
from streams.outcomes import Retry
from streams.settings.jobs import SchedulerConfig
from streams.source.jobs import AsyncJobScheduler
from streams.testing.faults import FaultPlan

KINDS = ("job", "process", "turn")
CONFIG = SchedulerConfig(
    concurrency=32,
    worker_queue_depth=20,
    max_concurrent_keys=50,
    retry=Retry(attempts=5, backoff_seconds=0.001, max_backoff_seconds=0.01, jitter=0),
)


def seconds_of(event: Any) -> float:
    """How long the work of this event takes."""
    slow, slow_ms = os.environ.get("BANK_SLOW_KEY", ""), float(os.environ.get("BANK_SLOW_MS", "0"))
    most = slow_ms if slow in (event.account, "*") else random.random() * float(os.environ.get("BANK_JOB_MS", "5"))
    return most / 1000


def crunch(event: Any) -> int:
    """A job in a process. Twice the cents: only the finalizer knows how to make them right."""
    time.sleep(seconds_of(event))
    return int(event.cents) * 2


def register(
    source: EventSource[Any], kind: str, event_class: type[Any], plan: FaultPlan, deposit: Callable[..., None]
) -> None:
    """Register the handler of this kind; ``deposit`` is what it does at its turn."""

    async def fetch(event: Any) -> int:
        plan.hit("handler.before")
        await asyncio.sleep(seconds_of(event))
        if random.random() < 0.01:
            raise ConnectionError("now and then")
        return int(event.cents) * 2

    def finalize(ctx: EventContext[Any], event: Any, doubled: int) -> None:
        assert doubled == 2 * event.cents
        deposit(ctx, event)

    def by_account(event: Any) -> str:
        return str(event.account)

    async def turn(ctx: EventContext[Any], event: Any) -> None:
        await asyncio.sleep(seconds_of(event))
        await ctx.turn()
        deposit(ctx, event)

    scheduler: Any
    match kind:
        case "job":
            scheduler = AsyncJobScheduler(source, fetch, finalize, config=CONFIG)
        case "process":
            scheduler = AsyncJobScheduler(
                source, crunch, finalize, config=SchedulerConfig(concurrency=2), kind="process"
            )
        case _:
            source.register_event_type(event_class, turn, concurrency=32)
            return
    scheduler.register_event_type(event_class, key=by_account)
