"""What is measured of Spark, and how much of it."""

from __future__ import annotations

import msgspec

BATCHES = 5
"""Of a stream."""


class Sizes(msgspec.Struct, frozen=True):
    """How much is measured. ``batch`` rows in each of ``BATCHES`` batches of a stream."""

    rows: int = 400_000
    batch: int = 200_000
    repeats: int = 3
    partitions: tuple[int, ...] = (2, 1, 4)


class CpuTimes(msgspec.Struct, frozen=True):
    """CPU time of the session's Java machine, of all its Python processes and of the broker."""

    java: float
    python: float
    broker: float

    def per_row(self, before: CpuTimes, rows: int) -> CpuTimes:
        """What was used since, given in seconds, as microseconds a row."""
        us = 1e6 / rows
        return CpuTimes(
            (self.java - before.java) * us, (self.python - before.python) * us, (self.broker - before.broker) * us
        )


class SparkRun(msgspec.Struct):
    """One job. ``round`` 0 is not counted: it is the first of its kind in the session. ``cpu`` in us per row.

    ``per_second`` of a stream is that of the median batch after the first, ``first_seconds`` that of its first batch.
    """

    what: str
    system: str
    partitions: int
    round: int
    rows: int
    per_second: float
    first_seconds: float
    cpu: CpuTimes
    load: float
    fault: str
    batch_ms: list[int] = []
