"""The consumer of logs on a real broker, of the input and of a changelog: what it reads, where it is, how soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from streams.errors import OffsetError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.consumer import LOG_START, LogConsumer
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.settings import ClientSettings
from tests.broker.client_kit import PATIENCE, Received, Writer, create, numbers, rows, truncate, writing
from tests.unit.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

PARTITIONS = 4
both = pytest.mark.parametrize("role", ["input", "tail"])


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "log", PARTITIONS)
    return topic_prefix + "log"


@pytest.fixture
def role() -> str:
    return "tail"


@pytest.fixture
def got(settings: ClientSettings, topic: str, role: str) -> Iterator[Received]:
    is_tail = role == "tail"
    consumer = LogFetcher(settings, topic, FOLLOWING) if is_tail else LogConsumer(settings, topic, ends=False)
    yield Received(consumer)
    consumer.close()


def wait_for_end(admin: TopicAdmin, topic: str, partition: int, end: int) -> None:
    """A commit may be answered before its marker is written."""
    wait_until(lambda: admin.watermarks(topic)[partition].stable >= end, "the marker", PATIENCE)


@both
def test_committed_records_only_from_the_offset_on(got: Received, writer: Writer, role: str) -> None:
    writer.commit(*rows(0, "a", "b"))
    writer.abort(*rows(0, "no", "no", "no"))
    writer.commit(*rows(0, "c"))
    got.consumer.add(0, 1)
    got.until(lambda: got.position.get(0) == (9 if role == "tail" else 8))
    assert got.values(0) == ["b", "c"]
    first = got.records[0][0]
    assert (first.offset, first.headers) == (1, (("h", b"x"),))
    assert abs(first.timestamp_ms - time.time() * 1000) < 60_000
    if role == "tail":
        assert (got.end, got.at_end) == ({0: 9}, {0}), "markers count"
    got.poll()
    assert len(got.values(0)) == 2


def test_the_very_end_an_empty_partition_and_a_log_that_begins_anywhere(
    got: Received, writer: Writer, settings: ClientSettings, admin: TopicAdmin, topic: str
) -> None:
    writer.commit(*rows(0, "a"), *rows(2, *numbers(0, 10)))
    truncate(settings, topic, 2, 4)
    wait_for_end(admin, topic, 0, 2)
    got.consumer.add_all({0: 2, 1: LOG_START, 2: LOG_START})
    got.until(lambda: got.at_end == {0, 1, 2} and got.position[2] == 11)
    assert got.position == got.end == {0: 2, 1: 0, 2: 11}
    assert [got.values(number) for number in range(3)] == [[], [], numbers(4, 10)]


@both
def test_nothing_is_left_over_of_an_earlier_life(got: Received, writer: Writer) -> None:
    """Removed in the middle of what was prefetched, and added again at other offsets."""
    for partition in range(2):
        writer.commit(*rows(partition, *numbers(0, 3000)))
    got.consumer.add(1, 0)
    for start in (2000, 0, 1500, 700, 0):
        again = Received(got.consumer)
        again.consumer.add(0, start)
        again.until(lambda: len(again.values(0)) >= 300, limit=100)  # noqa: B023
        assert again.values(0) == numbers(start, start + len(again.values(0)))
        again.consumer.remove([0])
        assert 0 not in again.consumer.poll_batch(0.05)


def quickest(took: list[float]) -> float:
    """What a quarter of them kept within. A busy machine makes most of them late; a wait that is built in, all."""
    return sorted(took)[len(took) // 4]


def test_adding_to_an_idle_and_to_a_busy_tail_is_quick(
    got: Received, writer: Writer, settings: ClientSettings, topic: str
) -> None:
    """20 to 50 ms on a quiet machine; librdkafka's traps here are waits of 500 ms and more."""
    writer.commit(*((partition, "k", "a") for partition in range(PARTITIONS)))
    tail, took = got.consumer, list[float]()
    tail.add(0, LOG_START)
    got.until(lambda: got.at_end == {0})
    idle_until = time.monotonic() + 1.0
    got.until(lambda: time.monotonic() > idle_until)  # all fetches wait at the broker
    stop, busy = threading.Event(), list[Future[None]]()

    def keep_busy() -> None:
        while not stop.is_set():
            other.commit(*rows(0, "x"))

    with writing(settings, topic, "busy") as other, ThreadPoolExecutor() as pool:
        try:
            for partition in range(1, PARTITIONS):
                for offset in (0, LOG_START):
                    began = time.monotonic()
                    tail.add(partition, offset)
                    got.until(lambda: partition in got.at_end)  # noqa: B023
                    took.append(time.monotonic() - began)
                    tail.remove([partition])
                    got.at_end.discard(partition)
                    got.position.pop(partition)
                if not busy:
                    busy.append(pool.submit(keep_busy))
        finally:
            stop.set()
        busy[0].result(PATIENCE)
    assert quickest(took) < 0.25, took


def test_what_is_committed_is_here_soon(got: Received, writer: Writer) -> None:
    """1 ms (p50) to 3 ms (p99) after the commit returned, on a quiet machine."""
    got.consumer.add_all(dict.fromkeys(range(PARTITIONS), LOG_START))
    got.until(lambda: len(got.at_end) == PARTITIONS)
    took = []
    for number in range(50):
        partition = number % PARTITIONS
        writer.commit(*rows(partition, str(number)))
        committed = time.monotonic()
        got.until(lambda: got.values(partition)[-1:] == [str(number)])  # noqa: B023
        took.append(time.monotonic() - committed)
    assert quickest(took) < 0.1, took


@both
@pytest.mark.parametrize("offset", [3, 1000])
def test_an_offset_that_is_not_in_the_log_ends_its_partition_only(
    got: Received, writer: Writer, settings: ClientSettings, topic: str, offset: int
) -> None:
    writer.commit(*rows(0, *numbers(0, 10)))
    truncate(settings, topic, 0, 5)
    got.consumer.add(0, offset)
    got.consumer.add(1, 0)
    got.until(lambda: got.failures)
    assert set(got.failures) == {0}
    assert isinstance(got.failures[0], OffsetError)
    assert f"{topic}[0]: offset {offset} " in str(got.failures[0])
    writer.commit(*rows(1, "fine"))
    got.until(lambda: got.values(1) == ["fine"])
    got.consumer.add(0, 5)  # it was removed
    got.until(lambda: got.values(0) == numbers(5, 10))


def test_a_log_that_is_cut_behind_the_reader_harms_nobody(
    got: Received, writer: Writer, settings: ClientSettings, topic: str
) -> None:
    writer.commit(*rows(0, "a", "b"))
    got.consumer.add(0, 0)
    got.until(lambda: got.at_end == {0} and got.position[0] == 3)
    truncate(settings, topic, 0, 3)
    writer.commit(*rows(0, "c"))
    got.until(lambda: got.values(0) == ["a", "b", "c"])
    assert not got.failures


@both
def test_no_such_partition_and_a_deleted_topic(got: Received, writer: Writer, admin: TopicAdmin, topic: str) -> None:
    got.consumer.add_all({9: 0, 0: 0, 1: 0})
    got.until(lambda: got.failures)
    assert set(got.failures) == {9}
    assert f"{topic}[9]" in str(got.failures[9])
    writer.commit(*rows(0, "fine"))
    got.until(lambda: got.values(0) == ["fine"])
    admin.delete([topic])
    got.until(lambda: set(got.failures) == {0, 1, 9})
    assert all(isinstance(error, TopicError) and topic in str(error) for error in got.failures.values())
