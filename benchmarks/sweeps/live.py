"""Live: what an event costs at a fixed rate, when few or many partitions share it.

In a drain every partition has records in plenty. At a rate each poll finds a handful, of as many partitions: what is
paid per partition and poll, not per event, shows only here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from benchmarks.cluster import Cluster
from benchmarks.measures import Measure, Options
from benchmarks.plots import Lines, Plot, Point
from benchmarks.steady import steady
from benchmarks.systems import REFERENCE, System
from benchmarks.tables import loads, names, of_system, ratios, right, spread, table, verdict
from benchmarks.workload import Shape

if TYPE_CHECKING:
    from benchmarks.bench import Bench


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """One run at a fixed rate by one system. Times in ms. ``behind``: see ``SteadyResult``."""

    partitions: int
    rate: int
    system: str
    round: int
    fault: str
    cpu_us_per_event: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    behind: str = ""
    load_average: float = 0.0


class LiveMeasure(Measure[Live]):
    """``make bench ARGS=live``."""

    name = "live"
    title = "Live events in few and in many partitions"
    place = 42
    presets = frozenset({"full"})
    result = Live
    about = (
        "Events at a fixed rate, as for the latencies, spread over more and more partitions of one member. Processor "
        "time is that of the system's process, all threads, per event: the more partitions, the fewer events of each "
        "are at hand at a time."
    )

    def arguments(self, options: Options) -> None:
        """How many, how fast."""
        options.add("--live-partitions", nargs="+", type=int, quick=[10], default=[10, 400], full=[1, 10, 100, 400],
                    help="that share the rate")  # fmt: skip
        options.add("--live-rate", type=int, quick=2_000, default=2_000, full=5_000, help="events a second")
        options.add("--live-seconds", type=float, quick=4, default=8, full=15, help="of a run")
        options.add("--live-rounds", type=int, quick=1, default=1, full=3, help="of the systems in turn")
        systems = [REFERENCE, "engine"]
        options.add("--live-systems", nargs="+", quick=systems, default=systems, full=systems, help="to be measured")

    def run(self, bench: Bench) -> Iterator[Live]:
        """By number of partitions."""
        bench.warm_up_live()
        options = bench.options
        systems = [System.parse(text) for text in options.live_systems]
        for partitions in options.live_partitions:
            shape = Shape(partitions=partitions)
            cluster = Cluster(bench.cluster.bootstrap_servers, prefix=f"live{partitions}-", shape=shape)

            def once(system: System, turn: int, *, cluster: Cluster = cluster) -> Live:
                found = steady(cluster, system, bench.seed + turn, options.live_rate, options.live_seconds, turn)
                return Live(
                    partitions=cluster.partitions,
                    rate=found.rate,
                    system=found.system,
                    round=turn,
                    fault=found.fault,
                    cpu_us_per_event=found.cpu_share / found.rate * 1e6,
                    p50=found.p50,
                    p99=found.p99,
                    behind=found.behind,
                    load_average=found.load_average,
                )

            def failed(system: System, turn: int, why: str, *, partitions: int = partitions) -> Live:
                return Live(partitions=partitions, rate=options.live_rate, system=system.label, round=turn, fault=why)

            what = f"{options.live_rate:,}/s in {partitions} partitions"
            yield from bench.in_turn(what, options.live_rounds, once, failed, systems)

    def in_short(self, found: Live) -> str:
        """One line."""
        told = f"{found.cpu_us_per_event:.1f} us/event, p50 {found.p50:.1f} p99 {found.p99:.1f} ms"
        where = f"{found.rate:,}/s in {found.partitions} partitions, {found.system}"
        return f"{where}: {found.fault or found.behind or told}"

    def tables(self, found: Sequence[Live]) -> list[Table]:
        """One."""
        shown = table(
            f"{found[0].rate:,} events/s in few and in many partitions; {loads(found)}",
            ("partitions", "system"),
            ("CPU us/event", "ratio", "p50 ms", "p99 ms", "rate held", "exactly once"),
        )
        for partitions in sorted({one.partitions for one in found}):
            here = [one for one in found if one.partitions == partitions]
            kept = [one for one in here if not one.behind]
            reference = names(here)[0]
            for system in names(here):
                mine = right(of_system(kept, system))
                behind = sum(bool(one.behind) for one in of_system(here, system))
                shown.add_row(
                    str(partitions),
                    system,
                    spread((one.cpu_us_per_event for one in mine), ",.1f"),
                    spread(ratios(kept, system, reference, _cpu), ".2f"),
                    spread((one.p50 for one in mine), ",.1f"),
                    spread((one.p99 for one in mine), ",.1f"),
                    f"no: {behind} of {len(of_system(here, system))} runs" if behind else "yes",
                    verdict(of_system(here, system)),
                )
        return [shown]

    def plots(self, found: Sequence[Live]) -> list[Plot]:
        """Cost by number of partitions."""
        good = [one for one in right(found) if not one.behind]
        if len({one.partitions for one in good}) < 2:
            return []
        return [
            Lines(
                name="live",
                title=f"Cost per event at {good[0].rate:,} events/s",
                x="partitions",
                y="CPU us per event",
                log_x=True,
                series={
                    system: [
                        Point(partitions, statistics.median(costs), min(costs), max(costs))
                        for partitions in sorted({one.partitions for one in good})
                        if (costs := [_cpu(one) for one in of_system(good, system) if one.partitions == partitions])
                    ]
                    for system in names(good)
                },
            )
        ]


def _cpu(one: Live) -> float:
    return one.cpu_us_per_event
