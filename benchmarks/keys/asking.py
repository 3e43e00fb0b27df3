"""Commands and their callers: ``python -m benchmarks.keys.asking member|ask|query JOB``.

The member takes commands. The callers are clients at a fixed rate: by ``ask``, or by ``send`` and a query that has the
record's effect (``at_least``). They write the ms that a call took: 50 %, 99 % and the highest.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from typing import TypeVar

import msgspec

from benchmarks.child import job_of
from benchmarks.reader import percentiles
from benchmarks.workload import Account, Job
from streams import EventProducer, EventSource, EventSourceConfig, Table, event_type
from streams.model.commands import Versioned
from streams.queries import CommandClient, QueryServer, StateReader
from streams.settings.groups import QueryConfig
from streams.source.event_producer import AsyncEventProducer
from streams.stores import Aggregate

C = TypeVar("C")
CLIENTS, KEYS = 8, 1_000
WARM_UP_CALLS = 80


@event_type("Pay")
class Pay(msgspec.Struct, frozen=True):
    """The command."""

    cents: int


@event_type("Paid")
class Paid(msgspec.Struct, frozen=True):
    """Its event."""

    cents: int


def source_of(job: Job) -> EventSource[Table[str, Versioned[Account]]]:
    """Build it. ``secret``: the file of the group's secret."""
    config = EventSourceConfig(
        group_id=job.group,
        topic=job.source,
        num_partitions=job.partitions,
        changelog_topic=job.changelog,
        bootstrap_servers=job.bootstrap_servers,
        queries=QueryConfig(secret_file=job.options["secret"]),
    )
    source = EventSource(config, store=Aggregate.factory(key=str, state=Account))
    accounts = source.aggregate(Account(), events=source.output(job.output))

    @accounts.decide
    def pay(_: Account, command: Pay) -> list[Paid]:
        return [Paid(command.cents)]

    @accounts.evolve
    def paid(account: Account, event: Paid) -> Account:
        return Account(account.count + 1, account.cents + event.cents)

    return source


async def by_ask(job: Job) -> tuple[float, float, float]:
    """Call by ``ask``."""
    async with AsyncExitStack() as stack:
        source = source_of(job)
        clients = [await stack.enter_async_context(CommandClient.of(source)) for _ in range(CLIENTS)]

        async def call(client: CommandClient[str, Account], number: int) -> None:
            await client.ask(Pay(1), key=f"account-{number % KEYS}", id=str(number), timeout_seconds=60)

        return await _called(job, clients, call)


async def by_query(job: Job) -> tuple[float, float, float]:
    """Call by ``send``, then ``get``."""
    async with AsyncExitStack() as stack:
        source = source_of(job)
        clients = [  # a producer each, as those that ask
            (
                await stack.enter_async_context(StateReader.of(source)),
                await stack.enter_async_context(EventProducer(job.bootstrap_servers)),
            )
            for _ in range(CLIENTS)
        ]

        async def call(client: tuple[StateReader[str, Versioned[Account]], AsyncEventProducer], number: int) -> None:
            reader, producer = client
            key = f"account-{number % KEYS}"
            sent = await producer.send(job.source, Pay(1), key=key, id=str(number))
            await reader.get(key, at_least=sent, timeout_seconds=60)

        return await _called(job, clients, call)


async def _called(
    job: Job, clients: Sequence[C], call: Callable[[C, int], Awaitable[None]]
) -> tuple[float, float, float]:
    in_turn, took = cycle(clients), list[float]()
    for number in range(WARM_UP_CALLS):
        await call(next(in_turn), number)
    rate, began = float(job.options["rate"]), time.monotonic()

    async def timed(client: C, number: int, due: float) -> None:
        await call(client, number)
        took.append(1000 * (time.monotonic() - due))  # of its plan: a caller that is late itself is no faster

    async with asyncio.TaskGroup() as calls:
        for number in range(int(rate * float(job.options["seconds"]))):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.create_task(timed(next(in_turn), WARM_UP_CALLS + number, due))
    return percentiles(took)


if __name__ == "__main__":
    given = job_of(Job)
    if sys.argv[1] == "member":
        member = source_of(given)
        with QueryServer(member, "127.0.0.1:0"):
            member.run()
    else:
        calls = by_ask if sys.argv[1] == "ask" else by_query
        sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(calls(given))))
