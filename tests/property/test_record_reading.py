"""Random logs, written by the producer's encoder, read by our own code: the same records; spoilt bytes are noticed."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import LogDamaged, TopicError
from streams.kafka.reading import record_batches, record_decoder
from streams.kafka.reading.record_batches import FetchedBatches
from streams.records import IncomingRecord
from tests.property.leaves_kit import needs_compiled, outcome, plain
from tests.property.spoilt_bodies import spoilt_bodies
from tests.unit.fetch_kit import HEAD_BYTES, Log, Row, encoded, framed, random_log

PLAIN = plain(record_decoder)
LOGS, FLIPS = 120, 600


def seed() -> int:
    found = int(os.environ.get("SEED", random.randrange(1 << 32)))
    print(f"SEED={found}")
    return found


def read(data: bytes, position: int, aborted: Any, most: int = 1 << 30) -> tuple[list[IncomingRecord], FetchedBatches]:
    found: list[IncomingRecord] = []
    batches = FetchedBatches("t", 3, position, data, aborted)
    while not batches.is_done:
        taken = batches.take(most)
        assert len(taken) <= most
        found += taken
        assert all(record.offset < batches.position for record in found)
    return found, batches


def rows_of(records: list[IncomingRecord]) -> list[tuple[int, Row]]:
    return [
        (one.offset, Row(one.key, one.value, list(one.headers or ()), one.timestamp_ms))  # type: ignore[arg-type]
        for one in records
    ]


def listed(expected: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
    return [(offset, row._replace(headers=list(row.headers))) for offset, row in expected]


@pytest.mark.parametrize("decoder", [record_decoder, PLAIN], ids=["as it runs", "plain"])
def test_random_logs_are_read_as_they_were_written(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_batches, "record_decoder", decoder)
    rng = random.Random(seed())
    for _ in range(LOGS):
        log = random_log(rng, rng.choice([0, 1, 12, 40]))
        start = rng.randint(log.start, log.end)
        most, position, found = rng.choice([1, 3, 1000]), start, list[IncomingRecord]()
        while position < log.stable:
            data, aborted = log.fetch(position, rng.choice([1, 300, 5000, 1 << 20]))
            records, batches = read(data, position, aborted, most)
            found += records
            if batches.position == position:  # what is left is a hole
                break
            position = batches.position
        assert rows_of(found) == listed(log.expected(start))
        assert {record.where.partition("@")[0] for record in found} <= {"t[3]"}


def test_uncommitted_records_are_read_where_they_are_wanted() -> None:
    log = Log()
    log.append([Row(value=b"a")], producer=1)
    log.append([Row(value=b"b")])
    log.mark(1, commit=False)
    log.append([Row(value=b"c")], producer=1)
    data, _ = log.fetch(0, 1 << 20, committed_only=False)
    found, batches = read(data, 0, None)
    assert [record.value for record in found] == [b"a", b"b", b"c"]
    assert batches.position == log.end


def test_no_flipped_bit_is_silent() -> None:
    """Of those that can be noticed: the offset and the leader's epoch of a batch are not in its checksum."""
    rng, flips = random.Random(seed()), 0
    while flips < FLIPS:
        log = random_log(rng, 12)
        data, aborted = log.fetch(log.start, 1 << 30)
        places, heads = places_to_spoil(log, data)
        for _ in range(20 if places else 0):
            place = rng.choice(heads if rng.random() < 0.3 else places)  # heads are short beside the records
            spoilt = bytearray(data)
            spoilt[place] ^= 1 << rng.randrange(8)
            batches = FetchedBatches("t", 3, log.start, bytes(spoilt), aborted)
            found, failure = read_until_damage(batches)
            # What was given is what was written, up to the position: no less, and no more.
            assert rows_of(found) == listed(log.expected(log.start, min(batches.position, log.stable))), place
            assert failure is None or "t[3]@" in str(failure)
            assert failure is not None or batches.position < last_offset(log), f"nothing noticed of {place}"
            flips += 1
    print(f"{flips} flips")


def places_to_spoil(log: Log, data: bytes) -> tuple[list[int], list[int]]:
    """All places that are covered; and those of them that are in heads."""
    places, heads, at = list[int](), list[int](), 0
    for batch in log.batches:
        if at < len(data):
            heads += [*range(at + 8, at + 12), *range(at + 16, at + HEAD_BYTES)]
            places += [*range(at + 8, at + 12), *range(at + 16, at + len(batch.content))]
            at += len(batch.content)
    assert at == len(data)
    return places, heads


def last_offset(log: Log) -> int:
    """The position behind all batches that are read."""
    return max((batch.following for batch in log.batches if batch.base < log.stable), default=log.start)


def read_until_damage(batches: FetchedBatches) -> tuple[list[IncomingRecord], TopicError | None]:
    found: list[IncomingRecord] = []
    try:
        while not batches.is_done:
            found += batches.take(1000)
    except TopicError as error:
        return found, error
    return found, None


@needs_compiled
@given(spoilt_bodies(), st.data())
def test_compiled_and_plain_code_make_the_same_of_any_bytes(spoilt: bytes, data: st.DataObject) -> None:
    count, position = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 12))
    append_ms = data.draw(st.sampled_from([-1, 0, 5]))
    start = data.draw(st.integers(0, 2))

    def decoded(module: Any) -> Any:
        records: list[IncomingRecord] = []
        given_arguments = (spoilt, start, len(spoilt), count, "t", 3, 10, 1000, append_ms, position)
        return outcome(module.decode_records, *given_arguments, bytes, records), records

    assert decoded(record_decoder) == decoded(PLAIN)


@needs_compiled
@given(st.binary(max_size=12), st.integers(0, 12))
def test_numbers_are_read_alike(data: bytes, stop: int) -> None:
    stop = min(stop, len(data))
    assert record_decoder.varint(data, 0, stop) == PLAIN.varint(data, 0, stop)


@pytest.mark.parametrize(
    "number", [0, 1, -1, 63, -64, 64, (1 << 31) - 1, -(1 << 31), (1 << 62), (1 << 63) - 1, -(1 << 63)]
)
def test_numbers_of_all_lengths(number: int) -> None:
    zigzag, raw = (number << 1) ^ (number >> 63), bytearray()
    zigzag &= (1 << 64) - 1
    while zigzag > 127:
        raw.append(zigzag & 127 | 128)
        zigzag >>= 7
    raw.append(zigzag)
    for module in (record_decoder, PLAIN):
        assert module.varint(bytes(raw), 0, len(raw)) == (number, len(raw))
        assert module.varint(bytes(raw), 0, len(raw) - 1)[1] > len(raw) - 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (framed(5, b"", 0, following=6, attributes=5) + b"", ""),
        (framed(5, b"x", 1, attributes=5), "codec has the number 5"),
        (framed(5, b"x", 1, attributes=4), "zstd cannot be decompressed"),
        (framed(5, b"\x81", 1, attributes=2), "snappy cannot be decompressed"),
        (framed(5, b"\x82SNAPPY\0" + bytes(8) + b"\0\0\0\x7fx", 1, attributes=2), "snappy cannot be decompressed"),
        (framed(5, b"x", 1, attributes=1), "gzip cannot be decompressed"),
        (framed(5, b"x", 1), "goes beyond its batch"),
        (framed(5, encoded([Row()])[0], 2), "goes beyond its batch"),
        (framed(5, encoded([Row()])[0], 2, following=6), "its head has 2 records"),
        (framed(5, encoded([Row(), Row()])[0], 1), "bytes follow the last of 1 records"),
        (framed(5, b"", 0, magic=0), "format 0"),
        (framed(5, b"", 0, magic=1), "format 1"),
        (framed(5, b"", 0, magic=3), "format is 3"),
        (framed(4, encoded([Row()])[0], 1), "stands where offset 5 is to follow"),
        (framed(9, encoded([Row()])[0], 1) + framed(9, encoded([Row()])[0], 1), "stands where offset 10"),
        (framed(5, encoded([Row()])[0], 1)[:8] + b"\0\0\0\x05" + bytes(60), "head makes no sense|format 0"),
        (framed(5, encoded([Row()])[0], 1)[:-1] + b"\7", "checksum is wrong"),
        (framed(5, encoded([Row()])[0], 1, following=4), "head makes no sense"),
    ],
)
def test_bytes_that_are_no_records_are_refused_by_name(content: bytes, words: str) -> None:
    batches = FetchedBatches("t", 3, 5, content, ())
    if not words:
        assert batches.take(10) == []
        assert batches.is_done
        return
    _, failure = read_until_damage(batches)
    assert re.search(words, str(failure))
    assert "t[3]@" in str(failure)
    assert isinstance(failure, LogDamaged) == ("is not read; copy" not in str(failure))


def test_a_batch_that_is_cut_off_is_fetched_again() -> None:
    content = framed(5, encoded([Row()])[0], 1)
    for size in range(1, len(content)):
        batches = FetchedBatches("t", 3, 5, content[:size], ())
        assert batches.is_cut
        assert batches.is_done
        whole = FetchedBatches("t", 3, 5, content + content[:size], ())
        assert not whole.is_cut or size >= HEAD_BYTES


def test_a_control_batch_alone_moves_the_position() -> None:
    log = Log(5)
    log.mark(9, commit=False)
    batches = FetchedBatches("t", 3, 5, log.batches[0].content, ())
    assert batches.take(10) == []
    assert (batches.is_done, batches.position) == (True, 6)
