"""Tables and pictures of the account workload."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from benchmarks.account.aims import RATES
from benchmarks.bench import MIB
from benchmarks.committed import SHARES
from benchmarks.drain import DrainResult
from benchmarks.plots import Bars, Lines, Plot, Point
from benchmarks.steady import SteadyResult
from benchmarks.systems import REFERENCE
from benchmarks.tables import loads, names, of_rounds, of_system, ratios, right, spread, table, verdict


def reference_of(systems: Sequence[str]) -> str:
    """The hand-written loop if it took part, else the first system."""
    return REFERENCE if REFERENCE in systems else systems[0]


def drain_tables(found: Sequence[DrainResult]) -> list[Table]:
    """One for each number of records."""
    return [_drains([one for one in found if one.records == size]) for size in dict.fromkeys(d.records for d in found)]


def _drains(found: Sequence[DrainResult]) -> Table:
    shown = table(
        f"Drain of {found[0].records:,} records: {of_rounds(found)}; {loads(found)}",
        ["system"],
        ["records/s", "ratio", "CPU us/record", "ratio", "broker us/record", "RSS MiB", "exactly once"],
    )
    systems = names(found)
    reference = reference_of(systems)
    for system in systems:
        mine = right(of_system(found, system))
        shown.add_row(
            system,
            spread(one.per_second for one in mine),
            spread(ratios(found, system, reference, _rate), ".2f"),
            spread((one.cpu_us_per_record for one in mine), ".1f"),
            spread(ratios(found, system, reference, lambda one: one.cpu_us_per_record), ".2f"),
            spread((one.broker_cpu_us_per_record for one in mine), ".1f"),
            spread(one.rss_highest / MIB for one in mine),
            verdict(of_system(found, system)),
        )
    shown.caption = f"Ratios are to `{reference}`, round by round."
    return shown


def _rate(one: DrainResult) -> float:
    return one.per_second


def steady_tables(found: Sequence[SteadyResult]) -> list[Table]:
    """One for each rate."""
    return [_steadies([one for one in found if one.rate == rate]) for rate in dict.fromkeys(one.rate for one in found)]


def _steadies(found: Sequence[SteadyResult]) -> Table:
    shown = table(
        f"{found[0].rate:,} events/s for {found[0].seconds:g} s, ms: {of_rounds(found)}; {loads(found)}",
        ["system"],
        ["p50", "ratio", "p99", "ratio", "max", "input", "CPU %", "rate held", "exactly once"],
    )
    systems = names(found)
    reference = reference_of(systems)
    kept = held(found)
    values: tuple[Callable[[SteadyResult], float], ...] = (lambda one: one.p50, lambda one: one.p99)
    for system in systems:
        mine = right(of_system(kept, system))
        cells = []
        for value in values:
            cells += [spread(map(value, mine), ".1f"), spread(ratios(kept, system, reference, value), ".2f")]
        shown.add_row(
            system,
            *cells,
            spread((one.highest for one in mine), ".0f"),
            spread((one.input_acknowledged_p99 for one in mine), ".1f"),
            spread(one.cpu_share * 100 for one in mine),
            _held(of_system(found, system)),
            verdict(of_system(found, system)),
        )
    shown.caption = f"Ratios are to `{reference}`, round by round."
    return shown


def held(found: Sequence[SteadyResult]) -> list[SteadyResult]:
    """The runs in which the rate was held: what others say about latency depends on their length."""
    return [one for one in found if not one.behind]


def _held(found: Sequence[SteadyResult]) -> str:
    behind = sum(bool(one.behind) for one in found)
    return f"no: {behind} of {len(found)} runs" if behind else "yes"


def memory_tables(found: Sequence[SteadyResult]) -> list[Table]:
    """Early and late."""
    shown = table(
        f"Resident memory at {found[0].rate:,} events/s for {found[0].seconds:g} s, MiB; {loads(found)}",
        ["system"],
        ["second quarter", "last quarter", "highest", "bytes/event", "exactly once"],
    )
    for one in found:
        sizes = [one.memory.second_quarter, one.memory.last_quarter, one.memory.highest] if one.memory else []
        cells = [f"{size / MIB:.1f}" for size in sizes] or ["-"] * 3
        shown.add_row(one.system, *cells, f"{growth_of(one):.1f}", "no" if one.fault else "yes")
    return [shown]


def growth_of(one: SteadyResult) -> float:
    """Bytes that the process grew by with each event, from the middle of the second quarter to that of the last."""
    if one.memory is None:
        return 0.0
    return (one.memory.last_quarter - one.memory.second_quarter) / (one.rate * one.seconds / 2)


def plots_of_drains(found: Sequence[DrainResult]) -> list[Plot]:
    """Rates of the largest backlog, side by side."""
    size = max(one.records for one in found)
    here = right(one for one in found if one.records == size)
    rates = {name: [one.per_second for one in of_system(here, name)] for name in names(here)}
    if not rates:
        return []
    return [
        Bars(
            name="drain",
            title=f"Drain of {size:,} records, exactly once",
            x="records/s",
            bars={name: {"records/s": statistics.median(values)} for name, values in rates.items()},
            ranges={name: (min(values), max(values)) for name, values in rates.items()},
        )
    ]


def plots_of_latency(found: Sequence[SteadyResult]) -> list[Plot]:
    """Percentiles at the rates that have aims; with three rates or more, throughput against latency."""
    here = right(held(found))
    rates = sorted({one.rate for one in here})
    drawn: list[Plot] = []
    if len(rates) > 2:
        values: dict[str, Callable[[SteadyResult], float]] = {"p50": lambda one: one.p50, "p99": lambda one: one.p99}
        for name, value in values.items():
            series = {
                system: [_point(rate, [value(one) for one in mine if one.rate == rate])
                         for rate in rates if any(one.rate == rate for one in mine)]
                for system in names(here) for mine in [of_system(here, system)]
            }  # fmt: skip
            drawn.append(
                Lines(name=f"latency-{name}", title=f"Throughput against latency, {name}", x="events/s",
                      y=f"{name} latency, ms", series=series, log_x=True, log_y=True)
            )  # fmt: skip
    for rate in [rate for rate in rates if rate in RATES] or rates:
        at_rate = [one for one in here if one.rate == rate and one.quantiles]
        series = {
            system: [_point(place, [one.quantiles[place] for one in of_system(at_rate, system)])
                     for place in range(len(SHARES))]
            for system in names(at_rate)
        }  # fmt: skip
        ticks = {float(place): f"{share * 100:g} %" for place, share in enumerate(SHARES[:-1])}
        ticks[float(len(SHARES) - 1)] = "max"
        drawn.append(
            Lines(name=f"percentiles-{rate}", title=f"Latency at {rate:,} events/s", x="share of events",
                  y="latency, ms", series=series, log_y=True, ticks=ticks)
        )  # fmt: skip
    return drawn


def _point(x: float, values: Sequence[float]) -> Point:
    return Point(x, statistics.median(values), min(values), max(values))
