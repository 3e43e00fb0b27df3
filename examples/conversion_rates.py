"""Writes rates for ``examples.conversion``: ``python -m examples.conversion_rates USD=0.92 JPY=0.0061``."""

from __future__ import annotations

import os
import sys
import time

from examples.conversion import RATES, Rate
from examples.topics import create_topics
from streams import EventProducer
from streams.codecs import codec_for

KEYS = codec_for(tuple[str, int])


def create_topic(servers: str, partitions: int = 3) -> None:
    """A compacted topic, if there is none."""
    create_topics(servers, {RATES: partitions}, {"cleanup.policy": "compact"})


def write(servers: str, rates: list[Rate]) -> None:
    """Returns when the broker has them."""
    with EventProducer(servers) as producer:
        for rate in rates:
            producer.send_soon(RATES, rate, key=KEYS.encode((rate.currency, rate.valid_from_ms)))


def main() -> None:
    servers, now = os.environ.get("KES_BOOTSTRAP_SERVERS", "127.0.0.1:9092"), int(time.time() * 1000)
    pairs = [argument.split("=") for argument in sys.argv[1:]]
    create_topic(servers)
    write(servers, [Rate(currency, now, round(float(euros) * 1_000_000)) for currency, euros in pairs])


if __name__ == "__main__":
    main()
