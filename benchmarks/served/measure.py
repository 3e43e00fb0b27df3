"""The load that HTTP queries and viewers of the monitor put on a member, and the latency of its answers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.drain import drain
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.served.asking import Asked
from benchmarks.served.member import ASKED, SECRET
from benchmarks.steady import steady
from benchmarks.systems import Module, System
from benchmarks.tables import loads, names, of_rounds, of_system, ratios, right, spread, table, verdict

ALONE, OPEN, QUERIED, VIEWED = "engine", "served", "served:queries=2000", "served:viewers=20"
LEAST_DRAIN = 0.9
MOST_MS = 10.0
"""That the answer of a query may be later than an output, both at 99 %."""
VIEWERS_PERCENT, NOBODY_PERCENT = 2.0, 0.5
"""Of a core, at most: 20 viewers; the open doors without anybody, which is to be nothing that can be measured."""
HELD = 0.9
"""Of the rate of queries, at the least: else their times depend on the length of the run."""


class ServedResult(msgspec.Struct, frozen=True):
    """A drain and a run at a fixed rate of one system. ``per_second``: of the drain. Times in ms: ``p99`` of outputs,
    ``query_p50`` and ``query_p99`` of answers, all at the fixed rate; ``percent`` of a core there, all threads.
    ``queries`` a second were answered, ``failed`` were not."""

    system: str
    round: int
    fault: str = ""
    per_second: float = 0.0
    p99: float = 0.0
    percent: float = 0.0
    queries: float = 0.0
    query_p50: float = 0.0
    query_p99: float = 0.0
    failed: int = 0
    load_average: float = 0.0


class Served(Measure[ServedResult]):
    """A member that others look at."""

    name, title, place = "served", "A member under queries and viewers", 49
    result = ServedResult
    about = """\
The account workload by the engine alone; with `--queries` and a monitor that nobody uses; with 2,000 queries a second
by HTTP, of random keys, through one `StateReader` in another process; and with 20 viewers of the monitor's page of the
source. First a backlog is drained, then events come at a fixed rate. A query counts from the moment at which it was
due, so a late one makes those behind it late. Those who ask, the broker and the generator share the machine with the
member: on few cores the cost in the drain is theirs, too. In a short drain they have hardly begun before it is over."""

    sizes: ClassVar = {
        "records": (150_000, 600_000, 1_200_000),
        "rate": (2_000, 20_000, 20_000),
        "seconds": (5.0, 10.0, 20.0),
        "rounds": (1, 3, 5),
    }

    def run(self, bench: Bench) -> Iterator[ServedResult]:
        """Let all of them work in turn."""
        sizes, cluster = bench.sizes(self), bench.cluster
        bench.warm_up(live=True)
        bench.now(f"writing {sizes.records:,} records")
        source = cluster.source("served-in")
        cluster.fill(source, bench.seed, sizes.records)

        def one(system: System, turn: int) -> ServedResult:
            with TemporaryDirectory() as folder:
                secret = Path(folder) / SECRET
                secret.touch(0o600)
                secret.write_text(secrets.token_urlsafe(32))
                if system.name != ALONE:
                    system = msgspec.structs.replace(system, options=system.options | {"folder": folder})
                drained = drain(cluster, system, source, bench.seed, sizes.records, bench.broker_pid, turn)
                (Path(folder) / ASKED).unlink(missing_ok=True)
                held = steady(cluster, system, bench.seed + turn, sizes.rate, sizes.seconds, turn)
                figures = Path(folder) / ASKED
                asked = msgspec.json.decode(figures.read_bytes(), type=Asked) if figures.exists() else Asked()
            fault = drained.fault or held.fault or held.behind
            if system.options.get("viewers") and not asked.seen:
                fault = fault or "a viewer saw nothing"
            return ServedResult(
                system.label, turn, fault, drained.per_second, held.p99, held.cpu_share * 100, asked.per_second,
                asked.p50, asked.p99, asked.failed, os.getloadavg()[0],
            )  # fmt: skip

        systems = bench.able([ALONE, OPEN, QUERIED, VIEWED])
        yield from bench.in_turn(self.name, sizes.rounds, one, ServedResult, systems)
        cluster.delete(source)

    def in_short(self, found: ServedResult) -> str:
        cost = f"{found.per_second:,.0f}/s; p99 {found.p99:.1f} ms, {found.percent:.0f} % of a core"
        answers = f"; {found.queries:,.0f} queries/s, p99 {found.query_p99:.1f} ms, {found.failed} failed"
        return f"{self.name} {found.round} {found.system}: {found.fault or cost + (answers if found.queries else '')}"

    def tables(self, found: Sequence[ServedResult]) -> list[Table]:
        shown = table(
            f"A member that others look at: {of_rounds(found)}; {loads(found)}",
            ["system"],
            ["drain, events/s", "outputs p99, ms", "% of a core", "queries/s", "p50, ms", "p99, ms", "failed", "right"],
        )
        for name in names(found):
            mine = of_system(found, name)
            kept = right(mine)
            shown.add_row(
                name,
                spread(one.per_second for one in kept),
                spread((one.p99 for one in kept), ".1f"),
                spread((one.percent for one in kept), ".1f"),
                spread(one.queries for one in kept),
                spread((one.query_p50 for one in kept), ".1f"),
                spread((one.query_p99 for one in kept), ".1f"),
                spread(one.failed for one in kept),
                verdict(mine),
            )
        return [shown]

    def aims(self, found: Sequence[ServedResult]) -> list[Aim]:
        made = []
        drains = ratios(found, QUERIED, OPEN, lambda one: one.per_second)
        if drains:
            made.append(at_least("drain under 2,000 queries/s, of that without", LEAST_DRAIN, drains))
        asked = right(of_system(found, QUERIED))
        if asked:
            late = [one.query_p99 - one.p99 for one in asked if one.queries >= HELD * 2_000 and not one.failed]
            made.append(at_most("query, p99 above an output's", MOST_MS, late, "ms"))
        for name, than, what, most in (
            (VIEWED, OPEN, "20 viewers of the monitor", VIEWERS_PERCENT),
            (OPEN, ALONE, "open doors without anybody", NOBODY_PERCENT),
        ):
            theirs = {one.round: one.percent for one in right(of_system(found, than))}
            more = [one.percent - theirs[one.round] for one in right(of_system(found, name)) if one.round in theirs]
            if more:
                made.append(at_most(what, most, more, "% of a core"))
        return made


KINDS = (Module("served", "benchmarks.served.member"),)
MEASURES = (Served(),)
