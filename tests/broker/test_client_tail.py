"""The tail of a changelog, on a real broker: what it tells of the position, and how soon."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from streams.clients.admin import TopicAdmin
from streams.clients.consumer import LOG_START, TAIL, LogConsumer
from streams.clients.settings import ClientSettings
from streams.clients.transactional import TransactionalProducer
from streams.errors import OffsetError, StreamsError, TopicError
from streams.records import IncomingRecord
from streams.runtime.reading.log_follower import Tail
from streams.testing.fixtures import BrokerAddress, OwnBroker
from streams.topics import TopicSpec
from tests.broker.outputs_kit import output

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SECONDS = 45.0
PARTITIONS = 4


@pytest.fixture
def settings(kafka_broker: BrokerAddress) -> ClientSettings:
    return ClientSettings(kafka_broker.bootstrap_servers)


@pytest.fixture
def admin(settings: ClientSettings) -> Iterator[TopicAdmin]:
    admin = TopicAdmin(settings)
    yield admin
    admin.close()


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    admin.create([TopicSpec(name=topic_prefix + "log", partitions=PARTITIONS, replication_factor=1)])
    return topic_prefix + "log"


@pytest.fixture
def producer(settings: ClientSettings, topic: str) -> Iterator[TransactionalProducer]:
    producer = writer(settings, topic)
    yield producer
    producer.close()


@pytest.fixture
def tail(settings: ClientSettings, topic: str) -> Iterator[LogConsumer]:
    tail = LogConsumer(settings, topic, TAIL)
    yield tail
    tail.close()


def writer(settings: ClientSettings, topic: str, name: str = "writer") -> TransactionalProducer:
    producer = TransactionalProducer(settings, f"{topic}.{name}", transaction_timeout_ms=60_000)
    producer.init(SECONDS)
    return producer


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


class Heard:
    """What the tail told, partition by partition."""

    def __init__(self) -> None:
        self.values: dict[int, list[bytes | None]] = {}
        self.position: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.at_end: set[int] = set()
        self.failures: dict[int, StreamsError] = {}

    def poll(self, tail: LogConsumer) -> None:
        for partition, progress in tail.poll_batch(0.05).items():
            assert progress.position >= self.position.get(partition, 0)
            assert all(record.partition == partition for record in progress.records)
            self.values.setdefault(partition, []).extend(record.value for record in progress.records)
            self.position[partition], self.end[partition] = progress.position, progress.end
            (self.at_end.add if progress.at_end else self.at_end.discard)(partition)
        self.failures.update(tail.take_failures())

    def until(self, tail: LogConsumer, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, vars(self)
            self.poll(tail)

    def ends(self, tail: LogConsumer, *partitions: int) -> None:
        self.until(tail, lambda: self.at_end >= set(partitions))


class TestPosition:
    def test_it_counts_markers_and_aborted_records(
        self, tail: LogConsumer, producer: TransactionalProducer, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a", b"b"])
        write(producer, topic, 0, [b"no"] * 3, commit=False)
        tail.add(0, 1)
        heard = Heard()
        heard.until(tail, lambda: heard.position.get(0) == 7)
        assert (heard.values, heard.end, heard.at_end) == ({0: [b"b"]}, {0: 7}, {0})

    def test_it_moves_when_only_aborted_transactions_come(
        self, tail: LogConsumer, producer: TransactionalProducer, topic: str
    ) -> None:
        """Nothing is delivered for them but a new end of the partition, each time."""
        write(producer, topic, 0, [b"a"])
        tail.add(0, LOG_START)
        heard = Heard()
        heard.until(tail, lambda: heard.position.get(0) == 2)
        for n in range(1, 4):
            write(producer, topic, 0, [b"no"] * 5, commit=False)
            heard.until(tail, lambda: heard.position[0] == 2 + 6 * n)  # noqa: B023
            assert heard.end[0] == heard.position[0]
        assert heard.values == {0: [b"a"]}

    def test_an_open_transaction_keeps_the_position_below_the_end(
        self, tail: LogConsumer, producer: TransactionalProducer, settings: ClientSettings, topic: str
    ) -> None:
        other = writer(settings, topic, "other")
        write(producer, topic, 0, [b"a"])
        wait_for_end(settings, topic, 0, 2)  # a commit may be answered before its marker is written
        other.begin()
        other.produce(output(topic, b"open", b"k", 0, None))
        other.flush(SECONDS)
        write(producer, topic, 0, [b"behind"])
        tail.add(0, 0)
        heard = Heard()
        heard.until(tail, lambda: heard.end.get(0) == 5 and heard.at_end == {0})
        assert (heard.values[0], heard.position[0]) == ([b"a"], 2)
        other.abort(SECONDS)
        heard.until(tail, lambda: heard.position[0] == 6)
        assert (heard.values[0], heard.end[0]) == ([b"a", b"behind"], 6)
        other.close()

    def test_an_empty_partition_and_the_very_end_are_told_too(
        self, tail: LogConsumer, producer: TransactionalProducer, settings: ClientSettings, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a"])
        wait_for_end(settings, topic, 0, 2)  # a commit may be answered before its marker is written
        tail.add(0, 2)
        tail.add(1, LOG_START)
        heard = Heard()
        heard.ends(tail, 0, 1)
        assert (heard.position, heard.end) == ({0: 2, 1: 0}, {0: 2, 1: 0})
        assert heard.values == {0: [], 1: []}

    def test_the_log_may_begin_anywhere(
        self, tail: LogConsumer, producer: TransactionalProducer, settings: ClientSettings, topic: str
    ) -> None:
        write(producer, topic, 0, [b"%d" % n for n in range(10)])
        truncate(settings, topic, 0, 4)
        tail.add(0, LOG_START)
        heard = Heard()
        heard.until(tail, lambda: heard.position.get(0) == 11)
        assert heard.values[0] == [b"%d" % n for n in range(4, 10)]


class TestComingAndGoing:
    def test_nothing_is_left_over_of_an_earlier_life(
        self, tail: LogConsumer, producer: TransactionalProducer, topic: str
    ) -> None:
        """Removed in the middle of what was prefetched, and added again at other offsets."""
        for partition in range(2):
            write(producer, topic, partition, [b"%d" % n for n in range(3000)])
        tail.add(1, 0)
        for start in (2000, 0, 1500, 700, 0):
            tail.add(0, start)
            got: list[int] = []
            deadline = time.monotonic() + SECONDS
            while len(got) < 300:
                assert time.monotonic() < deadline
                news = tail.poll_batch(0.05, limit=100).get(0)
                got += [record.offset for record in news.records] if news else []
            assert got == list(range(start, start + len(got)))
            tail.remove([0])
            assert 0 not in tail.poll_batch(0.05)

    def test_a_partition_can_be_followed_once(self, tail: LogConsumer, topic: str) -> None:
        tail.add(0, 0)
        with pytest.raises(ValueError, match=f"{topic}\\[0\\]"):
            tail.add(0, 0)
        tail.remove([0])
        tail.remove([0])
        tail.add(0, 0)

    def test_adding_to_an_idle_and_to_a_busy_tail_is_quick(
        self, tail: LogConsumer, producer: TransactionalProducer, settings: ClientSettings, topic: str
    ) -> None:
        """20 to 50 ms on a quiet machine; librdkafka's traps here are waits of 500 ms and more."""
        for partition in range(PARTITIONS):
            write(producer, topic, partition, [b"a"])
        heard, took = Heard(), []
        tail.add(0, LOG_START)
        heard.ends(tail, 0)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:  # idle: all fetches wait at the broker
            heard.poll(tail)
        stop = threading.Event()
        other = writer(settings, topic, "busy")

        def keep_busy() -> None:
            while not stop.is_set():
                write(other, topic, 0, [b"x"])

        with beside(keep_busy, stop) as busy:
            for partition in range(1, PARTITIONS):
                for offset in (0, LOG_START):
                    began = time.monotonic()
                    tail.add(partition, offset)
                    heard.ends(tail, partition)
                    took.append(time.monotonic() - began)
                    tail.remove([partition])
                    heard.at_end.discard(partition)
                    heard.position.pop(partition)
                if partition == 1:
                    busy.start()
        other.close()
        assert statistics.median(took) < 0.25, took

    def test_what_is_committed_is_here_soon(
        self, tail: LogConsumer, producer: TransactionalProducer, topic: str
    ) -> None:
        """1 ms (p50) to 3 ms (p99) after the commit returned, on a quiet machine."""
        for partition in range(PARTITIONS):
            tail.add(partition, LOG_START)
        heard, took = Heard(), []
        heard.ends(tail, *range(PARTITIONS))
        here: dict[bytes | None, float] = {}
        stop = threading.Event()

        def follow() -> None:
            while not stop.is_set():
                for progress in tail.poll_batch(0.02).values():
                    here.update((record.value, time.monotonic()) for record in progress.records)

        with beside(follow, stop) as thread:
            thread.start()
            for n in range(50):
                write(producer, topic, n % PARTITIONS, [b"%d" % n])
                committed = time.monotonic()
                while b"%d" % n not in here:
                    assert time.monotonic() < committed + SECONDS
                    time.sleep(0.0005)
                took.append(here[b"%d" % n] - committed)
        assert statistics.median(took) < 0.1, took


class TestFailures:
    @pytest.mark.parametrize("offset", [3, 1000])
    def test_an_offset_that_is_not_in_the_log_ends_its_partition_only(
        self,
        tail: LogConsumer,
        producer: TransactionalProducer,
        settings: ClientSettings,
        topic: str,
        offset: int,
    ) -> None:
        write(producer, topic, 0, [b"%d" % n for n in range(10)])
        truncate(settings, topic, 0, 5)
        tail.add(0, offset)
        tail.add(1, 0)
        heard = Heard()
        heard.until(tail, lambda: bool(heard.failures))
        assert set(heard.failures) == {0}
        assert isinstance(heard.failures[0], OffsetError)
        assert f"{topic}[0]: offset {offset} " in str(heard.failures[0])
        write(producer, topic, 1, [b"fine"])
        heard.until(tail, lambda: heard.values.get(1) == [b"fine"])
        tail.add(0, 5)  # it was removed
        heard.ends(tail, 0)
        assert heard.values[0] == [b"%d" % n for n in range(5, 10)]

    def test_a_log_that_is_cut_behind_the_reader_harms_nobody_and_before_it_is_told(
        self, tail: LogConsumer, producer: TransactionalProducer, settings: ClientSettings, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a", b"b"])
        tail.add(0, 0)
        heard = Heard()
        heard.ends(tail, 0)
        truncate(settings, topic, 0, 3)
        write(producer, topic, 0, [b"c"])
        heard.until(tail, lambda: heard.values[0] == [b"a", b"b", b"c"])
        assert not heard.failures

    def test_no_such_partition(self, tail: LogConsumer, producer: TransactionalProducer, topic: str) -> None:
        tail.add(9, 0)
        tail.add(0, 0)
        heard = Heard()
        heard.until(tail, lambda: 9 in heard.failures)
        assert set(heard.failures) == {9}
        assert isinstance(heard.failures[9], TopicError)
        write(producer, topic, 0, [b"fine"])
        heard.until(tail, lambda: heard.values.get(0) == [b"fine"])

    def test_a_deleted_topic(
        self, tail: LogConsumer, producer: TransactionalProducer, admin: TopicAdmin, topic: str
    ) -> None:
        write(producer, topic, 0, [b"a"])
        tail.add(0, 0)
        tail.add(1, 0)
        heard = Heard()
        heard.ends(tail, 0, 1)
        admin.delete([topic])
        heard.until(tail, lambda: set(heard.failures) == {0, 1})
        assert all(isinstance(error, TopicError) and topic in str(error) for error in heard.failures.values())


class TestThread:
    """``runtime.tail.Tail`` over the real thing."""

    @pytest.mark.timeout(480)
    def test_it_follows_forgets_and_outlives_an_outage(
        self,
        own_broker: OwnBroker,
        topic_prefix: str,
        caplog: pytest.LogCaptureFixture,
        request: pytest.FixtureRequest,
    ) -> None:
        caplog.set_level(logging.INFO, logger="streams.clients.connection")
        broker = own_broker(start_timeout=150.0)
        settings, topic = ClientSettings(broker.bootstrap_servers), topic_prefix + "log"
        tail = Tail(lambda: LogConsumer(settings, topic, TAIL))
        request.addfinalizer(tail.close)
        TopicAdmin(settings).create([TopicSpec(name=topic, partitions=2, replication_factor=1)])
        heard: list[tuple[int, int, list[bytes | None], int, int]] = []
        failed: list[Exception] = []

        def receive(partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
            heard.append((partition, epoch, [record.value for record in records], position, end))

        def wait(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 90
            while not condition():
                assert time.monotonic() < deadline, heard
                time.sleep(0.01)

        tail.start(receive, lambda _partition, _epoch, error: failed.append(error))
        tail.add(0, 0, 7)
        tail.add(1, -1, 8)
        wait(lambda: {(0, 7, (), 0, 0), (1, 8, (), 0, 0)} <= {(p, e, tuple(r), *at) for p, e, r, *at in heard})
        first = writer(settings, topic)
        write(first, topic, 0, [b"a"])
        wait(lambda: any(call[:3] == (0, 7, [b"a"]) for call in heard))
        tail.remove([1])
        broker.kill()
        wait(lambda: "can not be reached" in caplog.text)
        broker.restart()
        second = writer(settings, topic, "second")
        write(second, topic, 1, [b"nobody's"])
        write(second, topic, 0, [b"b"])
        wait(lambda: any(call[:3] == (0, 7, [b"b"]) for call in heard))
        assert "answers again" in caplog.text
        told = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"tail {topic}")]
        assert len(told) == 2, told
        assert [call for call in heard if call[0] == 1 and call[2]] == []
        assert not failed
        tail.close()
        wait(lambda: not any(thread.name == "kes-tail" for thread in threading.enumerate()))
        first.close()
        second.close()


@contextmanager
def beside(work: Callable[[], None], stop: threading.Event) -> Iterator[threading.Thread]:
    """A thread for the block to start. It has ended after the block, also if that fails."""
    thread = threading.Thread(target=work, daemon=True)
    try:
        yield thread
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join(SECONDS)


def wait_for_end(settings: ClientSettings, topic: str, partition: int, end: int) -> None:
    admin, deadline = TopicAdmin(settings), time.monotonic() + SECONDS
    while admin.watermarks(topic)[partition].stable < end:
        assert time.monotonic() < deadline
    admin.close()


def truncate(settings: ClientSettings, topic: str, partition: int, offset: int) -> None:
    """As retention does it."""
    client = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    for future in client.delete_records([TopicPartition(topic, partition, offset)]).values():
        future.result(SECONDS)
