"""Tools for the tests of applications: ``TestDriver`` (the engine without a broker, in virtual time), and pytest
fixtures around a real Kafka (``streams.testing.fixtures``). Names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.testing.chaos import FAULTS, Fault
    from streams.testing.driver import TestDriver
    from streams.testing.driving import Unsettled
    from streams.testing.points import POINTS, Point, Trap
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
    "FAULTS": "streams.testing.chaos",
    "Fault": "streams.testing.chaos",
    "POINTS": "streams.testing.points",
    "Point": "streams.testing.points",
    "SearchFailed": "streams.testing.schedule_search",
    "SearchReport": "streams.testing.schedule_search",
    "TestDriver": "streams.testing.driver",
    "Trap": "streams.testing.points",
    "Unsettled": "streams.testing.driving",
    "search": "streams.testing.schedule_search",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
