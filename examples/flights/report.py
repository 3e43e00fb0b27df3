"""What a worker tells the demo about its transactions: a line of JSON on its output, at most twice a second."""

from __future__ import annotations

import atexit
import os
import sys
import time

import msgspec

from streams.metrics import Measurement, MetricsHandler, TransactionSettled

VARIABLE = "FLIGHTS_REPORT"
EVERY_SECONDS = 0.5


class Tally(msgspec.Struct):
    """Sums since the process started. ``again`` are transactions that had to be sent more than once."""

    pid: int
    event: str = "tally"
    transactions: int = 0
    again: int = 0
    events: int = 0


def reporter() -> MetricsHandler | None:
    """A metrics handler that prints; ``None`` when nobody listens (``FLIGHTS_REPORT`` is not set)."""
    if not os.environ.get(VARIABLE):
        return None
    tally = Tally(pid=os.getpid())
    said = 0.0

    def say() -> None:
        sys.stdout.write(msgspec.json.encode(tally).decode() + "\n")
        sys.stdout.flush()

    def measured(measurement: Measurement) -> None:
        nonlocal said
        if not isinstance(measurement, TransactionSettled) or not measurement.committed:
            return
        tally.transactions += 1
        tally.again += measurement.attempts > 1
        tally.events += measurement.events
        now = time.monotonic()
        if now - said >= EVERY_SECONDS:
            said = now
            say()

    atexit.register(say)  # the sums since the last line
    return measured
