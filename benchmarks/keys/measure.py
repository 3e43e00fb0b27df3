"""Parked keys: the price of those that wait for all others, and the speed at which their queues are worked off. Durable
jobs. Events that count once: the price of their ids."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import msgspec
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.drain import middle_rate, stretch
from benchmarks.generator import Load
from benchmarks.keys.asking import CLIENTS
from benchmarks.keys.ids import bytes_of_an_id
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.steady import steady
from benchmarks.systems import Child, Failed, System, running, system_running
from benchmarks.tables import loads, names, of_rounds, of_system, right, spread, table, verdict
from benchmarks.workload import Balance, Job, deposits

NEVER = 1_000_000
"""Attempts that fail: all of them."""
OPEN, ONE, MANY = "nothing parked", "1 of 10,000 keys", "1 key in 100"
DRAINS = {OPEN: 0, ONE: 10_000, MANY: 100}
WORKED_OFF = "queues worked off"
QUEUED_KEYS = 1_000
AHEAD, DURABLE = "jobs ahead of the turn", "durable jobs"
JOBS = {AHEAD: "ahead", DURABLE: "durable"}
BEGIN, JOB_RATE = "begin of a durable job after its event, p50", 200
WAITING, WAITING_MEMORY, WAITING_CPU = 100_000, "100,000 jobs that wait, MB", "100,000 jobs that wait, % of a core"
DISK = "RocksDB" if importlib.util.find_spec("rocksdict") else "SQLite"
PLAIN, NEW, COPIES = "no ids", "ids, all new", "ids, all but 10,000 copies"
PLAIN_ON_DISK, NEW_ON_DISK = f"no ids, {DISK}", f"ids, all new, {DISK}"
ONCE = {
    PLAIN: "once:id=none",
    NEW: "once:id=offset",
    COPIES: "once:id=account",
    PLAIN_ON_DISK: f"once:id=none,disk={DISK}",
    NEW_ON_DISK: f"once:id=offset,disk={DISK}",
}
MEMORY = "bytes an id in memory"
ASKED, QUERIED, ASK_RATE = "ask", "send and query", 200
CALLS = {ASKED: "ask", QUERIED: "query"}
STOPPED, GOES_ON = "stopped by a bad event, longest delay", "with PARK, longest delay"
STOPS = {STOPPED: "waits=partition", GOES_ON: "waits=key"}
CALM, FAILING = "p99, none fails", "p99, one key fails"
RATE, STOP_RATE = 1_000, 200
PATIENCE_SECONDS = 120
SAMPLE_SECONDS = 0.05


class KeysResult(msgspec.Struct, frozen=True):
    """One run. ``figure``: events a second, milliseconds, or bytes. ``system``: the name of the row."""

    system: str
    round: int
    figure: float = 0.0
    fault: str = ""
    load_average: float = 0.0


def drained(cluster: Cluster, bad: int, source: str, seed: int, records: int) -> tuple[float, str]:
    """Handle a backlog while each event of some accounts fails: the rate of all events, and the fault."""
    # By the pace that is the default: a retry within the drain would be the failing handler's own time.
    job, system = cluster.job(source), System.parse(f"parking:bad={bad},fails={NEVER},pace=30")
    with system_running(system, job) as child:
        cluster.wait_committed(job, records, child.check, PATIENCE_SECONDS, system)
    good = sum(not bad or int(account[-5:]) % bad > 0 for account, _ in islice(deposits(seed), records))
    judge, appended = cluster.judged(job)
    cluster.forget(job, source=False)
    return middle_rate(appended) * records / good, judge.order(good)


def worked_off(cluster: Cluster, records: int, seed: int) -> tuple[float, str]:
    """Park all events of ``QUEUED_KEYS`` accounts; then start the repaired program, and wait until all are handled."""
    job = cluster.job()
    accounts = (f"account-{number % QUEUED_KEYS:05d}" for number in range(records))
    cluster.write(job.source, ((account, 1) for account in accounts))
    broken = System.parse(f"parking:bad=1,fails={NEVER}")
    with system_running(broken, job) as child:
        cluster.wait_committed(job, records, child.check, PATIENCE_SECONDS, broken)
    return _written(cluster, job, System.parse("parking"), records, source=True)


def counted_once(cluster: Cluster, label: str, source: str, seed: int, records: int) -> tuple[float, str]:
    """Handle a backlog by ids: the rate at which offsets are committed, since copies have no outputs, and the fault."""
    job, system = cluster.job(source), System.parse(label)
    committed, samples = cluster.progress(job, system), [(0, 0.0)]
    try:
        with system_running(system, job) as child:
            until = time.monotonic() + PATIENCE_SECONDS
            while samples[-1][0] < records:
                child.check()
                if time.monotonic() > until:
                    raise Failed(f"{label}: {samples[-1][0]:,} of {records:,} records in {PATIENCE_SECONDS} s")
                time.sleep(SAMPLE_SECONDS)
                samples.append((committed(), time.monotonic()))
    finally:
        committed.close()
    accounts = {account for account, _ in islice(deposits(seed), records)}
    judge, _ = cluster.judged(job)
    cluster.forget(job, source=False)
    low, high = stretch([done for done, _ in samples], records)
    (before, began), (after, ended) = samples[max(low, 1)], samples[high]
    rate = (after - before) / max(ended - began, SAMPLE_SECONDS)
    return rate, judge.order(len(accounts) if system.options["id"] == "account" else records)


def delayed(cluster: Cluster, label: str, seed: int, seconds: float) -> float:
    """Send deposits for so long while one account of its partition is bad: how late, in ms, the latest output of the
    other accounts is."""
    job, system, events = cluster.job(), System.parse(label), int(STOP_RATE * seconds)
    load = Load(
        bootstrap_servers=job.bootstrap_servers, topic=job.source, seed=seed, skip=0, events=events, rate=STOP_RATE
    )
    with system_running(system, job) as child:
        cluster.write(job.source, [("account-00001", 1)])
        _wait_for_outputs(cluster, job, 1, child, system)
        cluster.write(job.source, [("account-00000", 1)])
        with running("benchmarks.generator", load) as generator:
            generator.result(PATIENCE_SECONDS + seconds)
        _wait_for_outputs(cluster, job, events + 2, child, system)
    decode = msgspec.json.Decoder(Balance).decode
    found = ((decode(one.value() or b""), one.timestamp()[1]) for one in cluster.records(job.output, job.partitions))
    late = [at - 1000 * one.sent for one, at in found if one.sent and one.account != "account-00000"]
    cluster.forget(job, source=True)
    return max(late)


def done_by_jobs(cluster: Cluster, label: str, source: str, records: int) -> tuple[float, str]:
    """Handle a backlog by a job for each event, until all have had their ends."""
    return _written(cluster, cluster.job(source), System.parse(label), records, source=False)


def begun_after(cluster: Cluster, seconds: float, seed: int) -> tuple[float, str]:
    """Start a durable job for each of some events a second: the median time from an event's sending to the begin of
    its job, in ms."""
    job, system, events = cluster.job(), System.parse("durable:tells=1"), int(JOB_RATE * seconds)
    load = Load(
        bootstrap_servers=job.bootstrap_servers, topic=job.source, seed=seed, skip=0, events=events, rate=JOB_RATE
    )
    with system_running(system, job) as child:
        cluster.write(job.source, [("account-00000", 1)])
        _wait_for_outputs(cluster, job, 1, child, system)
        with running("benchmarks.generator", load) as generator:
            generator.result(PATIENCE_SECONDS)
        _wait_for_outputs(cluster, job, events + 1, child, system)
    decode = msgspec.json.Decoder(Balance).decode
    took = sorted(decode(one.value() or b"").sent for one in cluster.records(job.output, job.partitions))
    cluster.forget(job, source=True)
    return took[len(took) // 2] * 1000, "" if len(took) == events + 1 else f"{len(took)} of {events + 1} outputs"


def waiting_jobs(cluster: Cluster, seconds: float, seed: int) -> tuple[float, float]:
    """Start ``WAITING`` durable jobs that begin in an hour: the MB that the process grows by, and the percents of a
    core that it takes when nothing else is left to do."""
    job, system = cluster.job(), System.parse("durable:delay=3600")
    with system_running(system, job) as child:
        cluster.fill(job.source, seed, 1)
        cluster.wait_committed(job, 1, child.check, PATIENCE_SECONDS, system)
        before = child.sample(0, 0)
        cluster.fill(job.source, seed, WAITING - 1)
        cluster.wait_committed(job, WAITING, child.check, PATIENCE_SECONDS, system)
        began = time.monotonic()
        first = child.sample(began, 0)
        time.sleep(seconds)
        last = child.sample(began, 0)
    cluster.forget(job, source=True)
    return (first.rss - before.rss) / 1e6, 100 * (last.cpu - first.cpu) / (last.at - first.at)


def called(cluster: Cluster, how: str, seconds: float) -> tuple[float, float]:
    """Have clients call a source at ``ASK_RATE``: the ms that a call took, 50 % and 99 %."""
    with TemporaryDirectory(prefix="bench-") as folder:
        secret = Path(folder, "secret")
        secret.touch(0o600)
        secret.write_text("the secret of this group\n")
        options = {"secret": str(secret), "rate": str(ASK_RATE), "seconds": str(seconds)}
        job = msgspec.structs.replace(cluster.job(), options=options)
        with running("benchmarks.keys.asking member", job), running(f"benchmarks.keys.asking {how}", job) as callers:
            p50, p99, _ = msgspec.json.decode(callers.result(PATIENCE_SECONDS), type=tuple[float, float, float])
    cluster.forget(job, source=True)
    return p50, p99


def _wait_for_outputs(cluster: Cluster, job: Job, count: int, child: Child, system: System) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while sum(1 for _ in cluster.records(job.output, job.partitions)) < count:
        child.check()
        if time.monotonic() > until:
            raise Failed(f"{system.label} did not write {count:,} outputs in {PATIENCE_SECONDS} s")
        time.sleep(1.0)


def _written(cluster: Cluster, job: Job, system: System, records: int, *, source: bool) -> tuple[float, str]:
    """Run a system until it has written so many outputs."""
    with system_running(system, job) as child:
        _wait_for_outputs(cluster, job, records, child, system)
    judge, appended = cluster.judged(job)
    cluster.forget(job, source=source)
    return middle_rate(appended), judge.order(records)


class Keys(Measure[KeysResult]):
    """Parked keys, durable jobs, and events that count once."""

    name, title, place = "keys", "Parked keys, durable jobs, and events that count once", 46
    presets = frozenset({"full"})
    result = KeysResult
    about = f"""\
The account workload with `PARK`. *Drains*: each event of the named share of the accounts fails and waits; the rate
counts all events, by the log-append times of the others' outputs. *{WORKED_OFF.capitalize()}*: all events of
{QUEUED_KEYS:,} keys wait; then a repaired program starts. Each partition begins ten queues a second, so 100 keys of a
partition take ten seconds at least. *{DURABLE.capitalize()}*: each event starts a job that does nothing, whose end
makes the deposit; the same jobs *ahead of the turn* are the anchor. *Ask*: {CLIENTS} clients send {ASK_RATE} commands a
second by `ask`, or send them and query the state with their effect. *Longest delay*: of {STOP_RATE} events a second
while one account is bad, of the others' outputs: with its partition stopped, and with `PARK`. *p99*: {RATE:,} events
a second, in one run none fails, in the other each event of one key fails once, after a millisecond. *Ids*: the account
workload with `once=`, by ids that are all new, or by the accounts; on disk the state is there, too, with and without
ids. The rate is that of the committed offsets, since copies have no outputs. *{MEMORY.capitalize()}*: what a process
grows by for a million."""

    sizes: ClassVar = {
        "records": (20_000, 200_000, 500_000),
        "queued": (10_000, 100_000, 100_000),
        "seconds": (3.0, 10.0, 20.0),
        "stopped": (10.0, 60.0, 60.0),
        "rounds": (1, 3, 5),
    }

    def run(self, bench: Bench) -> Iterator[KeysResult]:
        """All rows in turn, round by round."""
        sizes, cluster = bench.sizes(self), bench.cluster
        bench.warm_up(live=True)
        source = cluster.source("keys-in")
        cluster.fill(source, bench.seed, sizes.records)
        for turn in range(1, sizes.rounds + 1):
            for row, bad in DRAINS.items():
                bench.now(f"keys {turn}/{sizes.rounds}: {row}")
                figure, fault = drained(cluster, bad, source, bench.seed, sizes.records)
                yield KeysResult(row, turn, figure, fault, os.getloadavg()[0])
            for row, label in ((CALM, "parking"), (FAILING, "parking:bad=10000,fails=1")):
                bench.now(f"keys {turn}/{sizes.rounds}: {row}")
                found = steady(cluster, System.parse(label), bench.seed, RATE, sizes.seconds)
                yield KeysResult(row, turn, found.p99, found.fault or found.behind, found.load_average)
            for row, waits in STOPS.items():
                bench.now(f"keys {turn}/{sizes.rounds}: {row}")
                label = f"parking:bad=10000,heals={sizes.stopped},{waits}"
                yield KeysResult(row, turn, delayed(cluster, label, bench.seed, sizes.stopped), "", os.getloadavg()[0])
            for row, label in JOBS.items():
                bench.now(f"keys {turn}/{sizes.rounds}: {row}")
                figure, fault = done_by_jobs(cluster, label, source, sizes.records)
                yield KeysResult(row, turn, figure, fault, os.getloadavg()[0])
            bench.now(f"keys {turn}/{sizes.rounds}: {BEGIN}")
            figure, fault = begun_after(cluster, sizes.seconds, bench.seed)
            yield KeysResult(BEGIN, turn, figure, fault, os.getloadavg()[0])
            bench.now(f"keys {turn}/{sizes.rounds}: {WAITING_MEMORY}")
            memory, share = waiting_jobs(cluster, sizes.seconds, bench.seed)
            yield KeysResult(WAITING_MEMORY, turn, memory, "", os.getloadavg()[0])
            yield KeysResult(WAITING_CPU, turn, share, "", os.getloadavg()[0])
            for row, how in CALLS.items():
                bench.now(f"keys {turn}/{sizes.rounds}: {row}")
                p50, p99 = called(cluster, how, sizes.seconds)
                yield KeysResult(f"{row}, p50", turn, p50, "", os.getloadavg()[0])
                yield KeysResult(f"{row}, p99", turn, p99, "", os.getloadavg()[0])
            for row, label in ONCE.items():
                bench.now(f"keys {turn}/{sizes.rounds}: {row}")
                figure, fault = counted_once(cluster, label, source, bench.seed, sizes.records)
                yield KeysResult(row, turn, figure, fault, os.getloadavg()[0])
            yield KeysResult(MEMORY, turn, bytes_of_an_id())
            bench.now(f"keys {turn}/{sizes.rounds}: {WORKED_OFF}")
            figure, fault = worked_off(cluster, sizes.queued, bench.seed)
            yield KeysResult(WORKED_OFF, turn, figure, fault, os.getloadavg()[0])

    def in_short(self, found: KeysResult) -> str:
        return f"{self.name} {found.round} {found.system}: {found.fault or f'{found.figure:,.1f}'}"

    def tables(self, found: Sequence[KeysResult]) -> list[Table]:
        title = f"{self.title}: events a second, ms, or bytes; {of_rounds(found)}; {loads(found)}"
        shown = table(title, ["row"], ["figure", "right"])
        for name in names(found):
            mine = of_system(found, name)
            shown.add_row(name, spread((one.figure for one in right(mine)), ",.1f"), verdict(mine))
        return [shown]

    def aims(self, found: Sequence[KeysResult]) -> list[Aim]:
        """By the rounds in which both sides are right."""
        by = {(one.system, one.round): one.figure for one in right(found)}
        rounds = sorted({turn for _, turn in by})

        def pairs(one: str, other: str) -> list[tuple[float, float]]:
            return [(by[one, turn], by[other, turn]) for turn in rounds if {(one, turn), (other, turn)} <= by.keys()]

        aims = []
        for row, least in ((ONE, 0.95), (MANY, 0.80)):
            if shares := [parked / plain for parked, plain in pairs(row, OPEN)]:
                aims.append(at_least(f"drain, {row} parked, to nothing parked", least, shares))
        if shares := [durable / ahead for durable, ahead in pairs(DURABLE, AHEAD)]:
            aims.append(at_least("durable jobs that do nothing, to the same ahead of the turn", 0.4, shares))
        for row, most, unit in (
            (BEGIN, 15, "ms"),
            (WAITING_MEMORY, 150, "MB"),
            (WAITING_CPU, 1, "%"),
            (f"{ASKED}, p50", 15, "ms"),
            (GOES_ON, 1_000, "ms"),
        ):
            if figures := [one.figure for one in right(of_system(found, row))]:
                aims.append(at_most(row, most, figures, unit))
        for row, anchor, least in ((NEW, PLAIN, 0.75), (COPIES, PLAIN, 1.2), (NEW_ON_DISK, PLAIN_ON_DISK, 0.5)):
            if shares := [ids / plain for ids, plain in pairs(row, anchor)]:
                aims.append(at_least(f"drain, {row}, to {anchor}", least, shares))
        for part, most in (("p50", 0.75), ("p99", 1.0)):
            if shares := [ask / query for ask, query in pairs(f"{ASKED}, {part}", f"{QUERIED}, {part}")]:
                aims.append(at_most(f"{ASKED}, {part}, to {QUERIED}", most, shares))
        if sizes := [one.figure for one in right(of_system(found, MEMORY))]:
            aims.append(at_most(MEMORY, 130, sizes))
        if later := [failing - calm for failing, calm in pairs(FAILING, CALM)]:
            aims.append(at_most("p99 of others while one key fails, later by", 3, later, "ms"))
        if rates := [one.figure for one in right(of_system(found, WORKED_OFF))]:
            aims.append(at_least("queued events worked off, a second", 10_000, rates))
        return aims


MEASURES = (Keys(),)
