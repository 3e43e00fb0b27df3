"""The loop that a good programmer writes by hand with confluent-kafka, for the same work and the same guarantees.

Two transactional producers in turn: while one's transaction commits on a thread, the other's fills. A transaction ends
after so many events (option ``events``) or so many milliseconds (option ``delay_ms``). A producer's records are
acknowledged before the next one's are sent, or a key's outputs could land out of order. Nothing here survives a
rebalance or a failure: that, types, stores and retries are a toolkit's work.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.child import job_of
from benchmarks.workload import Account, Balance, Deposited, Job


def consumer_of(job: Job, settings: dict[str, Any]) -> Consumer:
    """Build a consumer for a loop written by hand."""
    return Consumer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": job.group,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,
            "fetch.wait.max.ms": 20,
            "fetch.queue.backoff.ms": 5,
            **settings,
        }
    )


def producer_of(job: Job, number: int, settings: dict[str, Any]) -> Producer:
    """Build a producer for a loop written by hand, ready for transactions."""
    producer = Producer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "transactional.id": f"{job.group}-{number}",
            "transaction.timeout.ms": 10_000,
            "partitioner": "murmur2_random",
            "retry.backoff.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
            "delivery.report.only.error": True,
            **settings,
        }
    )
    producer.init_transactions(30)
    return producer


class Loop:
    """One process's work, on the thread that calls ``run``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.events = int(job.options.get("events", "1000"))
        self.delay = float(job.options.get("delay_ms", "10")) / 1000
        self.decoders = {b"Deposited": msgspec.json.Decoder(Deposited).decode}
        self.stopping = False
        self.states: dict[str, Account] = {}
        self.offsets: dict[int, int] = {}
        self.consumer = consumer_of(job, {"queued.min.messages": 20_000})
        self.producers = [producer_of(job, number, {"linger.ms": 5}) for number in range(2)]
        self.commits: queue.SimpleQueue[tuple[Producer, list[TopicPartition], Any] | None] = queue.SimpleQueue()
        self.committed = threading.Semaphore(1)
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Run until SIGTERM."""
        committer = threading.Thread(target=self._commit_all)
        committer.start()
        self.consumer.subscribe([self.job.source])
        turn = 0
        while not self.stopping:
            producer = self.producers[turn]
            if self._fill(producer):
                producer.flush()  # acknowledged before the other one's records are sent
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

    def _fill(self, producer: Producer) -> int:
        """Handle events until the transaction is large or old enough; return their number."""
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
            for message in messages:
                if message.error() is not None:
                    raise RuntimeError(message.error())
                self._handle(producer, message)
                count += 1
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
            try:
                producer.send_offsets_to_transaction(offsets, metadata, 10)
                producer.commit_transaction(10)
            except BaseException as error:
                self.failure = error
                return
            finally:
                self.committed.release()

    def stop(self, *_: object) -> None:
        """End after the transaction that is being filled."""
        self.stopping = True


_HEADERS: list[tuple[str, str | bytes | None]] = [("__grt__", b"Balance")]
_encode = msgspec.json.Encoder().encode


if __name__ == "__main__":
    by_hand = Loop(job_of(Job))
    signal.signal(signal.SIGTERM, by_hand.stop)
    by_hand.run()
