"""The measures: each is an object in a file ``benchmarks/*/measure.py``, found when the command starts.

Such a file may have ``MEASURES`` (objects of ``Measure``) and ``KINDS`` of systems (objects of
``benchmarks.systems.Kind``). It imports heavy packages where they are needed.
"""

from __future__ import annotations

import functools
import importlib
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from benchmarks.systems import register
from benchmarks.tables import spread

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.bench import Bench
    from benchmarks.drawing import Plot

PRESETS = ("quick", "default", "full")
"""The amount of work: about 2 minutes, about 20, everything."""

R = TypeVar("R")


class Aim(msgspec.Struct, frozen=True):
    """Something to be reached (in words: "at least 1.0"), and the figure found. ``is_met`` is ``None`` where it cannot
    be decided."""

    what: str
    aim: str
    found: str
    is_met: bool | None


def at_least(what: str, least: float, values: Sequence[float]) -> Aim:
    """Compare the median with the least that is wanted."""
    return Aim(what, f"at least {least:g}", spread(values, ".2f"), statistics.median(values) >= least)


def at_most(what: str, most: float, values: Sequence[float], unit: str = "") -> Aim:
    """Compare the median with the most that is allowed. No values: the rate was not held."""
    if not values:
        return Aim(what, f"at most {most:g} {unit}".strip(), "the rate was not held", False)
    told = f"{spread(values, '.1f' if unit else '.2f')} {unit}".strip()
    return Aim(what, f"at most {most:g} {unit}".strip(), told, statistics.median(values) <= most)


class Measure(ABC, Generic[R]):
    """One thing that is measured. ``R`` is the result of one run of one system.

    ``name``: the word on the command line, and the key in the JSON. ``title`` and ``about`` (Markdown: the method and
    its limits) are for the page. ``place``: measures are made and shown in this order. ``presets``: those in which it
    takes part when no measure is named. ``result``: the type ``R``, to read it back from JSON; it has a ``fault``,
    empty if the run did exactly its work, and a ``round`` from 1 on, by which runs are paired (0: not counted).
    ``sizes``: the amount of work, by name, with a value for each preset; the command line has an option for each.
    """

    name: str
    title: str
    about: str
    place: int
    presets: frozenset[str] = frozenset({"default", "full"})
    result: Any
    sizes: ClassVar[Mapping[str, tuple[Any, Any, Any]]] = {}

    @abstractmethod
    def run(self, bench: Bench) -> Iterator[R]:
        """Measure; each result is handed out as soon as it is there, and is kept then, whatever happens later. Systems
        take turns. Raises ``Failed``."""

    @abstractmethod
    def in_short(self, found: R) -> str:
        """Describe one result in a line, without a rate if it has a fault."""

    def fault(self, found: R) -> str:
        """Name the fault and its place; empty if there is none."""
        fault = str(getattr(found, "fault", ""))
        return f"{getattr(found, 'system', self.name)}: {fault}" if fault else ""

    @abstractmethod
    def tables(self, found: Sequence[R]) -> list[Table]:
        """Show all results, for the console and for the page: plain text in the cells."""

    def plots(self, found: Sequence[R]) -> list[Plot]:
        """Describe pictures for the page."""
        return []

    def aims(self, found: Sequence[R]) -> list[Aim]:
        """Compare with the aims: the first table of the page."""
        return []

    def renumbered(self, found: R, offset: int) -> R:
        """Give it another ``round``, so that rounds of different calls are never paired."""
        turn = getattr(found, "round", 0)
        return msgspec.structs.replace(found, round=turn + offset) if turn else found  # type: ignore[type-var]


@functools.cache
def measures() -> tuple[Measure[Any], ...]:
    """Find all of them, in their order; the systems that come with them are known from then on."""
    found: list[Measure[Any]] = []
    here = Path(__file__).parent
    for path in sorted(here.glob("*/measure.py")):
        module = importlib.import_module(f"benchmarks.{path.parent.name}.measure")
        found += getattr(module, "MEASURES", ())
        register(*getattr(module, "KINDS", ()))
    return tuple(sorted(found, key=lambda measure: (measure.place, measure.name)))
