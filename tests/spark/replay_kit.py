"""What tests of replays need: records in the bank's topic, the real source run over them, and what it left behind."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import msgspec
from confluent_kafka import Producer
from pyspark.sql import DataFrame, Row, SparkSession

from streams import EventSource
from streams.events import event_type_of
from streams.kafka.questions.admin import Watermarks
from streams.metrics import Measurement
from streams.model.topics import TopicSpec
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers, IncomingRecord
from tests.broker.engine_kit import Lab, Running
from tests.spark.replay_sources import PARTITIONS, Closed, Failing, Heavy, Moved, Slow, bank

Sent = tuple[int, bytes | None, bytes | None, Headers]
"""An input record: partition, key, value, headers."""


def encoded(event: Any) -> tuple[bytes, Headers]:
    kind = event_type_of(type(event))
    return kind.encode(event), list(kind.headers)


def moves(count: int, *, partitions: int, seed: int, failing: bool = True) -> list[Sent]:
    """Events of all kinds, older versions, unknown types and bytes that cannot be read among them."""
    rng = random.Random(seed)
    found: list[Sent] = []
    for number in range(count):
        partition = rng.randrange(partitions)
        account = f"a{partition}" if rng.random() < 0.1 else f"b{partition}.{rng.randrange(20)}"
        dice = rng.random()
        value: bytes | None
        if dice < 0.6:
            value, headers = encoded(Moved(account, rng.randrange(-100, 100), "EUR"))
        elif dice < 0.7:
            value, headers = msgspec.json.encode({"account": account, "cents": number}), [(TYPE_HEADER, b"Moved")]
        elif dice < 0.75:
            value, headers = encoded(Closed(account))
        elif dice < 0.8:
            value, headers = encoded(Slow(account))
        elif dice < 0.85:
            value, headers = encoded(Heavy(account))
        elif dice < 0.9 and failing:
            value, headers = encoded(Failing(account, rng.randrange(1, 5)))
        elif dice < 0.95:
            value, headers = b"x" * rng.randrange(5), [(TYPE_HEADER, b"Unknown"), ("trace", None)]
        else:
            value, headers = (
                rng.choice([None, b"", b"{"]),
                [(TYPE_HEADER, b"Moved"), (VERSION_HEADER, b"2"), ("k", b"v")],
            )
        found.append((partition, account.encode(), value, headers))
    return found


def produce(servers: str, topic: str, records: list[Sent]) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    for partition, key, value, headers in records:
        producer.produce(topic, value, key, partition, headers=headers)  # type: ignore[arg-type]
    assert producer.flush(30) == 0


def state_of(lab: Lab, topic: str, partition: int) -> dict[bytes, bytes]:
    """The last value per key in a changelog partition."""
    from streams.codecs import RESERVED_KEY_PREFIX

    found: dict[bytes, bytes] = {}
    for record in lab._records(topic, partition):
        if record.key is not None and not record.key.startswith(RESERVED_KEY_PREFIX):
            found.pop(record.key, None)
            if record.value is not None:
                found[record.key] = record.value
    return found


def stores_of(df: DataFrame, partition: int) -> dict[bytes, bytes]:
    return {bytes(row.key): bytes(row.value) for row in df.where(df.partition == partition).collect()}


class Stage:
    """The bank of one test: its topics, its members, and what is in its logs."""

    def __init__(self, lab: Lab, prefix: str, spark: SparkSession) -> None:
        self.lab, self.prefix, self.spark = lab, prefix, spark
        self.measured: list[Measurement] = []
        self.out = [f"{prefix}stood", f"{prefix}closed"]
        self.config = self.bank().config
        self.topic, self.changelog = self.config.topic, self.config.changelog
        names = [self.topic, *self.out]
        lab.admin.create([TopicSpec(name=name, partitions=PARTITIONS, replication_factor=1) for name in names], 30.0)

    def bank(self, **changes: Any) -> EventSource[Any]:
        return bank(self.prefix, bootstrap_servers=self.lab.bootstrap, metrics_handler=self.measured.append, **changes)

    def produce(self, count: int, seed: int) -> None:
        produce(self.lab.bootstrap, self.topic, moves(count, partitions=PARTITIONS, seed=seed))

    def run(self) -> None:
        """Run the bank until everything in its topic is handled and committed."""

        ends = self.ends

        async def run() -> None:
            async with Running(self.bank()) as running:
                await running.until_handled(*(ends[number] for number in sorted(ends)))

        asyncio.run(run())

    @property
    def ends(self) -> dict[int, int]:
        marks: dict[int, Watermarks] = self.lab.admin.watermarks(self.topic)
        return {number: mark.end for number, mark in marks.items()}

    def read(self, *topics: str) -> DataFrame:
        reader = self.spark.read.format("grt").option("kafka.bootstrap.servers", self.lab.bootstrap)
        return reader.option("subscribe", ",".join(topics or [self.topic])).load()

    def records(self, *topics: str) -> list[IncomingRecord]:
        return [record for name in topics for record in self.lab._records(name, None)]

    def must_have_stored(self, stores: DataFrame) -> None:
        """Byte for byte what the changelog holds, partition by partition."""
        for partition in range(PARTITIONS):
            assert state_of(self.lab, self.changelog, partition) == stores_of(stores, partition)


def by_key(rows: list[Any]) -> dict[tuple[str, bytes | None], list[tuple[bytes | None, Headers]]]:
    """Records or rows of outputs: what each key got, in order, with headers."""
    found: dict[tuple[str, bytes | None], list[tuple[bytes | None, Headers]]] = defaultdict(list)
    for row in rows:
        headers = [tuple(header) for header in row.headers or ()]
        if isinstance(row, Row):
            headers = [(name, None if value is None else bytes(value)) for name, value in headers]
            key, value = (None if each is None else bytes(each) for each in (row.key, row.value))
        else:
            key, value = row.key, row.value
        found[row.topic, key].append((value, headers))
    return dict(found)
