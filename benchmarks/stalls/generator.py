"""A process that sends one deposit to each partition in turn, at a fixed rate, until SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
import time

import msgspec
from confluent_kafka import KafkaError, Message, Producer

from benchmarks.child import job_of
from benchmarks.cluster import TYPE
from benchmarks.stalls.workload import Feed, account, cents
from benchmarks.workload import PARTITIONS, encoded

TICK_SECONDS = 0.001


class FeedResult(msgspec.Struct, frozen=True):
    """Deposits per partition; seconds until the broker had acknowledged one."""

    sent: list[int]
    acknowledged_p50: float
    acknowledged_p99: float
    acknowledged_max: float


def send(feed: Feed, stop: threading.Event) -> FeedResult:
    """Send until told to stop. What was due during a pause of this process is sent at once."""
    latencies: list[float] = []
    failed: list[str] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            latencies.append(message.latency() or 0.0)
        else:
            failed.append(error.str())

    producer = Producer(
        {
            "bootstrap.servers": feed.bootstrap_servers,
            "linger.ms": 0,
            "enable.idempotence": True,
            "on_delivery": delivered,
        }
    )
    sent, began = 0, time.time()
    while not stop.is_set():
        due = int((time.time() - began) * feed.rate)
        while sent < due:
            partition, turn = sent % PARTITIONS, sent // PARTITIONS
            name = account(partition)
            value = encoded(name, cents(turn + 1), time.time())
            producer.produce(feed.topic, value, name, partition=partition, headers=TYPE)
            sent += 1
        producer.poll(0)
        time.sleep(TICK_SECONDS)
    left = producer.flush(30)
    if left or failed:
        raise RuntimeError(f"{left + len(failed)} deposits were not delivered: {failed[:1]}")
    latencies.sort()
    half, most = (latencies[int(len(latencies) * share)] if latencies else 0.0 for share in (0.5, 0.99))
    counts = [sent // PARTITIONS + (partition < sent % PARTITIONS) for partition in range(PARTITIONS)]
    return FeedResult(counts, half, most, latencies[-1] if latencies else 0.0)


if __name__ == "__main__":
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    sys.stdout.buffer.write(msgspec.json.encode(send(job_of(Feed), stopped)))
