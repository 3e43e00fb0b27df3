"""``python -m benchmarks.instructions``: what an event costs, counted by stage, beside the loop written by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.instructions.child import ROOT, Counted, count
from benchmarks.instructions.stages import HARNESS, STAGES


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.instructions",
        description="Counts executed bytecodes and calls per event of the account workload, by stage, without a "
        "broker. The numbers are the same in every run, whatever else the machine does.",
    )
    parser.add_argument("--against", type=Path, help="another checkout, whose engine is counted as well")
    parser.add_argument("--events", type=int, default=4_000, help="that are counted (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=4_000, help="before them, not counted (default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    options = parse()
    console = Console()
    columns: dict[str, Counted] = {}
    if options.against is not None:
        folder = options.against.resolve()
        columns[f"engine of {folder.name}"] = count(folder, "engine", options.warm, options.events)
    columns["engine"] = count(ROOT, "engine", options.warm, options.events)
    columns["hand-written"] = count(ROOT, "hand-written", options.warm, options.events)
    for name, what in (("bytecodes", "bytecodes"), ("calls", "calls of Python functions"), ("c_calls", "calls of C")):
        console.print(_table(what, {column: getattr(found, name) for column, found in columns.items()}))


def _table(what: str, columns: dict[str, dict[str, float]]) -> Table:
    table = Table(title=f"{what} per event", title_justify="left")
    table.add_column("stage")
    for column in columns:
        table.add_column(column, justify="right")
    for stage in STAGES:
        table.add_row(stage, *(f"{found[stage]:.2f}" for found in columns.values()))
    sums = {column: total(found) for column, found in columns.items()}
    table.add_section()
    table.add_row("all", *(f"{found:.2f}" for found in sums.values()))
    by_hand = sums["hand-written"]
    table.add_row("to hand-written", *(f"{found / by_hand:.3f}" for found in sums.values()))
    return table


def total(found: dict[str, float]) -> float:
    """Of all stages that are the system's own."""
    return sum(number for stage, number in found.items() if stage != HARNESS)


if __name__ == "__main__":
    main()
