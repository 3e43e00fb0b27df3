"""Idle: what a member costs while no events come, with few and with many partitions."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import psutil
from confluent_kafka import KafkaException
from rich.table import Table

from benchmarks.bench import MIB
from benchmarks.cluster import Cluster
from benchmarks.measures import Aim, Measure, Options
from benchmarks.systems import REFERENCE, Child, Failed, Progress, System, system_running
from benchmarks.tables import loads, names, of_system, right, spread, table, verdict
from benchmarks.workload import Balance, Job, Judge, Shape

if TYPE_CHECKING:
    from benchmarks.bench import Bench

PRIMING_EVENTS = 1_000
"""Handled first, so that the member is at work, with every partition and every connection."""
CALM_SECONDS = 3.0
"""Between the last of them and the beginning."""
PATIENCE_SECONDS = 60.0
IDLE_AIM = 0.01


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """A member that has nothing to do. ``share``: of one core; ``switches``: how often a second one of its threads woke
    up."""

    partitions: int
    system: str
    round: int
    seconds: float
    fault: str
    share: float = 0.0
    broker_share: float = 0.0
    switches: float = 0.0
    rss: int = 0
    load_average: float = 0.0


class IdleMeasure(Measure[Idle]):
    """``make bench ARGS=idle``."""

    name = "idle"
    title = "A member without work"
    place = 46
    presets = frozenset({"default", "full"})
    result = Idle
    about = (
        f"One member handles {PRIMING_EVENTS:,} events, then nothing comes any more. Processor time of the process, "
        "all threads, as a share of one core; the broker's beside it (fetches that wait, heartbeats); how often a "
        "second a thread gave its processor up because it had to wait."
    )

    def arguments(self, options: Options) -> None:
        """How long."""
        options.add("--idle-partitions", nargs="+", type=int, quick=[10], default=[10, 400], full=[10, 100, 400],
                    help="of a member without work")  # fmt: skip
        options.add("--idle-seconds", type=float, quick=5, default=10, full=30, help="of watching it")
        options.add("--idle-rounds", type=int, quick=1, default=1, full=3, help="of the systems in turn")
        systems = [REFERENCE, "engine"]
        options.add("--idle-systems", nargs="+", quick=systems, default=systems, full=systems, help="to be watched")

    def run(self, bench: Bench) -> Iterator[Idle]:
        """By number of partitions."""
        options = bench.options
        systems = [System.parse(text) for text in options.idle_systems]
        for partitions in options.idle_partitions:
            cluster = Cluster(
                bench.cluster.bootstrap_servers, prefix=f"idle{partitions}-", shape=Shape(partitions=partitions)
            )

            def once(system: System, turn: int, *, cluster: Cluster = cluster) -> Idle:
                return watch(cluster, system, turn, bench.seed, options.idle_seconds, bench.broker_pid)

            def failed(system: System, turn: int, why: str, *, partitions: int = partitions) -> Idle:
                return Idle(partitions=partitions, system=system.label, round=turn, seconds=0, fault=why)

            yield from bench.in_turn(f"idle, {partitions} partitions", options.idle_rounds, once, failed, systems)

    def in_short(self, found: Idle) -> str:
        """One line."""
        told = (
            f"{found.share:.2%} of a core, {found.switches:,.0f} wake-ups/s, broker {found.broker_share:.1%}, "
            f"RSS {found.rss / MIB:.0f} MiB"
        )
        return f"idle with {found.partitions} partitions, {found.system}: {found.fault or told}"

    def tables(self, found: Sequence[Idle]) -> list[Table]:
        """One."""
        shown = table(
            f"A member without work; {loads(found)}",
            ("system",),
            ("partitions", "% of a core", "wake-ups/s", "broker, % of a core", "RSS MiB", "right"),
        )
        for partitions in sorted({one.partitions for one in found}):
            for system in names(found):
                mine = [one for one in of_system(found, system) if one.partitions == partitions]
                good = right(mine)
                shown.add_row(
                    system,
                    f"{partitions}",
                    spread((one.share * 100 for one in good), ".2f"),
                    spread(one.switches for one in good),
                    spread((one.broker_share * 100 for one in good), ".1f"),
                    spread(one.rss / MIB for one in good),
                    verdict(mine),
                )
        return [shown]

    def aims(self, found: Sequence[Idle]) -> list[Aim]:
        """For each number of partitions."""
        aims = []
        for partitions in sorted({one.partitions for one in found}):
            shares = [one.share for one in right(of_system(found, "engine")) if one.partitions == partitions]
            if shares:
                what = f"processor time of an idle member with {partitions} partitions"
                share = statistics.median(shares)
                aims.append(Aim(what, f"below {IDLE_AIM:.0%} of a core", f"{share:.2%}", share < IDLE_AIM))
        return aims


class _Look(msgspec.Struct, frozen=True):
    """A process at one moment."""

    at: float
    cpu: float
    switches: int

    @classmethod
    def of(cls, process: psutil.Process) -> _Look:
        with process.oneshot():
            times, switches = process.cpu_times(), 0
        for thread in process.threads():
            try:
                switches += psutil.Process(thread.id).num_ctx_switches().voluntary
            except psutil.Error:  # it has just ended
                continue
        return cls(time.monotonic(), times.user + times.system, switches)


def watch(cluster: Cluster, system: System, turn: int, seed: int, seconds: float, broker_pid: int) -> Idle:
    """Have some events handled, and watch what the process does when there are no more. Raises ``Failed``."""
    job = cluster.job()
    cluster.fill(job.source, seed, PRIMING_EVENTS)
    broker = psutil.Process(broker_pid)
    with system_running(system, job) as child:
        _until_handled(cluster, job, system, child)
        time.sleep(CALM_SECONDS)
        process = psutil.Process(child.pid)
        before, broker_before = _Look.of(process), sum(broker.cpu_times()[:2])
        time.sleep(seconds)
        after, broker_after = _Look.of(process), sum(broker.cpu_times()[:2])
        child.check()
        rss = process.memory_info().rss
    judge, decode = Judge(cluster.shape), msgspec.json.Decoder(Balance).decode
    for message in cluster.outputs(job):
        judge.hear((message.key() or b"").decode(), decode(message.value() or b""))
    cluster.forget(job, source=True)
    passed = after.at - before.at
    return Idle(
        partitions=cluster.partitions,
        system=system.label,
        round=turn,
        seconds=seconds,
        fault=judge.verdict(seed, PRIMING_EVENTS),
        share=(after.cpu - before.cpu) / passed,
        broker_share=(broker_after - broker_before) / passed,
        switches=(after.switches - before.switches) / passed,
        rss=rss,
        load_average=os.getloadavg()[0],
    )


def _until_handled(cluster: Cluster, job: Job, system: System, child: Child) -> None:
    committed = cluster.committed(job)
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while _events(committed) < PRIMING_EVENTS:
            child.check()
            if time.monotonic() > deadline:
                raise Failed(f"{system.label} did not handle {PRIMING_EVENTS} events in {PATIENCE_SECONDS:g} s")
            time.sleep(0.1)
    finally:
        committed.close()


def _events(committed: Progress) -> int:
    try:
        return committed()
    except KafkaException:  # the coordinator of a new broker's first group is just beginning
        return 0
