"""What the tests of jobs share; and jobs that run in processes, so they need a module of their own."""

from __future__ import annotations

import os
import signal
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


def schedule(bench: Bench, job: Any, planner: Any = None, **settings: Any) -> list[Any]:
    """The source has this job, dead letters for what fails, and tells what it measured."""
    measured: list[Any] = []
    made = settings.pop("made", {})
    source = bench.make(None, metrics_handler=measured.append, error_policy=DEAD_LETTER, **made)
    settings.setdefault("config", FEW)
    scheduler: Any = AsyncJobScheduler(source, job, settings.pop("finalizer", finalize), **settings)
    scheduler.register_event_type(
        Named, *([planner] if planner else []), **({} if planner else {"key": lambda event: event.name})
    )
    return measured


def failures(measured: list[Any]) -> list[str]:
    """What was said of events that failed."""
    return [one.error for one in measured if isinstance(one, EventFailed)]


async def ends(bench: Bench, offset: int) -> None:
    """Wait until partition 0 is committed up to here."""
    await bench.until(lambda: bench.broker.offsets.get(0) == offset, f"offset {offset} is committed")
