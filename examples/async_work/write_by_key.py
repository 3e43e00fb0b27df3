"""A database table that follows a topic: batches of rows, by key and with the event's offset, so that twice is once.

kes topics apply examples.async_work.write_by_key:source
ORDERS=orders.sqlite kes run examples.async_work.write_by_key:source
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator

import msgspec

from streams import AsyncBatcher, BatchItem, EventSource, EventSourceConfig, IncomingRecord, Retry, event_type
from streams.settings import BatcherConfig

DATABASE = os.environ.get("ORDERS", "orders.sqlite")
TABLE = """
CREATE TABLE IF NOT EXISTS orders (
    id TEXT PRIMARY KEY, status TEXT NOT NULL, cents INTEGER NOT NULL, "offset" INTEGER NOT NULL
)
"""
UPSERT = """
INSERT INTO orders (id, status, cents, "offset") VALUES (?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET status = excluded.status, cents = excluded.cents, "offset" = excluded."offset"
WHERE excluded."offset" > orders."offset"
"""


@event_type("OrderChanged")
class OrderChanged(msgspec.Struct, frozen=True):
    """The input: what an order is now. Its record's key is the order."""

    order: str
    status: str
    cents: int


Row = tuple[str, str, int, int]


@contextlib.asynccontextmanager
async def prepared() -> AsyncIterator[None]:
    """The table is there before the first event comes."""
    with contextlib.closing(sqlite3.connect(DATABASE, timeout=30)) as database, database:
        database.execute(TABLE)
    yield


source = EventSource(
    EventSourceConfig(group_id="orders-to-sql", topic="order-changes", num_partitions=4),
    lifespan=prepared,
)


def write(items: list[BatchItem[Row]]) -> None:
    """Write the rows of many events, on a thread, in one transaction. At least once: an old row changes nothing."""
    with contextlib.closing(sqlite3.connect(DATABASE, timeout=30)) as database, database:
        database.executemany(UPSERT, [item.value for item in items])


rows = AsyncBatcher(
    source,
    write,
    config=BatcherConfig(
        max_batch_size=500,
        max_concurrent_batches=1,  # SQLite has one writer anyway
        retry=Retry(attempts=10, on=(sqlite3.OperationalError,)),
    ),
)


@rows.register_event_type(OrderChanged)
def plan(record: IncomingRecord, event: OrderChanged) -> tuple[str, Row]:
    return event.order, (event.order, event.status, event.cents, record.offset)


if __name__ == "__main__":
    source.run()
