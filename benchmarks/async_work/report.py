"""Medians and spread of what work ahead of its turn did, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec
from rich.table import Table

from benchmarks.async_work.latency import Latency
from benchmarks.async_work.price import Price
from benchmarks.async_work.throughput import Throughput
from benchmarks.async_work.workload import PARTITIONS
from benchmarks.tables import of_system, ratios, right


class Figures(msgspec.Struct):
    """What one call has measured, in the order of measuring."""

    throughputs: list[Throughput] = []
    latencies: list[Latency] = []
    gaps: list[Latency] = []
    batches: list[Throughput] = []
    prices: list[Price] = []


def tables(figures: Figures) -> list[Table]:
    """One for each thing measured."""
    found = [_throughput_table(figures.throughputs)] if figures.throughputs else []
    for rate in dict.fromkeys(run.rate for run in figures.latencies):
        found.append(_latency_table([run for run in figures.latencies if run.rate == rate]))
    if figures.gaps:
        found.append(_gap_table(figures.gaps))
    if figures.batches:
        found.append(_batch_table(figures.batches))
    if figures.prices:
        found.append(_price_table(figures.prices))
    return found


def reference_of(system: str, systems: Sequence[str]) -> str:
    """The loop of the same concurrency; for what has none, the first loop."""
    same = f"loop, {system.rpartition(', ')[2]}"
    return same if same in systems else next((name for name in systems if name.startswith("loop")), systems[0])


def ratio(runs: Sequence[Throughput], system: str, reference: str) -> float:
    """The median of the ratios of rates, round by round; 0 when there is none."""
    pairs = ratios(runs, system, reference, lambda run: run.per_second)
    return statistics.median(pairs) if pairs else 0.0


def _throughput_table(runs: list[Throughput]) -> Table:
    systems = list(dict.fromkeys(run.system for run in runs))
    table = _table(f"Async work, throughput, medians of {_rounds(runs)}; {_loads(runs)}")
    for name in ("events/s", "least", "most", "ratio", "to", "CPU us/event", "correct"):
        table.add_column(name, justify="right")
    for system in systems:
        mine = right(of_system(runs, system))
        rates, reference = [run.per_second for run in mine], reference_of(system, systems)
        if not mine:
            table.add_row(system, *["-"] * 6, "no")
            continue
        table.add_row(
            system,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{ratio(runs, system, reference):.2f}",
            reference,
            f"{statistics.median(run.cpu_us_per_event for run in mine):,.0f}",
            _correct(runs, system),
        )
    return table


def _latency_table(runs: list[Latency]) -> Table:
    table = _table(f"Async work, {runs[0].rate:,.0f} events/s, medians of {_rounds(runs)}; {_loads(runs)}")
    for name in ("p50 ms", "least", "most", "p90", "p99 ms", "least", "most", "max", "input ack p99", "correct"):
        table.add_column(name, justify="right")
    for system in dict.fromkeys(run.system for run in runs):
        mine = right(of_system(runs, system))
        if not mine:
            table.add_row(system, *["-"] * 9, "no")
            continue
        table.add_row(
            system,
            *_spread(mine, lambda run: run.p50),
            f"{statistics.median(run.p90 for run in mine):,.0f}",
            *_spread(mine, lambda run: run.p99),
            f"{statistics.median(run.highest for run in mine):,.0f}",
            f"{statistics.median(run.input_acknowledged_p99 for run in mine):,.0f}",
            _correct(runs, system),
        )
    return table


def _gap_table(runs: list[Latency]) -> Table:
    table = _table(
        f"Async work, longest silence of each partition in ms, {runs[0].rate:,.0f} events/s in all, one of them slow "
        f"(partition 0); medians of {_rounds(runs)}; {_loads(runs)}"
    )
    table.add_column("its work, ms", justify="right")
    for partition in range(PARTITIONS):
        table.add_column(f"partition {partition}", justify="right")
    table.add_column("most of the others", justify="right")
    table.add_column("correct", justify="right")
    for system in dict.fromkeys(run.system for run in runs):
        for slow in dict.fromkeys(run.slow_ms for run in runs):
            mine = right(run for run in runs if (run.system, run.slow_ms) == (system, slow))
            if not mine:
                table.add_row(system, f"{slow:,}", *["-"] * (PARTITIONS + 1), "no")
                continue
            medians = [f"{statistics.median(run.gaps[number] for run in mine):,.0f}" for number in range(PARTITIONS)]
            others = max(max(run.gaps[1:]) for run in mine)
            table.add_row(system, f"{slow:,}", *medians, f"{others:,.0f}", _correct(runs, system))
    return table


def _batch_table(runs: list[Throughput]) -> Table:
    table = _table(f"Batches, 5 ms a call, medians of {_rounds(runs)}; {_loads(runs)}")
    for name in ("events/s", "least", "most", "ratio", "events a call", "calls saved", "correct"):
        table.add_column(name, justify="right")
    for system in dict.fromkeys(run.system for run in runs):
        mine = right(of_system(runs, system))
        if not mine:
            table.add_row(system, *["-"] * 6, "no")
            continue
        rates = [run.per_second for run in mine]
        a_call = statistics.median(run.handled / max(run.calls, 1) for run in mine)
        table.add_row(
            system,
            *(f"{rate:,.0f}" for rate in (statistics.median(rates), min(rates), max(rates))),
            f"{ratio(runs, system, runs[0].system):.2f}",
            f"{a_call:.1f}",
            f"{1 - 1 / max(a_call, 1):.0%}",
            _correct(runs, system),
        )
    return table


def _price_table(runs: list[Price]) -> Table:
    table = _table(f"Price of an event on the loop's thread, no broker, medians of {_rounds(runs)}; {_loads(runs)}")
    for name in ("us", "least", "most", "us without garbage collection", "least", "most"):
        table.add_column(name, justify="right")
    for way in dict.fromkeys(run.way for run in right(runs)):
        mine = [run for run in right(runs) if run.way == way]
        values = [run.us for run in mine], [run.us_without_gc for run in mine]
        table.add_row(way, *(f"{pick(found):.1f}" for found in values for pick in (statistics.median, min, max)))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("system", no_wrap=True)
    return table


def _spread(runs: Sequence[Latency], value: Callable[[Latency], float]) -> list[str]:
    values = [value(run) for run in runs]
    return [f"{found:,.0f}" for found in (statistics.median(values), min(values), max(values))]


def _rounds(runs: Sequence[Throughput | Latency | Price]) -> int:
    return len({run.round for run in runs})


def _loads(runs: Sequence[Throughput | Latency | Price]) -> str:
    loads = [run.load_average for run in runs]
    return f"load {min(loads):.1f} to {max(loads):.1f}"


def _correct(runs: Sequence[Throughput | Latency], system: str) -> str:
    return "no" if any(run.fault for run in of_system(runs, system)) else "yes"
