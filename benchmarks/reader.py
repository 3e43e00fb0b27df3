"""A process that reads the committed outputs as they come, times them, and judges them."""

from __future__ import annotations

import sys
import time

import msgspec
from confluent_kafka import Consumer, TopicPartition

from benchmarks.child import job_of
from benchmarks.workload import PARTITIONS, Balance, Judge

SILENCE_SECONDS = 20


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Read ``events`` outputs of the seed; time those after the first ``skip``."""

    bootstrap_servers: str
    topic: str
    seed: int
    skip: int
    events: int


class WatchResult(msgspec.Struct, frozen=True):
    """Milliseconds from the generator's clock to this reader; the worst by second. ``fault``: see ``Judge``."""

    timed: int
    p50: float
    p90: float
    p99: float
    highest: float
    highest_by_second: list[float]
    fault: str


def watch(job: Watch) -> WatchResult:
    """Read until all are there, or nothing comes any more."""
    consumer = Consumer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 10,
            "queued.min.messages": 1_000_000,
        }
    )
    consumer.assign([TopicPartition(job.topic, partition, 0) for partition in range(PARTITIONS)])
    decode = msgspec.json.Decoder(Balance).decode
    judge = Judge()
    seconds: list[float] = []
    by_second: dict[int, float] = {}
    heard = time.monotonic()
    while judge.outputs < job.events and time.monotonic() - heard < SILENCE_SECONDS:
        first = consumer.poll(0.1)
        if first is None:
            continue
        messages = [first, *consumer.consume(500, 0)]
        now = time.time()
        heard = time.monotonic()
        for message in messages:
            if message.error() is not None:
                raise RuntimeError(message.error())
            balance = decode(message.value() or b"")
            judge.hear((message.key() or b"").decode(), balance)
            if judge.outputs > job.skip:
                late = now - balance.sent
                seconds.append(late)
                second = int(balance.sent)
                by_second[second] = max(by_second.get(second, 0.0), late * 1000)
    consumer.close()
    times = sorted(seconds) or [0.0]
    p50, p90, p99 = (times[int(len(times) * share)] * 1000 for share in (0.5, 0.9, 0.99))
    worst = [by_second[second] for second in sorted(by_second)]
    return WatchResult(len(seconds), p50, p90, p99, times[-1] * 1000, worst, judge.verdict(job.seed, job.events))


if __name__ == "__main__":
    result = watch(job_of(Watch))
    sys.stdout.buffer.write(msgspec.json.encode(result))
