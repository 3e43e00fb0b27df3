"""The work of the measure ``journal``, in a process of its own: ``python -m benchmarks.journal.work JOB``.

Prints the figures as JSON. The member of a take-over (``lead``) writes what happens to it to a file.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.child import job_of
from benchmarks.reader import percentiles
from streams import Journal
from streams.journal import JournalEntry, JournalTerm

BULK_CHUNK, BULK_WAITING = 500, 20
"""Entries of one append, and appends that are under way."""
LOOP_BATCH = 5_000
"""Entries of one transaction of the loop by hand."""
FOLLOW_SECONDS = 0.005
"""Between two appends that are followed."""


class JournalJob(msgspec.Struct, frozen=True):
    """``what``: a key of ``WORK``. ``count``: entries, or samples. ``seconds``: of each run at a fixed concurrency.
    ``notes``: the file of a member."""

    what: str
    way: str
    bootstrap_servers: str
    topic: str
    callers: int = 1
    size: int = 100
    count: int = 0
    seconds: float = 3.0
    session_seconds: float = 6.0
    notes: str = ""


class Figures(msgspec.Struct, frozen=True):
    """``per_second`` of all, ``cpu_us`` of this process for each, ``p50`` and ``p99`` in milliseconds."""

    done: int = 0
    per_second: float = 0.0
    cpu_us: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


def journal_of(job: JournalJob) -> Journal:
    """The journal of the job; on one broker."""
    return Journal(
        job.topic,
        bootstrap_servers=job.bootstrap_servers,
        replication_factor=1,
        min_insync_replicas=1,
        session_seconds=job.session_seconds,
    )


class Clock:
    """Wall and processor time from its making on, and the times of single calls."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._wall

    def timed(self, since: float, calls: int = 1) -> None:
        """Note calls that took from ``since`` (``perf_counter``) until now."""
        self.times += [(time.perf_counter() - since) * 1e3] * calls

    def figures(self, done: int) -> Figures:
        """Return the figures of what was done until now."""
        seconds, cpu = self.seconds, time.process_time() - self._cpu
        p50, p99, _ = percentiles(self.times) if self.times else (0.0, 0.0, 0.0)
        return Figures(done, done / seconds, cpu / max(done, 1) * 1e6, p50, p99)


async def append(job: JournalJob) -> Figures:
    """Append by so many callers at once, each one entry after the other, for some seconds."""
    async with journal_of(job).lead() as term:
        return await _callers(job, lambda: term.append(b"x" * job.size))


async def barrier(job: JournalJob) -> Figures:
    """Wait for barriers, by so many callers at once."""
    async with journal_of(job).lead() as term:
        return await _callers(job, term.barrier)


async def _callers(job: JournalJob, call: Callable[[], Awaitable[object]]) -> Figures:
    await call()
    clock = Clock()

    async def caller() -> None:
        while clock.seconds < job.seconds:
            began = time.perf_counter()
            await call()
            clock.timed(began)

    await asyncio.gather(*(caller() for _ in range(job.callers)))
    return clock.figures(len(clock.times))


async def bulk(job: JournalJob) -> Figures:
    """Append ``count`` entries, some hundreds with each call, and some calls at a time."""
    async with journal_of(job).lead() as term:
        await term.append(b"first")
        clock = Clock()
        await _bulk(term, job.count, job.size)
        return clock.figures(job.count)


async def _bulk(term: JournalTerm, count: int, size: int) -> None:
    under_way = []
    for start in range(0, count, BULK_CHUNK):
        under_way.append(term.submit(*[b"x" * size] * min(BULK_CHUNK, count - start)))
        if len(under_way) > BULK_WAITING:
            await under_way.pop(0)
    for one in under_way:
        await one


async def catch_up(job: JournalJob) -> Figures:
    """Read the whole log."""
    async with journal_of(job).reader() as reader:
        clock, entries = Clock(), 0
        async for item in reader.catch_up():
            entries += isinstance(item, JournalEntry)
        return clock.figures(entries)


async def follow(job: JournalJob) -> Figures:
    """Append one entry after the other, and take the time from the return of ``append`` until a follower has it."""
    journal, done = journal_of(job), dict[int, float]()
    async with journal.reader() as reader, journal.lead() as term:
        clock = Clock()

        async def read() -> None:
            async for item in reader.follow():
                if isinstance(item, JournalEntry):
                    seen[item.position] = time.perf_counter()
                    if len(seen) == job.count:
                        return

        seen: dict[int, float] = {}
        reading = asyncio.create_task(read())
        for _ in range(job.count):
            done[await term.append(b"x" * job.size)] = time.perf_counter()
            await asyncio.sleep(FOLLOW_SECONDS)
        await reading
        clock.times = [max(0.0, seen[place] - at) * 1e3 for place, at in done.items()]
        return clock.figures(job.count)


async def checkpoint(job: JournalJob) -> Figures:
    """Make empty checkpoints while others append: the times of their blocks, for which appends wait."""
    async with journal_of(job).lead() as term:
        clock = Clock()
        appending = [asyncio.create_task(_endless(term, job.size)) for _ in range(job.callers)]
        for _ in range(job.count):
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            async with term.checkpoint():
                pass
            clock.timed(began)
        for task in appending:
            task.cancel()
        await asyncio.gather(*appending, return_exceptions=True)
        return clock.figures(job.count)


async def _endless(term: JournalTerm, size: int) -> None:
    while True:
        await term.append(b"x" * size)


async def lead(job: JournalJob) -> Figures:
    """Stand, and lead until SIGTERM. Its notes are ``member ID`` once it has joined, and ``leads SECONDS`` (of the
    system's monotonic clock) when its term has begun and an entry is appended."""
    stopped, candidate = asyncio.Event(), journal_of(job).candidate()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)

    async def work() -> None:
        async with journal_of(job).lead(candidate=candidate) as term:
            await term.append(b"first")
            _note(job, f"leads {time.monotonic()}")
            await stopped.wait()

    leading = asyncio.create_task(work())
    while not candidate.member_id and not leading.done():
        await asyncio.sleep(0.01)
    _note(job, f"member {candidate.member_id}")
    ended = asyncio.create_task(stopped.wait())
    await asyncio.wait([leading, ended], return_when=asyncio.FIRST_COMPLETED)
    if not leading.done():
        if candidate.is_elected:
            await asyncio.wait([leading], timeout=10)
        leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    return Figures()


def _note(job: JournalJob, line: str) -> None:
    with open(job.notes, "a") as file:
        file.write(line + "\n")


# -- by hand -----------------------------------------------------------------------------------------------------------


def _transactional(job: JournalJob) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "transactional.id": f"{job.topic}.by-hand",
            "linger.ms": 0,
            "queue.buffering.max.messages": 100_000,
            "message.max.bytes": 1_000_000,
            "log_level": 2,
        }
    )
    producer.init_transactions(30)
    return producer


def _commit(producer: Producer, topic: str, value: bytes, count: int, noted: list[int]) -> None:
    """Send entries in one transaction, and note their offsets, as `append` returns them."""
    producer.begin_transaction()
    headers: list[tuple[str, str | bytes | None]] = [("__grt__", b"bytes")]
    for _ in range(count):
        producer.produce(
            topic, value, headers=headers, partition=0, on_delivery=lambda _, m: noted.append(m.offset() or 0)
        )
    producer.commit_transaction(30)


async def append_by_hand(job: JournalJob) -> Figures:
    """Commit an entry of each caller in one transaction after the other."""
    producer, noted = _transactional(job), list[int]()
    _commit(producer, job.topic, b"first", 1, noted)
    clock, done = Clock(), 0
    while clock.seconds < job.seconds:
        began = time.perf_counter()
        _commit(producer, job.topic, b"x" * job.size, job.callers, noted)
        clock.timed(began, job.callers)
        done += job.callers
    return clock.figures(done)


async def bulk_by_hand(job: JournalJob) -> Figures:
    """Commit thousands of entries in one transaction after the other."""
    producer, noted = _transactional(job), list[int]()
    _commit(producer, job.topic, b"first", 1, noted)
    clock = Clock()
    for start in range(0, job.count, LOOP_BATCH):
        _commit(producer, job.topic, b"x" * job.size, min(LOOP_BATCH, job.count - start), noted)
    return clock.figures(job.count)


async def catch_up_by_hand(job: JournalJob) -> Figures:
    """Read the whole log with the client alone: each value, nothing checked."""
    consumer = Consumer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": "none",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 2,
        }
    )
    clock, entries, is_over = Clock(), 0, False
    consumer.assign([TopicPartition(job.topic, 0, 0)])
    while not is_over:
        for message in consumer.consume(2_000, 0.2):
            if message.error() is not None:
                is_over = True
            elif message.value():
                entries += 1
    figures = clock.figures(entries)
    consumer.close()
    return figures


async def append_unfenced(job: JournalJob) -> Figures:
    """As the seed does it: each entry by itself, acknowledged by the leader of the partition alone, fenced by
    nothing."""
    producer = Producer({"bootstrap.servers": job.bootstrap_servers, "acks": "1", "linger.ms": 0, "log_level": 2})
    clock = Clock()
    while clock.seconds < job.seconds:
        began = time.perf_counter()
        producer.produce(job.topic, b"x" * job.size, partition=0)
        producer.flush(30)
        clock.timed(began)
    return clock.figures(len(clock.times))


Work = Callable[[JournalJob], Coroutine[Any, Any, Figures]]
WORK: dict[tuple[str, str], Work] = {
    ("append", "Journal"): append,
    ("append", "by hand"): append_by_hand,
    ("append", "one by one, acks=1"): append_unfenced,
    ("bulk", "Journal"): bulk,
    ("bulk", "by hand"): bulk_by_hand,
    ("catch up", "Journal"): catch_up,
    ("catch up", "by hand"): catch_up_by_hand,
    ("follow", "Journal"): follow,
    ("barrier", "Journal"): barrier,
    ("checkpoint", "Journal"): checkpoint,
    ("lead", "Journal"): lead,
}


if __name__ == "__main__":
    the_job = job_of(JournalJob)
    found = asyncio.run(WORK[the_job.what, the_job.way](the_job))
    sys.stdout.buffer.write(msgspec.json.encode(found))
