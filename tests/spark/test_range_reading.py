"""One range, read as a task reads it, from a real broker: ends, gaps, and records that are gone. No Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from streams.errors import BrokerUnavailable, ConfigError, OffsetError
from streams.spark.kafka import topic_admin
from streams.spark.reading import kept, reader
from streams.spark.reading.planning import Bounds
from streams.spark.reading.read_options import ReadOptions, read_options
from streams.spark.reading.reader import Range, batches
from streams.spark.reading.topic_logs import LogView
from streams.testing.proxy import KafkaProxy
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(180)]


def fill(log: Log, topic: str, count: int) -> None:
    for number in range(count):
        log.produce(topic, str(number), headers=[("__grt__", b"AB"[number % 2 :][:1])])
    log.flush()


def options(log: Log, topic: str, **more: str) -> ReadOptions:
    return read_options({"kafka.bootstrap.servers": log.servers, "subscribe": topic, **more})


def planned(topic: str, start: int, end: int, given: ReadOptions) -> Range:
    found = topic_admin(given.kafka).identity(topic)
    assert found is not None
    return Range(topic, 0, start, end, found[0])


def offsets(span: Range, given: ReadOptions) -> list[int]:
    return [offset for batch in batches(span, given) for offset in batch.column("offset").to_pylist()]


@pytest.fixture(autouse=True)
def none_kept() -> Iterator[None]:
    yield
    kept.close_kept()


def read(topic: str, start: int, end: int, given: ReadOptions) -> list[int]:
    return offsets(planned(topic, start, end, given), given)


def test_a_range_is_read_from_its_start_up_to_its_end(log: Log, make_topic: MakeTopic) -> None:
    topic = make_topic()
    fill(log, topic, 12000)
    assert reader._CHUNK < 12000
    given = options(log, topic)
    for start, end in ((0, 1), (0, 12000), (1999, 2000), (1999, 2001), (3000, 4500)):
        assert read(topic, start, end, given) == list(range(start, end))
    some = options(log, topic, types="B")
    assert read(topic, 10, 20, some) == [11, 13, 15, 17, 19]
    assert read(topic, 10, 20, options(log, topic, types="C")) == []
    sizes = [batch.num_rows for batch in batches(planned(topic, 0, 12000, given), given)]
    assert max(sizes) <= reader._CHUNK


def test_ranges_may_begin_and_end_in_gaps(log: Log, topic_prefix: str) -> None:
    """On a marker, among aborted records, after the last record: at each offset that holds none."""
    topic = topic_prefix + "t"
    parts = [(3, True), (4, False), (1, True), (5, False), (2, True), (3, False)]
    log.create(topic)
    log.transactions(
        topic_prefix, topic, *(([str(number) for number in range(size)], commit) for size, commit in parts)
    )
    there, at = [], 0
    for size, commit in parts:
        there += list(range(at, at + size)) if commit else []
        at += size + 1  # the marker
    given = options(log, topic)
    for start, end in [(0, at), *((n, m) for n in range(0, at, 4) for m in (n + 1, n + 3, at) if m <= at)]:
        assert read(topic, start, end, given) == [n for n in there if start <= n < end], (start, end)
    for size in (1, 3):  # each goes on where the one before has ended
        for start in range(0, at, size):
            end = min(start + size, at)
            assert read(topic, start, end, given) == [n for n in there if start <= n < end], (start, end)


def test_records_that_are_gone_stop_the_task_or_are_left_out(
    log: Log, make_topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic()
    fill(log, topic, 100)
    log.delete_up_to(topic, 60)
    strict, lax = options(log, topic), options(log, topic, failOnDataLoss="false")
    assert LogView(strict).logs()[topic].partitions == {0: Bounds(60, 100, 100)}
    with pytest.raises(OffsetError, match=r"\[0\]: records from offset 50 are gone .* the log has 60 to 100 now"):
        read(topic, 50, 80, strict)
    assert read(topic, 50, 80, lax) == list(range(60, 80))
    assert read(topic, 10, 60, lax) == []
    assert "records from offset 50 are gone" in caplog.text
    with pytest.raises(OffsetError, match="records from offset 200 are gone"):
        read(topic, 200, 300, strict)
    assert read(topic, 200, 300, lax) == []


def test_a_log_that_ends_too_early_is_told_as_that(log: Log, make_topic: MakeTopic) -> None:
    topic = make_topic()
    fill(log, topic, 10)
    with pytest.raises(OffsetError, match=r"up to 30: the log ends at 10 and nothing came for 1 s"):
        read(topic, 0, 30, options(log, topic, stallSeconds="1"))


@pytest.mark.nightly
def test_a_topic_that_is_deleted_under_a_reader_is_told_as_that(log: Log, make_topic: MakeTopic) -> None:
    """Long before stallSeconds, and not as a broker that does not answer."""
    topic = make_topic()
    fill(log, topic, 10)
    strict = options(log, topic)
    for loss, expected in (("true", None), ("false", list(range(10)))):
        reading = batches(planned(topic, 0, 30, strict), options(log, topic, failOnDataLoss=loss))
        got = next(reading).column("offset").to_pylist()
        if expected is None:
            log.delete(topic)
            with pytest.raises(OffsetError, match=r"\[0\] was deleted before it was read up to 30"):
                next(reading)
            log.create(topic)
            fill(log, topic, 10)
        else:
            log.delete(topic)
            assert got == expected
            assert list(reading) == []


def test_a_topic_made_again_is_not_read_as_the_one_that_was_planned(log: Log, make_topic: MakeTopic) -> None:
    """It has a record at each offset of the range."""
    topic = make_topic()
    fill(log, topic, 30)
    strict, lax = options(log, topic), options(log, topic, failOnDataLoss="false")
    old = planned(topic, 0, 30, strict)
    log.make_again(topic)
    fill(log, topic, 50)
    new = planned(topic, 0, 50, strict)
    told = f"{topic} was deleted and recreated (id {old.topic_id} then, {new.topic_id} now) before offsets 0 to 29 of "
    with pytest.raises(OffsetError, match=re.escape(told) + r".*\[0\] were read. Load the DataFrame again"):
        offsets(old, strict)
    assert offsets(old, lax) == []
    assert offsets(new, strict) == list(range(50))


def test_a_topic_made_again_while_it_is_read(log: Log, make_topic: MakeTopic, caplog: pytest.LogCaptureFixture) -> None:
    """What was read is of the topic that was planned: brokers compare its id with each fetch."""
    topic = make_topic()
    fill(log, topic, 30)
    both = [options(log, topic, failOnDataLoss=loss) for loss in ("true", "false")]
    readers = [batches(planned(topic, 0, 60, given), given) for given in both]
    assert [next(each).column("offset").to_pylist() for each in readers] == [list(range(30))] * 2
    log.make_again(topic)
    fill(log, topic, 60)
    with pytest.raises(OffsetError, match=r"deleted and recreated .* before offsets 30 to 59 of .* were read"):
        list(readers[0])
    assert list(readers[1]) == []
    assert "before offsets 30 to 59" in caplog.text


def test_many_different_headers_arrive_as_they_are(log: Log, make_topic: MakeTopic) -> None:
    topic = make_topic()
    expected = []
    for number in range(3000):
        headers = [] if number % 7 == 0 else [("id", str(number).encode()), ("x", None), ("x", b"\xff")][: number % 4]
        log.produce(topic, str(number), json.dumps(number), headers=headers)
        expected.append([{"key": name, "value": value} for name, value in headers])
    log.flush()
    given = options(log, topic)
    found = [row for batch in batches(planned(topic, 0, 3000, given), given) for row in batch.to_pylist()]
    assert [row["offset"] for row in found] == [*range(3000)]
    assert [row["headers"] for row in found] == expected
    assert [row["value"] for row in found] == [str(number).encode() for number in range(3000)]
    assert [row["key"] for row in found] == [str(number).encode() for number in range(3000)]


@pytest.mark.parametrize(
    ("more", "told", "problem"),
    [
        ({"stallSeconds": "1"}, BrokerUnavailable, r"t\[0\] up to 5: nothing from 127.0.0.1:9 for 1 s"),
        ({"kafka.no.such": "1"}, ConfigError, "No such configuration property"),
    ],
)
def test_a_broker_that_is_away_and_a_wrong_setting_are_told_as_that(
    more: dict[str, str], told: type[Exception], problem: str
) -> None:
    given = read_options({"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t", **more})
    with pytest.raises(told, match=problem):
        offsets(Range("t", 0, 0, 5, "AAAAAAAAAAAAAAAAAAAABw"), given)


def answers_to_reads(topic: str, given: ReadOptions, proxy: KafkaProxy, ranges: list[tuple[int, int]]) -> list[int]:
    """Read ranges and return the bytes of the answers to each."""
    found = []
    for start, end in ranges:
        before = proxy.answered.get("Fetch", 0)
        assert read(topic, start, end, given) == list(range(start, end))
        found.append(proxy.answered.get("Fetch", 0) - before)
    return found


@pytest.mark.parametrize(("batch", "every"), [(16_384, 1), (1_000_000, 1), (16_384, 2)])
def test_a_range_fetches_little_more_than_its_records(log: Log, make_topic: MakeTopic, batch: int, every: int) -> None:
    """One range after the other, by batches of the usual sizes. Of every second one, the rest of which another worker
    has, there are two batches that only begin or end in it."""
    topic, size, count = make_topic(), 5_000, 40_000
    producer = Producer({"bootstrap.servers": log.servers, "batch.size": batch, "linger.ms": 100})
    for number in range(count):
        producer.produce(topic, f"{number:080}", key=f"{number:06}")
        if not number % 5_000:
            producer.poll(0)
    assert producer.flush(60) == 0
    ranges = [(start, start + size) for start in range(0, count, size * every)]
    with KafkaProxy(log.servers) as proxy:
        given = read_options({"kafka.bootstrap.servers": proxy.bootstrap_servers, "subscribe": topic})
        fetched = answers_to_reads(topic, given, proxy, ranges)
        of_rows = len(ranges) * size * 86
        print(f"fetched {sum(fetched) / of_rows:.2f} of the bytes of the rows")
        assert sum(fetched) <= (1.2 if every == 1 else 1.3) * of_rows, fetched
        assert len(kept._loops) == 1
        kept.close_kept()


def test_a_range_goes_on_where_the_one_before_has_ended_or_elsewhere(log: Log, make_topic: MakeTopic) -> None:
    """Forwards, backwards, over the end of the log and what comes after it, with records that were fetched ahead."""
    topic = make_topic()
    fill(log, topic, 3000)
    given = options(log, topic)
    for start, end in ((0, 10), (10, 20), (15, 30), (2000, 3000), (0, 1), (1, 3000)):
        assert read(topic, start, end, given) == list(range(start, end))
    (loop,) = kept._loops.values()
    fill(log, topic, 100)
    assert read(topic, 3000, 3050, given) == list(range(3000, 3050))
    assert read(topic, 3050, 3100, given) == list(range(3050, 3100))
    assert [one.loop for one in kept._loops.values()] == [loop.loop]
    assert read(topic, 0, 10, given) == list(range(10))
    log.make_again(topic)
    log.send(topic, ["new"] * 3200)
    span = planned(topic, 10, 20, given)
    assert [value for batch in batches(span, given) for value in batch.column("value").to_pylist()] == [b"new"] * 10


def test_what_is_kept_is_little_goes_when_idle_and_is_not_that_of_the_parent(
    log: Log, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [make_topic(str(number)) for number in range(4)]
    for topic in topics:
        fill(log, topic, 100)
        assert read(topic, 0, 10, options(log, topic)) == list(range(10))
    assert [key[2] for key in kept._rests] == topics  # type: ignore[index]
    most = sum(rest.batches.size for rest in kept._rests.values())
    monkeypatch.setattr(kept, "MOST_BYTES", most - 1)
    assert read(topics[1], 0, 10, options(log, topics[1])) == list(range(10))
    assert [key[2] for key in kept._rests] == [*topics[2:], topics[1]]  # type: ignore[index]
    (parent,) = loops = list(kept._loops.values())
    kept._forked()
    assert (kept._of_the_parent, kept._loops) == (loops, {})
    kept._of_the_parent.clear()
    parent.loop.close()
    monkeypatch.setattr(kept, "IDLE_SECONDS", 0.0)
    assert read(topics[0], 0, 5, options(log, topics[0])) == list(range(5))
    assert read(topics[1], 0, 5, options(log, topics[1])) == list(range(5))
    assert (len(kept._loops), len(kept._rests)) == (1, 1)


def test_a_range_that_was_not_read_up_to_its_end_leaves_its_connections(log: Log, make_topic: MakeTopic) -> None:
    topic = make_topic()
    fill(log, topic, 12_000)
    given = options(log, topic)
    reading = batches(planned(topic, 0, 12_000, given), given)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert (len(kept._loops), kept._rests) == (1, {})
    assert read(topic, 0, 12_000, given) == list(range(12_000))
