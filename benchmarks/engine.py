"""The same work by ``EventSource``, with everything on: types, typed table with changelog, metrics, group membership.

``python -m benchmarks.engine [HOW] JOB``: ``plain`` (the default), ``batch`` (a batch handler), and with work that
waits ahead of an event's turn, ``scheduler`` (``AsyncJobScheduler``) and ``concurrency`` (``concurrency=``). With
``ahead`` and ``durable`` the work does not wait: by the scheduler, and by a durable job for each event (after ``delay``
seconds; with ``tells`` outputs tell how long after its event a job began). With
``parking`` one account in ``bad`` (0: none) fails for a millisecond, ``fails`` times for each event, and is parked;
``pace``: the seconds until it is tried again for the first time. With ``heals`` all fail so many seconds long from the
first failure on, and with ``waits=partition`` their partitions wait meanwhile, as for one that is stopped.
With ``once`` events are handled once, by their ``id`` (``offset``: all are new; ``account``: all but the first of an
account are copies; ``none``: without ``once=``), and state and ids are on ``disk`` (``RocksDB``, ``SQLite``), or not.
Options: ``pool.NAME`` and ``config.NAME`` set that field of the settings, ``client.NAME`` a setting of librdkafka,
``switch`` the interpreter's switch interval in seconds, ``slots`` the jobs at a time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from benchmarks.child import job_of
from benchmarks.systems import SCRATCH
from benchmarks.workload import Account, Balance, Deposited, Job, wait_seconds
from streams import (
    PARK,
    AsyncJobScheduler,
    EventContext,
    EventSource,
    EventSourceConfig,
    GroupConfig,
    ParkingConfig,
    PoolConfig,
    Retry,
    SchedulerConfig,
    StateConfig,
    Table,
)
from streams.disk import RocksDB, SQLite
from streams.settings import Once

if TYPE_CHECKING:
    from streams import BatchContext
    from streams.protocols import DiskEngine
    from streams.records import IncomingRecord
    from streams.settings.once import EventId

Accounts = Table[str, Account]
Work = Callable[[Deposited], Awaitable[None]]

measured: Counter[str] = Counter()


def _options(options: dict[str, str], prefix: str) -> dict[str, object]:
    return {name.removeprefix(prefix): _value(text) for name, text in options.items() if name.startswith(prefix)}


def _value(text: str) -> object:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def without_handlers(job: Job, disk: DiskEngine | None = None, **settings: object) -> EventSource[Accounts]:
    """Build the event source of the account workload without its handler. ``settings`` are those of its config."""
    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=job.partitions,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        pool=msgspec.convert(_options(job.options, "pool."), PoolConfig),
        group=msgspec.convert(_options(job.options, "group."), GroupConfig),
        client_settings={
            name.removeprefix("client."): text for name, text in job.options.items() if name.startswith("client.")
        },
        metrics_handler=lambda measurement: measured.update([type(measurement).__name__]),
    )
    config = EventSourceConfig(**msgspec.structs.asdict(config) | _options(job.options, "config.") | settings)
    return EventSource(config, store=Table.factory(key=str, value=Account, engine=disk))


def source_of(job: Job) -> EventSource[Accounts]:
    """Build the event source with a plain handler."""
    source, output = without_handlers(job), job.output

    def deposited(ctx: EventContext[Accounts], event: Deposited) -> None:
        key = event.account
        account = ctx.store.get(key) or Account()
        account.count += 1
        account.cents += event.cents
        ctx.store.put(key, account)
        ctx.forward(output, Balance(key, account.count, account.cents, event.sent), key=key)

    source.register_event_type(Deposited)(deposited)
    return source


def by_batch(job: Job) -> EventSource[Accounts]:
    """Build it with a batch handler, which does for each event of a list the work of the plain one."""
    source, output = without_handlers(job), job.output

    def deposited(ctx: BatchContext[Accounts], events: list[Deposited]) -> None:
        get, put, forward = ctx.store.get, ctx.store.put, ctx.forward
        for event in events:
            key = event.account
            account = get(key) or Account()
            account.count += 1
            account.cents += event.cents
            put(key, account)
            forward(output, Balance(key, account.count, account.cents, event.sent), key=key)

    source.register_event_type(Deposited, deposited, batch=True)
    return source


def parking(job: Job) -> EventSource[Accounts]:
    """Build it with a handler that fails for some accounts."""
    first = float(job.options.get("pace", "0.1"))
    pace = ParkingConfig(
        first_retry_seconds=first, max_retry_seconds=10 * first, max_key_events=1_000_000, max_bytes=1 << 30
    )
    stops = Retry(attempts=1_000_000, backoff_seconds=0.1, max_backoff_seconds=0.1)
    policy = stops if job.options.get("waits") == "partition" else PARK
    source, output = without_handlers(job, error_policy=policy, parking=pace), job.output
    bad, fails = int(job.options.get("bad", "0")), int(job.options.get("fails", "1"))
    heals, began = float(job.options.get("heals", "0")), list[float]()

    def deposited(ctx: EventContext[Accounts], event: Deposited) -> None:
        if bad and int(event.account[-5:]) % bad == 0:
            if heals and not began:
                began.append(time.monotonic())
            if time.monotonic() < began[0] + heals if heals else ctx.attempt <= fails:
                time.sleep(0.001)
                raise ConnectionError("not yet")
        deposit(ctx, event, output)

    source.register_event_type(Deposited, deposited)
    return source


IDS: dict[str, Callable[[IncomingRecord, Deposited], EventId]] = {
    "offset": lambda record, _: record.offset,
    "account": lambda _, event: event.account,
}


def by_ids(job: Job) -> EventSource[Accounts]:
    """Build it with a plain handler whose events are handled once."""
    name, disk = job.options.get("id", "none"), None
    if "disk" in job.options:
        disk = {"RocksDB": RocksDB, "SQLite": SQLite}[job.options["disk"]]()
    kept = StateConfig(folder=os.environ.get(SCRATCH, "")) if disk else StateConfig()
    source, output = without_handlers(job, disk, state=kept), job.output
    once = Once(IDS[name], within=86_400, max_ids=10_000_000, engine=disk) if name in IDS else None

    def deposited(ctx: EventContext[Accounts], event: Deposited) -> None:
        deposit(ctx, event, output)

    source.register_event_type(Deposited, deposited, once=once)
    return source


async def one_step(_: Deposited) -> None:
    """Give way to the loop once: what is left is the toolkit's own price."""
    await asyncio.sleep(0)


async def wait(event: Deposited) -> None:
    """Wait as long as the event demands."""
    await asyncio.sleep(wait_seconds(event.cents))


def by_scheduler(job: Job, work: Work = one_step) -> EventSource[Accounts]:
    """Build it with ``AsyncJobScheduler``."""
    source, output = without_handlers(job), job.output

    def finish(ctx: EventContext[Accounts], event: Deposited, _: None) -> None:
        deposit(ctx, event, output)

    settings = SchedulerConfig(concurrency=int(job.options.get("slots", "64")))
    jobs: AsyncJobScheduler[Accounts, Deposited, None] = AsyncJobScheduler(source, work, finish, config=settings)
    jobs.register_event_type(Deposited, key=lambda event: event.account)
    return source


async def begin(_: Deposited) -> float:
    """Give way to the loop once: a durable job that does nothing. Returns when it began."""
    began = time.time()
    await asyncio.sleep(0)
    return began


def by_durable_jobs(job: Job) -> EventSource[Accounts]:
    """Build it with a durable job for each event: the deposit is that of its end, and those of an account keep their
    order."""
    source, output = without_handlers(job), job.output
    delay, tells = float(job.options.get("delay", "0")), "tells" in job.options

    def finish(ctx: EventContext[Accounts], event: Deposited, begun: float) -> None:
        deposit(ctx, msgspec.structs.replace(event, sent=begun - event.sent) if tells else event, output)

    settings = SchedulerConfig(concurrency=int(job.options.get("slots", "64")))
    jobs = AsyncJobScheduler(source, begin, finish, config=settings)

    def deposited(ctx: EventContext[Accounts], event: Deposited) -> None:
        ctx.start_job(jobs, event, delay=delay)

    source.register_event_type(Deposited, deposited)
    return source


def by_concurrency(job: Job, work: Work = one_step) -> EventSource[Accounts]:
    """Build it with ``concurrency=``."""
    source, output = without_handlers(job), job.output

    async def deposited(ctx: EventContext[Accounts], event: Deposited) -> None:
        await work(event)
        await ctx.turn()
        deposit(ctx, event, output)

    source.register_event_type(Deposited, deposited, concurrency=int(job.options.get("slots", "64")))
    return source


def deposit(ctx: EventContext[Accounts], event: Deposited, output: str) -> None:
    """Do the work of one event."""
    key = event.account
    account = ctx.store.get(key) or Account()
    account.count += 1
    account.cents += event.cents
    ctx.store.put(key, account)
    ctx.forward(output, Balance(key, account.count, account.cents, event.sent), key=key)


MADE: dict[str, Callable[[Job], EventSource[Accounts]]] = {
    "plain": source_of,
    "batch": by_batch,
    "parking": parking,
    "once": by_ids,
    "scheduler": lambda job: by_scheduler(job, wait),
    "ahead": by_scheduler,
    "durable": by_durable_jobs,
    "concurrency": lambda job: by_concurrency(job, wait),
}

if __name__ == "__main__":
    given = job_of(Job)
    if "switch" in given.options:
        sys.setswitchinterval(float(given.options["switch"]))
    MADE[sys.argv[1] if len(sys.argv) > 2 else "plain"](given).run()
