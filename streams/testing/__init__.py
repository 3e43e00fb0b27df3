"""Tools for the tests of applications: ``TestDriver`` (the engine without a broker, in virtual time), and pytest
fixtures around a real Kafka (``streams.testing.fixtures``). Names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.testing.driver import TestDriver
    from streams.testing.driver_base import Unsettled
    from streams.testing.fault_points import POINTS, Point, Trap
    from streams.testing.fault_search import FAULTS, Fault
    from streams.testing.schedule_search import SearchFailed, SearchReport, search

__all__ = [
    "FAULTS",
    "POINTS",
    "Fault",
    "Point",
    "SearchFailed",
    "SearchReport",
    "TestDriver",
    "Trap",
    "Unsettled",
    "search",
]

_HOME = {
    name: f"streams.testing.{module}"
    for module, names in {
        "driver": ["TestDriver"],
        "driver_base": ["Unsettled"],
        "fault_points": ["POINTS", "Point", "Trap"],
        "fault_search": ["FAULTS", "Fault"],
        "schedule_search": ["SearchFailed", "SearchReport", "search"],
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
