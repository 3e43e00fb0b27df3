"""``python -m benchmarks.instructions``: the cost of an event, counted by stage, beside the loop written by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.instructions.callgrind import instructions
from benchmarks.instructions.child import ROOT, count
from benchmarks.instructions.limits import KINDS, set_anew
from benchmarks.instructions.measure import by_stage, of_transactions
from benchmarks.tables import table

HAND_WRITTEN: Final = "hand-written"
WIDTH: Final = 150
"""Columns of the tables at least: names of functions are long."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.instructions",
        description="Counts executed bytecodes and calls per event of the account workload, by stage, without a "
        "broker. The numbers are the same in every run, at any load.",
    )
    kinds = (
        "engine (default); live: at 2,000 events/s; batch, scheduler, concurrency: handlers of that kind; "
        "compiled-engine and so on: with compiled leaves"
    )
    parser.add_argument("systems", nargs="*", default=["engine"], help=kinds)
    parser.add_argument("--against", type=Path, help="another checkout, whose engine is counted as well")
    parser.add_argument("--events", type=int, default=4_000, help="counted after as many (default: %(default)s)")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="the N functions that execute most")
    parser.add_argument("--callgrind", action="store_true", help="instructions as well, by valgrind: a minute")
    parser.add_argument("--set-limits", action="store_true", help="write down the limits of the guard, and stop")
    options = parser.parse_args()
    if options.set_limits:
        set_anew()
        return
    console, events = Console(), options.events
    console.width = max(console.width, WIDTH)
    folders = [ROOT] if options.against is None else [options.against.resolve(), ROOT]
    systems = {HAND_WRITTEN: (ROOT, HAND_WRITTEN)} | {
        (system if folder == ROOT else f"{system} of {folder.name}"): (folder, system)
        for system in options.systems
        for folder in folders
    }
    counted = {name: count(*place, events, events) for name, place in systems.items()}
    for kind, what in KINDS.items():
        console.print(by_stage(f"{what} per event", {name: getattr(one, kind) for name, one in counted.items()}))
    if any(one.turns for one in counted.values()):
        console.print(of_transactions({name: one.turns for name, one in counted.items()}))
    shown = table("bytecodes per event by function", ["stage, function"], list(systems))
    most = {name: max(one.functions.get(name, 0) for one in counted.values())
            for found in counted.values() for name in found.functions}  # fmt: skip
    for name in sorted(most, key=lambda name: -most[name])[: options.functions]:
        shown.add_row(name, *(f"{one.functions.get(name, 0):.2f}" for one in counted.values()))
    if options.functions:
        console.print(shown)
    if options.callgrind:
        executed = {name: instructions(*place, events, events) for name, place in systems.items()}
        shown = table("per event, by callgrind", [""], ["instructions", f"to {HAND_WRITTEN}"])
        for name, found in executed.items():
            shown.add_row(name, f"{found:,.0f}", f"{found / executed[HAND_WRITTEN]:.3f}")
        console.print(shown)


if __name__ == "__main__":
    main()
