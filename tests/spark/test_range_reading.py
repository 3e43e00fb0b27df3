"""One range, read as a task reads it, from a real broker: ends, gaps, and records that are gone. No Spark."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from streams.errors import BrokerUnavailable, ConfigError, OffsetError
from streams.spark import reader
from streams.spark.read_options import ReadOptions, read_options
from streams.spark.reader import Range, batches
from streams.spark.topic_logs import LogView
from streams.testing.fixtures import BrokerAddress
from tests.spark.conftest import MakeTopic

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(180)]


@pytest.fixture
def admin(kafka_broker: BrokerAddress) -> Iterator[AdminClient]:
    client = AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
    yield client
    client.poll(0)


@pytest.fixture
def send(kafka_broker: BrokerAddress) -> Producer:
    return Producer({"bootstrap.servers": kafka_broker.bootstrap_servers})


def fill(producer: Producer, topic: str, count: int) -> None:
    for number in range(count):
        producer.produce(topic, str(number), headers=[("__grt__", b"AB"[number % 2 :][:1])])
    assert producer.flush(60) == 0


def options(broker: BrokerAddress, topic: str, **more: str) -> ReadOptions:
    return read_options({"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic, **more})


def planned(topic: str, start: int, end: int, given: ReadOptions) -> Range:
    """A range of partition 0, as a planner makes it now."""
    found = LogView(given).topic_id_patiently(topic)
    assert found is not None
    return Range(topic, 0, start, end, found)


def offsets(span: Range, given: ReadOptions) -> list[int]:
    return [offset for batch in batches(span, given) for offset in batch.column("offset").to_pylist()]


def read(topic: str, start: int, end: int, given: ReadOptions) -> list[int]:
    return offsets(planned(topic, start, end, given), given)


def delete_up_to(admin: AdminClient, topic: str, offset: int) -> None:
    place = TopicPartition(topic, 0, offset)
    admin.delete_records([place])[place].result(30)


def test_a_range_is_read_from_its_start_up_to_its_end(
    kafka_broker: BrokerAddress, make_topic: MakeTopic, send: Producer
) -> None:
    topic = make_topic()
    fill(send, topic, 5000)
    given = options(kafka_broker, topic)
    for start, end in ((0, 1), (0, 5000), (1999, 2000), (1999, 2001), (3000, 4500)):
        assert read(topic, start, end, given) == list(range(start, end))
    some = options(kafka_broker, topic, types="B")
    assert read(topic, 10, 20, some) == [11, 13, 15, 17, 19]
    assert read(topic, 10, 20, options(kafka_broker, topic, types="C")) == []


def test_ranges_may_begin_and_end_in_gaps(kafka_broker: BrokerAddress, admin: AdminClient, topic_prefix: str) -> None:
    """On a marker, among aborted records, after the last record: at each offset that holds none."""
    topic = topic_prefix + "t"
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    settings = {"bootstrap.servers": kafka_broker.bootstrap_servers, "transactional.id": topic_prefix}
    producer = Producer(settings)
    producer.init_transactions(30)
    there, at = [], 0
    for size, commit in ((3, True), (4, False), (1, True), (5, False), (2, True), (3, False)):
        producer.begin_transaction()
        for number in range(size):
            producer.produce(topic, str(number), partition=0)
        producer.flush(30)
        there += list(range(at, at + size)) if commit else []
        at += size + 1  # the marker
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
    settled = Producer(settings)
    settled.init_transactions(30)  # returns when the last markers are written
    given = options(kafka_broker, topic)
    for start, end in [(0, at), *((n, m) for n in range(0, at, 4) for m in (n + 1, n + 3, at) if m <= at)]:
        assert read(topic, start, end, given) == [n for n in there if start <= n < end], (start, end)


def test_records_that_are_gone_stop_the_task_or_are_left_out(
    kafka_broker: BrokerAddress,
    make_topic: MakeTopic,
    send: Producer,
    admin: AdminClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = make_topic()
    fill(send, topic, 100)
    delete_up_to(admin, topic, 60)
    strict, lax = options(kafka_broker, topic), options(kafka_broker, topic, failOnDataLoss="false")
    with pytest.raises(OffsetError, match=r"\[0\]: records from offset 50 are gone .* the log has 60 to 100 now"):
        read(topic, 50, 80, strict)
    assert read(topic, 50, 80, lax) == list(range(60, 80))
    assert read(topic, 10, 60, lax) == []
    assert "records from offset 50 are gone" in caplog.text
    with pytest.raises(OffsetError, match="records from offset 200 are gone"):
        read(topic, 200, 300, strict)
    assert read(topic, 200, 300, lax) == []


def test_a_log_that_ends_too_early_is_told_as_that(
    kafka_broker: BrokerAddress, make_topic: MakeTopic, send: Producer
) -> None:
    topic = make_topic()
    fill(send, topic, 10)
    with pytest.raises(OffsetError, match=r"up to 30: the log ends at 10 and nothing came for 1 s"):
        read(topic, 0, 30, options(kafka_broker, topic, stallSeconds="1"))


def test_a_topic_that_is_deleted_under_a_reader_is_told_as_that(
    kafka_broker: BrokerAddress, make_topic: MakeTopic, send: Producer, admin: AdminClient
) -> None:
    """Long before stallSeconds, and not as a broker that does not answer."""
    topic = make_topic()
    fill(send, topic, 10)
    strict = options(kafka_broker, topic)
    for loss, expected in (("true", None), ("false", list(range(10)))):
        reading = batches(planned(topic, 0, 30, strict), options(kafka_broker, topic, failOnDataLoss=loss))
        got = next(reading).column("offset").to_pylist()
        if expected is None:
            admin.delete_topics([topic])[topic].result(30)
            with pytest.raises(OffsetError, match=r"\[0\] was deleted before it was read up to 30"):
                next(reading)
            admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
            fill(send, topic, 10)
        else:
            admin.delete_topics([topic])[topic].result(30)
            assert got == expected
            assert list(reading) == []


def make_again(admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result(30)
    deadline = time.monotonic() + 60
    while True:
        try:
            admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
            return
        except KafkaException as error:  # it is deleted in the background
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_a_topic_made_again_is_not_read_as_the_one_that_was_planned(
    kafka_broker: BrokerAddress, make_topic: MakeTopic, send: Producer, admin: AdminClient
) -> None:
    """It has a record at each offset of the range."""
    topic = make_topic()
    fill(send, topic, 30)
    strict, lax = options(kafka_broker, topic), options(kafka_broker, topic, failOnDataLoss="false")
    old = planned(topic, 0, 30, strict)
    make_again(admin, topic)
    fill(send, topic, 50)
    new = planned(topic, 0, 50, strict)
    told = f"{topic} was deleted and made again (id {old.topic_id} then, {new.topic_id} now) before offsets 0 to 29 of "
    with pytest.raises(OffsetError, match=re.escape(told) + r".*\[0\] were read. Load the DataFrame again"):
        offsets(old, strict)
    assert offsets(old, lax) == []
    assert offsets(new, strict) == list(range(50))


@pytest.mark.parametrize("loss", ["true", "false"])
def test_a_topic_made_again_while_it_is_read(
    kafka_broker: BrokerAddress,
    make_topic: MakeTopic,
    send: Producer,
    admin: AdminClient,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
) -> None:
    """What is out already cannot be taken back: the task fails, whatever failOnDataLoss says."""
    monkeypatch.setattr(reader, "_CHUNK", 10)
    topic = make_topic()
    fill(send, topic, 30)
    given = options(kafka_broker, topic, failOnDataLoss=loss)
    reading = batches(planned(topic, 0, 30, given), given)
    assert next(reading).column("offset").to_pylist() == list(range(10))
    assert next(reading).column("offset").to_pylist() == list(range(10, 20))
    make_again(admin, topic)
    fill(send, topic, 30)
    with pytest.raises(OffsetError, match=r"was deleted and made again .* may be of either topic and must not count"):
        list(reading)


def test_a_broker_that_is_away_is_told_as_that() -> None:
    given = read_options({"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t", "stallSeconds": "1"})
    with pytest.raises(BrokerUnavailable, match=r"t\[0\] up to 5: nothing from 127.0.0.1:9 for 1 s"):
        offsets(Range("t", 0, 0, 5, "id"), given)


def test_a_wrong_setting_is_told_as_that() -> None:
    given = read_options({"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t", "kafka.no.such": "1"})
    with pytest.raises(ConfigError, match="No such configuration property"):
        offsets(Range("t", 0, 0, 5, "id"), given)


def test_many_different_headers_arrive_as_they_are(
    kafka_broker: BrokerAddress, make_topic: MakeTopic, send: Producer
) -> None:
    topic = make_topic()
    expected = []
    for number in range(3000):
        headers = [] if number % 7 == 0 else [("id", str(number).encode()), ("x", None), ("x", b"\xff")][: number % 4]
        send.produce(topic, str(number), json.dumps(number), headers=headers)
        expected.append([{"key": name, "value": value} for name, value in headers])
    assert send.flush(60) == 0
    given = options(kafka_broker, topic)
    found = [row for batch in batches(planned(topic, 0, 3000, given), given) for row in batch.to_pylist()]
    assert [row["headers"] for row in found] == expected
    assert [row["value"] for row in found] == [str(number).encode() for number in range(3000)]
    assert [row["key"] for row in found] == [str(number).encode() for number in range(3000)]


def test_the_collector_is_on_again_between_batches(
    kafka_broker: BrokerAddress, make_topic: MakeTopic, send: Producer
) -> None:
    topic = make_topic()
    fill(send, topic, 12000)
    given = options(kafka_broker, topic)
    for _ in batches(planned(topic, 0, 12000, given), given):
        assert gc.isenabled()
    assert reader._CHUNK < 12000


@pytest.mark.slow
def test_a_compacted_log_has_gaps(
    kafka_broker: BrokerAddress, admin: AdminClient, send: Producer, topic_prefix: str
) -> None:
    topic = topic_prefix + "t"
    config = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.001"}
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(30)
    for number in range(60):
        send.produce(topic, str(number), key=str(number % 3))
        assert send.flush(60) == 0
    given = options(kafka_broker, topic)
    deadline = time.monotonic() + 120
    while len(there := read(topic, 0, 60, given)) > 3:
        assert time.monotonic() < deadline, "the broker compacts nothing"
        send.produce(topic, "roll", key="roll")  # the segment that is written to is never compacted
        assert send.flush(60) == 0
        time.sleep(0.5)
    for start, end in ((0, 30), (0, 1), (20, 40), (30, 58), (40, 60), (there[-1] - 1, 60), (there[-1] + 1, 60)):
        assert read(topic, start, end, given) == [n for n in there if start <= n < end], (start, end)
