"""The account workload by every system: the rate of a backlog, the latency at fixed rates, events that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from rich.table import Table

from benchmarks.account import report
from benchmarks.account.aims import aims_of_async, aims_of_drains, aims_of_latency, aims_of_live
from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.drain import DrainResult, drain
from benchmarks.drawing import Plot
from benchmarks.measures import Aim, Measure
from benchmarks.steady import SteadyResult, steady
from benchmarks.systems import REFERENCE, System

LADDER = [500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000]
"""Events a second, up to more than any system here holds on two cores."""
WAITING = [f"{name}:slots=64" for name in ("loop", "scheduler", "concurrency")]
ALL_WAITING = [*WAITING, *(label.replace("64", "256") for label in WAITING), "quixstreams:waits=1,commit_ms=100"]


class Drain(Measure[DrainResult]):
    """A backlog."""

    name, title, place = "drain", "Throughput: a backlog is handled", 20
    presets = frozenset({"quick", "default", "full"})
    result = DrainResult
    backlog = "Drain of {:,} records"
    about = """\
So many records wait; every system handles them from the start, as a new group. The rate is that of the outputs by
the broker's log-append time, between 10 % and 90 % of them. CPU time is that of the process with all its threads (of
the broker, in its column) over the same stretch."""

    sizes: ClassVar = {"records": (60_000, 300_000, 500_000), "rounds": (1, 3, 5)}

    def run(self, bench: Bench) -> Iterator[DrainResult]:
        """Let all systems work in turn, on the same input."""
        sizes, cluster, seed = bench.sizes(self), bench.cluster, bench.seed
        systems = bench.able(sizes.systems) if "systems" in sizes else bench.systems
        bench.warm_up()
        bench.now(f"writing {sizes.records:,} records")
        source = cluster.source(f"{self.name}-in")
        cluster.fill(source, seed, sizes.records)

        def one(system: System, turn: int) -> DrainResult:
            seconds = getattr(sizes, "seconds", 0.0)
            return drain(cluster, system, source, seed, sizes.records, bench.broker_pid, turn, seconds)

        yield from bench.in_turn(self.name, sizes.rounds, one, DrainResult, systems, records=sizes.records)
        cluster.delete(source)

    def in_short(self, found: DrainResult) -> str:
        rate = f"{found.per_second:,.0f}/s, {found.cpu_us_per_record:.1f} us CPU/record, exactly once"
        return f"{self.name} {found.round} {found.system}: {found.fault or rate}"

    def tables(self, found: Sequence[DrainResult]) -> list[Table]:
        return report.drain_tables(found, self.backlog)

    def plots(self, found: Sequence[DrainResult]) -> list[Plot]:
        return report.plots_of_drains(found, self.name, self.backlog)

    def aims(self, found: Sequence[DrainResult]) -> list[Aim]:
        return aims_of_drains(found)


class AsyncWork(Drain):
    """Events that wait for the world."""

    name, title, place = "async", "Async work: events that wait for the world", 70
    presets = frozenset({"default", "full"})
    backlog = "Events that wait 10 ms on average, {:,} of them"
    about = """\
A backlog of the account workload, in which every event waits 5 ms for the world, and one in a hundred 500 ms, before
it is counted. `loop` is asyncio over confluent-kafka by hand: the reference of the same number of slots. `scheduler`
is `AsyncJobScheduler`, `concurrency` is `@source.on(concurrency=)`. quixstreams is synchronous: the wait
is a `time.sleep` in its callback. Every system works for some seconds and is stopped in the middle of it; its
committed events are judged; the filling of the reorder buffer is part of the rate. Outputs of a partition are
committed in its order: an event behind one of 500 ms waits for it in every exactly-once system here."""

    sizes: ClassVar = {
        "systems": (WAITING, ALL_WAITING, ALL_WAITING),
        "records": (40_000, 150_000, 300_000),
        "seconds": (2.0, 5.0, 10.0),
        "rounds": (1, 2, 3),
    }

    def aims(self, found: Sequence[DrainResult]) -> list[Aim]:
        return aims_of_async(found)


class Latency(Measure[SteadyResult]):
    """Fixed rates."""

    name, title, place = "latency", "Latency at fixed rates", 30
    presets = frozenset({"quick", "default", "full"})
    result = SteadyResult
    about = """\
Events come at a fixed rate from a generator process. Milliseconds from its clock, right before it hands an event to
its producer, to a `read_committed` reader in a third process; the first three seconds do not count. "Input" is how
long the broker took to acknowledge the input itself (99 %). A system whose last tenth of outputs is more than a
second late could not keep up: its latency would grow with the length of the run, so none is reported."""

    sizes: ClassVar = {"rates": ([2_000], [2_000, 20_000], LADDER), "seconds": (5.0, 10.0, 20.0), "rounds": (1, 2, 3)}

    def run(self, bench: Bench) -> Iterator[SteadyResult]:
        """All systems in turn, rate by rate."""
        sizes, able = bench.sizes(self), list(bench.systems)
        bench.warm_up(live=True)
        for rate in sorted(sizes.rates):
            late: set[str] = set()
            for found in self.steadies(bench, bench.cluster, able, rate, sizes.seconds, sizes.rounds):
                late |= {found.system} if found.behind else set()
                yield found
            for system in [system for system in able if system.label in late]:
                bench.say(f"{system.label} could not hold {rate:,} events/s: it is left out of higher rates")
                able.remove(system)

    def steadies(
        self, bench: Bench, cluster: Cluster, systems: Sequence[System], rate: int, seconds: float, rounds: int
    ) -> Iterator[SteadyResult]:
        """Let systems work in turn at one rate."""

        def one(system: System, turn: int) -> SteadyResult:
            return steady(cluster, system, bench.seed + turn, rate, seconds, turn)

        what, partitions = f"{self.name}, {rate:,}/s in {cluster.partitions} partitions", cluster.partitions
        same = {"rate": rate, "seconds": seconds, "partitions": partitions}
        yield from bench.in_turn(what, rounds, one, SteadyResult, systems, **same)

    def in_short(self, found: SteadyResult) -> str:
        times = (
            f"p50 {found.p50:.1f} p99 {found.p99:.1f} max {found.highest:.1f} ms, {found.cpu_us_per_event:.0f} us/event"
        )
        where = f"{found.rate:,}/s in {found.partitions} partitions, {found.round} {found.system}"
        return f"{where}: {found.fault or found.behind or times}"

    def tables(self, found: Sequence[SteadyResult]) -> list[Table]:
        return report.steady_tables(found)

    def plots(self, found: Sequence[SteadyResult]) -> list[Plot]:
        return report.plots_of_latency(found)

    def aims(self, found: Sequence[SteadyResult]) -> list[Aim]:
        return aims_of_latency(found)


class Live(Latency):
    """Few and many partitions."""

    name, title, place = "live", "Live events in few and in many partitions", 42
    presets = frozenset({"full"})
    about = """\
Events at a fixed rate, as for the latencies, spread over more and more partitions of one member. In a drain every
partition has records in plenty; at a rate each poll finds a handful, of as many partitions: the price per partition
and poll shows only here. Processor time is that of the system's process, all threads, per event."""

    sizes: ClassVar = {
        "partitions": ([10], [10, 400], [1, 10, 100, 400]),
        "rate": (2_000, 2_000, 5_000),
        "seconds": (4.0, 8.0, 15.0),
        "rounds": (1, 1, 3),
    }

    def run(self, bench: Bench) -> Iterator[SteadyResult]:
        sizes, systems = bench.sizes(self), [System.parse(REFERENCE), System.parse("engine")]
        bench.warm_up(live=True)
        for partitions in sizes.partitions:
            cluster = Cluster(bench.cluster.bootstrap_servers, partitions, f"live{partitions}-")
            yield from self.steadies(bench, cluster, systems, sizes.rate, sizes.seconds, sizes.rounds)

    def plots(self, found: Sequence[SteadyResult]) -> list[Plot]:
        return report.plots_of_live(found)

    def aims(self, found: Sequence[SteadyResult]) -> list[Aim]:
        return aims_of_live(found)


MEASURES = (Drain(), Latency(), Live(), AsyncWork())
