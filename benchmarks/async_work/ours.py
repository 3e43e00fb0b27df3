"""The waiting workload by ``EventSource``: types, a typed table with changelog, metrics and membership as by default.

Option ``how``: ``scheduler`` (``AsyncJobScheduler``), ``handler`` (``concurrency=``), ``threads`` (a plain function as
the job), ``batcher`` (``AsyncBatcher`` with default settings, all items of a call wait together) or ``turns`` (a plain
``async def`` handler: one event of a partition at a time). ``concurrency`` is for the first three. Prints how many
calls it made.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.async_work.workload import PARTITIONS, Answered, Asked, Job
from benchmarks.child import job_of
from streams import (
    AsyncBatcher,
    AsyncJobScheduler,
    BatchItem,
    EventContext,
    EventSource,
    EventSourceConfig,
    SchedulerConfig,
    Table,
)

Counts = Table[str, int]


calls = 0


async def work(event: Asked) -> None:
    """Wait for the world."""
    global calls
    calls += 1
    await asyncio.sleep(event.milliseconds / 1000)


def blocking_work(event: Asked) -> None:
    """The same on a thread."""
    global calls
    calls += 1  # about: threads may count over each other
    time.sleep(event.milliseconds / 1000)


async def work_together(items: list[BatchItem[Asked]]) -> None:
    """One call for many: it takes as long as the longest would."""
    global calls
    calls += 1
    await asyncio.sleep(max(item.value.milliseconds for item in items) / 1000)


def source_of(job: Job) -> EventSource[Counts]:
    """The event source of the workload."""
    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=PARTITIONS,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        metrics_handler=lambda _: None,
    )
    source = EventSource(config, store=Table.factory(key=str, value=int))
    how, concurrency = job.options["how"], int(job.options.get("concurrency", "1"))
    output = job.output

    def finish(ctx: EventContext[Counts], event: Asked, _: Any = None) -> None:
        count = (ctx.store.get(event.key) or 0) + 1
        ctx.store.put(event.key, count)
        ctx.forward(output, Answered(event.key, event.number, count, event.sent), key=event.key)

    async def handler(ctx: EventContext[Counts], event: Asked) -> None:
        await work(event)
        await ctx.turn()
        finish(ctx, event)

    if how == "batcher":

        def finish_all(ctx: EventContext[Counts], items: list[BatchItem[Asked]]) -> None:
            finish(ctx, items[0].value)

        batcher: AsyncBatcher[Counts, Asked] = AsyncBatcher(source, work_together, finish_all)
        batcher.register_event_type(Asked, key=lambda event: event.key)
    elif how == "turns":
        source.register_event_type(Asked, handler)
    elif how == "handler":
        source.register_event_type(Asked, handler, concurrency=concurrency)
    else:
        function: Callable[[Asked], Any] = blocking_work if how == "threads" else work
        settings = SchedulerConfig(concurrency=concurrency)
        scheduler: AsyncJobScheduler[Counts, Asked, Any] = AsyncJobScheduler(source, function, finish, config=settings)
        scheduler.register_event_type(Asked, key=lambda event: event.key)
    return source


def main() -> None:
    """The process's way in."""
    source_of(job_of(Job)).run()
    sys.stdout.write(str(calls))


if __name__ == "__main__":
    main()
