"""Ranges read from brokers that answer as a script says: the rows that were written, and how each failure is told. No
Spark, no broker."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    DecodeError,
    LogDamaged,
    OffsetError,
    StreamsError,
    TopicError,
)
from streams.kafka.reading import record_decoder
from streams.kafka.wire.connection import LostConnection
from streams.kafka.wire.topic_questions import topic_id_text
from streams.kafka.writing.rows import row, varint
from streams.records import TopicPartition
from streams.spark import kafka
from streams.spark.reading import kept, reader
from streams.spark.reading.planning import Advance
from streams.spark.reading.read_options import ReadOptions, read_options
from streams.spark.reading.reader import Range, batches, ranges
from tests.property.leaves_kit import needs_compiled, outcome, plain
from tests.property.spoilt_bodies import spoilt_bodies
from tests.unit.fetch_kit import START_MS, Log, LogBrokers, Row, Stored, encoded, framed, random_log

pytestmark = pytest.mark.spark
PLAIN = plain(record_decoder)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reader, "_BELIEVE_SECONDS", 0.2)
    monkeypatch.setattr("streams.kafka.reading.fetching.UNKNOWN_SECONDS", 0.2)
    admins = dict(kafka._ADMINS)
    yield
    kept.close_kept()
    for key in kafka._ADMINS.keys() - admins.keys():
        kafka._ADMINS.pop(key).close()


@pytest.fixture
def brokers() -> Iterator[LogBrokers]:
    log = Log()
    for count in (3, 4, 5):
        log.append([Row(value=b"%d" % offset) for offset in range(log.end, log.end + count)])
    with LogBrokers({0: log}).serving() as found:
        yield found


def options(brokers: LogBrokers, **more: str) -> ReadOptions:
    return read_options({"kafka.bootstrap.servers": brokers.bootstrap_servers, "subscribe": "t", **more})


def span(start: int, end: int, partition: int = 0, *, topic_id: int = 7) -> Range:
    return Range("t", partition, start, end, topic_id_text(UUID(int=topic_id)))


def offsets(brokers: LogBrokers, start: int, end: int, **more: str) -> list[int]:
    return [at for batch in batches(span(start, end), options(brokers, **more)) for at in batch["offset"].to_pylist()]


def fails(error: type[StreamsError], brokers: LogBrokers, start: int = 0, end: int = 12, **more: str) -> str:
    with pytest.raises(error) as caught:
        offsets(brokers, start, end, **more)
    return str(caught.value)


def expected(log: Log, start: int, end: int) -> list[dict[str, Any]]:
    return [
        {
            "offset": offset,
            "key": row.key,
            "value": row.value,
            "headers": [{"key": name, "value": value} for name, value in row.headers],
            "timestamp": row.timestamp_ms,
            "timestampType": int(row.timestamp_ms == START_MS + 5),
        }
        for offset, row in log.expected(start, end)
    ]


def test_random_logs_are_read_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All codecs, transactions and holes, in ranges of any size, each of which goes on where the one before ended."""
    found_seed = int(os.environ.get("SEED", random.randrange(1 << 32)))
    print(f"SEED={found_seed}")
    rng = random.Random(found_seed)
    for _ in range(12):
        monkeypatch.setattr(reader, "_CHUNK", rng.choice([1, 7, 5000]))
        monkeypatch.setattr(reader, "_FIRST_BYTES", ((1 << 60, rng.choice([1, 700, 1 << 20])),))
        log = random_log(rng, rng.choice([1, 10, 40]))
        for producer in [*log.open]:
            log.mark(producer, commit=rng.random() < 0.5)
        log.append([Row()])  # no hole at the end
        with LogBrokers({0: log}).serving() as brokers:
            start = rng.randint(log.start, log.end)
            while start < log.end:
                end = min(log.end, start + rng.choice([1, 5, 2000]))
                rows = [row for batch in batches(span(start, end), options(brokers)) for row in batch.to_pylist()]
                for row in rows:
                    row["timestamp"] = round(row["timestamp"].timestamp() * 1000)
                    assert (row.pop("topic"), row.pop("partition"), row.pop("version")) == ("t", 0, 1)
                    row.pop("type")
                assert rows == expected(log, start, end)
                start = end


def test_all_is_read_uncommitted_and_types_are_chosen(brokers: LogBrokers) -> None:
    log = brokers.logs[0]
    log.append([Row(headers=[("__grt__", b"A")])], producer=5)
    log.mark(5, commit=False)
    log.append([Row(headers=[("__grt__", b"B")]), Row(key=None, value=None, headers=[("__grt__", b"A")])])
    assert offsets(brokers, 10, 16) == [10, 11, 14, 15]
    assert offsets(brokers, 10, 16, isolation="read_uncommitted") == [10, 11, 12, 14, 15]
    assert offsets(brokers, 0, 16, types="A") == [15]
    (row,) = next(batches(span(0, 16), options(brokers, types="A"))).to_pylist()
    assert (row["key"], row["value"], row["type"]) == (None, None, "A")
    assert offsets(brokers, 0, 16, types="C") == []


@pytest.mark.parametrize("code", [5, 6, 9, 74, 75, 7, 56, 13, -1, 3, 100, 103])
def test_what_passes_is_tried_again(brokers: LogBrokers, code: int) -> None:
    brokers.answer("Fetch", *[lambda answer: setattr(answer.responses[0].partitions[0], "error_code", code)] * 2)
    assert offsets(brokers, 0, 12) == [*range(12)]


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (1, OffsetError, "t[0]: records from offset 0 are gone (retention, or the log was truncated)"),
        (29, TopicError, "reading t[0]: not authorised (TOPIC_AUTHORIZATION_FAILED)"),
        (2, LogDamaged, "t[0]@0: the broker cannot read it either"),
        (87, TopicError, "t[0] can not be read from 127.0.0.1:"),
    ],
)
def test_what_does_not_pass_names_the_partition(
    brokers: LogBrokers, code: int, error: type[StreamsError], words: str
) -> None:
    brokers.answer("Fetch", *[lambda answer: setattr(answer.responses[0].partitions[0], "error_code", code)] * 2)
    assert words in fails(error, brokers)


def test_rows_before_damage_are_given(brokers: LogBrokers) -> None:
    content = framed(12, encoded([Row()])[0], 1)
    brokers.logs[0].put(Stored(12, 13, -1, False, content[:-1] + b"\7"))
    reading = batches(span(0, 13), options(brokers))
    assert next(reading)["offset"].to_pylist() == [*range(12)]
    with pytest.raises(LogDamaged, match=r"t\[0\]@12: the record batch cannot be read: its checksum is wrong"):
        next(reading)


def test_headers_that_make_no_sense_are_damage_and_a_time_that_no_column_holds_is_named(brokers: LogBrokers) -> None:
    log, record = brokers.logs[0], row(0, 0, b"k", b"v", b"\6\1")
    log.append([Row(timestamp_ms=10**6 * START_MS)])
    reading = batches(span(0, 13), options(brokers))
    with pytest.raises(DecodeError, match=r"t\[0\]@12: its time is 1700000000000000000 ms since 1970, which no column"):
        next(reading)
    log.put(Stored(13, 14, -1, False, framed(13, varint(len(record)) + record, 1)))
    reading = batches(span(0, 14), options(brokers, types="A"))
    with pytest.raises(LogDamaged, match=r"t\[0\]@13: the record batch cannot be read: a header has no name"):
        next(reading)


@pytest.mark.parametrize("count", [2, 1 << 30])
def test_a_head_that_promises_more_records_than_there_are_bytes(brokers: LogBrokers, count: int) -> None:
    brokers.logs[0].put(Stored(12, 12 + count, -1, False, framed(12, b"1234567", count)))
    assert f"its head has {count} records, and it has 7 bytes" in fails(LogDamaged, brokers, 12, 12 + count)


def test_the_topic_is_the_one_that_was_planned(brokers: LogBrokers, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OffsetError, match=r"recreated .* before offsets 3 to 11 of t\[0\] were read"):
        list(batches(span(3, 12, topic_id=8), options(brokers)))
    assert list(batches(span(3, 12, topic_id=8), options(brokers, failOnDataLoss="false"))) == []
    brokers.answer("Fetch", lambda _: setattr(brokers, "topic_id", UUID(int=9)))
    brokers.logs[0].skip(5)
    assert "before offsets 12 to 16 of t[0] were read" in fails(OffsetError, brokers, 0, 17)
    assert "went on" not in caplog.text


def test_brokers_that_are_asked_by_name_are_asked_for_the_id_afterwards(brokers: LogBrokers) -> None:
    brokers.fetch_versions = (4, 12)
    assert offsets(brokers, 0, 12) == [*range(12)]
    asked = [name for _, name, _ in brokers.requests]
    assert asked.index("Fetch") < len(asked) - 1 - asked[::-1].index("Metadata")
    brokers.answer("Fetch", lambda _: setattr(brokers, "topic_id", UUID(int=9)))
    assert "before offsets 0 to 11 of t[0] were read" in fails(OffsetError, brokers)
    assert offsets(brokers, 0, 12, failOnDataLoss="false") == []


def test_many_partitions_are_read_by_few_tasks_one_connection_and_a_request_each() -> None:
    made = {number: Log() for number in range(150)}
    for log in made.values():
        log.append([Row()])
    places = [TopicPartition("t", number) for number in made]
    planned = Advance(dict.fromkeys(places, 0), dict.fromkeys(places, 1))
    ids = {"t": topic_id_text(UUID(int=7))}
    with LogBrokers(made).serving() as many:
        tasks = ranges(planned, ids, options(many))
        rows = [row for task in tasks for batch in batches(task, options(many)) for row in batch.to_pylist()]
        names = [name for _, name, _ in many.requests]
    assert [row["partition"] for row in rows] == [*made]
    assert (names.count("Fetch"), names.count("Metadata"), names.count("ApiVersions")) == (150, 1, 2)
    assert len(tasks) == 3
    assert len(ranges(planned, ids, options(many, minPartitions="1"))) == 150
    planned.end |= dict.fromkeys(places[:100], 400)
    assert len(ranges(planned, ids, options(many))) == 50
    few = Advance(dict.fromkeys(places[:16], 0), dict.fromkeys(places[:16], 1))
    assert [type(task) for task in ranges(few, ids, options(many))] == [Range] * 16


def test_the_sizes_of_fetches(brokers: LogBrokers) -> None:
    """Little at first, then what is left, as far as the first answer tells; and what the user says."""
    log = brokers.logs[0]
    for _ in range(40):
        log.append([Row(value=b"x" * 10_000)])

    def sizes(**more: str) -> list[int]:
        kept.close_kept()
        brokers.requests.clear()
        assert offsets(brokers, 0, 52, **more) == [*range(52)]
        fetches = [request for _, name, request in brokers.requests if name == "Fetch"]
        return [one.partition_max_bytes for request in fetches for topic in request.topics for one in topic.partitions]

    first, *others = sizes()
    assert first == 32 << 10
    assert 300_000 < sum(others) < 600_000, others
    assert set(sizes(**{"kafka.max.partition.fetch.bytes": "20000"})) == {20_000}


def test_silence_is_told_after_stall_seconds(brokers: LogBrokers) -> None:
    assert "the log ends at 12 and nothing came for 1 s" in fails(OffsetError, brokers, 0, 30, stallSeconds="1")
    brokers.logs[0].append([Row()], producer=5)
    assert "the log ends at 12 and nothing" in fails(OffsetError, brokers, 0, 13, stallSeconds="1")
    brokers.answer("Fetch", *["gone"] * 1000)
    assert "nothing from 127.0.0.1:" in fails(BrokerUnavailable, brokers, stallSeconds="1")


def test_credentials_that_are_refused_are_told_at_once(brokers: LogBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise LostConnection("b:1: wrong password", "_AUTHENTICATION")

    monkeypatch.setattr("streams.kafka.wire.cluster.connect", refuse)
    assert "reading t[0]: 127.0.0.1:" in (told := fails(ConfigError, brokers))
    assert "refuses the credentials (_AUTHENTICATION)" in told


@needs_compiled
@given(spoilt_bodies(), st.data())
def test_compiled_and_plain_code_make_the_same_of_any_bytes(spoilt: bytes, data: st.DataObject) -> None:
    count, position, limit = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 12)), data.draw(st.integers(9, 17))
    append_ms, start = data.draw(st.sampled_from([-1, 0, 5])), data.draw(st.integers(0, 2))

    def decoded(module: Any) -> Any:
        edges, lists, kinds = np.zeros(24, np.int32), np.zeros(6, np.int32), np.zeros(6, np.uint8)
        numbers, times, known = np.zeros(6, np.int64), np.zeros(6, np.int64), dict[bytes, int]()
        place = spoilt, start, len(spoilt), count, 10, 1000, append_ms, position, limit, 7, 0
        made = outcome(module.decode_columns, *place, edges, numbers, times, lists, kinds, known)
        return made, known, [list(array) for array in (edges, numbers, times, lists, kinds)]

    assert decoded(record_decoder) == decoded(PLAIN)


def test_a_reading_that_is_given_up_leaves_connections_that_work(brokers: LogBrokers) -> None:
    with closing(batches(span(0, 12), options(brokers))) as reading:  # type: ignore[type-var]
        next(reading)
    assert offsets(brokers, 0, 12) == [*range(12)]
