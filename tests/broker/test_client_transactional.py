from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer

from streams.clients.admin import TopicAdmin
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.clients.transactional import TransactionalProducer
from streams.errors import RecordRefused, Stopped, TransactionFailed
from streams.records import IncomingRecord, Output
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec
from tests.broker.outputs_kit import output

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

Make = Callable[..., TransactionalProducer]


def group_metadata(group: str, generation: int = -1, member: str = "") -> bytes:
    """librdkafka's serialised group metadata. Generation -1 with no member is what the broker does not fence."""
    return b"CGMDv2:" + struct.pack("=i", generation) + group.encode() + b"\0" + member.encode() + b"\0\1"


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    admin.create([TopicSpec(name=topic_prefix + "t", partitions=2, replication_factor=1)])
    return topic_prefix + "t"


@pytest.fixture
def make(settings: ClientSettings, topic_prefix: str) -> Iterator[Make]:
    producers: list[TransactionalProducer] = []

    def build(name: str = "slot", **options: object) -> TransactionalProducer:
        producer = TransactionalProducer(
            settings,
            topic_prefix + name,
            transaction_timeout_ms=60_000,
            **options,  # type: ignore[arg-type]
        )
        producers.append(producer)
        producer.init(20)
        return producer

    yield build
    for producer in producers:
        producer.close()


def committed(settings: ClientSettings, admin: TopicAdmin, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Every committed record of the topic; waits for what is still open."""
    seen: list[IncomingRecord] = []
    reader = PartitionReader(settings)
    ranges = {number: (marks.start, marks.end) for number, marks in admin.watermarks(topic).items()}
    reader.read(
        topic, ranges, lambda _, records: seen.extend(records), stalled_after_seconds=20, cancelled=lambda: False
    )
    reader.close()
    return [(record.key, record.value) for record in seen]


def test_a_transaction_with_offsets(make: Make, settings: ClientSettings, admin: TopicAdmin, topic: str) -> None:
    group = topic + ".group"
    assert admin.committed(group, topic) == {}
    producer = make()
    producer.warm_up([topic], 10)
    for number in range(3):
        producer.begin()
        assert producer.produce(output(topic, b"%d" % number, b"k", -1, [("h", b"x"), ("h", None)], timestamp_ms=5))
        assert producer.produce(output(topic, None, b"gone", 1, None))
        producer.poll()
        producer.flush(20)
        producer.send_offsets(topic, {0: number + 1, 1: 7}, group_metadata(group), 20)
        producer.commit(20)
    assert producer.refused == []
    assert admin.committed(group, topic) == {0: 3, 1: 7}
    found = committed(settings, admin, topic)
    assert sorted(found, key=repr) == [(b"gone", None)] * 3 + [(b"k", b"0"), (b"k", b"1"), (b"k", b"2")]
    lag = admin.lag(group, topic)
    assert [part.committed for part in lag] == [3, 7]
    assert all(part.lag == max(part.end - (part.committed or 0), 0) for part in lag)


def test_an_aborted_transaction_leaves_nothing(
    make: Make, settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    group = topic + ".group"
    admin.committed(group, topic)
    producer = make()
    producer.begin()
    producer.produce(output(topic, b"v", b"k", 0, None))
    producer.flush(20)
    producer.send_offsets(topic, {0: 1}, group_metadata(group), 20)
    producer.abort(20)
    assert committed(settings, admin, topic) == []
    assert admin.committed(group, topic) == {}


def test_offsets_are_never_sent_without_any(make: Make, topic: str) -> None:
    producer = make()
    producer.begin()
    with pytest.raises(ValueError, match="not fenced"):
        producer.send_offsets(topic, {}, group_metadata("g"), 5)
    producer.abort(20)


def test_a_later_producer_with_the_same_id_fences_the_earlier_one(
    make: Make, settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    first = make()
    first.begin()
    first.produce(output(topic, b"zombie", b"k", 0, None))
    first.flush(20)
    second = make()
    with pytest.raises(TransactionFailed) as caught:
        first.commit(20)
    assert caught.value.kind == "fenced"
    assert first.transactional_id in str(caught.value)
    assert "a process with the same instance_id?" in str(caught.value), "what to do about it"
    for again in (first.begin, lambda: first.abort(5)):
        with pytest.raises(TransactionFailed) as caught:
            again()
        assert caught.value.kind in {"fenced", "unknown"}
    second.begin()
    second.produce(output(topic, b"alive", b"k", 0, None))
    second.flush(20)
    second.commit(20)
    assert committed(settings, admin, topic) == [(b"k", b"alive")]


@pytest.mark.parametrize(
    ("generation", "member", "kind", "code"),
    [(5, "nobody", "stale", "ILLEGAL_GENERATION"), (1, "nobody", "lost", "UNKNOWN_MEMBER_ID")],
)
def test_offsets_with_metadata_that_is_not_the_groups(
    make: Make,
    admin: TopicAdmin,
    settings: ClientSettings,
    topic: str,
    generation: int,
    member: str,
    kind: str,
    code: str,
) -> None:
    group = topic + ".group"
    if kind == "lost":  # the group must have members for the broker to know who is none
        consumer = Consumer({"bootstrap.servers": settings.bootstrap_servers, "group.id": group})
        consumer.subscribe([topic])
        deadline = time.monotonic() + 30
        while not consumer.assignment():
            assert time.monotonic() < deadline
            consumer.poll(0.1)
    else:
        admin.committed(group, topic)
        consumer = None
    producer = make()
    producer.begin()
    producer.produce(output(topic, b"v", b"k", 0, None))
    producer.flush(20)
    with pytest.raises(TransactionFailed) as caught:
        producer.send_offsets(topic, {0: 1}, group_metadata(group, generation, member), 20)
    assert (caught.value.kind, caught.value.code) == (kind, code)
    producer.abort(20)
    producer.begin()
    producer.abort(20)
    if consumer is not None:
        consumer.close()


class TestRefused:
    """How a record that is not taken shows itself."""

    def test_unknown_topic(self, make: Make, topic: str) -> None:
        producer = make()
        producer.begin()
        producer.produce(output(topic, b"good", b"k", 0, None))
        producer.produce(output(topic + ".nope", b"bad", b"k", -1, None))
        began = time.monotonic()
        with pytest.raises(TransactionFailed, match=r"\.nope") as caught:
            producer.flush(20)
        assert time.monotonic() - began < 15  # the flush may take 20
        assert (caught.value.kind, caught.value.code) == ("blocked", "UNKNOWN_TOPIC_OR_PART")
        assert "create the topic" in str(caught.value)
        assert [(bad.topic, bad.is_own) for bad in producer.refused] == [(topic + ".nope", False)]
        with pytest.raises(TransactionFailed) as caught:  # also when nobody minds the flush
            producer.commit(20)
        assert caught.value.kind in ("abortable", "blocked")
        producer.abort(20)
        assert len(producer.refused) == 1
        producer.begin()
        assert producer.refused == []
        producer.abort(20)

    def test_asking_for_an_unknown_topic_does_not_create_it(self, make: Make, admin: TopicAdmin, topic: str) -> None:
        producer = make()
        producer.warm_up([topic, topic + ".nope"], 10)
        assert admin.describe([topic + ".nope"]) == {topic + ".nope": None}

    def test_larger_than_the_topic_takes(self, make: Make, admin: TopicAdmin, topic: str) -> None:
        small = topic + ".small"
        admin.create([TopicSpec(name=small, partitions=1, replication_factor=1, configs={"max.message.bytes": "1000"})])
        producer = make()
        producer.begin()
        producer.produce(output(small, b"x" * 5000, b"big", -1, None))
        with pytest.raises(TransactionFailed) as caught:
            producer.flush(20)
        assert (caught.value.kind, caught.value.code) == ("abortable", "MSG_SIZE_TOO_LARGE")
        assert [(bad.topic, bad.partition, bad.is_own) for bad in producer.refused] == [(small, 0, True)]
        producer.abort(20)

    def test_a_batch_names_the_innocent_and_one_by_one_does_not(
        self, make: Make, admin: TopicAdmin, topic: str
    ) -> None:
        small = topic + ".small"
        admin.create([TopicSpec(name=small, partitions=1, replication_factor=1, configs={"max.message.bytes": "1000"})])
        named: dict[bool, list[Output | None]] = {}
        twins = [output(small, b"x" * 5000, b"big", 0, None) for _ in range(2)]
        for one_by_one in (False, True):
            producer = make(f"slot-{one_by_one}", one_by_one=one_by_one)
            producer.warm_up([small], 10)
            producer.begin()
            for number in range(3):
                producer.produce(output(small, b"x" * 400, b"fits%d" % number, 0, None))
            for twin in twins:
                producer.produce(twin)
            with pytest.raises(TransactionFailed):
                producer.flush(20)
            named[one_by_one] = [bad.output for bad in producer.refused]
            producer.abort(20)
        assert set(named[False]) == {None}
        assert named[True]
        assert all(any(bad is twin for twin in twins) for bad in named[True])

    def test_larger_than_the_client_takes(
        self, make: Make, settings: ClientSettings, admin: TopicAdmin, topic: str
    ) -> None:
        producer = make()
        producer.begin()
        with pytest.raises(RecordRefused, match="MSG_SIZE_TOO_LARGE") as caught:
            producer.produce(output(topic, b"x" * 2_000_000, b"big", 0, None))
        assert f"{topic}[0]" in str(caught.value)
        assert "b'big'" in str(caught.value)
        many = [output(topic, b"v", b"k", 0), output(topic, b"x" * 2_000_000, b"big", 0), output(topic, b"w", b"k", 0)]
        assert producer.produce_many(many, 0) == 1  # the refused one is not part of the transaction
        assert producer.produce_many(many, 1) == 1
        assert producer.produce_many(many, 2) == 3
        producer.flush(20)
        producer.commit(20)
        assert committed(settings, admin, topic) == [(b"k", b"v"), (b"k", b"w")]

    def test_no_such_partition(self, make: Make, topic: str) -> None:
        producer = make()
        producer.warm_up([topic], 10)
        producer.begin()
        with pytest.raises(RecordRefused, match=r"\[9\].*_UNKNOWN_PARTITION"):
            producer.produce(output(topic, b"v", b"k", 9, None))
        producer.abort(20)


def test_no_transaction_no_record(make: Make, topic: str) -> None:
    producer = make()
    with pytest.raises(TransactionFailed) as caught:
        producer.produce(output(topic, b"v", b"k", 0, None))
    assert caught.value.call == "produce"


def test_a_full_queue_says_so_and_the_record_is_not_taken(
    kafka_broker: BrokerAddress, admin: TopicAdmin, topic: str
) -> None:
    settings = ClientSettings(kafka_broker.bootstrap_servers, {"queue.buffering.max.messages": 10, "linger.ms": 100})
    producer = TransactionalProducer(settings, topic + ".full", transaction_timeout_ms=60_000)
    producer.init(20)
    producer.begin()
    many = [output(topic, b"%d" % number, b"k", 0) for number in range(15)]
    assert producer.produce_many(many, 0) == 10
    assert not producer.produce(many[10])
    deadline = time.monotonic() + 20
    while not producer.produce(output(topic, b"last", b"k", 0)):
        assert time.monotonic() < deadline
        producer.poll()
        time.sleep(0.001)
    producer.flush(20)
    producer.commit(20)
    assert [value for _, value in committed(settings, admin, topic)] == [*(b"%d" % n for n in range(10)), b"last"]
    producer.close()


def test_a_closed_producer_is_closed(make: Make, topic: str) -> None:
    took = []
    for number in range(3):
        producer = make(f"slot-{number}")
        producer.begin()
        producer.produce(output(topic, b"v", b"k", 0, None))
        began = time.monotonic()
        producer.close()
        producer.close()
        took.append(time.monotonic() - began)
    assert min(took) < 1, took
    for call in (
        producer.begin,
        producer.poll,
        lambda: producer.produce(output(topic, b"v", None)),
        lambda: producer.commit(1),
    ):
        with pytest.raises(Stopped):
            call()
