"""Logs on a real broker, read by our own requests and by librdkafka: the same records, the same ends."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from streams.broker import KafkaCluster
from streams.errors import OffsetError, StreamsError, TopicError, TopicReplaced
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.records import IncomingRecord
from tests.broker.client_kit import PATIENCE, Writer, create, numbers, rows, truncate, writing
from tests.broker.gate import gate
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "100",
    "delete.retention.ms": "0",
}
Records = dict[int, list[IncomingRecord]]


@contextlib.contextmanager
def readers(settings: ClientSettings) -> Iterator[tuple[PartitionReader, TopicAdmin]]:
    with contextlib.closing(PartitionReader(settings)) as reader, contextlib.closing(TopicAdmin(settings)) as admin:
        yield reader, admin


def by_librdkafka(settings: ClientSettings, topic: str, spans: dict[int, tuple[int, int]]) -> Records:
    """Read by its consumer as it is: nothing of the toolkit but the class of records."""
    found: Records = {number: [] for number in spans}
    left = {number for number, (start, end) in spans.items() if start < end}
    config = {"bootstrap.servers": settings.bootstrap_servers, "group.id": "none", "enable.auto.commit": False}
    consumer = Consumer({**config, "isolation.level": "read_committed", "enable.partition.eof": True})
    with contextlib.closing(consumer):
        consumer.assign([TopicPartition(topic, number, spans[number][0]) for number in left])
        deadline = time.monotonic() + PATIENCE
        while left:
            assert time.monotonic() < deadline, left
            for message in consumer.consume(500, 0.05):
                number, offset = message.partition(), message.offset()
                if message.error() is not None:
                    assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                elif offset < spans[number][1]:
                    _, stamp = message.timestamp()
                    headers = None if message.headers() is None else tuple(message.headers())
                    record = IncomingRecord(topic, number, offset, message.key(), message.value(), headers, stamp)
                    found[number].append(record)
                if offset >= spans[number][1] - (message.error() is None):
                    left.discard(number)
    return found


def places(found: Records) -> set[tuple[int, int]]:
    return {(number, record.offset) for number, records in found.items() for record in records}


def write_at_random(settings: ClientSettings, topic: str, partitions: int, rng: random.Random, steps: int) -> Any:
    """Batches of all codecs, within transactions that are committed, aborted and left open, and without; returns what
    keeps the open ones."""

    def produce(producer: Producer, count: int) -> None:
        for _ in range(count):
            value = rng.choice([None, b"", rng.randbytes(40), b"x" * 300, b"y" * 20_000])
            headers: Any = rng.choice([None, [("__grt__", b"A")], [("a", None), ("b", b"")]])
            key = rng.choice([b"k%d" % rng.randrange(40), b""])
            producer.produce(topic, value, key, rng.randrange(partitions), headers=headers)

    servers = {"bootstrap.servers": settings.bootstrap_servers, "linger.ms": 5}
    plain = [Producer({**servers, "compression.type": codec}) for codec in CODECS]
    writers = [Writer(settings, topic, f"w{number}") for number in range(3)]
    begun: set[int] = set()
    for _ in range(steps):
        count = rng.choice([1, 3, 30, 200])
        if rng.random() < 0.4:
            produce(producer := rng.choice(plain), count)
            assert not producer.flush(PATIENCE)
            continue
        number = rng.randrange(len(writers))
        writer = writers[number]
        if number in begun and rng.random() < 0.6:
            begun.discard(number)
            (writer.producer.commit_transaction if rng.random() < 0.5 else writer.producer.abort_transaction)(PATIENCE)
            continue
        if number not in begun:
            begun.add(number)
            writer.producer.begin_transaction()
        produce(writer.producer, count)
        assert not writer.producer.flush(PATIENCE)
    return writers, begun


@pytest.mark.parametrize(
    "configs", [{}, COMPACTED, {"message.timestamp.type": "LogAppendTime"}, {"compression.type": "zstd"}]
)
def test_random_logs_are_the_same_to_both(
    settings: ClientSettings, topic_prefix: str, seed: int, configs: dict[str, str]
) -> None:
    rng, topic = random.Random(seed), topic_prefix + "random"
    with readers(settings) as (reader, admin):
        admin.create([TopicSpec(name=topic, partitions=3, replication_factor=1, configs=configs)])
        writers, begun = write_at_random(settings, topic, 3, rng, 40)

        def compare() -> Records:
            marks = admin.watermarks(topic)
            spans = {number: (mark.start, mark.stable) for number, mark in marks.items()}
            found, other = None, by_librdkafka(settings, topic, spans)
            while found != other:
                before, found = found, reader.read_all(topic, spans, stalled_after_seconds=PATIENCE)
                # Compaction may come between two readings. Then the next ones agree; of one that did not come they do.
                assert found != before
                other = other if found == other else by_librdkafka(settings, topic, spans)
            assert found is not None
            for number, (start, end) in spans.items():
                if start < end:
                    inner = sorted(rng.randint(start, end) for _ in range(2))
                    some = reader.read_all(topic, {number: (inner[0], inner[1])}, stalled_after_seconds=PATIENCE)
                    within = [one for one in found[number] if inner[0] <= one.offset < inner[1]]
                    # Compaction takes more meanwhile, and adds nothing.
                    assert some[number] == [one for one in within if configs is not COMPACTED or one in some[number]]
            return found

        compare()
        for number in begun:
            (writers[number].commit if rng.random() < 0.5 else writers[number].abort)()
        wait_until(
            lambda: all(mark.stable == mark.end for mark in admin.watermarks(topic).values()), "markers", PATIENCE
        )
        found = compare()
        assert sum(map(len, found.values())) > 100
        if configs is COMPACTED:
            before, last = places(found), Producer({"bootstrap.servers": settings.bootstrap_servers})

            def has_holes() -> bool:
                for partition in range(3):  # compaction leaves the last segment alone, which ends with a record
                    last.produce(topic, b"last", b"last", partition)
                assert not last.flush(PATIENCE)
                return not before <= places(compare())

            wait_until(has_holes, "holes", PATIENCE, 0.2)


@pytest.mark.parametrize("codec", CODECS)
def test_a_record_larger_than_a_fetch(settings: ClientSettings, topic_prefix: str, codec: str) -> None:
    topic = topic_prefix + "large"
    with readers(settings) as (reader, admin):
        create(admin, topic, 2, max_message_bytes="20000000")
        content = random.Random(1).randbytes(5_000_000)
        options = {"bootstrap.servers": settings.bootstrap_servers, "message.max.bytes": 20_000_000}
        producer = Producer({**options, "compression.type": codec})
        for partition in range(2):
            for value in (b"small", content, b"after"):
                producer.produce(topic, value, b"k", partition)
        assert not producer.flush(PATIENCE)
        found = reader.read_all(topic, {0: (0, 3), 1: (0, 3)}, stalled_after_seconds=PATIENCE)
        for number in range(2):
            assert [record.value for record in found[number]] == [b"small", content, b"after"]


def read_with(settings: ClientSettings, topic: str, end: int, change: Callable[[], None]) -> StreamsError:
    """The error of a reading in whose middle the change comes."""
    changes = [change]

    def receive(_partition: int, _records: list[IncomingRecord]) -> None:
        if changes:
            changes.pop()()

    with contextlib.closing(PartitionReader(settings)) as reader, pytest.raises(StreamsError) as caught:
        reader.read(topic, {0: (0, end)}, receive, stalled_after_seconds=PATIENCE, cancelled=lambda: False)
    return caught.value


def test_a_log_that_is_trimmed_behind_the_reader(
    settings: ClientSettings, topic_prefix: str, admin: TopicAdmin
) -> None:
    topic = topic_prefix + "trimmed"
    create(admin, topic, 1)
    end = fill(settings, topic, admin)
    failure = read_with(settings, topic, end, lambda: truncate(settings, topic, 0, end - 1))
    assert isinstance(failure, OffsetError)
    assert f"{topic}[0]: offset " in str(failure)


def test_a_topic_that_is_made_again_in_the_middle(
    settings: ClientSettings, topic_prefix: str, admin: TopicAdmin
) -> None:
    topic = topic_prefix + "again"
    create(admin, topic, 1)

    def make_again() -> None:
        admin.delete([topic])
        wait_until(lambda: admin.describe([topic])[topic] is None, "it is gone", PATIENCE)
        create(admin, topic, 1)
        fill(settings, topic, admin)

    failure = read_with(settings, topic, fill(settings, topic, admin), make_again)
    assert isinstance(failure, TopicReplaced)
    assert f"{topic} was deleted and created again while it was read" in str(failure)
    failure = read_with(settings, topic, admin.watermarks(topic)[0].end, lambda: admin.delete([topic]))
    assert isinstance(failure, TopicError)
    assert f"{topic} does not exist at" in str(failure)


def fill(settings: ClientSettings, topic: str, admin: TopicAdmin) -> int:
    """Write more than some answers have; returns the end."""
    with writing(settings, topic) as writer:
        for _ in range(4):
            writer.commit(*rows(0, *["x" * 1000] * 3000))
    return admin.watermarks(topic)[0].end


@pytest.mark.slow
@pytest.mark.parametrize("how", gate(["frozen", "killed"], "frozen"))
def test_leaders_that_die_or_stand_still_in_the_middle(how: str) -> None:
    with KafkaCluster(3, properties={"broker.session.timeout.ms": "4000"}) as cluster:
        settings = ClientSettings(cluster.bootstrap_servers)
        with readers(settings) as (reader, admin):
            configs = {"min.insync.replicas": "2"}
            admin.create([TopicSpec(name="t", partitions=4, replication_factor=3, configs=configs)])
            with writing(settings, "t") as writer:
                for partition in range(4):
                    writer.commit(*rows(partition, *numbers(0, 40_000)))
            ends = {number: mark.end for number, mark in admin.watermarks("t").items()}
            victim = cluster.node(cluster.leader_of("t", 2))
            found: dict[int, list[str]] = {}

            def receive(number: int, records: list[IncomingRecord]) -> None:
                if not found:
                    victim.freeze() if how == "frozen" else victim.kill()
                found.setdefault(number, []).extend((record.value or b"").decode() for record in records)

            began = time.monotonic()
            spans = {number: (0, end) for number, end in ends.items()}
            reader.read("t", spans, receive, stalled_after_seconds=PATIENCE, cancelled=lambda: False)
            print(f"{how}: read in {time.monotonic() - began:.1f} s")
            assert found == dict.fromkeys(range(4), numbers(0, 40_000))
            if how == "frozen":
                victim.thaw()
