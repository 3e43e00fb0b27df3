"""Changes that must not be made twice, in batches, in PostgreSQL: each partition has a row that fences what is done.

kes topics apply examples.async_work.write_behind_fence:source
STOCK=postgresql://localhost/stock kes run examples.async_work.write_behind_fence:source
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

import msgspec
import psycopg

from streams import (
    AsyncBatcher,
    BatcherConfig,
    BatchItem,
    EventSource,
    EventSourceConfig,
    IncomingRecord,
    Retry,
    event_type,
)

DATABASE = os.environ.get("STOCK", "postgresql://localhost/stock")
PATIENCE = "-c idle_in_transaction_session_timeout=5s"  # a worker that is frozen must not keep its locks
TABLES = """
SELECT pg_advisory_xact_lock(1); -- workers that start together must not make them at the same moment
CREATE TABLE IF NOT EXISTS stock (product text PRIMARY KEY, count bigint NOT NULL);
CREATE TABLE IF NOT EXISTS fences (
    topic text, "partition" integer, next_offset bigint NOT NULL, PRIMARY KEY (topic, "partition")
);
"""
LOCK_FENCE = """
INSERT INTO fences VALUES (%s, %s, 0)
ON CONFLICT (topic, "partition") DO UPDATE SET next_offset = fences.next_offset RETURNING next_offset
"""
MOVE_FENCE = 'UPDATE fences SET next_offset = %s WHERE topic = %s AND "partition" = %s'
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


class Move(msgspec.Struct, frozen=True):
    """What is to be changed, and where the event is."""

    partition: int
    offset: int
    event: StockMoved


@contextlib.asynccontextmanager
async def prepared() -> AsyncIterator[None]:
    """The tables are there before the first event comes."""
    async with await psycopg.AsyncConnection.connect(DATABASE) as database:
        await database.execute(TABLES)
    yield


source = EventSource(EventSourceConfig(group_id="stock", topic="stock-moves", num_partitions=4), lifespan=prepared)


async def change(items: list[BatchItem[Move]]) -> None:
    """Change the counts that many events change, in one transaction with their fences."""
    partitions: dict[int, list[Move]] = defaultdict(list)
    for item in items:
        partitions[item.value.partition].append(item.value)
    counts: Counter[str] = Counter()
    async with await psycopg.AsyncConnection.connect(DATABASE, options=PATIENCE) as database:  # one transaction
        for partition, moves in sorted(partitions.items()):  # always locked in the same order: no deadlocks
            where = (source.config.topic, partition)
            row = await (await database.execute(LOCK_FENCE, where)).fetchone()
            assert row is not None
            new = [move for move in moves if move.offset >= row[0]]
            for move in new:
                counts[move.event.product] += move.event.count
            if new:
                await database.execute(MOVE_FENCE, (new[-1].offset + 1, *where))
        # One statement, not executemany, which sends a pipeline: a worker that is frozen half way through one keeps its
        # locks for good, because no timeout runs while the server waits for the rest of a command.
        products = sorted(counts)
        await database.execute(CHANGE, (products, [counts[product] for product in products]))


changes = AsyncBatcher(
    source,
    change,
    config=BatcherConfig(max_batch_size=500, retry=Retry(attempts=10, on=(psycopg.OperationalError,))),
)


@changes.register_event_type(StockMoved)
def plan(record: IncomingRecord, event: StockMoved) -> tuple[int, Move]:
    """The key is the partition: its changes are made in the order of its offsets, one batch at a time."""
    return record.partition, Move(record.partition, record.offset, event)


if __name__ == "__main__":
    source.run()
