"""What the members wrote about themselves, read as it is written."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from benchmarks.stalls.member import Line, Measured, Note, Status
from benchmarks.workload import PARTITIONS

FRESH_SECONDS = 1.0
"""A status that is older says nothing."""


class Traces:
    """The lines of every process, by its name (``INSTANCE.PID``)."""

    def __init__(self, folder: Path) -> None:
        self.lines: dict[str, list[Line]] = {}
        self.dead: set[str] = set()
        """Processes that were killed: what they said last does not hold any more."""
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._decode = msgspec.json.Decoder(Line).decode

    def refresh(self) -> None:
        """Read what is new; a line that is being written waits."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.lines.setdefault(path.stem, []).extend(self._decode(line) for line in whole.splitlines())

    def fresh(self) -> dict[str, Status]:
        """The last status of each process that wrote one lately."""
        self.refresh()
        last = {name: _last_status(lines) for name, lines in self.lines.items()}
        since = time.time() - FRESH_SECONDS
        return {
            name: status
            for name, status in last.items()
            if status is not None and status.at > since and name not in self.dead
        }

    def generation(self) -> int:
        """The newest that any of them has heard of."""
        self.refresh()
        heard = [line.generation for lines in self.lines.values() for line in lines if isinstance(line, Status)]
        return max(heard, default=-1)

    def notes(self, name: str, what: str, partition: int, since: float, until: float) -> list[float]:
        """When this happened."""
        return [
            line.at
            for line in self.lines.get(name, [])
            if isinstance(line, Note)
            and line.what == what
            and line.partition == partition
            and since <= line.at <= until
        ]

    def measured(self, name: str, kind: str, since: float, until: float) -> list[Measured]:
        """Measurements of one kind."""
        return [
            line
            for line in self.lines.get(name, [])
            if isinstance(line, Measured) and line.kind == kind and since <= line.at <= until
        ]

    def refused(self, since: float, until: float) -> int:
        """Transactions that were dropped, or had to be sent again."""
        settled = [line for name in self.lines for line in self.measured(name, "TransactionSettled", since, until)]
        return sum(not line.fields["committed"] or line.fields["attempts"] > 1 for line in settled)


def _last_status(lines: list[Line]) -> Status | None:
    return next((line for line in reversed(lines) if isinstance(line, Status)), None)


def is_settled(standing: Collection[Status], members: int, standbys: int) -> bool:
    """Whether so many members share all partitions evenly, with all copies warm, and nothing under way."""
    if len(standing) != members or any(status.moving or status.state != "running" for status in standing):
        return False
    owned = [len(status.active) for status in standing]
    active = {partition for status in standing for partition in status.active}
    if sum(owned) != PARTITIONS or len(active) != PARTITIONS or max(owned) - min(owned) > 1:
        return False
    copies = [partition for status in standing for partition in status.ready]  # a move may leave one more behind
    return all(copies.count(partition) >= min(standbys, members - 1) for partition in active)
