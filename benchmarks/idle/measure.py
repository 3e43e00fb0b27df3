"""A member without work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.measures import Aim, Measure, at_most
from benchmarks.systems import System, system_running
from benchmarks.tables import loads, names, of_rounds, of_system, right, spread, table, verdict

IDLE_PERCENT = 1.0
"""Of a core, at most."""
CALM_SECONDS = 3.0
"""After the last event, before the watch begins."""
EVENTS = 200
PATIENCE_SECONDS = 30.0


class IdleResult(msgspec.Struct, frozen=True):
    """One member that has nothing to do. ``percent`` of a core, all threads."""

    system: str
    round: int
    fault: str = ""
    percent: float = 0.0
    load_average: float = 0.0


class Idle(Measure[IdleResult]):
    """No events."""

    name, title, place = "idle", "A member without work", 44
    result = IdleResult
    about = f"""\
The only member of its group owns ten partitions, has handled {EVENTS} events, and gets no more. Processor time of its
process, all threads, in percent of a core: polls, heartbeats, timers."""

    sizes: ClassVar = {"seconds": (5.0, 15.0, 30.0), "rounds": (1, 3, 5)}

    def run(self, bench: Bench) -> Iterator[IdleResult]:
        """All systems in turn."""
        sizes, cluster = bench.sizes(self), bench.cluster

        def one(system: System, turn: int) -> IdleResult:
            job = cluster.job()
            cluster.fill(job.source, bench.seed, EVENTS)
            with system_running(system, job) as child:
                cluster.wait_committed(job, EVENTS, child.check, PATIENCE_SECONDS, system)
                time.sleep(CALM_SECONDS)
                began = time.monotonic()
                first = child.sample(began, EVENTS)
                time.sleep(sizes.seconds)
                last = child.sample(began, EVENTS)
            fault = cluster.judged(job)[0].verdict(bench.seed, EVENTS)
            cluster.forget(job, source=True)
            percent = (last.cpu - first.cpu) / (last.at - first.at) * 100
            return IdleResult(system.label, turn, fault, percent, os.getloadavg()[0])

        yield from bench.in_turn(self.name, sizes.rounds, one, IdleResult)

    def in_short(self, found: IdleResult) -> str:
        return f"{self.name} {found.round} {found.system}: {found.fault or f'{found.percent:.2f} % of a core'}"

    def tables(self, found: Sequence[IdleResult]) -> list[Table]:
        shown = table(
            f"Processor time without events: {of_rounds(found)}; {loads(found)}", ["system"], ["% of a core", "right"]
        )
        for name in names(found):
            mine = of_system(found, name)
            shown.add_row(name, spread((one.percent for one in right(mine)), ".2f"), verdict(mine))
        return [shown]

    def aims(self, found: Sequence[IdleResult]) -> list[Aim]:
        shares = [one.percent for one in right(of_system(found, "engine"))]
        return [at_most("idle member, 10 partitions", IDLE_PERCENT, shares, "% of a core")] if shares else []


MEASURES = (Idle(),)
