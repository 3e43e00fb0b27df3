"""``python -m benchmarks.instructions``: what an event costs, counted by stage, beside the loop written by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.instructions.callgrind import instructions
from benchmarks.instructions.child import ROOT, count
from benchmarks.instructions.limits import set_anew
from benchmarks.instructions.stages import STAGES, total

HAND_WRITTEN: Final = "hand-written"
WIDTH: Final = 110
"""Columns of the tables at least: names of functions are long."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.instructions",
        description="Counts executed bytecodes and calls per event of the account workload, by stage, without a "
        "broker. The numbers are the same in every run, whatever else the machine does.",
    )
    parser.add_argument(
        "systems",
        nargs="*",
        default=["engine"],
        help="engine (default), batch, scheduler, concurrency: handlers of that kind",
    )
    parser.add_argument("--against", type=Path, help="another checkout, whose engine is counted as well")
    parser.add_argument("--events", type=int, default=4_000, help="that are counted (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=4_000, help="before them, not counted (default: %(default)s)")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="the N functions that execute most")
    parser.add_argument("--callgrind", action="store_true", help="instructions as well, by valgrind: a minute")
    parser.add_argument(
        "--set-limits", action="store_true", help="write down what the guard compares with (tests/unit), and stop"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    options = parse()
    if options.set_limits:
        set_anew()
        return
    console = Console()
    console.width = max(console.width, WIDTH)
    folders = [ROOT] if options.against is None else [options.against.resolve(), ROOT]
    systems = [
        (system if folder == ROOT else f"{system} of {folder.name}", folder, system)
        for system in options.systems
        for folder in folders
    ]
    systems.append((HAND_WRITTEN, ROOT, HAND_WRITTEN))
    columns = {name: count(folder, system, options.warm, options.events) for name, folder, system in systems}
    for name, what in (("bytecodes", "bytecodes"), ("calls", "calls of Python functions"), ("c_calls", "calls of C")):
        console.print(_table(what, {column: getattr(found, name) for column, found in columns.items()}))
    if options.functions:
        _show_functions(console, {column: found.functions for column, found in columns.items()}, options.functions)
    if options.callgrind:
        table = Table(title="per event, by callgrind", title_justify="left")
        for text in ("", "instructions", "to hand-written", "objects for the garbage collector"):
            table.add_column(text, justify="right" if text else "left")
        found = {name: instructions(folder, system, options.warm, options.events) for name, folder, system in systems}
        by_hand = found[HAND_WRITTEN].instructions
        for name, one in found.items():
            ratio = one.instructions / by_hand
            table.add_row(name, f"{one.instructions:,.0f}", f"{ratio:.3f}", f"{one.collected_objects:.2f}")
        console.print(table)


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
    by_hand = sums[HAND_WRITTEN]
    table.add_row("to hand-written", *(f"{found / by_hand:.3f}" for found in sums.values()))
    return table


def _show_functions(console: Console, columns: dict[str, dict[str, float]], most: int) -> None:
    table = Table(title="bytecodes per event by function", title_justify="left")
    table.add_column("stage, function", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    names = sorted({name for found in columns.values() for name in found})
    names.sort(key=lambda name: -max(found.get(name, 0) for found in columns.values()))
    for name in names[:most]:
        table.add_row(name, *(f"{found.get(name, 0):.2f}" for found in columns.values()))
    console.print(table)


if __name__ == "__main__":
    main()
