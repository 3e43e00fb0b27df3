"""A process that notes when each committed output arrived, until SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
import time

import msgspec
from confluent_kafka import Consumer, TopicPartition

from benchmarks.child import job_of
from benchmarks.stalls.workload import LATE_FETCH_MS, Seen, Stepped, Watch
from benchmarks.workload import PARTITIONS


def watch(job: Watch, stop: threading.Event) -> list[Seen]:
    """Read until told to stop."""
    consumer = Consumer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": LATE_FETCH_MS,
            "queued.min.messages": 1_000_000,
        }
    )
    consumer.assign([TopicPartition(job.topic, partition, 0) for partition in range(PARTITIONS)])
    arrivals = []
    while not stop.is_set():
        first = consumer.poll(0.1)
        if first is not None:
            arrivals.append((time.time(), [first, *consumer.consume(2_000, 0)]))
    consumer.close()
    decode = msgspec.json.Decoder(Stepped).decode
    seen = []
    for arrived, messages in arrivals:
        for message in messages:
            if message.error() is not None:
                raise RuntimeError(message.error())
            step = decode(message.value() or b"")
            seen.append(Seen(arrived, message.partition() or 0, step.count, step.sent, step.handled, step.by))
    return seen


if __name__ == "__main__":
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    sys.stdout.buffer.write(msgspec.json.encode(watch(job_of(Watch), stopped)))
