"""Workers: the drain by 1 .. N processes that share the partitions, on a broker of its own."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.account.aims import ANCESTOR
from benchmarks.bench import MIB, WARM_UP_RECORDS
from benchmarks.cluster import Cluster
from benchmarks.drain import DrainResult, drain
from benchmarks.measures import Aim, Measure, Options
from benchmarks.plots import Lines, Plot, Point
from benchmarks.sweeps.figures import Drained, figures_of
from benchmarks.sweeps.fleet import of_workers
from benchmarks.systems import KINDS, REFERENCE, System
from benchmarks.tables import loads, names, of_system, ratios, right, spread, table, verdict
from benchmarks.workload import Shape
from streams.broker import KafkaBroker

if TYPE_CHECKING:
    from benchmarks.bench import Bench

SHARED = Shape(partitions=12)
"""Twelve can be shared evenly by 1, 2, 3, 4 and 6."""
SCALING_AIM = 1.7
TOGETHER_MS = 3_000
"""The broker waits so long for further members of an empty group (as any broker does unless it is told otherwise): they
begin together, and no partition moves while the backlog is handled."""


class Shared(Drained, frozen=True, kw_only=True):
    """One drain by several processes of one system. ``per_second`` is the rate of all together."""

    workers: int


class Workers(Measure[Shared]):
    """``make bench ARGS=workers``."""

    name = "workers"
    title = "Worker processes of one group"
    place = 45
    presets = frozenset({"default", "full"})
    result = Shared
    about = (
        f"A drain with {SHARED.partitions} partitions, by 1 .. N processes. `engine`: `kes run -n N`, one group, its "
        "supervisor's processor time included; `handwritten`: N loops, each with fixed partitions and no group; "
        "a peer: one process, to compare two workers with. "
        "*to one* compares with one process of the same system, round by round. Processes, broker and the reader share "
        "the machine, so the rate stops growing when its cores are used up: the columns of processor time say how much "
        "of it each record took."
    )

    def arguments(self, options: Options) -> None:
        """How many."""
        options.add("--workers", nargs="+", type=int, quick=[1, 2], default=[1, 2], full=[1, 2, 4],
                    help="processes")  # fmt: skip
        options.add("--worker-records", type=int, quick=60_000, default=200_000, full=500_000, help="of a drain")
        options.add("--worker-rounds", type=int, quick=1, default=1, full=3, help="of the systems in turn")
        systems = [REFERENCE, "engine", ANCESTOR]
        options.add(
            "--worker-systems", nargs="+", quick=systems, default=systems, full=systems, help="to be shared out"
        )

    def run(self, bench: Bench) -> Iterator[Shared]:
        """All numbers in turn, round by round."""
        options = bench.options
        records = options.worker_records
        bench.now("starting a Kafka broker")
        properties = {"broker.session.timeout.ms": "30000", "group.initial.rebalance.delay.ms": str(TOGETHER_MS)}
        with KafkaBroker(durable=True, heap_mb=1024, properties=properties) as broker:
            assert broker.pid is not None
            cluster = Cluster(broker.bootstrap_servers, prefix="workers", shape=SHARED)
            source = cluster.source("workers-in")
            bench.now(f"writing {records:,} records")
            cluster.fill(source, bench.seed, max(records, WARM_UP_RECORDS))
            pid = broker.pid
            bench.warm(
                "drains of its own",
                pid,
                lambda system: drain(cluster, system, source, bench.seed, max(records, WARM_UP_RECORDS), pid),
            )
            if records < WARM_UP_RECORDS:
                cluster.delete(source)
                source = cluster.source("workers-in-2")
                cluster.fill(source, bench.seed, records)
            able = bench.able([System.parse(text) for text in options.worker_systems])
            for turn in range(1, options.worker_rounds + 1):
                for number in options.workers:

                    def once(system: System, _: int, *, number: int = number, turn: int = turn) -> Shared:
                        done = drain(
                            cluster, system, source, bench.seed, records, pid, turn, running=of_workers(number)
                        )
                        return shared(done, number)

                    def failed(system: System, _: int, why: str, *, number: int = number, turn: int = turn) -> Shared:
                        return Shared(workers=number, system=system.label, round=turn, records=records, fault=why,
                                      load_average=os.getloadavg()[0])  # fmt: skip

                    systems = able if number == 1 else [one for one in able if not KINDS[one.name].is_peer]
                    yield from bench.in_turn(f"{number} workers, round {turn}", 1, once, failed, systems)

    def in_short(self, found: Shared) -> str:
        """One line."""
        told = (
            f"{found.per_second:,.0f}/s, {found.cpu_us_per_record:.1f} us/record, broker "
            f"{found.broker_cpu_us_per_record:.1f} us, exactly once"
        )
        return f"{found.workers} workers, {found.system}: {found.fault or told}"

    def tables(self, found: Sequence[Shared]) -> list[Table]:
        """One."""
        shown = table(
            f"Drain of {found[0].records:,} records by worker processes; {loads(found)}",
            ("system",),
            ("workers", "records/s", "to one", "CPU us/record", "broker us/record", "cores busy", "RSS MiB",
             "exactly once"),
        )  # fmt: skip
        for system in names(found):
            for number in sorted({one.workers for one in found}):
                mine = [one for one in of_system(found, system) if one.workers == number]
                if not mine:  # a peer, which is one process
                    continue
                good = right(mine)
                shown.add_row(
                    system,
                    str(number),
                    spread(one.per_second for one in good),
                    spread(scaling(found, system, number), ".2f"),
                    spread((one.cpu_us_per_record for one in good), ",.1f"),
                    spread((one.broker_cpu_us_per_record for one in good), ",.1f"),
                    spread((cores(one) for one in good), ".2f"),
                    spread(one.rss_highest / MIB for one in good),
                    verdict(mine),
                )
        return [shown]

    def aims(self, found: Sequence[Shared]) -> list[Aim]:
        """From one to two, which cannot be told where two processes and the broker want more processors than there are;
        and two beside the ancestor."""
        return [*_scaling_aim(found), *_ancestor_aim(found)]

    def plots(self, found: Sequence[Shared]) -> list[Plot]:
        """Rates by number of processes."""
        good = right(found)
        return [
            Lines(
                name="workers",
                title="Worker processes of one group",
                x="processes",
                y="records/s",
                series={
                    system: [
                        Point(number, statistics.median(rates), min(rates), max(rates))
                        for number in sorted({one.workers for one in good})
                        if (rates := [one.per_second for one in of_system(good, system) if one.workers == number])
                    ]
                    for system in names(good)
                },
            )
        ]


def shared(done: DrainResult, workers: int) -> Shared:
    """What a drain by so many processes tells."""
    return Shared(workers=workers, **figures_of(done))


def scaling(found: Sequence[Shared], system: str, workers: int) -> list[float]:
    """Rate of so many / rate of one, of each round in which both were right."""
    good = right(of_system(found, system))
    alone, many = ({one.round: one.per_second for one in good if one.workers == number} for number in (1, workers))
    return [many[turn] / alone[turn] for turn in sorted(alone.keys() & many.keys()) if alone[turn]]


def _scaling_aim(found: Sequence[Shared]) -> Iterator[Aim]:
    scaled = scaling(found, "engine", 2)
    if not scaled:
        return
    times = statistics.median(scaled)
    wanted = [2 * cores(one) for one in right(of_system(found, "engine")) if one.workers == 1]
    is_met = True if times >= SCALING_AIM else None if max(wanted) > (os.cpu_count() or 1) else False
    beside = "" if is_met is not None else f"; {max(wanted):.1f} cores would be needed, {os.cpu_count()} are here"
    yield Aim("one worker process to two", f"at least {SCALING_AIM} x", f"{times:.2f} x{beside}", is_met)


def _ancestor_aim(found: Sequence[Shared]) -> Iterator[Aim]:
    """``gkes`` uses as many cores as it gets, so two of our processes stand beside one of its."""
    beside = [one for one in found if (one.system, one.workers) in (("engine", 2), (ANCESTOR, 1))]
    what = f"two worker processes, to `{ANCESTOR}`"
    times = ratios(beside, "engine", ANCESTOR, lambda one: one.per_second)
    if times:
        yield Aim(what, "at least 1", spread(times, ".2f"), statistics.median(times) >= 1)
    elif right(of_system(beside, "engine")) and of_system(beside, ANCESTOR):
        yield Aim(what, "at least 1", f"`{ANCESTOR}` was not right", None)


def cores(one: Shared) -> float:
    """Processors that system and broker kept busy together."""
    return one.per_second * (one.cpu_us_per_record + one.broker_cpu_us_per_record) / 1e6
