"""A process that sends deposits at a fixed rate, each with the time at which it was sent."""

from __future__ import annotations

import sys
import time

import msgspec
from confluent_kafka import Producer

from benchmarks.child import job_of
from benchmarks.cluster import TYPE
from benchmarks.workload import deposits, encoded

TICK_SECONDS = 0.002


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``skip``: so many deposits of the seed were sent by somebody else already."""

    bootstrap_servers: str
    topic: str
    seed: int
    skip: int
    events: int
    rate: int


class LoadResult(msgspec.Struct, frozen=True):
    """How well the generator kept its rate: seconds that it was behind its own plan, at worst, and for 99 %."""

    behind_p99: float
    behind_most: float


def send(load: Load) -> LoadResult:
    """Send it all. What the plan had due by now is sent at once, so a pause of this process is made up for."""
    producer = Producer({"bootstrap.servers": load.bootstrap_servers, "partitioner": "murmur2_random", "linger.ms": 1})
    source = deposits(load.seed)
    for _ in range(load.skip):
        next(source)
    behind: list[float] = []
    began, sent = time.time(), 0
    while sent < load.events:
        due = min(int((time.time() - began) * load.rate), load.events)
        if sent < due:
            behind.append(time.time() - began - sent / load.rate)
        while sent < due:
            account, cents = next(source)
            producer.produce(load.topic, encoded(account, cents, time.time()), account, headers=TYPE)
            sent += 1
        producer.poll(0)
        time.sleep(TICK_SECONDS)
    if producer.flush(30):
        raise RuntimeError("the last deposits could not be delivered in 30 s")
    behind.sort()
    return LoadResult(behind[int(len(behind) * 0.99)], behind[-1])


if __name__ == "__main__":
    result = send(job_of(Load))
    sys.stdout.buffer.write(msgspec.json.encode(result))
