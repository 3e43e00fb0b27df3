"""Two stages of work for each event, each with limits of its own: parse in processes, ask a service, then store.

kes topics apply examples.async_work.chained_stages:source
TARIFFS_URL=http://127.0.0.1:8000 kes run examples.async_work.chained_stages:source
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import AsyncIterator

import httpx
import msgspec

from streams import AsyncJobScheduler, EventContext, EventSource, EventSourceConfig, Retry, Table, event_type
from streams.errors import ProcessJobError
from streams.settings import COMPUTE, WIDE_NETWORK

BILLS = "bills"


@event_type("ReadingsUploaded")
class ReadingsUploaded(msgspec.Struct, frozen=True):
    """The input: a meter's readings as CSV (``time,watt_hours``). Its record's key is the meter."""

    meter: str
    table: str


@event_type("Billed")
class Billed(msgspec.Struct, frozen=True):
    """The output: what an upload costs, and what the meter owes now."""

    meter: str
    watt_hours: int
    cents: int
    owed_cents: int


@event_type("UploadRefused")
class UploadRefused(msgspec.Struct, frozen=True):
    """The error record: an upload that nobody can read."""

    meter: str
    reason: str


class Usage(msgspec.Struct, frozen=True):
    """What the first stage gives to the second. It crosses from process to process."""

    meter: str
    watt_hours: int


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[None]:
    """One client for as long as the event source runs."""
    global client
    async with httpx.AsyncClient(base_url=os.environ.get("TARIFFS_URL", "http://127.0.0.1:8000")) as client:
        yield


client: httpx.AsyncClient
source = EventSource(
    EventSourceConfig(group_id="billing", topic="readings", num_partitions=4),
    store=Table.factory(key=str, value=int),
    lifespan=connected,
)
source.output(BILLS)
Context = EventContext[Table[str, int]]


def parse(upload: ReadingsUploaded) -> Usage:
    """The first job: keeps a processor busy, so it runs in a process."""
    return Usage(upload.meter, sum(int(row["watt_hours"]) for row in csv.DictReader(upload.table.splitlines())))


async def price(usage: Usage) -> int:
    """The second job: what the usage costs."""
    answer = await client.get(f"/tariffs/{usage.meter}")
    answer.raise_for_status()
    return usage.watt_hours * int(answer.json()["cents_per_kwh"]) // 1000


def bill(ctx: Context, usage: Usage, cents: int) -> None:
    """The finalizer of both."""
    owed = ctx.store.get(usage.meter, 0) + cents
    ctx.store.put(usage.meter, owed)
    ctx.forward(BILLS, Billed(usage.meter, usage.watt_hours, cents, owed), key=usage.meter)


def refuse(ctx: Context, upload: ReadingsUploaded, error: Exception) -> None:
    """In the finalizer's place, when the first job has failed for good."""
    if isinstance(error, ProcessJobError):
        raise error  # a process that died says nothing about the upload
    ctx.forward(BILLS, UploadRefused(upload.meter, str(error)), key=upload.meter)


pricing = AsyncJobScheduler(
    source,
    price,
    bill,
    config=msgspec.structs.replace(WIDE_NETWORK, timeout_seconds=2.0, retry=Retry(attempts=8)),
)
parsing = AsyncJobScheduler(source, parse, kind="process", config=COMPUTE, on_failure=refuse, then=pricing)
parsing.register_event_type(ReadingsUploaded, key=lambda upload: upload.meter)

if __name__ == "__main__":
    source.run()
