"""Changes that must not be made twice, in batches, in PostgreSQL: a sink with a fence for each partition.

kes topics apply examples.async_work.write_behind_fence:source
STOCK=postgresql://localhost/stock kes run examples.async_work.write_behind_fence:source
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import psycopg

from streams import EventSource, EventSourceConfig, event_type
from streams.source import PostgresSink, SinkItem

DATABASE = os.environ.get("STOCK", "postgresql://localhost/stock")
TABLE = """
SELECT pg_advisory_xact_lock(1); -- workers that start together must not make it at the same moment
CREATE TABLE IF NOT EXISTS stock (product text PRIMARY KEY, count bigint NOT NULL)
"""
CHANGE = """
INSERT INTO stock SELECT * FROM unnest(%s::text[], %s::bigint[])
ON CONFLICT (product) DO UPDATE SET count = stock.count + excluded.count
"""


@event_type("StockMoved")
class StockMoved(msgspec.Struct, frozen=True):
    """The input: goods that came (or went, if negative). Its record's key is the shop, not the product."""

    shop: str
    product: str
    count: int


@contextlib.asynccontextmanager
async def prepared() -> AsyncIterator[None]:
    """The table is there before the first event comes."""
    async with await psycopg.AsyncConnection.connect(DATABASE) as database:
        await database.execute(TABLE)
    yield


source = EventSource(EventSourceConfig(group_id="stock", topic="stock-moves", num_partitions=4), lifespan=prepared)
sink = PostgresSink(source, DATABASE, name="stock")


@sink.register_event_type(StockMoved)
async def change(db: psycopg.AsyncConnection[Any], items: Sequence[SinkItem[StockMoved]]) -> None:
    """Change the counts that many events change."""
    counts: Counter[str] = Counter()
    for item in items:
        counts[item.event.product] += item.event.count
    products = sorted(counts)  # always locked in the same order: no deadlocks with other partitions
    await db.execute(CHANGE, (products, [counts[product] for product in products]))


if __name__ == "__main__":
    source.run()
