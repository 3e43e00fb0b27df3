"""A process that sends the events of a plan at a fixed rate, each with the time at which it was sent."""

from __future__ import annotations

import sys
import time
from itertools import islice

import msgspec
from confluent_kafka import Producer

from benchmarks.async_work.workload import TYPE, Plan
from benchmarks.child import job_of
from benchmarks.generator import LoadResult, paced


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``skip``: so many events of the plan were sent by somebody else already."""

    bootstrap_servers: str
    topic: str
    plan: Plan
    skip: int
    events: int
    rate: float


def send(load: Load) -> LoadResult:
    """Send it all."""
    asks = islice(load.plan.asks(), load.skip, None)

    def next_to(producer: Producer) -> None:
        ask = next(asks)
        producer.produce(load.topic, ask.encoded(time.time()), ask.key, ask.partition, headers=TYPE)

    return paced(load.bootstrap_servers, load.events, load.rate, next_to)


if __name__ == "__main__":
    result = send(job_of(Load))
    sys.stdout.buffer.write(msgspec.json.encode(result))
