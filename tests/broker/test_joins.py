"""A source with a joined table on a real broker, in two processes that are killed: each event has met the rows as of
its place, and each update the row before. And tables that do not fit."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from streams.codecs import int_codec
from streams.errors import TopicError
from streams.runtime.changelog import JOIN_PREFIX, OFFSET_KEY, decode_offset
from streams.sak.murmur2 import partition_of
from streams.testing.fixtures import BrokerAddress
from tests.broker import join_program as program
from tests.broker.battery_kit import Worker
from tests.broker.bench_kit import LoadedBench
from tests.unit.joins_kit import folded

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

KEYS = [f"c{number}" for number in range(20)]


class JoinWorker(Worker):
    program = Path(__file__).with_name("join_program.py")


class JoinBench(LoadedBench):
    worker = JoinWorker

    def __init__(self, bootstrap: str, group: str) -> None:
        super().__init__(bootstrap, group)
        self.orders, self.table, self.said = program.topics_of(group)
        self.inputs = [self.orders, self.table]

    def create(self, policy: str = "compact", partitions: int = program.PARTITIONS) -> None:
        self.make(self.orders, self.said, partitions=program.PARTITIONS)
        self.make(self.table, partitions=partitions, cleanup_policy=policy, segment_ms="3600000")

    def row(self, key: str, value: bytes | None, partition: int) -> None:
        self.produce(self.table, value, key, partition)
        self.sent += 1

    def send(self, count: int, rng: random.Random, *, rows: float = 0.5) -> None:
        for _ in range(count):
            key = rng.choice(KEYS)
            partition = partition_of(key.encode(), program.PARTITIONS)
            if rng.random() < rows:
                self.row(key, None if rng.random() < 0.1 else int_codec.encode(self.sent), partition)
            else:
                value = msgspec.json.encode(program.Ordered(key))
                self.produce(self.orders, value, key, partition, b"joined.Ordered")
                self.sent += 1
        self.flush()

    def judge(self) -> None:
        sent = {topic: self.read(topic) for topic in self.inputs}
        said, changelog = self.read(self.said), self.read(f"{self.group}.{self.orders}.changelog")
        for partition, lines in said.items():
            decoded = [msgspec.json.decode(record.value or b"") for record in lines]
            records = {topic: found[partition] for topic, found in sent.items()}
            rows = folded(partition, decoded, self.table, records)
            last = {record.key or b"": record.value for record in changelog[partition]}
            prefix = JOIN_PREFIX + self.table.encode() + b"\0"
            kept = {key[len(prefix) :].decode(): value for key, value in last.items() if key.startswith(prefix)}
            assert {key: int_codec.decode(value) for key, value in kept.items() if value is not None} == rows, (
                "in the changelog"
            )
            final = decode_offset([record for record in changelog[partition] if record.key == OFFSET_KEY][-1])
            known = final.position_in(self.table, partition)
            assert known is not None
            committed = [self.admin.committed(self.group, topic, 30.0)[partition] for topic in sent]
            assert [final.offset, known[0]] == committed


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str) -> Iterator[JoinBench]:
    with JoinBench(kafka_broker.bootstrap_servers, f"{topic_prefix}join") as made:
        yield made


def killed_under_load(bench: JoinBench, folder: Path, seed: int, *, kills: int, records: int) -> None:
    rng = random.Random(seed)
    bench.create()
    bench.send(records, rng, rows=0.9)
    bench.kill_under_load(folder, rng, kills=kills, records=records)


@pytest.mark.nightly  # in the gate: test_battery_merged
def test_a_joined_table_and_a_kill(bench: JoinBench, tmp_path: Path, seed: int) -> None:
    killed_under_load(bench, tmp_path, seed, kills=1, records=300)


@pytest.mark.nightly
def test_a_joined_table_and_many_kills(bench: JoinBench, tmp_path: Path, seed: int) -> None:
    killed_under_load(bench, tmp_path, seed, kills=12, records=3_000)


@pytest.mark.nightly
def test_a_table_that_does_not_fit_is_refused_at_the_start(bench: JoinBench) -> None:
    bench.create(policy="delete", partitions=9)
    with pytest.raises(TopicError, match=r"customers has 9 partitions.*cleanup.policy=delete.*topic is compacted"):
        program.build(bench.bootstrap, bench.group, "one").run()


@pytest.mark.nightly
def test_rows_of_librdkafkas_own_partitioner_are_named(bench: JoinBench) -> None:
    bench.create(policy="compact,delete")
    for key in KEYS:
        bench.row(key, int_codec.encode(1), zlib.crc32(key.encode()) % program.PARTITIONS)
    bench.send(0, random.Random(0))
    with pytest.raises(TopicError, match=r"belongs to partition . of 2 by murmur2.*partitioner='crc32'"):
        program.build(bench.bootstrap, bench.group, "one").run()
