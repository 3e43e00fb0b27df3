"""What every drain of a sweep tells."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.drain import DrainResult


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """One drain by one system. ``fault`` is empty if every event was counted exactly once; else there is no rate."""

    system: str
    round: int
    records: int
    fault: str
    per_second: float = 0.0
    cpu_us_per_record: float = 0.0
    broker_cpu_us_per_record: float = 0.0
    rss_highest: int = 0
    load_average: float = 0.0


def figures_of(done: DrainResult) -> dict[str, Any]:
    """The fields of ``Drained``, from what was measured."""
    return {name: getattr(done, name) for name in Drained.__struct_fields__}
