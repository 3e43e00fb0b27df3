"""The stages of the pipeline that are killed, and how one sees from outside that a stage is at its work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.flights.cluster import Cluster
from examples.flights.events import FLIGHTS_TOPIC


@dataclass
class Stage:
    """``struck_at``: when it was killed (``time.monotonic``); ``back_seconds``: how much later its work was done."""

    name: str
    at_work: Callable[[], bool]
    struck_at: float | None = None
    back_seconds: float | None = None

    def strike(self) -> None:
        """Note that it was killed just now."""
        self.struck_at = time.monotonic()

    def is_back(self) -> None:
        """Note that its work is done, if it was killed."""
        if self.struck_at is not None and self.back_seconds is None:
            self.back_seconds = time.monotonic() - self.struck_at


def stages(cluster: Cluster, folder: Path) -> list[Stage]:
    """Spark's stages, in the order in which they are killed."""
    return [
        Stage("files to events", lambda: transaction_is_open(cluster)),
        Stage("changelog to table", lambda: batch_is_under_way(folder / "storage", "aircraft_changes")),
        Stage("report", lambda: is_being_written(folder / "warehouse" / "airports")),
    ]


def transaction_is_open(cluster: Cluster) -> bool:
    """Whether records of an open transaction are at the end of the flights topic."""
    stable = cluster.ends(FLIGHTS_TOPIC)
    return any(end > stable[number] for number, end in cluster.ends(FLIGHTS_TOPIC, committed_only=False).items())


def batch_is_under_way(storage: Path, flow: str) -> bool:
    """Whether a streaming flow has begun a batch that it has not finished, by its checkpoint."""
    for offsets in storage.rglob("offsets"):
        if any(flow in part for part in offsets.parts):
            begun, done = (newest(folder) for folder in (offsets, offsets.with_name("commits")))
            if begun > done:
                return True
    return False


def newest(folder: Path) -> int:
    """The highest number that is a file's name; -1 without one."""
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=-1)


def is_being_written(table: Path) -> bool:
    """Whether tasks are writing files of a table just now."""
    return any(table.glob("_temporary/*"))
