"""Where the milliseconds go: the latency at a fixed rate, stretch by stretch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from benchmarks.at_rate import runs_at
from benchmarks.bench import Bench
from benchmarks.measures import Measure, Options
from benchmarks.plots import Bars, Plot
from benchmarks.tables import loads, names, of_rounds, of_system, right, spread, table, verdict
from benchmarks.where.run import ABLE, Where, where
from benchmarks.where.ways import STRETCHES, Stretch


class WhereMeasure(Measure[Where]):
    """Fixed rates, with a look inside."""

    name, title, place = "where", "Where the milliseconds go", 31
    presets = frozenset({"default", "full"})
    result = Where
    about = """\
The same load as for latencies, and the same events all the way: the generator's clock is in each event, the time of
the input's log is the broker's (to the millisecond), and the system writes down when it was how far: a line per
poll, slice and transaction, none per event. All processes share one machine's clock. A stretch goes from the end of
the one before to its own: an event waits in it for whatever ends it. Two things are told of each. Its p50 and p99
over all events: these do not add up, for an event that is late in one stretch is in time in another. And its mean
over two groups of events, those whose *whole* way was about as long as the median (45 % to 55 %) and the slowest 1 %:
these do add up, so the second says what makes the tail. The loop by hand has the same points; what it does between
two of them is in its file. `handle` is the end of a slice (of the engine) or of a poll (of the loop), so the events
handled after this one are in it."""

    def arguments(self, options: Options) -> None:
        """How much."""
        options.add("--where-rates", type=int, nargs="+", quick=[2_000], default=[2_000], full=[500, 2_000, 10_000],
                    help="events a second")  # fmt: skip
        options.add("--where-seconds", type=float, quick=5, default=10, full=20, help="length of a run")
        options.add("--where-rounds", type=int, quick=1, default=2, full=3, help="rounds of each rate")

    def run(self, bench: Bench) -> Iterator[Where]:
        """All systems that can tell, in turn, rate by rate."""
        able = [system for system in bench.systems if system.name in ABLE]
        for system in [system for system in bench.systems if system not in able]:
            bench.say(f"{system.label} does not tell where the milliseconds go: it is left out of `{self.name}`")
        if not able:
            return
        bench.warm_up_live()
        seconds, rounds = bench.options.where_seconds, bench.options.where_rounds
        for rate in sorted(bench.options.where_rates):
            yield from runs_at(bench, "where", where, Where, rate, seconds, rounds, able)

    def in_short(self, found: Where) -> str:
        """The two longest stretches of the slowest events."""
        longest = sorted(found.stretches, key=lambda name: -found.stretches[name].slowest)[:2]
        most = ", ".join(f"{name} {found.stretches[name].slowest:.1f}" for name in longest)
        times = f"p50 {found.p50:.1f} p99 {found.p99:.1f} ms; most of the slowest 1 %: {most}; exactly once"
        return f"where {found.rate:,}/s {found.round} {found.system}: {found.fault or found.behind or times}"

    def tables(self, found: Sequence[Where]) -> list[Table]:
        """One for each rate and system."""
        return [
            _table(mine)
            for rate in _rates(found)
            for system in names(found)
            if (mine := of_system([one for one in found if one.rate == rate], system))
        ]

    def plots(self, found: Sequence[Where]) -> list[Plot]:
        """Two bars for each system: its events about the median, and its slowest; systems side by side."""
        drawn: list[Plot] = []
        for rate in _rates(found):
            here = [one for one in _held(found) if one.rate == rate]
            bars = {
                f"{system}, {group}": {
                    name: statistics.median(value(one.stretches[name]) for one in of_system(here, system))
                    for name in STRETCHES
                }
                for group, value in GROUPS.items()
                for system in names(here)
            }
            drawn.append(
                Bars(name=str(rate), title=f"Where the milliseconds go at {rate:,} events/s", x="ms", bars=bars)
            )
        return drawn


GROUPS: dict[str, Callable[[Stretch], float]] = {
    "about the median": lambda stretch: stretch.middle,
    "slowest 1 %": lambda stretch: stretch.slowest,
}
COLUMNS: dict[str, Callable[[Stretch], float]] = {
    "p50": lambda stretch: stretch.p50,
    "p99": lambda stretch: stretch.p99,
    **GROUPS,
}


def _rates(found: Sequence[Where]) -> list[int]:
    return list(dict.fromkeys(one.rate for one in found))


def _held(found: Sequence[Where]) -> list[Where]:
    """The runs that have figures: right, and at the rate that was asked for."""
    return [one for one in right(found) if not one.behind]


def _table(mine: Sequence[Where]) -> Table:
    """Of one system at one rate."""
    first, kept = mine[0], _held(mine)
    shown = table(
        f"{first.system} at {first.rate:,} events/s for {first.seconds:g} s, ms: {of_rounds(mine)}; {loads(mine)}",
        ["stretch", "until"],
        list(COLUMNS),
    )
    for name, what in STRETCHES.items():
        cells = [spread((value(one.stretches[name]) for one in kept), ".1f") for value in COLUMNS.values()]
        shown.add_row(name, what, *cells)
    sums = [[sum(map(value, one.stretches.values())) for one in kept] for value in GROUPS.values()]
    whole = [[one.p50 for one in kept], [one.p99 for one in kept], *sums]
    shown.add_row("all", "from the generator to the reader", *(spread(values, ".1f") for values in whole))
    told = [f"Exactly once: {verdict(mine)}."]
    if kept:
        events, size = (
            spread((one.events for one in kept), ",.0f"),
            spread((one.per_transaction for one in kept), ".1f"),
        )
        slowest = spread(one.slowest_transactions for one in kept)
        told.append(
            f"{events} events a run, {size} of them per transaction; transactions of the slowest 1 %: {slowest}."
        )
    behind = len(right(mine)) - len(kept)
    if behind:
        told.append(f"The rate was not held in {behind} of {len(mine)} runs: they have no figures.")
    shown.caption = " ".join(told)
    return shown


MEASURES = (WhereMeasure(),)
