"""A source whose handler starts a durable job per order, for the tests of durable jobs."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from streams import AsyncJobScheduler, EventContext, EventSource, EventSourceConfig, Retry, Table, event_type
from streams.core.jobs import PREFIX
from streams.runtime.changelog import decode_timer, timer_key
from streams.runtime.partition.job_runs import JobRun
from streams.settings import SchedulerConfig
from streams.testing import TestDriver
from streams.testing.simulation.virtual_time import elapse

QUICK: Final = Retry(attempts=3, backoff_seconds=1, jitter=0)

LONG: Final = Retry(attempts=10, backoff_seconds=600, max_backoff_seconds=600, jitter=0)


@event_type("Order")
class Order(msgspec.Struct, frozen=True):
    """Starts a job with its number; ``act``: what else its handler does."""

    number: int
    key: str = "a"
    act: str = ""
    name: str | None = None
    delay: float = 0


class Call(msgspec.Struct, frozen=True):
    """The item of a job."""

    number: int
    key: str


class Shop:
    """A source, the receiver that its jobs call, and what happened. By number: a call takes ``seconds``, and fails
    while it is in ``broken``. ``calls``: (number, id, attempt); ``answered``: numbers; ``failed``: (number, error).
    ``finalizer_broken``: the finalizer fails for these."""

    def __init__(
        self, *, retry: Retry | None = QUICK, ordered: bool = True, scheduler: Any = None, **settings: Any
    ) -> None:
        self.limits = {"concurrency": 4, "timeout_seconds": 60} | (scheduler or {})
        self.retry = retry
        self.ordered = ordered
        self.settings = {"num_partitions": 1} | settings
        self.on_error: Retry | None = None
        self.takes_failures = True
        self.defines_jobs = True
        self.concurrency: int | None = None
        self.calls: list[tuple[int, str, int]] = []
        self.answered: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.cancelled: list[int] = []
        self.broken: set[int] = set()
        self.finalizer_broken: set[int] = set()
        self.seconds: dict[int, float] = {}
        self.running = self.most_running = 0

    async def deliver(self, call: Call, run: JobRun) -> str:
        self.calls.append((call.number, run.id, run.attempt))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        run.progress(1, 2, "half")
        try:
            await elapse(self.seconds.get(call.number, 0.0))
        except asyncio.CancelledError:
            self.cancelled.append(call.number)
            raise
        finally:
            self.running -= 1
        if call.number in self.broken:
            raise ConnectionError(f"no answer to {call.number}")
        return f"ok {call.number}"

    def source(self) -> EventSource[Table[str, tuple[int, ...]]]:
        config = EventSourceConfig(group_id="shop", topic="orders", **self.settings)
        source = EventSource(config, store=Table.factory(key=str, value=tuple[int, ...]))

        def finalizer(ctx: EventContext[Table[str, tuple[int, ...]]], call: Call, result: str) -> None:
            assert result == f"ok {call.number}"
            assert ctx.job is not None
            ctx.store.put(call.key, (*(ctx.store.get(call.key) or ()), call.number))
            if call.number in self.finalizer_broken:
                raise RuntimeError(f"no end of {call.number}")
            ctx.forward("ends", call, key=call.key)
            self.answered.append(call.number)

        def on_failure(ctx: EventContext[Table[str, tuple[int, ...]]], call: Call, error: Exception) -> None:
            ctx.store.put(call.key, (*(ctx.store.get(call.key) or ()), -call.number))
            self.failed.append((call.number, f"{type(error).__name__}: {error}"))

        if self.defines_jobs:
            jobs: Any = AsyncJobScheduler(
                source,
                self.deliver,
                finalizer,
                on_failure=on_failure if self.takes_failures else None,
                config=SchedulerConfig(retry=self.retry, **self.limits),
                name="deliver",
                on_error=self.on_error,
            )

        def on_order(ctx: EventContext[Table[str, tuple[int, ...]]], event: Order) -> None:
            if event.act == "cancel":
                ctx.cancel_job(event.name or "")
                return
            if self.defines_jobs:
                order: Any = {} if self.ordered else {"order": None}
                ctx.start_job(jobs, Call(event.number, event.key), name=event.name, delay=event.delay, **order)
            if event.act == "fail":
                raise RuntimeError(f"no {event.number}")

        async def ahead(ctx: EventContext[Table[str, tuple[int, ...]]], event: Order) -> None:
            on_order(ctx, event)

        handler, policy = on_order if self.concurrency is None else ahead, self.settings.get("error_policy")
        source.register_event_type(Order, handler, on_error=policy, concurrency=self.concurrency)
        return source

    def driver(self, **options: Any) -> TestDriver[Table[str, tuple[int, ...]]]:
        return TestDriver(self.source, **options)


def order(driver: TestDriver[Any], *numbers: int, key: str = "a", wait: bool = True, **more: Any) -> None:
    for number in numbers:
        driver.send(Order(number, key, **more), key=key, wait=False)
    if wait:
        driver.settle()


def job_records(driver: TestDriver[Any], partition: int = 0) -> dict[str, Any]:
    """The jobs in the changelog, by the names of their records."""
    log = driver._world.broker.log(driver._world.config.changelog, partition)
    records = [each for each in log.committed(0, log.end) if (each.key or b"").startswith(timer_key("@job"))]
    timers = dict(map(decode_timer, records))
    return {name.removeprefix(PREFIX): timer for name, timer in timers.items() if timer is not None}
