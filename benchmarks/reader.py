"""A process that reads the committed outputs as they come: it times them, judges them, and notes silent partitions."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

import msgspec
from confluent_kafka import Consumer, TopicPartition

from benchmarks.child import job_of
from benchmarks.workload import PARTITIONS, Judge, Signed

SILENCE_SECONDS = 20
SHORTEST_SECONDS = 0.02
"""Shorter silences are not noted."""


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Read ``events`` outputs of the seed (0: until SIGTERM, and without a verdict), or until nothing came for
    ``SILENCE_SECONDS``; time those after the first ``skip``. ``gaps``: note silences."""

    bootstrap_servers: str
    topic: str
    seed: int = 0
    skip: int = 0
    events: int = 0
    partitions: int = PARTITIONS
    gaps: bool = False


class Gap(msgspec.Struct, frozen=True):
    """A partition without outputs. Seconds since the epoch by this machine's clock. ``moved``: another process wrote
    the output that ended it."""

    partition: int
    since: float
    until: float
    moved: bool = False


class WatchResult(msgspec.Struct, frozen=True):
    """Milliseconds from the generator's clock to this reader; the median of the last tenth, which shows whether the
    system fell behind. ``fault``: see ``Judge``."""

    p50: float
    p99: float
    highest: float
    p50_at_end: float
    gaps: list[Gap]
    fault: str


def watch(job: Watch) -> WatchResult:
    """Read until all are there. Raises ``RuntimeError`` for a partition that cannot be read."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    consumer = Consumer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 5,
            "queued.min.messages": 1_000_000,
        }
    )
    consumer.assign([TopicPartition(job.topic, partition, 0) for partition in range(job.partitions)])
    decode, judge = msgspec.json.Decoder(Signed).decode, Judge()
    late: list[float] = []
    gaps: list[Gap] = []
    last: dict[int, tuple[float, str]] = {}
    until = time.monotonic() + SILENCE_SECONDS
    while not stopping and not 0 < job.events <= judge.outputs and (not job.events or time.monotonic() < until):
        first = consumer.poll(0.1)
        if first is None:
            continue
        messages = [first, *consumer.consume(2_000, 0)]
        now, until = time.time(), time.monotonic() + SILENCE_SECONDS
        for message in messages:
            if message.error() is not None:
                raise RuntimeError(message.error())
            balance = decode(message.value() or b"")
            judge.add((message.key() or b"").decode(), balance)
            if judge.outputs > job.skip:
                late.append((now - balance.sent) * 1000)
            if job.gaps:
                partition = message.partition() or 0
                since, writer = last.get(partition, (now, balance.by))
                if now - since > SHORTEST_SECONDS or writer != balance.by:
                    gaps.append(Gap(partition, since, now, writer != balance.by))
                last[partition] = now, balance.by
    consumer.close()
    fault = judge.verdict(job.seed, job.events) if job.events else ""
    at_end, *_ = percentiles(late[-max(len(late) // 10, 1) :])
    return WatchResult(*percentiles(late), at_end, gaps, fault)


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """50 %, 99 % and the highest; zeros of nothing."""
    ordered = sorted(values) or [0.0]
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(watch(job_of(Watch))))
