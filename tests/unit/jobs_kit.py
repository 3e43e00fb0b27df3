"""What the tests of jobs share; and jobs that run in processes, so they need a module of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from streams import EventContext
from streams.async_jobs import AsyncJobScheduler
from streams.job_settings import SchedulerConfig
from streams.metrics import EventFailed
from streams.outcomes import DEAD_LETTER
from tests.unit.runtime_kit import OUT, Bench, Named, count

FEW = SchedulerConfig(concurrency=4)


class Stubborn(Exception):
    """Cannot be put together again by pickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class World:
    """What jobs talk to: each is held at the gate of its event's name until the test opens it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.cancelled: list[str] = []

    async def call(self, event: Named) -> str:
        name = event.name
        self.begun.append(name)
        try:
            await self.gates[name].wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return name.upper()

    def open(self, *names: str) -> None:
        for name in names:
            self.gates[name].set()


async def shout(event: Named) -> str:
    """A job that ends at once."""
    return event.name.upper()


def by_name(event: Named) -> str:
    """What the event's name says, in a process."""
    match event.name:
        case "raise":
            raise ValueError("raised there")
        case "stubborn":
            raise Stubborn("a", "b")
        case "exit":
            raise SystemExit(3)
        case "die":
            os._exit(1)
        case "interrupt":  # as Ctrl-C does, which is for all processes of a terminal
            os.kill(os.getpid(), signal.SIGINT)
        case "lambda":
            return lambda: None  # type: ignore[return-value]
    return f"{event.name}{os.getpid()}"


def finalize(ctx: EventContext[Any], event: Named, result: str) -> None:
    """Counts, and sends the result."""
    count(ctx, event.name)
    ctx.forward(OUT, Named(result), key=event.name)


def schedule(
    bench: Bench,
    job: Any,
    planner: Any = None,
    *,
    key: Callable[[Named], str] = lambda event: event.name,
    **settings: Any,
) -> list[Any]:
    """The source has this job, and dead letters for what fails; what it measures."""
    measured: list[Any] = []
    source = bench.make(None, metrics_handler=measured.append, error_policy=DEAD_LETTER, **settings.pop("made", {}))
    settings.setdefault("config", FEW)
    scheduler: Any = AsyncJobScheduler(source, job, settings.pop("finalizer", finalize), **settings)
    scheduler.register_event_type(Named, *([planner] if planner else []), **({} if planner else {"key": key}))
    return measured


def failures(measured: list[Any]) -> list[str]:
    """What was said of events that failed."""
    return [one.error for one in measured if isinstance(one, EventFailed)]
