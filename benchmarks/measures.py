"""What can be measured: each measure is an object in a file ``benchmarks/*/measure.py``, found when the command starts.

Such a file may have ``MEASURES`` (objects of ``Measure``) and ``KINDS`` of systems (objects of
``benchmarks.systems.Kind``); what is heavy to import it imports where it is needed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from benchmarks.systems import register

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.bench import Bench
    from benchmarks.plots import Plot

PRESETS = ("quick", "default", "full")
"""How much is measured: about 2 minutes, about 20, everything."""

R = TypeVar("R")


class Aim(msgspec.Struct, frozen=True):
    """Something to be reached (in words: "at least 1.0"), and what was found. ``is_met`` is ``None`` where it
    cannot be told."""

    what: str
    aim: str
    found: str
    is_met: bool | None


class Options:
    """Takes the options of measures. Each has a value for every preset; what the command line says counts more."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._group: Any = parser
        self._by_preset: dict[str, dict[str, Any]] = {}

    def group(self, measure: Measure[Any]) -> None:
        """What is added from now on belongs to this measure."""
        self._group = self._parser.add_argument_group(measure.name, measure.title)

    def add(self, flag: str, *, quick: Any, default: Any, full: Any, help: str, **settings: Any) -> None:
        """An option as of ``ArgumentParser.add_argument``, with its values by preset."""
        name = flag.lstrip("-").replace("-", "_")
        self._by_preset[name] = {"quick": quick, "default": default, "full": full}
        values = [_told(value) for value in (quick, default, full)]
        told = f"{help} ({' / '.join(values if len(set(values)) > 1 else values[:1])})" if any(values) else help
        self._group.add_argument(flag, default=None, help=told.replace("%", "%%"), **settings)

    def filled(self, parsed: argparse.Namespace, preset: str) -> argparse.Namespace:
        """What was not said is as the preset has it."""
        for name, values in self._by_preset.items():
            if getattr(parsed, name) is None:
                setattr(parsed, name, values[preset])
        return parsed


class Measure(ABC, Generic[R]):
    """One thing that is measured. ``R`` is what comes of one run of one system.

    ``name``: the word on the command line, and the key in the JSON. ``title`` and ``about`` (Markdown: what is
    measured, how, and what it does not tell) are for the page. ``place``: measures are made and shown in this order.
    ``presets``: those in which it takes part when no measure is named. ``result``: the type ``R``, to read it back from
    JSON; it has a ``fault``, empty if the run did exactly what it should, and a ``round`` from 1 on, by which runs are
    paired (0: not counted).
    """

    name: str
    title: str
    about: str
    place: int
    presets: frozenset[str] = frozenset({"default", "full"})
    result: Any

    def arguments(self, options: Options) -> None:
        """Add the measure's own options."""

    @abstractmethod
    def run(self, bench: Bench) -> Iterator[R]:
        """Measure; each result is handed out as soon as it is there, and is kept then, whatever happens later. Systems
        take turns. Raises ``Failed``."""

    @abstractmethod
    def in_short(self, found: R) -> str:
        """One line about one result, without a rate if it has a fault."""

    def fault(self, found: R) -> str:
        """What was not right, and whose it is; empty if all was."""
        fault = str(getattr(found, "fault", ""))
        return f"{getattr(found, 'system', self.name)}: {fault}" if fault else ""

    @abstractmethod
    def tables(self, found: Sequence[R]) -> list[Table]:
        """What all results say, for the console and for the page: plain text in the cells."""

    def plots(self, found: Sequence[R]) -> list[Plot]:
        """Pictures for the page."""
        return []

    def aims(self, found: Sequence[R]) -> list[Aim]:
        """What is to be reached, and whether it was: the first table of the page."""
        return []

    def renumbered(self, found: R, offset: int) -> R:
        """The same with another ``round``, so that rounds of different calls are never paired."""
        turn = getattr(found, "round", 0)
        return msgspec.structs.replace(found, round=turn + offset) if turn else found  # type: ignore[type-var]


@functools.cache
def measures() -> tuple[Measure[Any], ...]:
    """All there are, in their order; the systems that come with them are known from then on."""
    found: list[Measure[Any]] = []
    here = Path(__file__).parent
    for path in sorted(here.glob("*/measure.py")):
        module = importlib.import_module(f"benchmarks.{path.parent.name}.measure")
        found += getattr(module, "MEASURES", ())
        register(*getattr(module, "KINDS", ()))
    return tuple(sorted(found, key=lambda measure: (measure.place, measure.name)))


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_told, value))
    return f"{value:,}" if isinstance(value, int) else str(value or "")
