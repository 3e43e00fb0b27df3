from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from streams.clients.admin import TopicAdmin
from streams.clients.consumer import INPUT, LogConsumer
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.clients.transactional import TransactionalProducer
from streams.errors import BrokerUnavailable, OffsetError, Stopped, TopicError
from streams.records import IncomingRecord
from streams.testing.faults import KafkaProxy, Rule
from streams.topics import TopicSpec
from tests.broker.outputs_kit import output

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SECONDS = 45.0


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    admin.create([TopicSpec(name=topic_prefix + "t", partitions=3, replication_factor=1)])
    return topic_prefix + "t"


@pytest.fixture
def producer(settings: ClientSettings, topic: str) -> Iterator[TransactionalProducer]:
    producer = TransactionalProducer(settings, topic + ".writer", transaction_timeout_ms=60_000)
    producer.init(SECONDS)
    yield producer
    producer.close()


@pytest.fixture
def consumer(settings: ClientSettings, topic: str) -> Iterator[LogConsumer]:
    consumer = LogConsumer(settings, topic, INPUT)
    yield consumer
    consumer.close()


@pytest.fixture
def reader(settings: ClientSettings) -> Iterator[PartitionReader]:
    reader = PartitionReader(settings)
    yield reader
    reader.close()


def write(
    producer: TransactionalProducer, topic: str, partition: int, values: list[bytes], *, commit: bool = True
) -> None:
    producer.begin()
    for value in values:
        assert producer.produce(output(topic, value, b"k", partition, [("h", b"x")]))
    producer.flush(SECONDS)
    if commit:
        producer.commit(SECONDS)
    else:
        producer.abort(SECONDS)


def poll_until(consumer: LogConsumer, count: int, limit: int = 500) -> dict[int, list[IncomingRecord]]:
    got: dict[int, list[IncomingRecord]] = {}
    deadline = time.monotonic() + SECONDS
    while sum(map(len, got.values())) < count:
        assert time.monotonic() < deadline, f"{got} after {SECONDS} s, wanted {count} records"
        for partition, progress in consumer.poll_batch(0.1, limit).items():
            got.setdefault(partition, []).extend(progress.records)
        for failure in consumer.take_failures().values():
            raise failure
    return got


def values(records: list[IncomingRecord]) -> list[bytes | None]:
    return [record.value for record in records]


def read(
    reader: PartitionReader, topic: str, ranges: dict[int, tuple[int, int]], seconds: float = SECONDS
) -> dict[int, list[bytes | None]]:
    got: dict[int, list[bytes | None]] = {}

    def receive(partition: int, records: list[IncomingRecord]) -> None:
        assert records
        got.setdefault(partition, []).extend(values(records))

    reader.read(topic, ranges, receive, stalled_after_seconds=seconds, cancelled=lambda: False)
    return got


class TestInput:
    """``LogConsumer`` of the input."""

    def test_committed_records_only_from_the_offset_on(
        self, consumer: LogConsumer, producer: TransactionalProducer, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a", b"b"])
        write(producer, topic, 0, [b"aborted"], commit=False)
        write(producer, topic, 0, [b"c"])
        consumer.add(0, 1)
        got = poll_until(consumer, 2)
        assert values(got[0]) == [b"b", b"c"]
        assert got[0][0].offset == 1
        assert got[0][0].headers == (("h", b"x"),)
        assert abs(got[0][0].timestamp_ms - time.time() * 1000) < 60_000
        assert not consumer.poll_batch(0.2)

    def test_partitions_come_and_go(self, consumer: LogConsumer, producer: TransactionalProducer, topic: str) -> None:
        for partition in range(3):
            write(producer, topic, partition, [b"%d-%d" % (partition, n) for n in range(50)])
        consumer.add(0, 0)
        consumer.add(1, 0)
        first = poll_until(consumer, 20, limit=20)
        consumer.remove([0])
        consumer.add(2, 10)
        done = sum(len(first.get(number, [])) for number in (1, 2))
        rest = poll_until(consumer, 50 - done + 40)
        assert set(rest) <= {1, 2}
        assert values(first.get(1, []) + rest.get(1, [])) == [b"1-%d" % n for n in range(50)]
        assert values(rest[2]) == [b"2-%d" % n for n in range(10, 50)]
        consumer.add(0, 5)
        assert values(poll_until(consumer, 45)[0]) == [b"0-%d" % n for n in range(5, 50)]

    def test_a_pause_neither_loses_nor_repeats(
        self, consumer: LogConsumer, producer: TransactionalProducer, topic: str
    ) -> None:
        write(producer, topic, 0, [b"%d" % n for n in range(400)])  # polls may bring more than was waited for
        consumer.add(0, 0)
        got = values(poll_until(consumer, 30, limit=30)[0])
        for _ in range(4):
            consumer.pause([0])
            for _ in range(3):
                assert not consumer.poll_batch(0.05)
            consumer.resume([0])
            got += values(poll_until(consumer, 30, limit=30)[0])
        got += values(poll_until(consumer, 400 - len(got))[0])
        assert got == [b"%d" % n for n in range(400)]

    @pytest.mark.parametrize("offset", [3, 1000])
    def test_an_offset_that_is_not_in_the_log(
        self,
        consumer: LogConsumer,
        producer: TransactionalProducer,
        settings: ClientSettings,
        topic: str,
        offset: int,
    ) -> None:
        write(producer, topic, 0, [b"%d" % n for n in range(10)])
        write(producer, topic, 1, [b"fine"])
        truncate(settings, topic, 0, 5)
        consumer.add(0, offset)
        with pytest.raises(OffsetError) as caught:
            poll_until(consumer, 1)
        assert f"{topic}[0]" in str(caught.value)
        assert f"offset {offset} " in str(caught.value)
        consumer.remove([0])
        consumer.add(1, 0)
        consumer.add(0, 5)
        got = poll_until(consumer, 6)
        assert values(got[0]) == [b"%d" % n for n in range(5, 10)]
        assert values(got[1]) == [b"fine"]

    def test_a_deleted_topic(
        self, consumer: LogConsumer, producer: TransactionalProducer, admin: TopicAdmin, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a"])
        consumer.add(0, 0)
        poll_until(consumer, 1)
        admin.delete([topic])
        with pytest.raises(TopicError, match=topic):
            poll_until(consumer, 1)

    def test_no_such_partition(self, consumer: LogConsumer, topic: str) -> None:
        consumer.add(9, 0)
        with pytest.raises(TopicError, match=r"\[9\]"):
            poll_until(consumer, 1)


class TestReader:
    """``PartitionReader``."""

    def test_several_partitions_up_to_their_ends(
        self, reader: PartitionReader, producer: TransactionalProducer, admin: TopicAdmin, topic: str
    ) -> None:
        for partition in range(2):
            write(producer, topic, partition, [b"%d-%d" % (partition, n) for n in range(1500)])
        ends = {number: marks.end for number, marks in admin.watermarks(topic).items()}
        write(producer, topic, 0, [b"later"])
        got = read(reader, topic, {number: (0, end) for number, end in ends.items()})
        assert got == {n: [b"%d-%d" % (n, m) for m in range(1500)] for n in range(2)}  # partition 2 is empty
        assert read(reader, topic, {0: (1498, ends[0]), 1: (5, 7)}) == {
            0: [b"0-1498", b"0-1499"],
            1: [b"1-5", b"1-6"],
        }
        assert read(reader, topic, {0: (7, 7)}) == {}

    def test_a_fetch_that_takes_its_time_is_not_given_up(
        self, settings: ClientSettings, producer: TransactionalProducer, topic: str
    ) -> None:
        """A slow line: fetching anew would drop the answer that is on its way, again and again."""
        write(producer, topic, 0, [b"x" * 1_000] * 100)
        with KafkaProxy(settings.bootstrap_servers) as proxy:
            proxy.add(Rule(apis=["Fetch"], action="slow", bytes_per_second=30_000))
            reader = PartitionReader(ClientSettings(proxy.bootstrap_servers))
            try:
                found = read(reader, topic, {0: (0, 101)})
            finally:
                reader.close()
            assert len(found[0]) == 100
            assert proxy.passed["Fetch"] <= 3, "one for the records: given up, it would be asked for again each second"

    def test_the_end_may_be_markers_and_aborted_records(
        self, reader: PartitionReader, producer: TransactionalProducer, admin: TopicAdmin, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a"])
        for _ in range(5):
            write(producer, topic, 0, [b"aborted"] * 20, commit=False)
        end = admin.watermarks(topic)[0].end
        assert end > 100
        assert read(reader, topic, {0: (0, end)}) == {0: [b"a"]}
        assert read(reader, topic, {0: (2, end)}) == {}

    def test_an_open_transaction_holds_the_end_back(
        self,
        reader: PartitionReader,
        producer: TransactionalProducer,
        settings: ClientSettings,
        admin: TopicAdmin,
        topic: str,
    ) -> None:
        write(producer, topic, 0, [b"a"])
        producer.begin()
        producer.produce(output(topic, b"open", b"k", 0, None))
        producer.flush(SECONDS)
        write_2 = TransactionalProducer(settings, topic + ".other", transaction_timeout_ms=60_000)
        write_2.init(SECONDS)
        write(write_2, topic, 0, [b"b"])
        marks = admin.watermarks(topic)[0]
        assert marks.stable < marks.end
        assert read(reader, topic, {0: (0, marks.stable)}) == {0: [b"a"]}
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="no progress for 1 s") as caught:
            read(reader, topic, {0: (0, marks.end)}, seconds=1.0)
        assert time.monotonic() - began < SECONDS / 2
        assert f"{topic}[0] at {marks.stable} of {marks.end}" in str(caught.value)
        producer.commit(SECONDS)
        assert read(reader, topic, {0: (0, marks.end)}) == {0: [b"a", b"open", b"b"]}
        write_2.close()

    def test_it_goes_on_when_the_open_transaction_ends(
        self, reader: PartitionReader, producer: TransactionalProducer, admin: TopicAdmin, topic: str
    ) -> None:
        producer.begin()
        producer.produce(output(topic, b"open", b"k", 0, None))
        producer.flush(SECONDS)
        end = admin.watermarks(topic)[0].end
        asked = 0

        def cancelled() -> bool:
            nonlocal asked
            asked += 1
            if asked == 10:
                producer.abort(SECONDS)
            return False

        reader.read(
            topic,
            {0: (0, end)},
            lambda *_: pytest.fail("aborted records are not delivered"),
            stalled_after_seconds=SECONDS,
            cancelled=cancelled,
        )
        assert asked >= 10

    def test_below_the_log_start(
        self, reader: PartitionReader, producer: TransactionalProducer, settings: ClientSettings, topic: str
    ) -> None:
        write(producer, topic, 0, [b"%d" % n for n in range(10)])
        truncate(settings, topic, 0, 5)
        with pytest.raises(OffsetError) as caught:
            read(reader, topic, {0: (2, 10)})
        assert f"{topic}[0]: offset 2 " in str(caught.value)
        assert read(reader, topic, {0: (5, 10)}) == {0: [b"%d" % n for n in range(5, 10)]}

    def test_no_such_topic(self, reader: PartitionReader, topic: str) -> None:
        with pytest.raises(TopicError, match=r"\.nope"):
            read(reader, topic + ".nope", {0: (0, 5)})

    def test_cancelled(self, reader: PartitionReader, topic: str) -> None:
        with pytest.raises(Stopped, match=topic):
            reader.read(topic, {0: (0, 5)}, lambda *_: None, stalled_after_seconds=SECONDS, cancelled=lambda: True)

    def test_what_the_receiver_raises_comes_out_and_the_reader_can_be_used_again(
        self, reader: PartitionReader, producer: TransactionalProducer, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a"])

        def broken(_partition: int, _records: list[IncomingRecord]) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            reader.read(topic, {0: (0, 1)}, broken, stalled_after_seconds=SECONDS, cancelled=lambda: False)
        assert read(reader, topic, {0: (0, 1)}) == {0: [b"a"]}


class TestAdmin:
    """``TopicAdmin`` (committed offsets: with the transactional producer)."""

    def test_create_describe_compare_delete(self, admin: TopicAdmin, topic_prefix: str) -> None:
        spec = TopicSpec(
            name=topic_prefix + "a", partitions=4, replication_factor=1, configs={"cleanup.policy": "compact"}
        )
        assert admin.describe([spec.name]) == {spec.name: None}
        assert admin.differences([spec]) == [f"topic {spec.name} does not exist"]
        assert admin.create([spec]) == [spec.name]
        assert admin.create([spec]) == []
        assert admin.differences([spec, spec]) == []
        found = admin.describe([spec.name])[spec.name]
        assert found is not None
        assert (found.partitions, found.replication_factor) == (4, 1)
        assert found.configs["cleanup.policy"] == "compact"
        admin.delete([spec.name, topic_prefix + "never-there"])
        assert admin.describe([spec.name]) == {spec.name: None}
        admin.create([spec])
        again = admin.describe([spec.name])[spec.name]
        assert again is not None
        assert again.topic_id != found.topic_id

    def test_what_cannot_be_created_is_said(self, admin: TopicAdmin, topic_prefix: str) -> None:
        name = topic_prefix + "a"
        with pytest.raises(TopicError, match=f"{name}: INVALID_REPLICATION_FACTOR"):
            admin.create([TopicSpec(name=name, partitions=1, replication_factor=99)])
        with pytest.raises(TopicError, match=f"{name}: INVALID_CONFIG"):
            admin.create([TopicSpec(name=name, partitions=1, replication_factor=1, configs={"no.such": "x"})])
        with pytest.raises(TopicError, match="TOPIC_EXCEPTION"):
            admin.create([TopicSpec(name=name + "/", partitions=1, replication_factor=1)])

    def test_pending_offsets_are_waited_for(
        self, admin: TopicAdmin, producer: TransactionalProducer, topic: str
    ) -> None:
        group = topic + ".group"
        assert admin.committed(group, topic) == {}
        metadata = b"CGMDv2:" + struct.pack("=i", -1) + group.encode() + b"\0\0\1"
        producer.begin()
        producer.send_offsets(topic, {0: 7}, metadata, SECONDS)
        with pytest.raises(BrokerUnavailable, match="may still be open"):
            admin.committed(group, topic, timeout_seconds=2.0)
        producer.commit(SECONDS)
        assert admin.committed(group, topic) == {0: 7}

    def test_offsets_of_what_is_not_there(self, admin: TopicAdmin, topic: str) -> None:
        with pytest.raises(TopicError, match=r"\.nope does not exist"):
            admin.watermarks(topic + ".nope")
        with pytest.raises((TopicError, BrokerUnavailable), match=r"\[9\]"):
            admin.watermarks(topic, [0, 9], timeout_seconds=2.0)


def truncate(settings: ClientSettings, topic: str, partition: int, offset: int) -> None:
    """As retention does it."""
    client = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    for future in client.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(SECONDS)
