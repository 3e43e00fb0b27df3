"""The source on one cluster; group, state and outputs on another (protocol, section 9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from streams import EventSource
from streams.broker import KafkaBroker
from streams.errors import OffsetError, TopicError
from streams.testing.fixtures import BrokerAddress
from tests.broker.engine_kit import Lab, Running, start_failure
from tests.vocabulary import Totals

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

PARTITIONS = 2


class Two:
    """Cluster A with the source topic, cluster B with everything else."""

    def __init__(self, source_servers: str, servers: str, prefix: str) -> None:
        self.far = Lab(source_servers, prefix, PARTITIONS)
        self.near = Lab(servers, prefix, PARTITIONS)

    def source(self, name: str, **settings: Any) -> EventSource[Totals]:
        settings = {"source_bootstrap_servers": self.far.bootstrap, **settings}
        return self.near.telling(instance_id=name, **settings)

    async def check(self, rounds: int) -> None:
        await self.near.until_outputs(rounds * PARTITIONS)
        assert sorted(await self.near.totals()) == sorted(
            (f"k{partition}", amount) for partition in range(PARTITIONS) for amount in range(1, rounds + 1)
        )


@pytest.fixture
def two(kafka_broker: BrokerAddress, far_broker: KafkaBroker, topic_prefix: str) -> Two:
    return Two(far_broker.bootstrap_servers, kafka_broker.bootstrap_servers, topic_prefix)


async def feed(two: Two, rounds: int) -> None:
    for _ in range(rounds):
        for partition in range(PARTITIONS):
            await two.far.add(f"k{partition}", partition=partition)


@pytest.mark.asyncio
async def test_source_elsewhere_is_exact_over_restarts_and_moves(two: Two) -> None:
    await two.near.create(two.near.output)
    first = two.source("first", num_standbys=1)
    async with Running(first, active=PARTITIONS) as run:
        await feed(two, 5)
        await run.until_committed(5 * PARTITIONS)
        second = two.source("second", num_standbys=1)
        async with Running(second, active=1):
            await feed(two, 5)
            await two.check(10)
    async with Running(two.source("third"), active=PARTITIONS):
        await feed(two, 5)
        await two.check(15)
    stand_in = first.config.offsets_topic
    near, far = two.near.admin, two.far.admin
    committed = await asyncio.to_thread(near.committed, two.near.group, stand_in)
    assert committed == {0: 15, 1: 15}, "under the stand-in's name, on the cluster of the group"
    assert not await asyncio.to_thread(far.committed, two.near.group, two.near.topic)
    there = await asyncio.to_thread(far.describe, [first.config.topic, first.config.changelog, stand_in])
    here = await asyncio.to_thread(near.describe, [first.config.topic, first.config.changelog, stand_in])
    assert [name for name, found in there.items() if found] == [first.config.topic]
    assert [name for name, found in here.items() if found] == [first.config.changelog, stand_in]
    assert not await two.near.records(stand_in), "nothing is ever written to it"
    await feed(two, 3)
    await two.far.delete_records(two.near.topic, {0: 17})
    error = await start_failure(two.source("fourth"))
    assert isinstance(error, OffsetError)
    assert f"{two.near.topic}[0]" in str(error)


@pytest.mark.nightly
@pytest.mark.asyncio
async def test_it_begins_where_it_is_told_to(two: Two, kes: Callable[..., tuple[int, Any, str]]) -> None:
    await two.near.create(two.near.output)
    await two.far.create(two.far.topic)
    await feed(two, 5)
    source = two.source("first")
    words = ("offsets", "start", "--at", "0@3", "--at", "earliest", "--yes")
    for is_first in (True, False):
        code, answer, err = await asyncio.to_thread(kes, source, *words)
        assert (code, answer and answer["written"]) == (0, is_first), err
    async with Running(source) as run:
        await run.until_handled(5, 5)
    assert sorted(name for name, _ in await two.near.totals()) == ["k0"] * 2 + ["k1"] * 5


@pytest.mark.asyncio
async def test_a_source_topic_that_differs_is_named(two: Two) -> None:
    await two.far.create(two.near.topic, partitions=PARTITIONS + 1)
    error = await start_failure(two.source("first"))
    assert isinstance(error, TopicError)
    assert two.near.topic in str(error)


def test_tools_ask_the_right_cluster(two: Two, kes: Callable[..., tuple[int, Any, str]]) -> None:
    source = EventSource(two.near.config(source_bootstrap_servers=two.far.bootstrap))
    config = source.config

    def answer(*words: str) -> Any:
        code, found, err = kes(source, *words)
        assert code == 0, err
        return found

    created = {topic["name"]: topic["state"] for topic in answer("topics", "apply")["topics"]}
    assert created == dict.fromkeys(
        [config.topic, config.changelog, config.dead_letters, config.offsets_topic], "created"
    )
    assert {topic["state"] for topic in answer("topics", "plan")["topics"]} == {"as wanted"}
    consumer = Consumer({"bootstrap.servers": config.bootstrap_servers, "group.id": config.group_id})
    consumer.commit(offsets=[TopicPartition(config.offsets_topic, 0, 7)], asynchronous=False)
    consumer.close()
    found = answer("lag")["partitions"]
    assert [(entry["committed"], entry["end"]) for entry in found] == [(7, 0), (None, 0)]
    deleted = asyncio.run(source.delete_source())
    assert set(deleted) == created.keys() - {config.topic}
    assert two.far.admin.describe([config.topic])[config.topic] is not None, "the other cluster is left alone"
