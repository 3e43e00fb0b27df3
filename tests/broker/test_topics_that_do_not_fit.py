"""Further topics of a source that are missing, of another shape, or written by another partitioner, on a real broker:
refused at the start, with what to do."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.codecs import int_codec
from streams.errors import TopicError
from streams.testing.faults import FaultPlan
from streams.testing.fixtures import BrokerAddress
from tests.broker import merged_program as program
from tests.broker.bench_kit import Bench

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(180)]


@pytest.fixture
def bench(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Bench]:
    with Bench(kafka_broker.bootstrap_servers, f"{topic_prefix}merged", tmp_path) as made:
        yield made


def refused(bench: Bench, said: str) -> None:
    with pytest.raises(TopicError, match=said):
        program.build(bench.bootstrap, bench.group, "one", FaultPlan()).run()


@pytest.mark.parametrize(
    ("name", "partitions", "policy", "said"),
    [
        ("payments", 3, "delete", "payments has 3 partitions.*same number of partitions"),
        ("payments", 0, "", r"payments does not exist \(an input is never made at the start"),
        ("customers", 9, "delete", "customers has 9 partitions.*cleanup.policy=delete.*topic is compacted"),
        ("rates", 2, "delete", "-rates has cleanup.policy=delete.*the topic of a lookup is compacted"),
        ("rates", 0, "", r"-rates does not exist \(a lookup is never made at the start: kes topics"),
    ],
)
def test_a_topic_that_does_not_fit(bench: Bench, name: str, partitions: int, policy: str, said: str) -> None:
    topics = program.topics_of(bench.group)
    for other, configs in program.TOPICS.items():
        if other != name:
            bench.make(topics[other], partitions=program.PARTITIONS, **configs)
        elif partitions:
            bench.make(topics[name], partitions=partitions, cleanup_policy=policy)
    refused(bench, said)


def test_rows_of_librdkafkas_own_partitioner_are_named(bench: Bench) -> None:
    topics = program.topics_of(bench.group)
    for name, configs in program.TOPICS.items():
        bench.make(topics[name], partitions=program.PARTITIONS, **configs)
    for key in program.CUSTOMERS:
        bench.produce(topics["customers"], int_codec.encode(1), key, zlib.crc32(key.encode()) % program.PARTITIONS)
    bench.flush()
    refused(bench, "belongs to partition . of 2 by murmur2.*partitioner='crc32'")
