"""The tail thread over a consumer of the test's own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.errors import OffsetError, TopicError
from streams.kafka.reading.consumer import LOG_START
from streams.records import IncomingRecord, PolledPartition
from streams.runtime.reading.log_follower import Tail
from tests.unit.runtime_kit import FakeConsumer
from tests.unit.waiting import PATIENCE, wait_until

Call = tuple[int, int, list[bytes | None], int, int]
News = dict[int, PolledPartition] | tuple[dict[int, PolledPartition], dict[int, Exception]] | Exception


def news(partition: int, *offsets: int, at_end: bool = False, end: int = 100) -> dict[int, PolledPartition]:
    records = [IncomingRecord("t", partition, offset, b"k", b"%d" % offset, None) for offset in offsets]
    return {partition: PolledPartition(records, (offsets[-1] + 1) if offsets else end, end, at_end)}


class Scripted(FakeConsumer):
    """Brings what the test puts into ``news``; remembers its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.told: list[tuple[object, ...]] = []
        self.polls = 0
        self.refuse_add: Exception | None = None

    def add(self, partition: int, offset: int) -> None:
        if self.refuse_add is not None:
            raise self.refuse_add
        self.told.append(("add", partition, offset))

    def remove(self, partitions: Collection[int]) -> None:
        self.told += [("remove", partition) for partition in partitions]

    def poll_batch(self, timeout_seconds: float, limit: int) -> dict[int, PolledPartition]:
        assert not self.closed.is_set()
        self.polls += 1
        try:
            found = self.news.get(timeout=timeout_seconds)
        except queue.Empty:
            return {}
        if isinstance(found, Exception):
            raise found
        if isinstance(found, tuple):
            found, self.failures = found
        return found


class Stage:
    """A tail, the consumers that it made, and what it said."""

    def __init__(self, **settings: float) -> None:
        self.consumers: list[Scripted] = []
        self.refusal: Exception | None = None
        self.received: list[Call] = []
        self.failed: list[tuple[int, int, Exception]] = []
        self.threads: set[threading.Thread] = set()
        self.on_receive: Callable[[int, int], object] = lambda _partition, _epoch: None
        self.tail = Tail(self._connect, **settings)
        self.tail.start(self._receive, self._fail)

    def _connect(self) -> Scripted:
        if self.refusal is not None:
            raise self.refusal
        self.consumers.append(Scripted())
        return self.consumers[-1]

    def _receive(self, partition: int, epoch: int, records: list[IncomingRecord], position: int, end: int) -> None:
        self.threads.add(threading.current_thread())
        self.received.append((partition, epoch, [record.value for record in records], position, end))
        self.on_receive(partition, epoch)

    def _fail(self, partition: int, epoch: int, error: Exception) -> None:
        self.threads.add(threading.current_thread())
        self.failed.append((partition, epoch, error))

    def follow(self, *partitions: int, offset: int = 0) -> Scripted:
        """Follow them, in the epochs 1, 2, ..., and wait until the consumer was told."""
        for partition in partitions:
            self.tail.add(partition, offset, partition + 1)
            wait_until(lambda: self.consumers and ("add", partition, offset) in self.consumers[-1].told)  # noqa: B023
        return self.consumers[-1]

    def hears(self, *calls: Call) -> None:
        wait_until(lambda: len(self.received) >= len(calls), self.received)
        assert self.received == list(calls)

    def end(self) -> None:
        self.tail.close()
        thread = self.tail._thread
        if thread is not None:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert all(consumer.closed.is_set() for consumer in self.consumers)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.end()


def test_what_is_new_comes_with_its_epoch_on_the_tails_own_thread(stage: Stage) -> None:
    """Caught up below the end, it is told so by a call without records."""
    assert stage.tail._thread is None, "none before there is something to do"
    consumer = stage.follow(3, offset=LOG_START)
    consumer.news.put(news(3, 5, 6))
    consumer.news.put(news(3, at_end=True))
    consumer.news.put(news(3, 7, at_end=True, end=9))
    consumer.news.put(news(3, 8, at_end=True, end=9))
    calls = [(3, 4, [b"5", b"6"], 7, 100), (3, 4, [], 100, 100), (3, 4, [b"7"], 8, 9), (3, 4, [], 8, 9)]
    stage.hears(*calls, (3, 4, [b"8"], 9, 9))
    assert stage.threads == {stage.tail._thread}
    assert consumer.told == [("add", 3, LOG_START)]


def test_nothing_comes_of_what_is_removed(stage: Stage) -> None:
    consumer = stage.follow(0)
    stage.tail.remove([0])
    consumer.news.put(news(0, 1))
    wait_until(lambda: ("remove", 0) in consumer.told)
    stage.follow(1)
    consumer.news.put(news(0, 2))  # a left-over
    consumer.news.put(news(1, 3))
    stage.hears((1, 2, [b"3"], 4, 100))
    stage.tail.remove([17])
    assert not stage.failed


def test_what_is_removed_in_receive_is_removed_at_once(stage: Stage) -> None:
    """Also what came with the same poll: of another partition, and the second call of the same one."""
    consumer = stage.follow(0, 1, 2)
    stage.on_receive = lambda _partition, _epoch: stage.tail.remove([0, 1])
    consumer.news.put({**news(0, 1, at_end=True), **news(1, 1), **news(2, 1)})
    stage.hears((0, 1, [b"1"], 2, 100), (2, 3, [b"1"], 2, 100))


def test_one_that_is_added_again_begins_anew(stage: Stage) -> None:
    consumer = stage.follow(0, offset=10)
    stage.on_receive = lambda _partition, epoch: stage.tail.add(0, 4, 2) if epoch == 1 else None
    consumer.news.put(news(0, 10, at_end=True))
    wait_until(lambda: ("add", 0, 4) in consumer.told)
    consumer.news.put(news(0, 4))
    stage.hears((0, 1, [b"10"], 11, 100), (0, 2, [b"4"], 5, 100))
    assert consumer.told == [("add", 0, 10), ("remove", 0), ("add", 0, 4)]


def test_taken_back_before_its_turn_it_never_reaches_the_consumer(stage: Stage) -> None:
    consumer = stage.follow(0)
    entered, go_on = threading.Event(), threading.Event()

    def dwell(_partition: int, _epoch: int) -> None:
        entered.set()
        assert go_on.wait(PATIENCE)

    stage.on_receive = dwell
    consumer.news.put(news(0, 1))
    assert entered.wait(PATIENCE)
    stage.tail.add(5, 0, 2)
    stage.tail.remove([5])
    stage.tail.add(6, 0, 3)
    go_on.set()
    wait_until(lambda: ("add", 6, 0) in consumer.told)
    assert ("add", 5, 0) not in consumer.told


# -- failures ----------------------------------------------------------------------------------------------------------


def test_what_receive_raises_ends_that_partition_only(stage: Stage) -> None:
    consumer, error = stage.follow(0, 1), KeyError("mine")

    def broken(partition: int, epoch: int) -> None:
        if epoch == 1:
            raise error

    stage.on_receive = broken
    consumer.news.put({**news(0, 1), **news(1, 1)})
    consumer.news.put({**news(0, 2), **news(1, 2)})
    calls = [(0, 1, [b"1"], 2, 100), (1, 2, [b"1"], 2, 100), (1, 2, [b"2"], 3, 100)]
    stage.hears(*calls)
    assert stage.failed == [(0, 1, error)]
    assert ("remove", 0) in consumer.told
    stage.tail.add(0, 1, 3)
    wait_until(lambda: ("add", 0, 1) in consumer.told)
    consumer.news.put(news(0, 1))
    stage.hears(*calls, (0, 3, [b"1"], 2, 100))


def test_a_partition_that_can_not_be_read_fails_after_what_came_before(stage: Stage) -> None:
    consumer, error = stage.follow(0, 1), OffsetError("gone")
    consumer.news.put((news(0, 1), {0: error, 9: OffsetError("nobody's")}))
    consumer.news.put({**news(0, 2), **news(1, 2)})
    stage.hears((0, 1, [b"1"], 2, 100), (1, 2, [b"2"], 3, 100))
    assert stage.failed == [(0, 1, error)]


def test_what_fail_raises_harms_nobody(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    consumer = stage.follow(0, 1)
    stage.tail.start(stage._receive, lambda *_: 1 / 0)  # type: ignore[arg-type]
    consumer.news.put((news(1, 1), {0: OffsetError("gone")}))
    consumer.news.put(news(1, 2))
    stage.hears((1, 2, [b"1"], 2, 100), (1, 2, [b"2"], 3, 100))
    assert "could not be reported" in caplog.text


def test_a_broken_consumer_ends_everything_that_it_read_and_is_replaced(stage: Stage) -> None:
    first, error = stage.follow(0, 1), RuntimeError("consumer closed")
    first.news.put(error)
    wait_until(lambda: stage.failed == [(0, 1, error), (1, 2, error)], stage.failed)
    wait_until(first.closed.is_set)
    second = stage.follow(0, offset=5)
    assert second is not first
    second.news.put(news(0, 5))
    stage.hears((0, 1, [b"5"], 6, 100))


def test_a_consumer_that_can_not_be_made_or_refuses_is_told(stage: Stage) -> None:
    stage.refusal = TopicError("no")
    stage.tail.add(0, 0, 1)
    wait_until(lambda: stage.failed == [(0, 1, stage.refusal)])
    stage.refusal = None
    consumer = stage.follow(1)
    consumer.refuse_add = KafkaException(KafkaError(KafkaError._STATE))
    stage.tail.add(2, 0, 3)
    wait_until(lambda: stage.failed[1:] == [(2, 3, consumer.refuse_add)])
    consumer.news.put(news(1, 1))
    stage.hears((1, 2, [b"1"], 2, 100))


# -- beginning and end -------------------------------------------------------------------------------------------------


def test_while_nothing_is_followed_it_sleeps_and_in_the_end_gives_the_consumer_back() -> None:
    stage = Stage()
    first = stage.follow(0)
    stage.tail.remove([0])
    wait_until(lambda: ("remove", 0) in first.told)
    polls = first.polls
    stage.follow(1)  # within the time: the same
    stage.tail._idle_seconds = 0.2
    stage.tail.remove([1])
    assert stage.consumers == [first]
    wait_until(first.closed.is_set)
    assert first.polls < polls + 50
    second = stage.follow(2)
    second.news.put(news(2, 1))
    stage.hears((2, 3, [b"1"], 2, 100))
    stage.end()


@pytest.mark.parametrize("before", ["never used", "asleep", "at work"])
def test_close_ends_it_and_nothing_is_followed_after(before: str) -> None:
    stage = Stage()
    if before != "never used":
        consumer = stage.follow(0)
    if before == "asleep":
        stage.tail.remove([0])
        wait_until(lambda: ("remove", 0) in consumer.told)
    stage.end()
    thread = stage.tail._thread
    stage.tail.add(1, 0, 2)
    stage.tail.remove([1])
    stage.tail.close()
    assert stage.tail._thread is thread
    assert all(("add", 1, 0) not in made.told for made in stage.consumers)


def test_nobody_hears_of_anything_before_start() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        Tail(Scripted).add(0, 0, 1)
