"""The asyncio loop that a good programmer writes by hand over confluent-kafka, for the same work and guarantees.

A thread consumes; a task per busy key takes its events in order; a semaphore bounds the work that runs at a time. What
is complete, up to its partition's first event that is not, is sent and committed by one transaction after the other, on
a thread, by producers in turn. Outputs and state wait for their turn in the partition: an output that is committed
before the offset in front of it would come twice after a crash.
Option ``slots``: events that wait at a time. Nothing here survives a rebalance or a failure: that, types, stores and
retries are a toolkit's work.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from benchmarks.child import job_of
from benchmarks.handwritten import consumer_of, producer_of
from benchmarks.workload import Account, Balance, Deposited, Job, wait_seconds

MOST_PENDING = 20_000
"""Events that are read and not committed."""
LARGEST_BATCH = 2_000
"""Events in a transaction."""
PRODUCERS = 3
"""Used in turn: one transactional id cannot commit back to back."""


@dataclass(slots=True)
class Pending:
    """An event between its arrival and its turn."""

    event: Deposited
    offset: int
    is_done: bool = False


class Loop:
    """One process's work."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.stopping = asyncio.Event()
        self.progress = asyncio.Event()
        self.slots = asyncio.Semaphore(int(job.options.get("slots", "64")))
        self.lines: dict[int, deque[Pending]] = {partition: deque() for partition in range(job.partitions)}
        self.queues: dict[str, deque[Pending]] = {}
        self.states: dict[str, Account] = {}
        self.pending = 0
        self.metadata: Any = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.threads = ThreadPoolExecutor(2)
        self.consumer = consumer_of(job, {})
        self.producers = [producer_of(job, number, {"linger.ms": 0}) for number in range(PRODUCERS)]

    async def run(self) -> None:
        """Run until SIGTERM. Events that wait then are given up; they are not committed either."""
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
        """Fetch the metadata here, on the thread that polls: on another one the call waits for the end of a poll."""
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
        key = pending.event.account
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
                await asyncio.sleep(wait_seconds(queue[0].event.cents))
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

    def _complete(self) -> tuple[list[tuple[str, bytes]], dict[str, bytes], dict[int, int]] | None:
        """Take the events that are next in their partitions and done: outputs, changes and offsets."""
        outputs: list[tuple[str, bytes]] = []
        changes: dict[str, bytes] = {}
        offsets: dict[int, int] = {}
        for partition, line in self.lines.items():
            while line and line[0].is_done and len(outputs) < LARGEST_BATCH:
                done = line.popleft()
                event, key = done.event, done.event.account
                state = self.states.setdefault(key, Account())
                state.count += 1
                state.cents += event.cents
                changes[key] = _encode(state)
                outputs.append((key, _encode(Balance(key, state.count, state.cents, event.sent))))
                offsets[partition] = done.offset + 1
        self.pending -= len(outputs)
        return (outputs, changes, offsets) if outputs else None

    def _commit(
        self, producer: Producer, outputs: list[tuple[str, bytes]], changes: dict[str, bytes], offsets: dict[int, int]
    ) -> None:
        producer.begin_transaction()
        for key, value in outputs:
            producer.produce(self.job.output, value, key, headers=_HEADERS)
        for key, value in changes.items():
            producer.produce(self.job.changelog, value, key)
        producer.flush()
        positions = [TopicPartition(self.job.source, *position) for position in offsets.items()]
        producer.send_offsets_to_transaction(positions, self.metadata, 10)
        producer.commit_transaction(10)


_HEADERS: list[tuple[str, str | bytes | None]] = [("__grt__", b"Balance")]
_decode = msgspec.json.Decoder(Deposited).decode
_encode = msgspec.json.Encoder().encode


async def main() -> None:
    """Run the process."""
    await Loop(job_of(Job)).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
