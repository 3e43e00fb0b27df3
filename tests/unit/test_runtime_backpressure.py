"""Who is slow holds up only itself: the poll thread, the queues and the engine between them, over a consumer that
never runs dry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streams import EventSourceConfig, QueueConfig
from streams.core.admission import size_of_records
from streams.core.partition import PartitionState
from streams.errors import OffsetError
from streams.records import IncomingRecord, PolledPartition
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.partition.inbox import Inbox
from streams.runtime.reading.poller import Poller
from streams.runtime.signal import Signal
from tests.unit.runtime_kit import FakeConsumer
from tests.unit.waiting import PATIENCE

QUEUE, POLL = 500, 50
ROOM = 8 * POLL
"""As in production: less than what a partition may queue, so that a hung one uses up all of it before it is full."""


CONFIG = EventSourceConfig(group_id="g", topic="t", num_partitions=9, queues=QueueConfig(max_queued_records=100))


def records_of(partition: int, offset: int, count: int, size: int = 1) -> list[IncomingRecord]:
    value = b"x" * size
    return [IncomingRecord("t", partition, number, None, value, None) for number in range(offset, offset + count)]


def partitions_over(source: Any, config: EventSourceConfig, workers: Any) -> Partitions:
    nothing: Any = None
    member: Any = SimpleNamespace(input=source, further_inputs=(), config=config, workers=workers, now=time.monotonic)
    return Partitions(member, nothing, nothing, nothing, {})


class Endless(FakeConsumer):
    """Always has more, of each partition that is not paused."""

    def __init__(self, record_size: int = 1) -> None:
        super().__init__()
        self._size = record_size

    def poll_batch(self, timeout_seconds: float, limit: int) -> dict[int, PolledPartition]:
        if not (live := self.live):
            self.closed.wait(timeout_seconds)
        share = limit // max(len(live), 1)
        return self.moved({number: records_of(number, self.positions[number], share, self._size) for number in live})


class Queued:
    """``DeliveredRecords`` whose task never waits: all records are queued."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def take(self, records: list[IncomingRecord], size: int, _: int) -> int:
        self._inbox.add(records, size)
        return 0


class Bench:
    """The engine's parts between the consumer and the handlers, without the rest of it."""

    def __init__(
        self,
        partitions: int,
        *,
        record_size: int = 1,
        most_bytes: int = 1 << 30,
        room_bytes: int = 1 << 30,
        total_bytes: int = 1 << 40,
    ) -> None:
        self.consumer = Endless(record_size)
        self.poller = Poller(lambda: self.consumer, max_poll_records=POLL, room=ROOM, room_bytes=room_bytes)
        config = EventSourceConfig(
            group_id="g",
            topic="t",
            num_partitions=partitions,
            queues=QueueConfig(
                max_queued_records=QUEUE, max_queued_bytes=most_bytes, max_queued_bytes_total=total_bytes
            ),
        )
        self.inboxes = [Inbox(config, self.poller, number, Signal()) for number in range(partitions)]
        self.handled = [0] * partitions
        self.failures: list[Exception] = []
        workers = {
            number: SimpleNamespace(
                state=PartitionState.ACTIVE, epoch=1, inbox=inbox, inboxes=[inbox], delivery=Queued(inbox)
            )
            for number, inbox in enumerate(self.inboxes)
        }
        self._partitions = partitions_over(self.poller, config, workers)

    def start(self, before: Callable[[], None] = lambda: None) -> None:
        """``before`` is called before the engine makes room."""

        def make_room() -> None:
            before()
            self._partitions.make_room(0)

        self.poller.start(self._partitions.deliver, make_room, self.failures.append)
        for number in range(len(self.inboxes)):
            self.poller.add(number, 0, 1)

    def handle_all(self, number: int) -> None:
        """What a slice of plain handlers does, at once."""
        inbox = self.inboxes[number]
        while inbox:
            records = inbox.take()
            assert [record.offset for record in records] == list(
                range(self.handled[number], self.handled[number] + len(records))
            )
            self.handled[number] += len(records)
            inbox.handled(len(records))

    async def until(self, condition: Callable[[], bool], what: str, working: Collection[int] = ()) -> None:
        """Wait, while these partitions handle what comes."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.handled} handled, {self.queues} queued"
            assert not self.failures
            for number in working:
                self.handle_all(number)
            await asyncio.sleep(0.001)

    @property
    def queues(self) -> list[int]:
        return [inbox.records for inbox in self.inboxes]


@pytest.fixture
def bench_of() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(partitions: int, **settings: int) -> Bench:
        made.append(Bench(partitions, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.poller.close()
        assert bench.consumer.closed.wait(PATIENCE), "the poll thread ends"


@pytest.mark.parametrize("hung", [{0}, {0, 1, 2}, {1, 3}], ids=str)
async def test_hung_partitions_do_not_stop_the_others(bench_of: Any, hung: set[int]) -> None:
    """None of the hung ones has a full queue when the room is used up, so nobody is paused for that reason."""
    bench = bench_of(4)
    working = {0, 1, 2, 3} - hung
    bench.start()
    await bench.until(lambda: all(bench.handled[number] > 10 * ROOM for number in working), "the others go on", working)
    assert sum(bench.queues[number] for number in hung) <= len(hung) * QUEUE + ROOM + POLL, "and memory stays flat"
    for number in hung:
        assert bench.handled[number] == 0
        assert bench.inboxes[number].paused or not bench.queues[number]
    await bench.until(
        lambda: all(bench.handled[number] > 10 * ROOM for number in hung), "once they work again", range(4)
    )
    assert not any(inbox.paused and not inbox for inbox in bench.inboxes), "an empty queue is read"


async def test_large_records_that_hang_do_not_stop_small_steps(bench_of: Any) -> None:
    """The same in bytes: two queues that are half full each are all of the room."""
    room = 1_000_000
    bench = bench_of(3, record_size=10_000, most_bytes=room, room_bytes=room)
    bench.start()
    await bench.until(lambda: bench.handled[2] > 1_000, "ten times the room goes by", [2])
    assert sum(inbox.size for inbox in bench.inboxes[:2]) <= 3 * room
    await bench.until(lambda: bench.handled[0] > 500 and bench.handled[1] > 500, "the others, at last", range(3))


@pytest.mark.parametrize(
    ("record_size", "room_bytes", "most"),
    [(1, 1 << 30, ROOM + POLL), (1_000, 20_000, 20 + POLL)],
    ids=["count", "bytes"],
)
async def test_nothing_is_polled_without_room(bench_of: Any, record_size: int, room_bytes: int, most: int) -> None:
    """Seen at the moment of the question, which is asked only after several polls were left out."""
    bench = bench_of(2, record_size=record_size, room_bytes=room_bytes)
    polled_when_asked: list[int] = []

    def look() -> None:
        polled_when_asked.append(sum(bench.consumer.positions.values()))

    bench.start(look)
    await bench.until(lambda: bool(polled_when_asked), "it asks for room")
    assert polled_when_asked[0] <= most
    assert bench.queues != [0, 0]


async def test_a_question_that_comes_too_late_pauses_nobody(bench_of: Any) -> None:
    """All was handled while the question was on its way: a pause of an empty queue would never end."""
    bench = bench_of(1, record_size=1_000, room_bytes=10_000)  # one poll is more than the room
    questions = 0

    def handle_before_the_question() -> None:
        nonlocal questions
        questions += 1
        bench.handle_all(0)

    bench.start(handle_before_the_question)
    await bench.until(lambda: questions >= 3, "it asks again, each time that there is no room")
    assert bench.handled[0] >= 2 * POLL
    assert not bench.inboxes[0].paused


async def test_a_partition_that_cannot_be_read_ends_the_input_once(bench_of: Any) -> None:
    """What else comes may be of a recreated topic."""
    bench = bench_of(2)
    bench.consumer.failures = {number: OffsetError(f"t[{number}]") for number in range(2)}
    bench.start()
    assert await asyncio.to_thread(bench.consumer.closed.wait, PATIENCE)
    while not bench.failures:  # all of them were posted before the consumer was closed
        await asyncio.sleep(0.001)
    assert [str(error) for error in bench.failures] == ["t[0]"]


class Told:
    """``ports.Input`` that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.calls.append((name, *values))


def ask(told: Told, **inboxes: Inbox) -> None:
    workers = {name: SimpleNamespace(inbox=inbox, inboxes=[inbox]) for name, inbox in inboxes.items()}
    partitions_over(told, CONFIG, workers).make_room(0)


def inbox_of(told: Any, partition: int = 0) -> Inbox:
    return Inbox(CONFIG, told, partition, Signal())


def add(inbox: Inbox, records: list[IncomingRecord]) -> None:
    inbox.add(records, size_of_records(records))


def test_the_one_with_most_makes_room() -> None:
    told = Told()
    few, many, none = (inbox_of(told, number) for number in range(3))
    add(few, records_of(0, 0, 3, 10))
    add(many, records_of(1, 0, 5, 10))
    ask(told, few=few, many=many, none=none)
    assert told.calls == [("pause", 1), ("handled", 5, 50)]
    ask(told, few=few, many=many, none=none)
    assert told.calls[2:] == [("pause", 0), ("handled", 3, 30)], "next time it is another one's turn"


def test_short_batches_are_taken_as_one() -> None:
    inbox = inbox_of(Told())
    for offset, count in ((0, 100), (100, 100), (200, 50)):
        inbox.add(records_of(0, offset, count), count, short=128)
    assert [(batch[0].offset, len(batch)) for batch in (inbox.take(), inbox.take())] == [(0, 200), (200, 50)]
    assert not inbox


def test_bytes_that_count_make_room_though_no_record_counts() -> None:
    """Small records that are not counted any more wait before large ones that are: handling the small ones uncounts as
    many records, but few bytes."""
    told = Told()
    inbox = inbox_of(told)
    small = records_of(0, 0, 6, 1)
    add(inbox, small)
    inbox.hold()
    inbox.handled(3)  # half of it: resumed
    assert not inbox.paused
    add(inbox, records_of(0, 6, 3, 1_000))
    inbox.handled(3)
    assert (inbox.counted, inbox.counted_size) == (0, 2_997)
    told.calls.clear()
    ask(told, one=inbox)
    assert told.calls == [("pause", 0), ("handled", 0, 2_997)]


def test_a_held_queue_is_read_again_when_half_of_it_is_handled() -> None:
    told = Told()
    inbox = inbox_of(told)
    waiting = records_of(0, 0, 10)
    add(inbox, waiting)
    inbox.hold()
    assert told.calls == [("pause", 0), ("handled", 10, size_of_records(waiting))]
    inbox.handled(4)
    assert ("resume", 0) not in told.calls
    inbox.handled(1)
    assert told.calls[-1] == ("resume", 0)
    inbox.handled(5)
    assert (inbox.records, inbox.size, inbox.counted) == (0, 0, 0)
    assert sum(call[1] for call in told.calls if call[0] == "handled") == 10, "nothing is uncounted twice"


async def test_many_slow_ones_share_the_memory_of_the_process(bench_of: Any) -> None:
    """Twenty that hang, each with room for everything, and one that does not: it goes on, and the sum is bounded."""
    size, total = 1_000, 2_000_000
    bench = bench_of(21, record_size=size, total_bytes=total)
    bench.start()
    await bench.until(lambda: all(inbox.paused for inbox in bench.inboxes[1:]), "the slow ones are paused", [0])
    before = bench.handled[0]
    await bench.until(lambda: bench.handled[0] > before + QUEUE, "the quick one goes on", [0])
    assert sum(inbox.size for inbox in bench.inboxes) <= total + 21 * POLL * size, "and what one poll brings"
    assert bench.queues[1] < QUEUE, "long before its own queue is full"
