"""The bank with a durable job per deposit: it calls the receiver at ``BANK_HOOKS``, and its end is told in a topic of
its own. ``BANK_STEP`` may be a step of jobs, as in ``bank_parked.py``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from streams import AsyncJobScheduler, EventContext, EventSource, JobRun, Retry, event_type
from streams.core.jobs import Jobs
from streams.runtime.partition.job_runs import JobRuns
from streams.settings import SchedulerConfig

ATTEMPTS = 1_000


class Hook(msgspec.Struct, frozen=True):
    """The item: the place of the deposit."""

    place: str


@event_type("Told")
class Told(msgspec.Struct, frozen=True):
    """The end of a job: its id, and the receiver's answer; -1: it has failed for good."""

    place: str
    id: str
    answer: int


class Call:
    """The two moments of a call."""

    @staticmethod
    def sent() -> None: ...

    @staticmethod
    def answered() -> None: ...


STEPS: dict[str, tuple[Any, str]] = {
    "started": (Jobs, "numbered"),
    "begun": (JobRuns, "_begin"),
    "call sent": (Call, "sent"),
    "call answered": (Call, "answered"),
    "failed": (JobRuns, "_failed"),
    "ended": (JobRuns, "_end"),
}
"""Those after which a change is part of a transaction, and those between."""


def told_of(group: str) -> str:
    return f"{group}-told"


def starting(source: EventSource[Any], group: str, deposit: Callable[..., None]) -> Callable[..., None]:
    """The handler, with a job for each deposit of its key."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    client = httpx.AsyncClient(timeout=1.0)

    async def deliver(hook: Hook, run: JobRun) -> int:
        Call.sent()
        answer = await client.post(os.environ["BANK_HOOKS"], content=hook.place, headers={"Idempotency-Key": run.id})
        Call.answered()
        answer.raise_for_status()
        return answer.status_code

    def end(ctx: EventContext[Any], hook: Hook, answer: int) -> None:
        assert ctx.job is not None
        ctx.forward(told_of(group), Told(hook.place, ctx.job.id, answer), key=hook.place)

    def failed(ctx: EventContext[Any], hook: Hook, error: Exception) -> None:
        end(ctx, hook, -1)

    retry = Retry(attempts=ATTEMPTS, backoff_seconds=0.02, max_backoff_seconds=0.1)
    config = SchedulerConfig(concurrency=16, timeout_seconds=1.0, retry=retry)
    hooks = AsyncJobScheduler(source, deliver, end, on_failure=failed, config=config)

    def handle(ctx: EventContext[Any], event: Any) -> None:
        deposit(ctx, event)
        assert ctx.input is not None
        ctx.start_job(hooks, Hook(f"{ctx.input.partition}@{ctx.input.offset}"))

    return handle
