"""The account workload by every system: how fast a backlog is handled, how late outputs are, if memory stays flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.account.aims import aims_of_drains, aims_of_latency
from benchmarks.account.report import drain_tables, memory_tables, plots_of_drains, plots_of_latency, steady_tables
from benchmarks.at_rate import runs_at
from benchmarks.bench import MIB, Bench
from benchmarks.drain import DrainResult, drain
from benchmarks.measures import Aim, Measure, Options
from benchmarks.plots import Plot
from benchmarks.steady import SteadyResult, steady
from benchmarks.systems import System

LADDER = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000)
"""Events a second, up to what no system here holds on two cores."""


class Drain(Measure[DrainResult]):
    """A backlog."""

    name, title, place = "drain", "Throughput: a backlog is handled", 20
    presets = frozenset({"quick", "default", "full"})
    result = DrainResult
    about = """\
So many records wait; every system handles them from the start, as a new group. The rate is that of the outputs by
the broker's log-append time, between 10 % and 90 % of them, so neither the start of a process nor its end counts.
CPU time is that of the process with all its threads (of the broker, in its column) over the same stretch. Every
output is read back and judged before a rate is told."""

    def arguments(self, options: Options) -> None:
        """How much."""
        options.add("--records", type=int, quick=60_000, default=300_000, full=500_000, help="records of a drain")
        options.add("--drain-rounds", type=int, quick=1, default=3, full=5, help="rounds of a drain")

    def run(self, bench: Bench) -> Iterator[DrainResult]:
        """All systems in turn, on the same input."""
        cluster, records, seed = bench.cluster, bench.options.records, bench.seed
        bench.warm_up()
        bench.now(f"writing {records:,} records")
        source = cluster.source("drain-in")
        cluster.fill(source, seed, records)

        def one(system: System, turn: int) -> DrainResult:
            return drain(cluster, system, source, seed, records, bench.broker_pid, turn=turn)

        def failed(system: System, turn: int, why: str) -> DrainResult:
            return DrainResult(system.label, turn, records, seed, why)

        yield from bench.in_turn("drain", bench.options.drain_rounds, one, failed)
        cluster.delete(source)

    def in_short(self, found: DrainResult) -> str:
        """Rate and price."""
        rate = f"{found.per_second:,.0f}/s, {found.cpu_us_per_record:.1f} us CPU/record, exactly once"
        return f"drain {found.round} {found.system}: {found.fault or rate}"

    def tables(self, found: Sequence[DrainResult]) -> list[Table]:
        """One for each size."""
        return drain_tables(found)

    def plots(self, found: Sequence[DrainResult]) -> list[Plot]:
        """Rates side by side."""
        return plots_of_drains(found)

    def aims(self, found: Sequence[DrainResult]) -> list[Aim]:
        """To the loop, and to peers."""
        return aims_of_drains(found)


class Latency(Measure[SteadyResult]):
    """Fixed rates."""

    name, title, place = "latency", "Latency at fixed rates", 30
    presets = frozenset({"quick", "default", "full"})
    result = SteadyResult
    about = """\
Events come at a fixed rate from a generator process. Milliseconds from its clock, right before it hands an event to
its producer, to a `read_committed` reader in a third process; the first three seconds do not count. "Input" is how
long the broker took to acknowledge the input itself (99 %): what is late there is late before any system has seen
it. A system whose last tenth of outputs is more than a second late could not keep up: its latency grows with the
length of the run, so none is told, and it is left out of higher rates."""

    def arguments(self, options: Options) -> None:
        """How much."""
        options.add(
            "--rates",
            type=int,
            nargs="+",
            quick=[2_000],
            default=[2_000, 20_000],
            full=list(LADDER),
            help="events a second",
        )
        options.add("--seconds", type=float, quick=5, default=10, full=20, help="length of a run")
        options.add("--latency-rounds", type=int, quick=1, default=2, full=3, help="rounds of each rate")

    def run(self, bench: Bench) -> Iterator[SteadyResult]:
        """All systems in turn, rate by rate."""
        bench.warm_up_live()
        able = list(bench.systems)
        for rate in sorted(bench.options.rates):
            late: set[str] = set()
            for found in runs_at(
                bench, "latency", steady, SteadyResult, rate, bench.options.seconds, bench.options.latency_rounds, able
            ):
                late |= {found.system} if found.behind else set()
                yield found
            for system in [system for system in able if system.label in late]:
                bench.say(f"{system.label} could not hold {rate:,} events/s: it is left out of higher rates")
                able.remove(system)

    def in_short(self, found: SteadyResult) -> str:
        """Percentiles."""
        times = f"p50 {found.p50:.1f} p99 {found.p99:.1f} max {found.highest:.1f} ms, exactly once"
        return f"{found.rate:,}/s {found.round} {found.system}: {found.fault or found.behind or times}"

    def tables(self, found: Sequence[SteadyResult]) -> list[Table]:
        """One for each rate."""
        return steady_tables(found)

    def plots(self, found: Sequence[SteadyResult]) -> list[Plot]:
        """Throughput against latency; the percentiles of each rate."""
        return plots_of_latency(found)

    def aims(self, found: Sequence[SteadyResult]) -> list[Aim]:
        """In milliseconds, and to peers."""
        return aims_of_latency(found)


class Memory(Measure[SteadyResult]):
    """A longer time at one rate."""

    name, title, place = "memory", "Memory over time", 80
    presets = frozenset({"full"})
    result = SteadyResult
    about = """\
Resident memory of the process, twice a second, at 2,000 events a second. Flat means that the medians of the second
and of the last quarter of the time are alike. Buffers of the client and the table fill in the first quarter."""

    def arguments(self, options: Options) -> None:
        """How long."""
        options.add("--memory-seconds", type=float, quick=10, default=60, full=180, help="length of the run")

    def run(self, bench: Bench) -> Iterator[SteadyResult]:
        """Each system once."""
        bench.warm_up_live()
        yield from runs_at(bench, "memory", steady, SteadyResult, 2_000, bench.options.memory_seconds, 1)

    def in_short(self, found: SteadyResult) -> str:
        """Early and late."""
        if found.fault or found.memory is None:
            return f"memory {found.system}: {found.fault}"
        memory = found.memory
        return f"memory {found.system}: {memory.second_quarter / MIB:.1f} -> {memory.last_quarter / MIB:.1f} MiB"

    def tables(self, found: Sequence[SteadyResult]) -> list[Table]:
        """One."""
        return memory_tables(found)


MEASURES = (Drain(), Latency(), Memory())
