"""From Kafka through PostgreSQL to Kafka: counts events of a key in a table that would show each one written twice, and
stashes the count. Its names come from the environment: SINK_GROUP, SINK_DATABASE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg

from streams import AsyncOutbox, EventSource, EventSourceConfig, PostgresSink, SinkItem, event_type, to_record

GROUP = os.environ.get("SINK_GROUP", "sink")
OUTPUT = f"{GROUP}-output"
PARTITIONS = 4
TABLE = """
CREATE TABLE written (number bigserial, key text NOT NULL, place text NOT NULL)
"""


@event_type("Happened")
class Happened(msgspec.Struct, frozen=True):
    """The input: the ``number``-th of its key."""

    key: str
    number: int


@event_type("Written")
class Written(msgspec.Struct, frozen=True):
    """The output: so many are in the table."""

    key: str
    count: int


source = EventSource(EventSourceConfig(group_id=GROUP, topic=f"{GROUP}-input", num_partitions=PARTITIONS))
sink = PostgresSink(source, os.environ.get("SINK_DATABASE", ""), name="written")
outbox = AsyncOutbox()


@sink.register_event_type(Happened)
async def write(db: psycopg.AsyncConnection[Any], items: Sequence[SinkItem[Happened]]) -> None:
    records = []
    for item in items:
        event = item.event
        text = "INSERT INTO written (key, place) VALUES (%s, %s)"
        await db.execute(text, [event.key, f"{item.record.partition}:{item.record.offset}"])
        row = await (await db.execute("SELECT count(*) FROM written WHERE key = %s", [event.key])).fetchone()
        assert row is not None
        records.append(to_record(OUTPUT, Written(event.key, row[0]), key=event.key))
    await outbox.stash_many(db, records)


if __name__ == "__main__":
    source.run()
