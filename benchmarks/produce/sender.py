"""Send a number of events and print how long it took: ``python -m benchmarks.produce.sender JOB``."""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import islice
from typing import Any

import msgspec
from confluent_kafka import KafkaError, Message, Producer

from benchmarks.child import job_of
from benchmarks.workload import Deposited, deposits
from streams import EventProducer

NOTE = "Paid at the counter in coins; the customer counted them twice, and so did I: ok."


class SendJob(msgspec.Struct, frozen=True):
    """``way``: a key of ``WAYS``."""

    way: str
    bootstrap_servers: str
    topic: str
    events: int
    seed: int


class Sent(msgspec.Struct, frozen=True):
    """From the first call until the last acknowledgement."""

    seconds: float
    cpu_seconds: float


def by_hand(job: SendJob, events: list[Deposited]) -> None:
    """Send by the client itself, with the settings and the promise of ``EventProducer``: idempotent, murmur2, typed
    headers, at most as many records on their way, and every acknowledgement looked at."""
    failed: list[KafkaError] = []

    def note(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failed.append(error)

    settings: dict[str, Any] = {
        "bootstrap.servers": job.bootstrap_servers,
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "queue.buffering.max.messages": 100_000,
    }
    producer = Producer(settings)
    headers: list[tuple[str, str | bytes | None]] = [("__grt__", b"Deposited")]
    for event in events:
        value = msgspec.json.encode(event)
        while True:
            try:
                producer.produce(job.topic, value, event.account, headers=headers, on_delivery=note)
                break
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush()
    if failed:
        raise SystemExit(f"{len(failed)} records failed; the first: {failed[0]}")


def blocking(job: SendJob, events: list[Deposited]) -> None:
    """Send by ``with EventProducer``."""
    with EventProducer(job.bootstrap_servers) as producer:
        for event in events:
            producer.send_soon(job.topic, event, key=event.account)


def on_a_loop(job: SendJob, events: list[Deposited]) -> None:
    """Send by ``async with EventProducer``."""

    async def main() -> None:
        async with EventProducer(job.bootstrap_servers) as producer:
            for event in events:
                await producer.send_soon(job.topic, event, key=event.account)

    asyncio.run(main())


WAYS = {"handwritten": by_hand, "with": blocking, "async with": on_a_loop}


if __name__ == "__main__":
    job = job_of(SendJob)
    events = [Deposited(account, cents, 0.0, NOTE) for account, cents in islice(deposits(job.seed), job.events)]
    began, cpu = time.perf_counter(), time.process_time()
    WAYS[job.way](job, events)
    sent = Sent(time.perf_counter() - began, time.process_time() - cpu)
    sys.stdout.buffer.write(msgspec.json.encode(sent))
