"""A process that sends deposits at a fixed rate, each with the time at which it was sent, until the end or SIGTERM."""

from __future__ import annotations

import signal
import sys
import time
from itertools import islice

import msgspec
from confluent_kafka import KafkaError, Message, Producer

from benchmarks.child import job_of
from benchmarks.cluster import TYPE
from benchmarks.reader import percentiles
from benchmarks.workload import deposits, encoded

TICK_SECONDS = 0.002


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``events`` deposits of the seed, after the first ``skip``."""

    bootstrap_servers: str
    topic: str
    seed: int
    skip: int
    events: int
    rate: int
    in_turn: bool = False


class LoadResult(msgspec.Struct, frozen=True):
    """Deposits sent; seconds that the generator was behind its own plan (99 %), and until the broker had acknowledged
    a deposit (99 %).

    A connection carries one small request per partition and tick, one after the other: on a busy machine the input
    itself is late, which no system under test can make up for.
    """

    sent: int
    behind_p99: float
    acknowledged_p99: float


def send(load: Load) -> LoadResult:
    """Send the deposits. What is due after a pause of this process is sent at once. Raises ``RuntimeError`` when
    something was not delivered."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    # Drawn before the clock runs: at 50,000 a second the drawing alone would be a tenth of a processor.
    events = list(islice(deposits(load.seed, in_turn=load.in_turn), load.skip, load.skip + load.events))
    acknowledged: list[float] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            acknowledged.append(message.latency() or 0.0)

    producer = Producer(
        {
            "bootstrap.servers": load.bootstrap_servers,
            "partitioner": "murmur2_random",
            "linger.ms": 1,
            "enable.idempotence": True,
            "on_delivery": delivered,
        }
    )
    behind: list[float] = []
    began, sent = time.time(), 0
    while sent < len(events) and not stopping:
        due = min(int((time.time() - began) * load.rate), len(events))
        if sent < due:
            behind.append(time.time() - began - sent / load.rate)
        for account, cents in events[sent:due]:
            producer.produce(load.topic, encoded(account, cents, time.time()), account, headers=TYPE)
        sent = max(sent, due)
        producer.poll(0)
        time.sleep(TICK_SECONDS)
    left = producer.flush(60)
    if left or len(acknowledged) < sent:
        raise RuntimeError(f"{sent - len(acknowledged)} events were not delivered")
    return LoadResult(sent, percentiles(behind)[1], percentiles(acknowledged)[1])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(send(job_of(Load))))
