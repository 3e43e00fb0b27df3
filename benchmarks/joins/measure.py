"""Several inputs, joined tables and the loop: drains, the load of a table, a hop, moves."""

from __future__ import annotations

import argparse
import os
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.drain import DrainResult, drained, middle_rate
from benchmarks.joins.workload import FIRST_ORDERS, Backlog, Invoiced, JoinJudge, customer, fill_deposits, row
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.stalls.measure import at_moves, play
from benchmarks.stalls.member import looked_into
from benchmarks.steady import SteadyResult, steady
from benchmarks.systems import Failed, Module, System, system_running
from benchmarks.tables import by_what, loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from benchmarks.workload import KEYS, Job
from streams.runtime.changelog import JOIN_PREFIX

ONE, TWO, JOIN, HOP = "engine", "two-inputs", "join", "hop"
PEERS = ["kafka-streams:commit_ms=100", "quixstreams:commit_ms=100", "goka"]
ALL_PEERS = [*PEERS[:1], "kafka-streams:commit_ms=20", *PEERS[1:2], "quixstreams:commit_ms=20", *PEERS[2:]]
OF_RATE = {"kafka-streams": 1.6, "quixstreams": 3.0, "goka": 1.0}
"""The drain with a join, at least so many times as fast as each."""
DRAIN, LOAD, LATENCY, SILENCE = "drain", "load of a table", "latency", "silence"
LEAST_ROWS = 150_000
MOST_MS = 150.0
PATIENCE_SECONDS = 180.0


class JoinResult(msgspec.Struct, frozen=True):
    """One figure, with its unit. ``p99``: of latencies; the worst, of silences. ``cpu_us``: of the process for each
    record of its inputs that are counted, tables excepted. ``met``: share of orders with the very row of their time."""

    what: str
    system: str
    round: int
    fault: str = ""
    value: float = 0.0
    unit: str = ""
    p99: float = 0.0
    cpu_us: float = 0.0
    met: float = 0.0
    load_average: float = 0.0


class Joins(Measure[JoinResult]):
    """Beside the account workload, and beside peers."""

    name, title, place = "joins", "Several inputs, joined tables, the loop", 36
    presets = frozenset({"full"})
    result = JoinResult
    about = """\
*Drain*: outputs per second by the broker's log-append time. `engine` is the account workload, with one input: records
wait, and are handled from the start, by a new group; the rate is that between 10 % and 90 % of the outputs. The
source `two-inputs` has the same records at the same times, every other one in a second topic (50 to a millisecond of
event time). `join` and the peers handle as many orders, with a table of 10,000 customers, of which one changes after
every ten orders; an output is the order with the row of its customer. They run, and have read the table and some
orders, when all other orders and changes of rows are committed at once; the rate is that from this commit to the last
output, so changes are paid for whenever they are taken. Kafka Streams joins a stream with a table under
`exactly_once_v2`, with rows in memory and in a changelog. quixstreams does `join_asof`, exactly once, with rows in
RocksDB. goka does a `Join`, at least once, with rows in memory. Right is a system that sends each order once, in the
order of its customer, with a row that was there, and never with an older one than before. *Row of its time* is the
share of orders that met the very row that the times of the records demand. It is no fault to meet another one: Kafka
has no order between topics. *Load*: a table of so many rows and no order; rows per second by the log-append time of
the changelog, which is then compared with the table. *Latency*: the account workload at a fixed rate, each deposit
handled at once (`engine`), or after one hop through the loop (`hop`); what the second takes longer is the hop.
*Silence*: the planned moves of the stalls, of a source with a joined table and a lookup that do not change; the median
of the partitions that moved, and the worst."""

    sizes: ClassVar = {
        "systems": (PEERS, PEERS, ALL_PEERS),
        "orders": (60_000, 300_000, 300_000),
        "rows": (100_000, 500_000, 1_000_000),
        "rate": (2_000, 2_000, 2_000),
        "seconds": (5.0, 10.0, 20.0),
        "rounds": (1, 3, 5),
    }

    def run(self, bench: Bench) -> Iterator[JoinResult]:
        """Drains, loads, latencies, moves; systems take turns."""
        sizes = bench.sizes(self)
        systems = [System.parse(label) for label in (ONE, TWO, JOIN)] + bench.able(sizes.systems)
        bench.warm_up(live=True)
        yield from self._drains(bench, sizes, systems)
        yield from self._loads(bench, sizes)
        yield from self._latencies(bench, sizes)
        yield from self._moves(bench, sizes)

    def _drains(self, bench: Bench, sizes: argparse.Namespace, systems: Sequence[System]) -> Iterator[JoinResult]:
        cluster, seed, orders = bench.cluster, bench.seed, sizes.orders
        bench.now(f"{self.name}: writing {orders:,} deposits, twice")
        source, first, second = (cluster.source(f"{self.name}-{name}") for name in ("deposits", "first", "second"))
        fill_deposits(cluster, (source,), seed, orders)
        fill_deposits(cluster, (first, second), seed, orders)

        def one(system: System, turn: int) -> JoinResult:
            if system.label not in (ONE, TWO):
                return joined(bench, system, orders, turn)
            job = cluster.job(source if system.label == ONE else first)
            job = msgspec.structs.replace(job, second=second if system.label == TWO else "")

            def judged(job: Job, handled: int) -> tuple[str, list[int]]:
                judge, appended = cluster.judged(job)
                return judge.verdict(seed, handled), appended

            return of_drain(drained(cluster, system, job, orders, bench.broker_pid, judged, turn))

        yield from bench.in_turn(f"{self.name}, {DRAIN}", sizes.rounds, one, partial(JoinResult, DRAIN), systems)
        cluster.delete(source, first, second)

    def _loads(self, bench: Bench, sizes: argparse.Namespace) -> Iterator[JoinResult]:
        cluster, rows, encode = bench.cluster, sizes.rows, msgspec.json.encode
        bench.now(f"{self.name}: writing {rows:,} rows")
        customers = cluster.source(f"{self.name}-rows")
        cluster.set_topic(customers, {"cleanup.policy": "compact"})
        keys = [customer(number) for number in range(rows)]
        cluster.write((customers, key, encode(row(key, 0)), [], 0) for key in keys)
        due = sums((key.encode(), encode(row(key, 0))) for key in keys)

        def one(system: System, turn: int) -> JoinResult:
            job = msgspec.structs.replace(cluster.job(), table=customers)
            cluster.set_topic(job.changelog, {"message.timestamp.type": "LogAppendTime"})
            with system_running(system, job) as child:
                watched = msgspec.structs.replace(job, source=customers)
                cluster.wait_committed(watched, rows, child.check, PATIENCE_SECONDS)
            prefix, kept, appended = JOIN_PREFIX + customers.encode() + b"\0", list[tuple[bytes, bytes]](), []
            for message in cluster.records(job.changelog, cluster.partitions):
                key = message.key() or b""
                if key.startswith(prefix):
                    kept.append((key.removeprefix(prefix), message.value() or b""))
                    appended.append(message.timestamp()[1])
            cluster.forget(job, source=True)
            fault = "" if sums(kept) == due else f"the changelog has {len(kept):,} rows, and not those of the table"
            rate = middle_rate(appended)
            return JoinResult(LOAD, system.label, turn, fault, rate, "rows/s", load_average=os.getloadavg()[0])

        systems = [System.parse(JOIN)]
        yield from bench.in_turn(f"{self.name}, {LOAD}", sizes.rounds, one, partial(JoinResult, LOAD), systems)
        cluster.delete(customers)

    def _latencies(self, bench: Bench, sizes: argparse.Namespace) -> Iterator[JoinResult]:
        def one(system: System, turn: int) -> JoinResult:
            return of_steady(steady(bench.cluster, system, bench.seed + turn, sizes.rate, sizes.seconds, turn))

        systems = [System.parse(ONE), System.parse(HOP)]
        yield from bench.in_turn(f"{self.name}, {LATENCY}", sizes.rounds, one, partial(JoinResult, LATENCY), systems)

    def _moves(self, bench: Bench, sizes: argparse.Namespace) -> Iterator[JoinResult]:
        cluster = bench.cluster
        customers = cluster.source(f"{self.name}-accounts")
        cluster.set_topic(customers, {"cleanup.policy": "compact"})
        keys = [customer(number) for number in range(KEYS)]
        topics = [customers, cluster.source(looked_into(customers))]
        cluster.set_topic(topics[1], {"cleanup.policy": "compact"})
        cluster.write((topic, key, msgspec.json.encode(row(key, 0)), [], 0) for topic in topics for key in keys)
        for turn in range(1, sizes.rounds + 1):
            bench.now(f"{self.name}, {SILENCE}, {turn}/{sizes.rounds}")
            try:
                stalls = play(cluster, "planned", turn, bench.seed + turn, customers)
            except Failed as error:
                yield JoinResult(SILENCE, JOIN, turn, f"failed: {error}")
                continue
            for stall in stalls:
                if times := at_moves([stall]):
                    value, worst, load = statistics.median(times), times[-1], stall.load_average
                    what = f"{SILENCE}, {stall.what}"
                    yield JoinResult(what, JOIN, turn, stall.fault, value, "ms", worst, load_average=load)
        cluster.delete(*topics)

    def in_short(self, found: JoinResult) -> str:
        p99 = f", p99 {found.p99:,.1f}" if found.p99 else ""
        met = f", {found.met:.1%} with the row of their time" if found.met else ""
        figures = f"{found.value:,.1f} {found.unit}{p99}{met}"
        return f"{self.name} {found.round}, {found.what}, {found.system}: {found.fault or figures}"

    def tables(self, found: Sequence[JoinResult]) -> list[Table]:
        drains = [one for one in found if one.what == DRAIN]
        columns = ["outputs/s", f"to {ONE}", "processor time, us each", "row of its time", "right"]
        shown = table(f"Drain: {of_rounds(drains)}; {loads(drains)}", ["system"], columns)
        for system in names(drains):
            mine = of_system(drains, system)
            kept = right(mine)
            shown.add_row(
                system,
                spread(one.value for one in kept),
                spread(ratios(drains, system, ONE, lambda one: one.value), ".2f"),
                spread((one.cpu_us for one in kept), ".1f"),
                spread((one.met for one in kept if one.met), ".1%"),
                verdict(mine),
            )
        rest = [one for one in found if one.what != DRAIN]
        others = table(f"Beside the drains: {of_rounds(rest)}; {loads(rest)}", ["what", "of"],
                       ["figure", "p99, or the worst", "unit", "right"])  # fmt: skip
        for what, of_it in by_what(rest).items():
            for system in names(of_it):
                mine = of_system(of_it, system)
                kept = right(mine)
                values, p99s = [one.value for one in kept], [one.p99 for one in kept if one.p99]
                unit = next((one.unit for one in kept), "")
                form = ",.0f" if unit == "rows/s" else ".1f"
                others.add_row(what, system, spread(values, form), spread(p99s, ".1f"), unit, verdict(mine))
        return [one for one in (shown, others) if one.row_count]

    def aims(self, found: Sequence[JoinResult]) -> list[Aim]:
        aims: list[Aim] = []
        drains = [one for one in found if one.what == DRAIN]
        wanted = [(TWO, ONE, 0.9), (JOIN, ONE, 0.85)]
        wanted += [(JOIN, peer, OF_RATE[kind]) for peer in names(drains) if (kind := peer.partition(":")[0]) in OF_RATE]
        for system, reference, least in wanted:
            if compared := ratios(drains, system, reference, lambda one: one.value):
                aims.append(at_least(f"drain, `{system}` to `{reference}`", least, compared))
        if loaded := right(one for one in found if one.what == LOAD):
            shares = [one.value / LEAST_ROWS for one in loaded]
            aims.append(at_least(f"load of a table, of {LEAST_ROWS:,} rows/s", 1, shares))
        latencies = [one for one in found if one.what.startswith(LATENCY)]
        if slower := ratios(latencies, HOP, ONE, lambda one: one.value):
            aims.append(at_most("a hop through the loop, p50, to an output's", 1.5, [one - 1 for one in slower]))
        for what, moved in by_what(right(one for one in found if one.what.startswith(SILENCE))).items():
            worst = max(one.p99 for one in moved)
            aims.append(Aim(f"{what}, joined table and lookup", f"at most {MOST_MS:g} ms", f"worst {worst:,.0f} ms",
                            worst <= MOST_MS))  # fmt: skip
        return aims


def joined(bench: Bench, system: System, orders: int, turn: int) -> JoinResult:
    """Let a system that runs, and has read its table, join a backlog of orders with it. Raises ``Failed``."""
    cluster, seed, judge = bench.cluster, bench.seed, JoinJudge(bench.seed, orders)
    job = cluster.job()
    job = msgspec.structs.replace(job, table=cluster.source(f"{job.group}-customers"))
    cluster.set_topic(job.table, {"cleanup.policy": "compact"})
    backlog, decode = Backlog(cluster, job.source, job.table, seed, orders), msgspec.json.Decoder(Invoiced).decode
    backlog.first()
    began, appended = 0.0, list[int]()

    def ready(check: Callable[[], None]) -> None:
        nonlocal began
        cluster.wait_committed(job, FIRST_ORDERS, check, PATIENCE_SECONDS, system)
        began = backlog.rest()

    def judged(job: Job, _: int) -> tuple[str, list[int]]:
        for message in cluster.records(job.output, cluster.partitions):
            judge.add((message.key() or b"").decode(), decode(message.value() or b""))
            appended.append(message.timestamp()[1])
        return judge.verdict(), appended

    found = drained(cluster, system, job, orders, bench.broker_pid, judged, turn, ready=ready, most=backlog.orders)
    cluster.delete(job.source)  # the table has the group in its name, and is gone with what the run made
    seconds = max(appended, default=0) / 1000 - began
    rate = (len(appended) - FIRST_ORDERS) / seconds if seconds > 0 else 0.0
    return of_drain(msgspec.structs.replace(found, per_second=rate), judge.met / max(judge.outputs, 1))


def of_drain(found: DrainResult, met: float = 0.0) -> JoinResult:
    """Take over the figures of a drain."""
    rate, cpu = found.per_second, found.cpu_us_per_record
    return JoinResult(
        DRAIN, found.system, found.round, found.fault, rate, "outputs/s", 0.0, cpu, met, found.load_average
    )


def of_steady(found: SteadyResult) -> JoinResult:
    """Take over the figures of a run at a fixed rate; one that was not held has none."""
    what, fault = f"{LATENCY} at {found.rate:,}/s", found.fault or found.behind
    cpu = found.cpu_us_per_event
    return JoinResult(
        what, found.system, found.round, fault, found.p50, "ms", found.p99, cpu, load_average=found.load_average
    )


def sums(rows: Iterable[tuple[bytes, bytes]]) -> tuple[int, int]:
    """Return the number of rows and the sum of their checksums: equal for the same rows in any order."""
    number = total = 0
    for key, value in rows:
        number, total = number + 1, total + zlib.crc32(value, zlib.crc32(key))
    return number, total


KINDS = (
    Module(TWO, "benchmarks.joins.work two"),
    Module(JOIN, "benchmarks.joins.work join"),
    Module(HOP, "benchmarks.joins.work hop"),
)
MEASURES = (Joins(),)
