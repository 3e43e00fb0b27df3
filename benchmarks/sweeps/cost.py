"""Cost: what an event costs as one dimension of the workload grows. A drain at each place, systems in turn."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.bench import MIB
from benchmarks.cluster import Cluster
from benchmarks.drain import drain
from benchmarks.measures import Measure, Options
from benchmarks.plots import Lines, Plot, Point
from benchmarks.sweeps.figures import Drained, figures_of
from benchmarks.sweeps.shapes import DIMENSIONS, NAMES, Place, places, records_of, usual_size
from benchmarks.systems import REFERENCE, System
from benchmarks.tables import names, of_system, ratios, right, spread, table, verdict

if TYPE_CHECKING:
    from benchmarks.bench import Bench


class Cost(Drained, frozen=True, kw_only=True):
    """One drain by one system at one place. ``fault`` is empty if every event was counted exactly once."""

    dimension: str
    size: int


class CostMeasure(Measure[Cost]):
    """``make bench ARGS=cost``."""

    name = "cost"
    title = "Cost per event as one thing grows"
    place = 40
    presets = frozenset({"default", "full"})
    result = Cost
    about = (
        "A drain as above, with one dimension of the workload larger or smaller than usual: "
        + "; ".join(f"*{one.name}*: {one.told} (usually {usual_size(one.name):,})" for one in DIMENSIONS)
        + ". The processor time is that of the system's process, all threads, between 10 % and 90 % of the records. "
        "*to usual* compares a system with itself at the usual shape, round by round: a cost that does not depend on "
        "the dimension stays at 1. More keys are fewer events per key and transaction, so a system that coalesces its "
        "changelog writes more of it. Events of 100 kB are 4,000: rates of a second or less of work."
    )

    def arguments(self, options: Options) -> None:
        """Which dimensions, how many records, who."""
        options.add("--dimensions", nargs="+", choices=NAMES, quick=["types"], default=list(NAMES), full=list(NAMES),
                    help="that grow")  # fmt: skip
        options.add("--cost-records", type=int, quick=30_000, default=60_000, full=200_000, help="of a drain")
        options.add("--cost-rounds", type=int, quick=1, default=1, full=3, help="of the systems in turn")
        options.add("--cost-sizes", choices=("some", "all"), quick="some", default="some", full="all",
                    help="of each dimension")  # fmt: skip
        systems = [REFERENCE, "engine"]
        options.add("--cost-systems", nargs="+", quick=systems, default=systems, full=systems,
                    help="which must know other shapes of the workload")  # fmt: skip

    def run(self, bench: Bench) -> Iterator[Cost]:
        """Place by place."""
        bench.warm_up()
        options = bench.options
        systems = [System.parse(text) for text in options.cost_systems]
        wanted = places(options.dimensions, all_sizes=options.cost_sizes == "all")
        for number, place in enumerate(wanted, start=1):
            name = f"cost{number:02d}-"
            cluster = Cluster(bench.cluster.bootstrap_servers, prefix=name, shape=place.shape)
            records = records_of(place.shape, options.cost_records)
            source = cluster.source(f"{name}in")
            bench.now(f"writing {records:,} records of {told(place)}")
            cluster.fill(source, bench.seed, place.shape.stored + records)
            drains = _Drains(cluster, source, place, records, bench.seed, bench.broker_pid)
            yield from bench.in_turn(f"cost, {told(place)}", options.cost_rounds, drains.run, drains.failed, systems)
            cluster.delete(source)

    def in_short(self, found: Cost) -> str:
        """One line."""
        where = f"{found.dimension} {found.size:,}" if found.size else found.dimension
        if found.fault:
            return f"{where}, {found.system}: {found.fault}"
        return (
            f"{where}, {found.system}: {found.cpu_us_per_record:.1f} us/record, {found.per_second:,.0f}/s, "
            f"broker {found.broker_cpu_us_per_record:.1f} us, RSS {found.rss_highest / MIB:.0f} MiB"
        )

    def tables(self, found: Sequence[Cost]) -> list[Table]:
        """One for each dimension, the usual shape in its place among the sizes."""
        return [_table(found, dimension) for dimension in _measured(found)]

    def plots(self, found: Sequence[Cost]) -> list[Plot]:
        """A line for each system, a picture for each dimension."""
        return [
            Lines(
                name=f"cost-{dimension}",
                title=f"Cost per event: {dimension}",
                x=next(one.told for one in DIMENSIONS if one.name == dimension),
                y="CPU us per record",
                log_x=usual_size(dimension) > 0,
                series={
                    system: [
                        Point(size, statistics.median(costs), min(costs), max(costs))
                        for size in _sizes(found, dimension)
                        if (costs := [_cpu(one) for one in right(of_system(at(found, dimension, size), system))])
                    ]
                    for system in names(found)
                },
            )
            for dimension in _measured(found)
        ]


class _Drains:
    """Drains of one input."""

    def __init__(self, cluster: Cluster, source: str, place: Place, records: int, seed: int, broker_pid: int) -> None:
        self._cluster, self._source, self._place = cluster, source, place
        self._records, self._seed, self._broker_pid = records, seed, broker_pid

    def run(self, system: System, turn: int) -> Cost:
        """One."""
        done = drain(self._cluster, system, self._source, self._seed, self._records, self._broker_pid, turn)
        return Cost(dimension=self._place.dimension, size=self._place.size, **figures_of(done))

    def failed(self, system: System, turn: int, why: str) -> Cost:
        """One without figures."""
        return Cost(
            dimension=self._place.dimension,
            size=self._place.size,
            system=system.label,
            round=turn,
            records=self._records,
            fault=why,
            load_average=os.getloadavg()[0],
        )


def told(place: Place) -> str:
    """For people."""
    return f"{place.dimension} {place.size:,}" if place.size else "the usual shape"


def at(found: Sequence[Cost], dimension: str, size: int) -> list[Cost]:
    """What was measured at one value of a dimension; the usual value is that of the usual shape."""
    mine = [one for one in found if one.dimension == dimension and one.size == size]
    return mine or [one for one in found if one.dimension == "usual" and size == usual_size(dimension)]


def growth(found: Sequence[Cost], dimension: str, size: int, system: str) -> list[float]:
    """Cost at this value / cost at the usual shape, of each round in which both were right."""
    here, usual = (
        {one.round: one.cpu_us_per_record for one in right(of_system(runs, system))}
        for runs in (at(found, dimension, size), at(found, dimension, usual_size(dimension)))
    )
    return [here[turn] / usual[turn] for turn in sorted(here.keys() & usual.keys()) if usual[turn]]


def _measured(found: Sequence[Cost]) -> list[str]:
    return [name for name in dict.fromkeys(one.dimension for one in found) if name != "usual"]


def _sizes(found: Sequence[Cost], dimension: str) -> list[int]:
    sizes = {one.size for one in found if one.dimension == dimension}
    if any(one.dimension == "usual" for one in found):
        sizes.add(usual_size(dimension))
    return sorted(sizes)


def _table(found: Sequence[Cost], dimension: str) -> Table:
    told_as = next(one.told for one in DIMENSIONS if one.name == dimension)
    shown = table(
        f"Cost per event: {told_as}",
        (dimension, "system"),
        ("CPU us/record", "ratio", "to usual", "records/s", "ratio", "broker us/record", "RSS MiB", "exactly once"),
    )
    for size in _sizes(found, dimension):
        here = at(found, dimension, size)
        reference = names(here)[0]
        for system in names(here):
            mine = of_system(here, system)
            good = right(mine)
            shown.add_row(
                f"{size:,}",
                system,
                spread((one.cpu_us_per_record for one in good), ",.1f"),
                spread(ratios(here, system, reference, _cpu), ".2f"),
                spread(growth(found, dimension, size, system), ".2f"),
                spread(one.per_second for one in good),
                spread(ratios(here, system, reference, _rate), ".2f"),
                spread((one.broker_cpu_us_per_record for one in good), ",.1f"),
                spread(one.rss_highest / MIB for one in good),
                verdict(mine),
            )
    return shown


def _cpu(one: Cost) -> float:
    return one.cpu_us_per_record


def _rate(one: Cost) -> float:
    return one.per_second
