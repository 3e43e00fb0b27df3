"""The same transactions through both producers, from a seed: a plain consumer then reads the same, byte for byte."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from streams import EventSourceConfig
from streams.broker import KafkaCluster
from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.config import PRODUCERS
from streams.errors import RecordRefused, TransactionFailed
from streams.group import Snapshot
from streams.records import DEFAULT_MESSAGE_LIMIT, Headers, Output, record_size
from streams.runtime.connections import KafkaConnections
from streams.runtime.transactions.hung_calls import HungCalls
from streams.runtime.transactions.producer_slot import Slot
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec
from tests.broker.client_kit import group_metadata
from tests.broker.gate import nightly

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

PARTITIONS = {"in": 3, "plain": 3, "compacted": 2, "stamped": 1, "small": 1}
CONFIGS = {
    "compacted": {"cleanup.policy": "compact"},
    "stamped": {"message.timestamp.type": "LogAppendTime"},
    "small": {"max.message.bytes": "2000"},
}
HOUR_MS = 3_600_000
TRANSACTIONS = 30
KEYS = [b"", b"k", "größe".encode(), b"\0\xff", b"x" * 300, *(b"key-%d" % n for n in range(8))]


class Planned(NamedTuple):
    outputs: list[Output]
    offsets: dict[int, int]
    commits: bool


def extremes(now_ms: int) -> Iterator[Output]:
    """Records at the edge of what is taken, and beyond; each gets a transaction of its own."""

    def at(topic: str, value: bytes | None, key: bytes | None = b"k", time_ms: int = 0, **rest: Any) -> Output:
        return Output(topic, value, key, rest.get("headers"), rest.get("partition", 0), time_ms, 0, 0)

    yield at("plain", b"many", headers=[(f"h{n}", b"%d" % n if n % 3 else None) for n in range(10_000)])
    yield at("plain", None, None)
    yield at("plain", b"", b"")
    room = DEFAULT_MESSAGE_LIMIT - record_size(b"k", b"", None)
    for size in (room, room + 1):  # the client's limit
        yield at("plain", b"v" * size)
    for size in range(1918, 1928):  # the topic's, of a batch: in between
        yield at("small", b"v" * size)
    yield at("plain", b"v", partition=PARTITIONS["plain"])
    yield at("compacted", b"v", None)  # refused by the broker, with the reason
    for ahead in (HOUR_MS // 2, 2 * HOUR_MS):  # one hour is the broker's default for a clock that is ahead
        yield at("plain", b"ahead", time_ms=now_ms + ahead)
    yield at("plain", b"old", time_ms=1)


def history(rng: random.Random) -> list[Planned]:
    """Plan transactions; the first ones are those of ``extremes``."""
    now_ms = int(time.time() * 1000)
    edge = [Planned([output], {0: number}, True) for number, output in enumerate(extremes(now_ms))]
    large = [Output("plain", rng.randbytes(100_000), b"k", None, 0, 0, 0, 0) for _ in range(40)]
    found = [*edge, Planned(large, {1: 1}, True)]  # several batches for one partition
    for number in range(TRANSACTIONS):
        offsets = {partition: number * 10 + partition for partition in rng.sample(range(3), rng.randint(1, 3))}
        outputs = [record(rng, now_ms) for _ in range(rng.choice((1, 3, 30, 200)))]
        if rng.random() < 0.1:  # in the middle: the others are refused with it
            outputs.insert(rng.randrange(len(outputs)), rng.choice(edge[-4:]).outputs[0])
        found.append(Planned(outputs, offsets, rng.random() < 0.8))
    return found


def record(rng: random.Random, now_ms: int) -> Output:
    topic = rng.choice(("plain", "compacted", "stamped"))
    key = rng.choice([*KEYS, None] if topic == "plain" else KEYS)
    value = rng.choice((None, b"", rng.randbytes(rng.choice((1, 63, 64, 127, 128, 8192))), b"{}" * 500))
    names: list[Headers | None] = [None, [], [("h", b"x"), ("h", None), ("ключ", b"")]]
    stamp = rng.choice((0, now_ms - rng.choice((100_000, 109_000, 10**9))))
    # Without a key and a partition each producer chooses for itself.
    partition = -1 if key is not None and rng.random() < 0.5 else rng.randrange(PARTITIONS[topic])
    return Output(topic, value, key, rng.choice(names), partition, stamp, 0, 0)


class Played:
    """One producer's run of a history: the outcome of each transaction, and what is there afterwards."""

    def __init__(self, address: str, prefix: str, producer: str, codec: str) -> None:
        self.address, self.prefix, self.producer = address, f"{prefix}{producer}.", producer
        self.group = self.prefix + "group"
        config = EventSourceConfig(
            group_id=self.group,
            topic=self.prefix + "in",
            bootstrap_servers=address,
            instance_id="one",
            num_partitions=3,
            producer=producer,
            client_settings={"compression.type": codec},
        )
        connections = KafkaConnections(config)
        hung = HungCalls(1, lambda _: None, lambda error: None)
        self.slot = connections.slot(self.prefix) or Slot(self.prefix, connections, 20, hung)

    async def run(self, planned: list[Planned]) -> list[object]:
        await self.slot.reopen([self.prefix + topic for topic in PARTITIONS])
        try:
            return [await self._transaction(transaction) for transaction in planned]
        finally:
            self.slot.abandon()

    async def _transaction(self, planned: Planned) -> object:
        outputs = [msgspec.structs.replace(output, topic=self.prefix + output.topic) for output in planned.outputs]
        position, refused = 0, list[str]()
        self.slot.begin()
        while (position := self.slot.produce_many(outputs, position)) < len(outputs):
            try:
                if not self.slot.produce(outputs[position]):
                    await asyncio.sleep(0.001)
                    continue
            except RecordRefused as refusal:
                refused.append(": ".join(str(refusal).removeprefix(self.prefix).split(": ")[:2]))
            position += 1
        try:
            await self.slot.flush()
            if planned.commits:
                anybody = Snapshot(1, -1, "", group_metadata(self.group))
                await self.slot.commit(self.prefix + "in", planned.offsets, lambda: anybody, lambda: None)
                return refused
        except TransactionFailed as failure:
            outcome = [failure.call, failure.code, failure.kind]
            refused += {f"{bad.topic.removeprefix(self.prefix)}[{bad.partition}]" for bad in self.slot.refused}
        else:
            outcome = ["aborted"]
        await self.slot.abort()
        if self.producer != "wire":  # rule R8
            await self.slot.reopen([])
        return [*outcome, *refused]

    def read(self) -> dict[str, list[Any]]:
        """Read what is committed, by partition, and the offsets of the group."""
        admin = TopicAdmin(ClientSettings(self.address))
        found: dict[str, list[Any]] = {"offsets": sorted(admin.committed(self.group, self.prefix + "in").items())}
        settings: dict[str, Any] = {"bootstrap.servers": self.address, "group.id": self.group}
        consumer = Consumer({**settings, "enable.auto.commit": False, "enable.partition.eof": True})
        names = [(topic, number) for topic, count in PARTITIONS.items() for number in range(count)]
        found |= {f"{topic}[{number}]": [] for topic, number in names}
        consumer.assign([TopicPartition(self.prefix + topic, number, 0) for topic, number in names])
        ends = 0
        while ends < len(names):
            message = consumer.poll(30)
            assert message is not None, "the ends of all partitions are reached"
            if (error := message.error()) is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                ends += 1
                continue
            topic = (message.topic() or "").removeprefix(self.prefix)
            kind, at = message.timestamp()
            now = time.time() * 1000
            stamp = "now" if topic == "stamped" or now - 60_000 < at <= now else at
            row = (message.key(), message.value(), message.headers() or [], kind, stamp)
            found[f"{topic}[{message.partition()}]"].append(row)
        consumer.close()
        return found


def differences(one: Any, other: Any) -> list[str]:
    """List the positions at which two lists differ; short, because records may be large."""
    wrong = [f"{len(one)} and {len(other)}"] if len(one) != len(other) else []
    pairs = enumerate(zip(one, other, strict=False))
    return [*wrong, *(f"{number}: {str(a)[:300]} and {str(b)[:300]}" for number, (a, b) in pairs if a != b)]


@pytest.mark.parametrize("brokers", [1, nightly(3)])
async def test_both_producers_write_the_same(
    kafka_broker: BrokerAddress, topic_prefix: str, brokers: int, seed: int
) -> None:
    if brokers == 1:
        await compare(kafka_broker.bootstrap_servers, topic_prefix, random.Random(seed), 1)
    else:
        with KafkaCluster() as cluster:
            await compare(cluster.bootstrap_servers, topic_prefix, random.Random(seed), 3)


async def compare(address: str, prefix: str, rng: random.Random, copies: int) -> None:
    codec = rng.choice(("none", "gzip", "snappy", "lz4", "zstd"))
    planned, admin = history(rng), TopicAdmin(ClientSettings(address))
    runs = []
    for producer in PRODUCERS:
        played = Played(address, prefix, producer, codec)
        for topic, count in PARTITIONS.items():
            spec = {"partitions": count, "replication_factor": copies, "configs": CONFIGS.get(topic, {})}
            admin.create([TopicSpec(name=played.prefix + topic, **spec)])
        admin.committed(played.group, played.prefix + "in")  # so that the group has a coordinator
        runs.append((await played.run(planned), await asyncio.to_thread(played.read)))
    (outcomes, read), (other_outcomes, other_read) = runs
    assert not differences(outcomes, other_outcomes), codec
    assert read.keys() == other_read.keys()
    for where in read:
        assert not differences(read[where], other_read[where]), (where, codec)
    assert {"plain[0]", "compacted[1]", "stamped[0]", "small[0]", "offsets"} <= {where for where in read if read[where]}
