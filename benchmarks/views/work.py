"""A `View` that is polled, in a process of its own: ``python -m benchmarks.views.work JOB``.

``programs/goka/view.go`` does the same with goka's view.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from benchmarks.child import job_of
from benchmarks.workload import Job
from streams import View

GETS = 200_000
POLL_SECONDS = 0.0005
PATIENCE_SECONDS = 120.0
SENT = "sent"
"""The key of the records that are sent while a view is watched. Their numbers rise over all runs."""


class Price(msgspec.Struct):
    """The value of a key. That of ``SENT`` is -1 less its record's number."""

    cents: int
    currency: str = "EUR"
    note: str = "the price of something"


class ViewJob(Job, frozen=True, kw_only=True):
    """Watch the view of ``table``, of so many ``keys`` beside ``SENT``, until it has the record with number ``last``.
    ``ready``: the file that is made when ``first`` and those behind it may be sent."""

    keys: int
    first: int
    last: int
    ready: str


class Watched(msgspec.Struct):
    """Records/s of catching up, the price of a ``get``; ``seen``: (number, nanoseconds since the epoch) of each look
    that found another record; at the end the number of ``rows``, and the sum of their ``cents``."""

    rate: float
    get_us: float
    seen: list[tuple[int, int]]
    rows: int
    cents: int


def key_of(number: int) -> str:
    """Return the key of a row."""
    return f"key-{number:07}"


def names_of(keys: int) -> list[str]:
    """List the keys to get, in an order that no memory foresees."""
    return [key_of(number * 7919 % keys) for number in range(GETS)]


def watch(job: ViewJob) -> Watched:
    """Catch up, get, then poll until the last record is there."""
    began = time.perf_counter()
    with View(job.table, key=str, value=Price, ordered=True, bootstrap_servers=job.bootstrap_servers) as view:
        view.ready(PATIENCE_SECONDS)
        rate = job.keys / (time.perf_counter() - began)
        names = names_of(job.keys)
        began = time.perf_counter()
        for name in names:
            view.get(name)
        get_us = (time.perf_counter() - began) / GETS * 1e6
        seen: list[tuple[int, int]] = []
        newest = job.first - 1
        Path(job.ready).touch()
        while newest < job.last:
            price = view.get(SENT)
            at = time.time_ns()
            number = -1 - price.cents if price is not None else -1
            if number >= job.first and number != newest:
                seen.append((number, at))
                newest = number
            time.sleep(POLL_SECONDS)
        return Watched(rate, get_us, seen, len(view), sum(price.cents for price in view.values()))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(watch(job_of(ViewJob))))
