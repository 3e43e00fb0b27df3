"""Tools for the tests of applications: ``TestDriver`` (the engine without a broker, in virtual time), and pytest
fixtures around a real Kafka (``streams.testing.fixtures``). Names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.testing.driver import TestDriver
    from streams.testing.driving import Unsettled
    from streams.testing.points import POINTS, Point, Trap

__all__ = ["POINTS", "Point", "TestDriver", "Trap", "Unsettled"]

_HOME = {
    "POINTS": "streams.testing.points",
    "Point": "streams.testing.points",
    "TestDriver": "streams.testing.driver",
    "Trap": "streams.testing.points",
    "Unsettled": "streams.testing.driving",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
