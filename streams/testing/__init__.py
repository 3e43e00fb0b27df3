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
    "FAULTS": "streams.testing.fault_search",
    "Fault": "streams.testing.fault_search",
    "POINTS": "streams.testing.fault_points",
    "Point": "streams.testing.fault_points",
    "SearchFailed": "streams.testing.schedule_search",
    "SearchReport": "streams.testing.schedule_search",
    "TestDriver": "streams.testing.driver",
    "Trap": "streams.testing.fault_points",
    "Unsettled": "streams.testing.driver_base",
    "search": "streams.testing.schedule_search",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
