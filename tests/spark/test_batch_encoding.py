"""Rows as Kafka's record batches, read by another decoder (kafka-python's). No broker."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streams.errors import ConfigError, RecordRefused
from streams.kafka.writing.made_batch import MadeBatch
from streams.sak.murmur2 import murmur2, partition_of
from streams.spark.reading import record_batches
from streams.spark.replaying import replay_task
from streams.spark.writing import batch_encoding
from streams.spark.writing.batch_encoding import BatchEncoder, compression, flat
from streams.spark.writing.placing import TopicShape, key_hashes
from tests.spark.log_kit import seed

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of kafka-python's own
    from kafka.record import MemoryRecords

pytestmark = pytest.mark.spark

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SHAPES = {"t": TopicShape(3, 1_048_588), "a": TopicShape(1, None), "b": TopicShape(7, 12_000)}
PLAIN = {"compression.type": "none"}


def decoded(batch: MadeBatch) -> list[Any]:
    """The records, as they are when the driver has put a producer into the head."""
    records = MemoryRecords(b"".join(batch.stamped(7, 3, 11)))
    (read,) = list(iter(records.next_batch, None))
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (7, 3, 11)
    assert read.is_transactional
    assert read.validate_crc()
    (unstamped,) = list(iter(MemoryRecords(batch.head + batch.body).next_batch, None))
    assert unstamped.validate_crc()
    found = list(read)
    assert read.last_offset_delta == len(found) - 1 == batch.records - 1
    assert [record.offset for record in found] == list(range(len(found)))
    assert read.max_timestamp == max(record.timestamp for record in found)
    return found


def encoded(batches: list[Any], topic: str | None, kafka: dict[str, str] | None = None) -> list[MadeBatch]:
    encoder = BatchEncoder(topic, PLAIN if kafka is None else kafka, "test", lambda name: SHAPES[name])
    made = list(encoder.encode(batches))
    assert encoder.rows == sum(batch.num_rows for batch in batches) == sum(batch.records for batch in made)
    return made


def expected(row: dict[str, Any]) -> tuple[Any, ...]:
    """Key, value and headers of a record, as plainly as can be."""
    ours: list[tuple[str, bytes | None]] = []
    if row.get("type") is not None:
        ours.append(("__grt__", row["type"].encode()))
        if row.get("version") not in (None, 1):
            ours.append(("__grv__", str(row["version"]).encode()))
    own = [(pair["key"], pair["value"]) for pair in row.get("headers") or ()]
    replaced = ["__grt__"] if ours else []
    replaced += ["__grv__"] if ours and row.get("version") is not None else []
    kept = [pair for pair in own if pair[0] not in replaced]
    return row.get("key"), row["value"], tuple(ours + kept)


COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "topic": (pa.string(), ["a", "b"]),
    "key": (pa.binary(), [None, b"", b"k", b"l", b"12", b"123", b"1234", b"a key of two dozen bytes", b"k" * 700]),
    "value": (pa.binary(), [None, b"", b"v", b"v" * 63, b"v" * 64, b"v" * 8200]),
    "type": (pa.string(), [None, "T", "U"]),
    "version": (pa.int32(), [None, 0, 1, 2, 30]),
    "headers": (
        HEADERS,
        [
            None,
            [],
            [{"key": "x", "value": b"1"}],
            [{"key": "x", "value": None}, {"key": "x", "value": b"2"}, {"key": "__grt__", "value": b"old"}],
            [{"key": "__grv__", "value": b"9"}],
        ],
    ),
    "timestamp": (pa.int64(), [None, 1000, 1_700_000_000_123_456, 1_700_000_000_200_000, 253_370_764_800_000_000]),
}


TYPES: dict[str, Any] = {name: kind for name, (kind, _) in COLUMNS.items()} | {"partition": pa.int32()}


def any_table(rng: random.Random) -> tuple[str | None, list[dict[str, Any]], Any]:
    """A topic for all rows or none, rows, and the same as an Arrow batch."""
    names = ["value", *(name for name in COLUMNS if name != "value" and rng.random() < 0.6)]
    topic = None if "topic" in names and rng.random() < 0.5 else rng.choice(["t", "a", "b"])
    # Often only a few different values, so that whole columns are alike.
    choices = {name: rng.sample(COLUMNS[name][1], rng.randint(1, len(COLUMNS[name][1]))) for name in names}
    names.append("partition")
    choices["partition"] = [None, 0]
    rows = [{name: rng.choice(choices[name]) for name in names} for _ in range(rng.choice([0, 1, 2, 5, 40]))]
    for row in rows:  # rows without a key go anywhere: a test of their own
        row["partition"] = 0 if row.get("key") is None else row["partition"]
    batch = pa.record_batch([pa.array([row[name] for row in rows], TYPES[name]) for name in names], names=names)
    if "timestamp" in names:
        position = names.index("timestamp")
        batch = batch.set_column(position, "timestamp", batch.column(position).cast(pa.timestamp("us", "UTC")))
    return topic, rows, batch


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_any_mixture_of_columns(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record once, in its order within its partition, and in the partition of its key or its own."""
    rng = random.Random(seed())
    for _ in range(150):
        topic, rows, table = any_table(rng)
        size = rng.choice([1, 200, 1_000_000])
        monkeypatch.setattr(batch_encoding, "GATHERED_BYTES", rng.choice([0, 1_000, 16 << 20]))
        cut = sorted(rng.randint(0, len(rows)) for _ in range(2))
        parts = [table.slice(0, cut[0]), table.slice(cut[0], cut[1] - cut[0]), table.slice(cut[1])]
        before = int(time.time() * 1000)
        kafka = {"compression.type": codec, "batch.size": str(size)}
        made = encoded(parts, topic, kafka)
        found: dict[tuple[str, int], list[Any]] = {}
        for batch in made:
            assert batch.partitions == SHAPES[batch.topic].partitions
            assert batch.records == 1 or len(batch.body) + 61 <= min(size, SHAPES[batch.topic].batch_bytes or size)
            found.setdefault((batch.topic, batch.partition), []).extend(decoded(batch))
        wanted: dict[tuple[str, int], list[Any]] = {}
        for row in rows:
            wanted.setdefault(place_of(row, topic), []).append(expected(row))
        assert {
            place: [(record.key, record.value, tuple(record.headers)) for record in records]
            for place, records in found.items()
        } == wanted
        times: dict[tuple[str, int], list[int | None]] = {}
        for row in rows:
            stamp = row.get("timestamp")
            times.setdefault(place_of(row, topic), []).append(None if stamp is None else stamp // 1000)
        for place, records in found.items():
            for record, stamp in zip(records, times[place], strict=True):
                assert record.timestamp >= before if stamp is None else record.timestamp == stamp


def place_of(row: dict[str, Any], topic: str | None) -> tuple[str, int]:
    name, given = topic or row["topic"], row.get("partition")
    return name, partition_of(row["key"], SHAPES[name].partitions) if given is None else given


def test_rows_without_a_key_go_to_all_partitions_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_encoding, "GATHERED_BYTES", 1_000)
    values = [b"%d" % number for number in range(12_000)]
    for columns in ({}, {"key": pa.nulls(500, pa.binary())}, {"partition": pa.nulls(500, pa.int32())}):
        tables = [pa.record_batch({"value": values[at : at + 500], **columns}) for at in range(0, 12_000, 500)]
        made = encoded(tables, "t")
        places = {record.value: batch.partition for batch in made for record in decoded(batch)}
        assert Counter(places.values()) == {0: 4000, 1: 4000, 2: 4000}
        assert sum(places[one] != places[next_one] for one, next_one in pairwise(values)) == 12, "runs of 1,000"
    begins = {encoded([pa.record_batch({"value": [b"x"]})], "t")[0].partition for _ in range(100)}
    assert begins == {0, 1, 2}, "tasks begin anywhere"


def test_the_batches_of_a_partition_are_sent_in_rounds() -> None:
    """One of each partition after the other, because a request takes one of each."""
    table = pa.record_batch({"value": [b"x" * 100] * 90, "partition": [0, 1, 2] * 30})
    made = encoded([table], "t", {**PLAIN, "batch.size": "1200"})
    assert [batch.partition for batch in made] == [0, 1, 2] * (len(made) // 3)
    assert len(made) > 6


def test_keys_are_placed_as_java_places_them() -> None:
    rng = random.Random(seed())
    keys = [rng.randbytes(rng.choice([*range(14), 100, 511, 512, 513, 2000])) for _ in range(2000)]
    column = pa.array([b"before", *keys], pa.large_binary()).slice(1)
    starts, data = flat(column)
    assert key_hashes(starts[:-1], np.diff(starts), data).tolist() == [murmur2(key) for key in keys]


def test_strings_are_taken_as_their_bytes() -> None:
    (batch,) = encoded([pa.record_batch({"key": ["ä"], "value": ["ö"]})], "a")
    assert [(record.key, record.value) for record in decoded(batch)] == [("ä".encode(), "ö".encode())]


def test_a_codec_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compression\.type must be none, gzip, snappy, lz4 or zstd, not 'brotli'"):
        compression({"compression.type": "brotli"})


def test_a_row_that_is_too_large_is_named_among_many() -> None:
    values = [b"v"] * 5000
    table = pa.record_batch({"key": [b"%d" % number for number in range(5000)], "value": values})
    table = table.set_column(1, "value", pa.array([*values[:4321], b"x" * 1_000_000, *values[4322:]]))
    with pytest.raises(RecordRefused, match=r"t\[\d\], key b'4321': the record has 1000040 bytes, and kafka\.message"):
        encoded([table], "t")


@pytest.mark.parametrize("version", [b"x", b"0", b"2147483648", None], ids=str)
def test_what_is_read_is_written_as_it_is_with_a_version_that_makes_no_sense(version: bytes | None) -> None:
    """Read back it must not have become version 1."""
    headers: list[tuple[str, bytes | None]] = [("__grt__", b"T"), ("__grv__", version)]
    _, number = record_batches._type_and_version(tuple(headers))
    pairs = [{"key": key, "value": value} for key, value in headers]
    row = {"value": [b"v"], "type": ["T"], "version": pa.array([number], pa.int32())}
    (batch,) = encoded([pa.record_batch({**row, "headers": pa.array([pairs], HEADERS)})], "t")
    assert decoded(batch)[0].headers == headers


def test_rows_without_headers_are_replayed_with_their_version() -> None:
    assert replay_task._with_type(None, "T", 2) == [("__grt__", b"T"), ("__grv__", b"2")]
    assert replay_task._with_type(None, "T", 1) == [("__grt__", b"T")]
    assert replay_task._with_type(None, "T", 0) == [("__grt__", b"T"), ("__grv__", b"0")], "which is refused"


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("timestamp", pa.array([None, 999], pa.timestamp("us", "UTC")), "column timestamp is 1970"),
        ("timestamp", pa.array([5000, -1], pa.timestamp("us", "UTC")), "column timestamp is 1970"),
        ("headers", pa.array([[None], []], HEADERS), "a header that is null, or whose key is"),
        ("headers", pa.array([[None], None], HEADERS), "a header that is null, or whose key is"),
        ("headers", pa.array([[{"key": None, "value": b"x"}], []], HEADERS), "a header that is null, or whose key is"),
        ("partition", pa.array([0, 3], pa.int32()), "names partition 3 of 't', which has 3"),
        ("partition", pa.array([None, -1], pa.int32()), "names partition -1 of 't'"),
    ],
)
def test_rows_that_are_no_records(column: str, values: Any, problem: str) -> None:
    with pytest.raises(RecordRefused, match=problem):
        encoded([pa.record_batch({"value": pa.array([b"a", b"b"]), column: values})], "t")
