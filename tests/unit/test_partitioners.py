"""Partitions of keys by other functions than murmur2: of outputs, of producers, and asked for."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from streams import SKIP, EventProducer, EventSource, partition_of
from streams.errors import ConfigError
from streams.kafka.settings import ClientSettings
from streams.testing import TestDriver
from tests.unit.handlers_kit import OUT, config
from tests.vocabulary import TOTALS, Added, register

OUTPUTS = 7
KEYS = [f"account-{number}" for number in range(50)]


def by_length(key: bytes, partitions: int) -> int:
    return len(key) % partitions


@pytest.mark.parametrize(
    ("partitioner", "key", "partition"),
    [
        ("murmur2", b"21", 0x7FFFFFFF & -973932308 & 0xFFFFFFFF),  # a value of Kafka's own test of murmur2
        ("crc32", b"123456789", 0xCBF43926),  # the check value of CRC-32
        ("fnv1a", b"foobar", 0x100000000 - 0xBF9CF968),  # that of FNV-1a, as sarama's signed number
        (by_length, "käse", 5),
    ],
)
def test_known_places(partitioner: Any, key: str | bytes, partition: int) -> None:
    assert partition_of(key, 1 << 32, partitioner) == partition
    assert partition_of(key, 10, partitioner) == partition % 10


@pytest.mark.parametrize(
    ("count", "partitioner", "said"),
    [
        (0, "murmur2", "num_partitions is 0"),
        (True, "murmur2", "num_partitions is True"),
        (3, "md5", "partitioner is 'md5'; it must be one of murmur2, crc32, fnv1a, or a function"),
        (3, lambda key, partitions: partitions, "returned 3; partitions are 0 to 2"),
        (3, lambda key, partitions: True, "returned True"),
    ],
)
def test_what_is_no_partition(count: Any, partitioner: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        partition_of("k", count, partitioner)


def forwarding(partitioner: Any) -> EventSource[Any]:
    source = EventSource(config(2, error_policy=SKIP), TOTALS)
    source.output(OUT, num_partitions=OUTPUTS, partitioner=partitioner)
    source.output("plain", num_partitions=OUTPUTS)

    def forward(ctx: Any, event: Added) -> None:
        ctx.forward(OUT, event, key=event.name)
        ctx.forward("plain", event, key=event.name)
        ctx.forward(OUT, event, key=event.name, partition=2)

    register(source, forward)
    return source


@pytest.mark.parametrize("partitioner", ["murmur2", "crc32", "fnv1a", by_length])
def test_outputs_are_placed_as_declared(partitioner: Any) -> None:
    with TestDriver(forwarding(partitioner)) as driver:
        for name in KEYS:
            driver.send(Added(name, 1, ""), key=name, wait=False)
        driver.settle()
        placed = [(record.key, record.partition) for record in driver.outputs(OUT)]
        due = [(key.encode(), partition_of(key, OUTPUTS, partitioner)) for key in KEYS]
        assert sorted(placed) == sorted([*due, *((key.encode(), 2) for key in KEYS)])
        for record in driver.outputs("plain"):
            assert record.partition == partition_of(record.key or b"", OUTPUTS)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda: 1 // 0, "its partitioner choosy has failed: ZeroDivisionError"),
        (
            lambda: (_ for _ in ()).throw(asyncio.CancelledError),
            "its partitioner choosy has failed: CancelledError",
        ),
        (lambda: OUTPUTS, f"its partitioner choosy returned {OUTPUTS}: partitions are 0 to {OUTPUTS - 1}"),
        (lambda: -1, "returned -1"),
        (lambda: "0", "returned '0'"),
    ],
    ids=["raises", "cancels", "beyond", "negative", "text"],
)
def test_an_event_that_cannot_be_placed_meets_its_policy(
    found: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def choosy(key: bytes, partitions: int) -> int:
        return found() if key == b"bad" else 0

    with TestDriver(forwarding(choosy)) as driver:
        for name in ("a", "bad", "b"):
            driver.send(Added(name, 1, ""), key=name)
        assert [record.key for record in driver.outputs(OUT)] == [b"a", b"a", b"b", b"b"]
        assert {record.key for record in driver.outputs("plain")} == {b"a", b"b"}
    assert said in caplog.text


def test_producers_have_one_by_name() -> None:
    names = {"murmur2": "murmur2_random", "crc32": "consistent_random", "fnv1a": "fnv1a_random"}
    for ours, theirs in names.items():
        settings = ClientSettings("127.0.0.1:1", partitioner=ours)  # type: ignore[arg-type]  # a str of a table
        assert settings.plain_producer(1)["partitioner"] == theirs
        EventProducer("127.0.0.1:1", partitioner=ours)  # type: ignore[arg-type]
    wrong: Any = by_length
    with pytest.raises(ConfigError, match=r"it must be one of murmur2, crc32, fnv1a. What another function chooses"):
        EventProducer("127.0.0.1:1", partitioner=wrong)


def test_crc32_is_what_librdkafka_takes() -> None:
    assert [partition_of(key, 10, "crc32") for key in KEYS] == [zlib.crc32(key.encode()) % 10 for key in KEYS]


def without_keys(null_keys: Any) -> EventSource[Any]:
    source = EventSource(config(2, error_policy=SKIP), TOTALS)
    source.output(OUT, num_partitions=3, null_keys=null_keys)

    def forward(ctx: Any, event: Added) -> None:
        for _ in range(6):
            ctx.forward(OUT, event)

    register(source, forward)
    return source


@pytest.mark.parametrize(("null_keys", "partitions"), [("sticky", 1), ("spread", 3), ("cause", 1)])
def test_records_without_a_key_are_placed_as_declared(null_keys: str, partitions: int) -> None:
    with TestDriver(without_keys(null_keys)) as driver:
        for at, partition in enumerate((0, 1, 1, 0)):
            driver.send(Added(f"n{at}", 1, ""), key="k", partition=partition)
            placed = [record.partition for record in driver.new_outputs(OUT)]
            assert len(placed) == 6
            assert len(set(placed)) == partitions
            if null_keys == "cause":
                assert set(placed) == {partition}
            if null_keys == "spread":
                assert {placed.count(number) for number in range(3)} == {2}


def test_what_is_no_way_to_place_records_without_a_key() -> None:
    with pytest.raises(
        ConfigError, match=r"null_keys of source\.output\('out'\) is 'random'; it must be one of sticky, spread"
    ):
        EventSource(config(1), TOTALS).output("out", null_keys="random")  # type: ignore[arg-type]


def test_a_record_without_a_key_that_is_refused_is_found_again() -> None:
    """Its place is not that of its partitioner: it is remembered."""
    from streams.kafka.wire.placement import Placement
    from streams.kafka.writing.record_batch import EncodedRecords
    from streams.records import Output

    encoded = EncodedRecords({"t": Placement("t", 3, 1_000_000, "spread")}, 1_000_000)
    outputs = [Output("t", b"%d" % number, None, None, -1, 0, 0, number) for number in range(9)]
    assert encoded.add(outputs, 0, 1_700_000_000_000) == 9
    found = [encoded.output_at("t", partition, index) for index in range(3) for partition in (1, 2, 0)]
    assert [output and output.value for output in found] == [output.value for output in outputs]
