"""Batches as they lie in a log: the values of their records, and bytes that are none."""

from __future__ import annotations

import os
import random
import struct
import time

import pytest

from streams.kafka.questions.raw_log import batches, values
from streams.kafka.wire.codec import MalformedAnswer
from streams.kafka.wire.compression import compression_of
from streams.kafka.writing.record_batch import encode_headers
from streams.kafka.writing.rows import Rows

VALUES = [b"1", b"", None, bytes(300), b"x" * 70_000]


def encoded(values: list[bytes | None], codec: str = "none") -> bytes:
    rows = Rows()
    for number, value in enumerate(values):
        key = b"key" if number % 2 else None
        rows.add(1_000 + 7 * number, key, value, encode_headers([("h", b"v")] * number), 1_000_000)
    compression = compression_of({"compression.type": codec})
    return b"".join(piece for batch in rows.batches() for piece in batch.encode(9, 2, 0, compression))


def test_values_are_read_without_deletions() -> None:
    found = list(batches(encoded(VALUES[:4]) + encoded(VALUES[4:])))
    assert [(each.producer_id, each.epoch, each.is_control, each.marker) for each in found] == [(9, 2, False, None)] * 2
    assert [value for each in found for value in values(each, "t", 0)] == [each for each in VALUES if each is not None]


def test_what_is_cut_off_is_left_out() -> None:
    data = encoded([b"1"])
    for end in range(len(data)):
        assert list(batches(data + data[:end])) == list(batches(data))


def test_a_compressed_batch_is_read_and_a_damaged_one_is_refused() -> None:
    [batch] = batches(encoded([b"1"] * 9, "gzip"))
    assert values(batch, "t", 0) == [b"1"] * 9
    with pytest.raises(MalformedAnswer, match=r"t\[3\]@0: .* checksum is wrong"):
        values(batch._replace(content=batch.content[:-1] + b"x"), "t", 3)


@pytest.mark.parametrize("length", [-(2**31), -62, -12, -1, 0, 13])
def test_a_length_that_is_none_ends_the_reading(length: int) -> None:
    data = encoded([b"1"])
    with pytest.raises(MalformedAnswer):
        list(batches(data + data[:8] + struct.pack(">i", length) + data[12:]))


@pytest.mark.parametrize(("kind", "records", "marker"), [(1, 1, True), (0, 1, False), (1, 0, None)])
def test_a_marker_tells_a_commit_unless_compaction_has_emptied_it(kind: int, records: int, marker: bool | None) -> None:
    rows = Rows()
    rows.add(1_000, struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 0), encode_headers([]), 1_000_000)
    data = bytearray(b"".join(rows.batches()[0].encode(9, 2, 0, None)))
    struct.pack_into(">h", data, 21, 0x30)
    struct.pack_into(">i", data, 57, records)
    [found] = batches(bytes(data))
    assert (found.is_control, found.marker) == (True, marker)


def test_flipped_bytes_end_the_reading_or_are_batches() -> None:
    seed = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
    print(f"SEED={seed}")
    rng, data = random.Random(seed), encoded(VALUES[:4]) * 2
    for _ in range(500):
        said = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            said[rng.randrange(len(said))] = rng.randrange(256)
        try:
            found = list(batches(bytes(said)))
            assert sum(len(each.content) for each in found) <= len(said)
            assert all(len(value) <= len(said) for each in found for value in values(each, "t", 0))
        except MalformedAnswer:
            pass
