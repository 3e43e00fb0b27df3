"""What a run found: facts about the machine, medians, ratios, as JSON and as tables."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.async_work.report import Figures, tables
from benchmarks.drain import DrainResult
from benchmarks.restore.report import restore_table
from benchmarks.restore.run import Restore
from benchmarks.spark.figures import SparkRun
from benchmarks.spark.report import spark_tables
from benchmarks.stalls.group import Stall
from benchmarks.stalls.report import stall_table
from benchmarks.steady import SteadyResult

MIB = 1024 * 1024


class Run(msgspec.Struct):
    """Everything measured by one call, in the order of measuring."""

    facts: dict[str, Any]
    drains: list[DrainResult] = []
    steadies: list[SteadyResult] = []
    restores: list[Restore] = []
    stalls: list[Stall] = []
    sparks: list[SparkRun] = []
    async_work: Figures = msgspec.field(default_factory=Figures)

    @property
    def faults(self) -> list[str]:
        """What was not exactly once, or not what it should be."""
        of_systems: list[DrainResult | SteadyResult | Restore] = [*self.drains, *self.steadies, *self.restores]
        found = [f"{one.system}: {one.fault}" for one in of_systems if one.fault]
        found += [f"{one.what}, round {one.round}: {one.fault}" for one in self.stalls if one.fault]
        places = ((one, f"{one.what}, {one.system}, {one.partitions} partitions") for one in self.sparks if one.fault)
        found += [f"{place}, round {one.round}: {one.fault}" for one, place in places]
        return found + self.async_work.faults


def machine_facts(seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "arguments": list(arguments),
        "seed": seed,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_mib": psutil.virtual_memory().total // MIB,
        "load_average_before": os.getloadavg(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "confluent_kafka": version("confluent-kafka"),
        "librdkafka": confluent_kafka.libversion()[0],
        "msgspec": version("msgspec"),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def median_of(found: Sequence[Any], system: str, value: Callable[[Any], float]) -> float:
    """The median over the repeats of one system."""
    return statistics.median(value(one) for one in found if one.system == system)


def paired_ratio(found: Sequence[Any], system: str, reference: str, value: Callable[[Any], float]) -> float:
    """The median of the ratios system/reference, pair by pair of one round: what a drifting machine leaves true."""
    pairs = zip(
        (value(one) for one in found if one.system == system),
        (value(one) for one in found if one.system == reference),
        strict=False,
    )
    return statistics.median(mine / theirs if theirs else 0.0 for mine, theirs in pairs)


def _systems(found: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(one.system for one in found))


def show(console: Console, run: Run) -> None:
    """Print the tables."""
    if run.drains:
        console.print(_drain_table(run.drains))
    for rate in dict.fromkeys(one.rate for one in run.steadies):
        console.print(_steady_table([one for one in run.steadies if one.rate == rate]))
    if run.restores:
        console.print(restore_table(run.restores))
    if run.stalls:
        console.print(stall_table(run.stalls))
    for table in [*spark_tables(run.sparks), *tables(run.async_work)]:
        console.print(table)
    for fault in run.faults:
        console.print(f"[red]not exactly once:[/] {fault}")


def _drain_table(found: list[DrainResult]) -> Table:
    systems = _systems(found)
    reference = systems[0]
    rounds = len([one for one in found if one.system == reference])
    table = Table(title=f"Drain of {found[0].records:,} records, medians of {rounds}", title_justify="left")
    table.add_column("system", no_wrap=True)
    for name in ("records/s", "ratio", "CPU us/record", "ratio", "broker us/record", "RSS MiB", "exactly once"):
        table.add_column(name, justify="right")
    for system in systems:
        table.add_row(
            system,
            f"{median_of(found, system, _rate):,.0f}",
            f"{paired_ratio(found, system, reference, _rate):.2f}",
            f"{median_of(found, system, _cpu):.1f}",
            f"{paired_ratio(found, system, reference, _cpu):.2f}",
            f"{median_of(found, system, lambda one: one.broker_cpu_us_per_record):.1f}",
            f"{median_of(found, system, lambda one: one.rss_highest) / MIB:.0f}",
            "no" if any(one.fault for one in found if one.system == system) else "yes",
        )
    return table


def _rate(one: DrainResult) -> float:
    return one.per_second


def _cpu(one: DrainResult) -> float:
    return one.cpu_us_per_record


def _steady_table(found: list[SteadyResult]) -> Table:
    systems = _systems(found)
    title = f"{found[0].rate:,} events/s for {found[0].seconds:g} s, medians of {len(found) // len(systems)}"
    table = Table(title=title, title_justify="left")
    table.add_column("system", no_wrap=True)
    for name in ("p50 ms", "p90 ms", "p99 ms", "max ms", "input ack p50", "p99", "CPU %", "RSS MiB"):
        table.add_column(name, justify="right")
    table.add_column("exactly once", justify="right")
    for system in systems:
        memory = [median_of(found, system, value) / MIB for value in (_memory_early, _memory_late)]
        table.add_row(
            system,
            *(f"{median_of(found, system, value):.1f}" for value in (_p50, _p90, _p99, _highest, _ack50, _ack99)),
            f"{median_of(found, system, lambda one: one.cpu_share) * 100:.0f}",
            f"{memory[0]:.1f} -> {memory[1]:.1f}",
            "no" if any(one.fault for one in found if one.system == system) else "yes",
        )
    return table


def _p50(one: SteadyResult) -> float:
    return one.p50


def _p90(one: SteadyResult) -> float:
    return one.p90


def _p99(one: SteadyResult) -> float:
    return one.p99


def _highest(one: SteadyResult) -> float:
    return one.highest


def _ack50(one: SteadyResult) -> float:
    return one.input_acknowledged_p50


def _ack99(one: SteadyResult) -> float:
    return one.input_acknowledged_p99


def _memory_early(one: SteadyResult) -> float:
    return one.memory.second_quarter


def _memory_late(one: SteadyResult) -> float:
    return one.memory.last_quarter
