"""A process that puts queries to a member at a fixed rate, and looks at its monitor, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time

import aiohttp
import msgspec

from benchmarks.child import job_of
from benchmarks.reader import percentiles
from benchmarks.workload import KEYS, Account, Job
from streams import EventSourceConfig
from streams.errors import StreamsError
from streams.queries import StateReader
from streams.settings.groups import QueryConfig

CALLERS = 48
"""Queries at a time, at most: a member answers 64."""
PATIENCE_SECONDS = 60.0


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """``queries`` a second, and ``viewers`` of the page of the source. ``secret``: the file of the group's secret,
    which is the monitor's token too."""

    job: Job
    secret: str
    queries: int
    viewers: int
    monitor: str


class Asked(msgspec.Struct, frozen=True):
    """Answers a second, and milliseconds from the moment at which a query was due to its answer. ``failed`` queries
    have none. ``seen``: parts of pages that a viewer got, each a second or more apart."""

    per_second: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    failed: int = 0
    seen: int = 0


class Clients:
    """Those who ask and look. ``began``: when the first query was answered."""

    def __init__(self, asking: Asking) -> None:
        self.asking, self.began = asking, 0.0
        self.seconds: list[float] = []
        self.failed = 0
        self.seen = [0] * asking.viewers

    def result(self) -> Asked:
        """Sum up, now."""
        p50, p99, _ = percentiles(self.seconds)
        rate = len(self.seconds) / (time.perf_counter() - self.began) if self.began else 0.0
        return Asked(rate, p50 * 1e3, p99 * 1e3, self.failed, min(self.seen, default=0))


async def ask(asking: Asking) -> Asked:
    """Ask and look until SIGTERM."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    clients = Clients(asking)
    async with asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(_view(clients, number)) for number in range(asking.viewers)]
        if asking.queries:
            working.append(tasks.create_task(_query(clients)))
        await over.wait()
        found = clients.result()
        for task in working:
            task.cancel()
    return found


async def _query(clients: Clients) -> None:
    asking, job = clients.asking, clients.asking.job
    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=job.partitions,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        queries=QueryConfig(secret_file=asking.secret),
    )
    rng = random.Random(1)
    async with StateReader(config, key=str, value=Account) as accounts, asyncio.TaskGroup() as tasks:
        await accounts.get("account-00000", timeout_seconds=PATIENCE_SECONDS)
        clients.began = time.perf_counter()

        async def call(number: int) -> None:
            while True:
                due = clients.began + number / asking.queries
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                try:
                    await accounts.get(f"account-{rng.randrange(KEYS):05d}")
                except StreamsError:
                    clients.failed += 1
                else:
                    clients.seconds.append(time.perf_counter() - due)
                number += CALLERS

        for number in range(CALLERS):
            tasks.create_task(call(number))


async def _view(clients: Clients, number: int) -> None:
    asking = clients.asking
    with open(asking.secret) as file:
        head = {"Authorization": f"Bearer {file.read()}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{asking.monitor}events?page=source", headers=head) as stream:
                    async for piece in stream.content.iter_any():
                        clients.seen[number] += b"data: " in piece
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(ask(job_of(Asking)))))
