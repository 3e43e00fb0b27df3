"""Progress of reads that may take long: a line now and then on stderr, none where the read ends soon."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from streams.looks.figures import LogLines
from streams.records import IncomingRecord

QUIET_SECONDS: Final = 2.0
"""Work that takes less reports nothing."""


def late_lines(unit: str) -> Callable[[str, int, int], None]:
    """Return a function like that of ``progress``, which is silent at first."""
    lines = LogLines(unit, time.monotonic, _write)
    begins = time.monotonic() + QUIET_SECONDS

    def report(what: str, done: int, total: int) -> None:
        if time.monotonic() >= begins:
            lines(what, done, total)

    return report


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class OffsetProgress:
    """Progress of a read of spans of offsets, partition -> (first, end)."""

    def __init__(self, what: str, spans: Mapping[int, tuple[int, int]]) -> None:
        self._what = what
        self._at = {number: start for number, (start, end) in spans.items() if start < end}
        self._first = sum(self._at.values())
        self._total = sum(spans[number][1] for number in self._at) - self._first
        self._report = late_lines("offsets")

    def reached(self, partition: int, records: list[IncomingRecord]) -> None:
        """Note that these records were read."""
        self._at[partition] = records[-1].offset + 1
        self._report(self._what, sum(self._at.values()) - self._first, self._total)
