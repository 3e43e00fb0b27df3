"""A process that sends deposits at a fixed rate, each with the time at which it was sent."""

from __future__ import annotations

import sys
import time

import msgspec
from confluent_kafka import KafkaError, Message, Producer

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
    """Seconds that the generator was behind its own plan (99 %), and until the broker had acknowledged a deposit.

    A connection carries one small request per partition and tick, one after the other: on a busy machine the input
    itself is late, which no system under test can make up for.
    """

    behind_p99: float
    acknowledged_p50: float
    acknowledged_p99: float


def send(load: Load) -> LoadResult:
    """Send it all. What the plan had due by now is sent at once, so a pause of this process is made up for."""
    acknowledged: list[float] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            acknowledged.append(message.latency() or 0.0)

    producer = Producer(
        {
            "bootstrap.servers": load.bootstrap_servers,
            "partitioner": "murmur2_random",
            "linger.ms": 1,
            "on_delivery": delivered,
        }
    )
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
    if len(acknowledged) < load.events:
        raise RuntimeError(f"{load.events - len(acknowledged)} deposits were not delivered")
    behind.sort()
    acknowledged.sort()
    half, most = (acknowledged[int(len(acknowledged) * share)] for share in (0.5, 0.99))
    return LoadResult(behind[int(len(behind) * 0.99)], half, most)


if __name__ == "__main__":
    result = send(job_of(Load))
    sys.stdout.buffer.write(msgspec.json.encode(result))
