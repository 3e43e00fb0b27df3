"""What a read-committed reader sees of a topic, as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from confluent_kafka import Consumer, Message, TopicPartition

SILENCE_SECONDS = 20
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Of the values, at or below a quantile."""


def batches(
    bootstrap_servers: str,
    topic: str,
    partitions: int,
    enough: Callable[[], bool],
    patience: float = SILENCE_SECONDS,
    **settings: int,
) -> Iterator[tuple[float, list[Message]]]:
    """(Time of the clock, messages) from the start of the topic, until there is enough or nothing came for ``patience``
    seconds. ``settings`` are librdkafka's, with underscores for dots. Raises ``RuntimeError`` for what cannot be read.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 10,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    heard = time.monotonic()
    while not enough() and time.monotonic() - heard < patience:
        first = consumer.poll(0.1)
        if first is None:
            continue
        messages = [first, *consumer.consume(500, 0)]
        now, heard = time.time(), time.monotonic()
        for message in messages:
            if message.error() is not None:
                raise RuntimeError(message.error())
        yield now, messages
    consumer.close()


def percentiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """50 %, 90 %, 99 % and the highest; zeros of nothing."""
    ordered = sorted(values) or [0.0]
    p50, p90, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.9, 0.99))
    return p50, p90, p99, ordered[-1]


def quantiles(values: Sequence[float]) -> list[float]:
    """At ``SHARES``; zeros of nothing."""
    ordered = sorted(values) or [0.0]
    return [ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in SHARES]
