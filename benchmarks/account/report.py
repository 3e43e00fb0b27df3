"""Tables and pictures of the account workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.table import Table

from benchmarks.bench import MIB
from benchmarks.drain import DrainResult
from benchmarks.drawing import Plot
from benchmarks.steady import SteadyResult
from benchmarks.systems import REFERENCE
from benchmarks.tables import loads, names, of_rounds, of_system, ratios, right, spread, table, verdict


def reference_of(system: str, systems: Sequence[str]) -> str:
    """Choose the system that ratios are to: the loop of the same number of slots, the loop with large transactions, any
    loop, the first system: whichever took part."""
    loops = [name for name in systems if name.startswith("loop")]
    wanted = [f"loop:{system.partition(':')[2]}", REFERENCE, *loops, systems[0]]
    return next(name for name in wanted if name in systems)


def _to(references: Sequence[str]) -> str:
    return f"Ratios are to {', '.join(f'`{name}`' for name in dict.fromkeys(references))}, round by round."


def drain_tables(found: Sequence[DrainResult], title: str) -> list[Table]:
    """One for each number of records."""
    return [_drains([one for one in found if one.records == size], title) for size in _sizes(found)]


def _sizes(found: Sequence[DrainResult]) -> list[int]:
    return sorted({one.records for one in found})


def _drains(found: Sequence[DrainResult], title: str) -> Table:
    shown = table(
        f"{title.format(found[0].records)}: {of_rounds(found)}; {loads(found)}",
        ["system"],
        ["records/s", "ratio", "CPU us/record", "ratio", "broker us/record", "RSS MiB", "exactly once"],
    )
    references = []
    for system in names(found):
        mine, reference = right(of_system(found, system)), reference_of(system, names(found))
        references.append(reference)
        shown.add_row(
            system,
            spread(one.per_second for one in mine),
            spread(ratios(found, system, reference, lambda one: one.per_second), ".2f"),
            spread((one.cpu_us_per_record for one in mine), ".1f"),
            spread(ratios(found, system, reference, lambda one: one.cpu_us_per_record), ".2f"),
            spread((one.broker_cpu_us_per_record for one in mine), ".1f"),
            spread(one.rss_highest / MIB for one in mine),
            verdict(of_system(found, system)),
        )
    shown.caption = _to(references)
    return shown


def steady_tables(found: Sequence[SteadyResult]) -> list[Table]:
    """One for each rate and number of partitions."""

    def place(one: SteadyResult) -> tuple[int, int]:
        return one.rate, one.partitions

    return [_steadies(list(here)) for _, here in groupby(sorted(found, key=place), place)]


def _steadies(found: Sequence[SteadyResult]) -> Table:
    first = found[0]
    shown = table(
        f"{first.rate:,} events/s in {first.partitions} partitions for {first.seconds:g} s, ms: {of_rounds(found)}; "
        f"{loads(found)}",
        ["system"],
        ["p50", "ratio", "p99", "ratio", "max", "input", "CPU us/event", "ratio", "rate held", "exactly once"],
    )
    kept, systems = held(found), names(found)
    reference = reference_of("", systems)
    values: tuple[tuple[Callable[[SteadyResult], float], str], ...] = (
        (lambda one: one.p50, ".1f"), (lambda one: one.p99, ".1f"), (lambda one: one.cpu_us_per_event, ".0f")
    )  # fmt: skip
    for system in systems:
        mine, all_mine = right(of_system(kept, system)), of_system(found, system)
        p50, p99, cpu = (
            [spread(map(value, mine), form), spread(ratios(kept, system, reference, value), ".2f")]
            for value, form in values
        )
        highest, acknowledged = [one.highest for one in mine], [one.input_acknowledged_p99 for one in mine]
        behind = sum(bool(one.behind) for one in all_mine)
        was_held = f"no: {behind} of {len(all_mine)} runs" if behind else "yes"
        shown.add_row(
            system, *p50, *p99, spread(highest, ".0f"), spread(acknowledged, ".1f"), *cpu, was_held, verdict(all_mine)
        )
    shown.caption = _to([reference])
    return shown


def held(found: Sequence[SteadyResult]) -> list[SteadyResult]:
    """Select the runs in which the rate was held: the latency of the others depends on their length."""
    return [one for one in found if not one.behind]


def plots_of_drains(found: Sequence[DrainResult], name: str, title: str) -> list[Plot]:
    """Rates of the largest backlog, side by side."""
    size = _sizes(found)[-1]
    here = right(one for one in found if one.records == size)
    rates = {system: [one.per_second for one in of_system(here, system)] for system in names(here)}
    return [Plot.of(name, title.format(size), "records/s", rates)]


def plots_of_latency(found: Sequence[SteadyResult]) -> list[Plot]:
    """Latencies side by side, at the rates that more than two systems held."""
    kept = right(held(found))
    return [
        Plot.of(
            f"latency-{rate}",
            f"Latency at {rate:,} events/s, 99 % of the events",
            "ms",
            {name: [one.p99 for one in of_system(kept, name) if one.rate == rate] for name in names(kept)},
        )
        for rate in sorted({one.rate for one in kept})
        if len({one.system for one in kept if one.rate == rate}) > 2
    ]


def plots_of_live(found: Sequence[SteadyResult]) -> list[Plot]:
    """Cost by number of partitions."""
    values: dict[str, list[float]] = {}
    for one in right(held(found)):
        values.setdefault(f"{one.partitions} partitions, {one.system}", []).append(one.cpu_us_per_event)
    return [Plot.of("live", f"Cost per event at {found[0].rate:,} events/s", "us", values)]
