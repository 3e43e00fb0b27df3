"""A process that sends deposits at a fixed rate, each with the time at which it was sent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import islice

import msgspec
from confluent_kafka import KafkaError, Message, Producer

from benchmarks.child import job_of
from benchmarks.cluster import type_headers
from benchmarks.workload import USUAL, Shape, deposits, encoded, kind_of, note_of

TICK_SECONDS = 0.002


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``skip``: so many deposits of the seed were sent by somebody else already."""

    bootstrap_servers: str
    topic: str
    seed: int
    skip: int
    events: int
    rate: int
    shape: Shape = USUAL


class LoadResult(msgspec.Struct, frozen=True):
    """Seconds that the generator was behind its own plan (99 %), and until the broker had acknowledged a deposit.

    A connection carries one small request per partition and tick, one after the other: on a busy machine the input
    itself is late, which no system under test can make up for.
    """

    behind_p99: float
    acknowledged_p50: float
    acknowledged_p99: float


def send(load: Load) -> LoadResult:
    """Send it all."""
    shape = load.shape
    # Drawn before the clock runs: at 50,000 a second the drawing alone would be a tenth of a processor.
    due = iter(list(islice(deposits(load.seed, shape), load.skip, load.skip + load.events)))
    note, headers, types, topic = note_of(shape.value_bytes), type_headers(shape.types), shape.types, load.topic

    def next_to(producer: Producer) -> None:
        account, cents = next(due)
        producer.produce(
            topic, encoded(account, cents, time.time(), note), account, headers=headers[kind_of(cents, types)]
        )

    return paced(load.bootstrap_servers, load.events, load.rate, next_to)


def paced(bootstrap_servers: str, events: int, rate: float, next_to: Callable[[Producer], None]) -> LoadResult:
    """Have ``next_to`` produce so many events at this rate. What the plan had due by now is sent at once, so a pause of
    this process is made up for. Raises ``RuntimeError`` when something was not delivered."""
    acknowledged: list[float] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            acknowledged.append(message.latency() or 0.0)

    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "partitioner": "murmur2_random",
            "linger.ms": 1,
            "on_delivery": delivered,
        }
    )
    behind: list[float] = []
    began, sent = time.time(), 0
    while sent < events:
        due = min(int((time.time() - began) * rate), events)
        if sent < due:
            behind.append(time.time() - began - sent / rate)
        while sent < due:
            next_to(producer)
            sent += 1
        producer.poll(0)
        time.sleep(TICK_SECONDS)
    if producer.flush(30):
        raise RuntimeError("the last events could not be delivered in 30 s")
    if len(acknowledged) < events:
        raise RuntimeError(f"{events - len(acknowledged)} events were not delivered")
    behind.sort()
    acknowledged.sort()
    half, most = (acknowledged[int(len(acknowledged) * share)] for share in (0.5, 0.99))
    return LoadResult(behind[int(len(behind) * 0.99)], half, most)


if __name__ == "__main__":
    result = send(job_of(Load))
    sys.stdout.buffer.write(msgspec.json.encode(result))
