"""The loop that a good programmer writes by hand with confluent-kafka, for the same work and the same guarantees.

Two transactional producers in turn: while one's transaction commits on a thread, the other's fills. A transaction ends
after so many events (option ``events``) or so many milliseconds (option ``delay_ms``). A producer's records are
acknowledged before the next one's are sent, or a key's outputs could land out of order. Nothing here survives a
rebalance or a failure: that, types, stores and retries is what a toolkit is for. Several processes share the work
without a group: option ``share=1/3`` is the second of three, and takes each third partition. Option ``trace``: a file
for when which events had come how far (``benchmarks.tracing``).
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks import tracing
from benchmarks.child import job_of
from benchmarks.workload import Account, Balance, Job, kinds


class Loop:
    """One process's work, on the thread that calls ``run``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.events = int(job.options.get("events", "1000"))
        self.delay = float(job.options.get("delay_ms", "10")) / 1000
        self.share = job.options.get("share", "")
        self.trace = tracing.Trace() if tracing.OPTION in job.options else None
        self.decoders = {kind.__name__.encode(): msgspec.json.Decoder(kind).decode for kind in kinds(job.shape.types)}
        self.stopping = False
        self.states: dict[str, Account] = {}
        self.offsets: dict[int, int] = {}
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
                "queued.min.messages": 20_000,
            }
        )
        self.producers = [self._producer(number) for number in range(2)]
        self.commits: queue.SimpleQueue[tuple[Producer, list[TopicPartition], Any] | None] = queue.SimpleQueue()
        self.committed = threading.Semaphore(1)
        self.failure: BaseException | None = None

    def _producer(self, number: int) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.job.bootstrap_servers,
                "transactional.id": f"{self.job.group}-{self.share.replace('/', '-')}-{number}",
                "transaction.timeout.ms": 10_000,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
                "retry.backoff.ms": 5,
                "queue.buffering.max.messages": 1_000_000,
                "delivery.report.only.error": True,
            }
        )
        producer.init_transactions(30)
        return producer

    def run(self) -> None:
        """Until SIGTERM."""
        committer = threading.Thread(target=self._commit_all)
        committer.start()
        self._take_partitions()
        turn = 0
        while not self.stopping:
            producer = self.producers[turn]
            if self._fill(producer):
                self._mark("sealed", self.offsets)
                self._mark("flushing", self.offsets)
                producer.flush()  # acknowledged before the other one's records are sent
                self._mark("flushed", self.offsets)
                self.committed.acquire()
                if self.failure is not None:
                    raise self.failure
                offsets = [TopicPartition(self.job.source, *position) for position in self.offsets.items()]
                self.offsets = {}
                self.commits.put((producer, offsets, self.consumer.consumer_group_metadata()))
                turn = 1 - turn
        self.commits.put(None)
        committer.join()
        self.consumer.close()

    def _take_partitions(self) -> None:
        if not self.share:
            self.consumer.subscribe([self.job.source])
            return
        mine, _, of = self.share.partition("/")
        shared = range(int(mine), self.job.shape.partitions, int(of))
        self.consumer.assign([TopicPartition(self.job.source, partition) for partition in shared])

    def _fill(self, producer: Producer) -> int:
        """Handle events until the transaction is large or old enough; how many."""
        count, deadline = 0, 0.0
        while count < self.events and not self.stopping:
            wait = 0.1 if not count else deadline - time.monotonic()
            if wait <= 0:
                break
            first = self.consumer.poll(wait)
            if first is None:
                continue
            if not count:
                producer.begin_transaction()
                deadline = time.monotonic() + self.delay
            messages = (first, *self.consumer.consume(min(500, self.events - count) - 1, 0))
            received = time.time()
            for message in messages:
                if message.error() is not None:
                    raise RuntimeError(message.error())
                self._handle(producer, message)
                count += 1
            self._mark("received", self.offsets, received)
            self._mark("handled", self.offsets)
            producer.poll(0)
        return count

    def _handle(self, producer: Producer, message: Any) -> None:
        decode = None
        for name, kind in message.headers():
            if name == "__grt__":
                decode = self.decoders.get(kind)
                break
        if decode is None:
            raise RuntimeError(f"an event without a known type: {message.headers()}")
        event = decode(message.value())
        key = event.account
        state = self.states.get(key)
        if state is None:
            state = self.states[key] = Account()
        state.count += 1
        state.cents += event.cents
        output = _encode(Balance(key, state.count, state.cents, event.sent))
        partition = message.partition()
        producer.produce(self.job.changelog, _encode(state), key, partition)
        producer.produce(self.job.output, output, key, headers=_HEADERS)
        self.offsets[partition] = message.offset() + 1

    def _commit_all(self) -> None:
        while (work := self.commits.get()) is not None:
            producer, offsets, metadata = work
            positions = {place.partition: place.offset for place in offsets}
            try:
                self._mark("began", positions)
                producer.send_offsets_to_transaction(offsets, metadata, 10)
                self._mark("offsets", positions)
                producer.commit_transaction(10)
                self._mark("committed", positions)
            except BaseException as error:
                self.failure = error
                return
            finally:
                self.committed.release()

    def _mark(self, point: str, offsets: dict[int, int], seconds: float | None = None) -> None:
        if self.trace is not None:
            self.trace.at(point, offsets, seconds)

    def stop(self, *_: object) -> None:
        """End after the transaction that is being filled."""
        self.stopping = True


_HEADERS: list[tuple[str, str | bytes | None]] = [("__grt__", b"Balance")]
_encode = msgspec.json.Encoder().encode


def main() -> None:
    """The process's way in."""
    loop = Loop(job_of(Job))
    signal.signal(signal.SIGTERM, loop.stop)
    loop.run()
    if loop.trace is not None:
        loop.trace.write(loop.job.options[tracing.OPTION])


if __name__ == "__main__":
    main()
