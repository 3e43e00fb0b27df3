"""Medians of what Spark did, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.spark.figures import SparkRun
from benchmarks.tables import ratios, right

REFERENCES = {
    "decode": {"grt: events": "grt: raw", "grt: by codec": "grt: raw", "connector: from_json": "connector: raw"}
}


def spark_tables(found: Sequence[SparkRun]) -> list[Table]:
    """One table for each thing measured; only counted rounds."""
    return [_table([run for run in found if run.what == what]) for what in dict.fromkeys(run.what for run in found)]


def ratio(runs: Sequence[SparkRun], system: str, reference: str) -> float:
    """The median of the ratios of rates, round by round; 0 when one side has no round."""
    pairs = ratios(runs, system, reference, lambda run: run.per_second)
    return statistics.median(pairs) if pairs else 0.0


def _table(found: list[SparkRun]) -> Table:
    what, rows = found[0].what, found[0].rows
    counted = [run for run in found if run.round]
    loads = [run.load for run in counted] or [0.0]
    each = "the median batch after the first" if what == "stream" else "the whole job"
    title = f"Spark, {what} of {rows:,} rows: {each}; load {min(loads):.1f} to {max(loads):.1f}"
    table = Table(title=title, title_justify="left")
    table.add_column("partitions", justify="right")
    table.add_column("system", no_wrap=True)
    first = "first batch s" if what == "stream" else "first s"
    for name in ("rows/s", "least", "most", "ratio", "to", "CPU us/row: Java", "Python", "broker", first, "correct"):
        table.add_column(name, justify="right")
    for partitions in dict.fromkeys(run.partitions for run in found):
        here = [run for run in found if run.partitions == partitions]
        for system in dict.fromkeys(run.system for run in here):
            table.add_row(str(partitions), system, *_cells(what, here, system))
    return table


def _cells(what: str, here: list[SparkRun], system: str) -> list[str]:
    mine = [run for run in here if run.system == system]
    counted = right(mine)
    if not counted:
        return [*["-"] * 9, "no" if any(run.fault for run in mine) else "yes"]
    rates = [run.per_second for run in counted]
    reference = REFERENCES.get(what, {}).get(system, "connector")
    times = ratio([run for run in here if run.round], system, reference)
    first = mine[0] if what != "stream" else None
    return [
        f"{statistics.median(rates):,.0f}",
        f"{min(rates):,.0f}",
        f"{max(rates):,.0f}",
        f"{times:.2f}" if times else "-",
        reference if times else "-",
        f"{statistics.median(run.cpu.java for run in counted):.2f}",
        f"{statistics.median(run.cpu.python for run in counted):.2f}",
        f"{statistics.median(run.cpu.broker for run in counted):.2f}",
        f"{first.first_seconds if first else statistics.median(run.first_seconds for run in counted):.1f}",
        "no" if any(run.fault for run in mine) else "yes",
    ]
