"""What tests of the benchmarks share: runs of the command, made up, and what is shown of them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from benchmarks.drain import DrainResult
from benchmarks.report import Entry, Run, machine_facts, show


def run_of(**measured: list[Any]) -> Run:
    """A call of the command that found this, by measure."""
    entries = {name: [Entry(one, 0.5, 0.75, 2.0) for one in found] for name, found in measured.items()}
    return Run(machine_facts(1, list(measured)), entries)


def shown(run: Run) -> str:
    """What the console says."""
    console = Console(width=170, record=True, file=io.StringIO())
    show(console, run)
    return console.export_text()


def rows_of(text: str) -> list[list[str]]:
    """The tables' rows, cell by cell."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]


def drained(system: str, turn: int, rate: float, fault: str = "") -> DrainResult:
    return DrainResult(system, turn, fault, 1_000, rate, 1e6 / rate, 2.0, load_average=0.5)
