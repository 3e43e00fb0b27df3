"""The asyncio loop that a good programmer writes by hand over confluent-kafka, for the same work and guarantees.

A thread consumes; a task per busy key takes its events in order; a semaphore bounds the work that runs at a time. What
is complete, up to its partition's first event that is not, is sent and committed by one transaction after the other, on
a thread, by producers in turn. Outputs and state wait for their turn in the partition: an output that is committed
before the offset in front of it would come twice after a crash.
Option ``concurrency``. Nothing here survives a rebalance or a failure: that, types, stores and retries is what a
toolkit is for.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from benchmarks.async_work.workload import PARTITIONS, Answered, Asked, Job
from benchmarks.child import job_of

MOST_PENDING = 20_000
"""Events that are read and not committed."""
LARGEST_BATCH = 2_000
"""Events in a transaction."""
PRODUCERS = 3
"""Used in turn: one transactional id cannot commit back to back."""


class Pending:
    """An event between its arrival and its turn."""

    __slots__ = ("event", "is_done", "offset")

    def __init__(self, event: Asked, offset: int) -> None:
        self.event = event
        self.offset = offset
        self.is_done = False


class Loop:
    """One process's work."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.stopping = asyncio.Event()
        self.progress = asyncio.Event()
        self.slots = asyncio.Semaphore(int(job.options["concurrency"]))
        self.lines: dict[int, deque[Pending]] = {partition: deque() for partition in range(PARTITIONS)}
        self.queues: dict[str, deque[Pending]] = {}
        self.counts: dict[str, int] = {}
        self.pending = 0
        self.metadata: Any = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.threads = ThreadPoolExecutor(2)
        self.consumer = Consumer(
            {
                "bootstrap.servers": job.bootstrap_servers,
                "group.id": job.group,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
                "fetch.wait.max.ms": 20,
                "fetch.queue.backoff.ms": 5,
            }
        )
        self.producers = [self._producer(number) for number in range(PRODUCERS)]

    def _producer(self, number: int) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.job.bootstrap_servers,
                "transactional.id": f"{self.job.group}-{number}",
                "transaction.timeout.ms": 10_000,
                "partitioner": "murmur2_random",
                "linger.ms": 0,
                "retry.backoff.ms": 5,
                "delivery.report.only.error": True,
            }
        )
        producer.init_transactions(30)
        return producer

    async def run(self) -> None:
        """Until SIGTERM; what runs then is not waited for: it is not committed either."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
        self.consumer.subscribe([self.job.source], on_assign=self._assigned)
        parts = [asyncio.ensure_future(part) for part in (self._consume(), self._commit_all(), self.stopping.wait())]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        self.stopping.set()
        self.progress.set()
        await asyncio.gather(*parts)
        for task in self.tasks:
            task.cancel()
        await loop.run_in_executor(None, self.consumer.close)

    def _assigned(self, consumer: Consumer, _: list[TopicPartition]) -> None:
        """Asked for here, on the thread that polls: on another one the question waits for the end of a poll."""
        self.metadata = consumer.consumer_group_metadata()

    async def _consume(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopping.is_set():
            if self.pending >= MOST_PENDING:
                await asyncio.sleep(0.01)
                continue
            for message in await loop.run_in_executor(self.threads, self._poll):
                if message.error() is not None:
                    raise RuntimeError(message.error())
                self._begin(message)

    def _poll(self) -> list[Message]:
        first = self.consumer.poll(0.1)
        return [] if first is None else [first, *self.consumer.consume(499, 0)]

    def _begin(self, message: Any) -> None:
        pending = Pending(_decode(message.value()), message.offset())
        self.pending += 1
        self.lines[message.partition()].append(pending)
        key = pending.event.key
        queue = self.queues.get(key)
        if queue is not None:
            queue.append(pending)
            return
        self.queues[key] = deque((pending,))
        task = asyncio.create_task(self._work_through(key))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _work_through(self, key: str) -> None:
        queue = self.queues[key]
        while queue:
            async with self.slots:
                await asyncio.sleep(queue[0].event.milliseconds / 1000)
            queue.popleft().is_done = True
            self.progress.set()
        del self.queues[key]

    async def _commit_all(self) -> None:
        loop, turn = asyncio.get_running_loop(), 0
        while not self.stopping.is_set():
            await self.progress.wait()
            self.progress.clear()
            while batch := self._complete():
                await loop.run_in_executor(self.threads, self._commit, self.producers[turn], *batch)
                turn = (turn + 1) % PRODUCERS

    def _complete(self) -> tuple[list[tuple[str, bytes]], dict[str, int], dict[int, int]] | None:
        """Outputs, changes and offsets of what is next in each partition and done."""
        outputs: list[tuple[str, bytes]] = []
        changes: dict[str, int] = {}
        offsets: dict[int, int] = {}
        for partition, line in self.lines.items():
            while line and line[0].is_done and len(outputs) < LARGEST_BATCH:
                done = line.popleft()
                event = done.event
                count = changes[event.key] = self.counts[event.key] = self.counts.get(event.key, 0) + 1
                outputs.append((event.key, _encode(Answered(event.key, event.number, count, event.sent))))
                offsets[partition] = done.offset + 1
        self.pending -= len(outputs)
        return (outputs, changes, offsets) if outputs else None

    def _commit(
        self, producer: Producer, outputs: list[tuple[str, bytes]], changes: dict[str, int], offsets: dict[int, int]
    ) -> None:
        producer.begin_transaction()
        for key, value in outputs:
            producer.produce(self.job.output, value, key, headers=_HEADERS)
        for key, count in changes.items():
            producer.produce(self.job.changelog, b"%d" % count, key)
        producer.flush()
        positions = [TopicPartition(self.job.source, *position) for position in offsets.items()]
        producer.send_offsets_to_transaction(positions, self.metadata, 10)
        producer.commit_transaction(10)


_HEADERS: list[tuple[str, str | bytes | None]] = [("__grt__", b"Answered")]
_decode = msgspec.json.Decoder(Asked).decode
_encode = msgspec.json.Encoder().encode


async def main() -> None:
    """The process's way in."""
    await Loop(job_of(Job)).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
