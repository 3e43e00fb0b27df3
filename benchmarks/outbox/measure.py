"""An outbox: its drain, the way of a row, the price for writers, moves, and an idle relay, beside other relays."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import psycopg
from rich.table import Table

from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.measures import Aim, Measure, at_least, at_most
from benchmarks.outbox.arrivals import Arrivals, Judged, judged, parts
from benchmarks.outbox.peers import PEERS, Peer
from benchmarks.outbox.postgres import Postgres
from benchmarks.outbox.work import PARTITIONS, OutboxFigures, OutboxJob, config_of, stash
from benchmarks.reader import percentiles
from benchmarks.systems import Child, Failed, Unavailable, running
from benchmarks.tables import loads, names, of_rounds, of_system, ratios, right, spread, table, verdict
from streams import Outbox, Record
from streams.clients.settings import ClientSettings
from streams.errors import StreamsError
from streams.outbox.positions import positions_name
from streams.outbox.relay import apply
from streams.records import TYPE_HEADER
from streams.runtime.ownership.tenure import remove_dead_member

OURS, BY_HAND = "kes outbox", "by hand"
BARE, NO_ROW = "INSERT of the same row", "no row"
BY_ARRAYS, UNORDERED = "kes_stash_rows", "kes_stash_rows, unordered"
KEYS, VALUE_BYTES = 10_000, 300
STASHED_AT_ONCE = 1_000
PATIENCE_SECONDS, SESSION_SECONDS = 600.0, 6.0
MOVES = ("planned stop", "supervised death", "kill -9", "PostgreSQL restarted")
MOST_SECONDS = {"planned stop": 0.3, "supervised death": 1.0, "kill -9": SESSION_SECONDS + 0.5}
DRAIN, HOT_KEY, SNAPSHOT = "drain", "drain, one key", "drain, a held snapshot"
PAUSE_SECONDS = 1.5
"""Before a row: a relay falls asleep earlier."""
IDLE, QUERIES = "idle, processor", "idle, transactions of the database"
_RATE = re.compile(r"tps = ([\d.]+)")


class OutboxResult(msgspec.Struct, frozen=True):
    """One figure, with its unit; ``p99`` where it is one of many. ``doubled``: rows that are there twice."""

    what: str
    system: str
    round: int
    fault: str = ""
    value: float = 0.0
    unit: str = ""
    p99: float = 0.0
    doubled: int = 0
    cpu_us: float = 0.0
    load_average: float = 0.0


class Outboxes(Measure[OutboxResult]):
    """Rows of PostgreSQL on their way to Kafka."""

    name, title, place = "outbox", "An outbox", 49
    presets = frozenset({"full"})
    peers = frozenset(peer.name for peer in PEERS)
    result = OutboxResult
    about = """\
PostgreSQL from a wheel and one broker, on this machine, with ordinary settings. *Drain*: rows of 300 bytes and 10,000
keys wait in one shard when the relay starts; rows per second between the first record and the last one, by the times
at which the broker appended them. By hand means a loop that polls the table, sends with an idempotent producer, waits
for all acknowledgements and deletes: at least once. *goharvest* has its own defaults, and a tenth of the rows.
*Debezium* is one distributed worker of Kafka Connect with exactly-once support and the event router, a transaction per
poll, on a PostgreSQL with `wal_level=logical`; its poll interval is 10 ms (its default, 500 ms, would be its latency),
and it was stopped while the rows were written. Both have tables of their own, as their documentation shows them.
*Right* means: all rows are there, once, those of a key in order; goharvest, which promises less, may double rows.
*Held snapshot*: another session keeps one open. *Latency*: from the begin of a row's transaction until a
`read_committed` consumer of this process has it; the writers are as many connections as the rate takes. *After a
pause*: single rows, each 1.5 s after the one before. *Writers*: `pgbench` with an INSERT into another table,
alone (*no row*), and with a row of one of 10,000 keys for the outbox: by `kes_stash`, by the function that
`Outbox.stash` calls (also without the lock of its key), and by a bare INSERT of the same row, which takes no lock and
wakes no relay. A relay runs meanwhile, on the same cores, and sends the rows; each has an outbox of its own. *Moves*:
two relays of one shard, 100 rows in a second; the longest time in which the consumer got nothing. *Idle*: a relay of
four shards that sleeps."""

    sizes: ClassVar = {
        "rows": (5_000, 100_000, 500_000),
        "rates": ([100], [100, 1_000], [100, 1_000, 5_000]),
        "seconds": (3.0, 10.0, 30.0),
        "samples": (3, 20, 100),
        "clients": ([4], [1, 16], [1, 16, 64]),
        "rounds": (1, 1, 3),
    }

    def run(self, bench: Bench) -> Iterator[OutboxResult]:
        """All rows in turn, round by round; each in a database of its own."""
        sizes, cluster = bench.sizes(self), Cluster(bench.cluster.bootstrap_servers, PARTITIONS, self.name)
        peers = _able(bench)
        bench.now("starting PostgreSQL")
        with Postgres() as postgres, Postgres(reads_log=True) as with_log:
            for turn in range(1, sizes.rounds + 1):
                place = Place(postgres, cluster)
                beside = [(peer, Place(with_log if peer.reads_log else postgres, cluster)) for peer in peers]
                steps = itertools.chain(self._steps(place, sizes), *(self._of_peer(*one, sizes) for one in beside))
                while True:
                    bench.now(f"{self.name} {turn}/{sizes.rounds}")
                    try:
                        found = next(steps)
                    except StopIteration:
                        break
                    except (Failed, StreamsError, psycopg.Error) as error:
                        yield OutboxResult("all that follows", OURS, turn, f"failed: {error}")
                        break
                    yield msgspec.structs.replace(found, round=turn, load_average=os.getloadavg()[0])

    def _steps(self, place: Place, sizes: argparse.Namespace) -> Iterator[OutboxResult]:
        yield from (place.drained(DRAIN, way, sizes.rows) for way in (OURS, BY_HAND))
        yield place.drained(HOT_KEY, OURS, sizes.rows // 2, keys=1)
        yield place.drained(SNAPSHOT, OURS, sizes.rows // 2, is_held=True)
        for rate in sizes.rates:
            yield place.latency(rate, sizes.seconds)
        yield place.after_pauses(sizes.samples)
        for clients in sizes.clients:
            yield from place.writers(clients, sizes.seconds)
        for how in MOVES:
            yield place.moved(how)
        yield from place.idle(sizes.seconds)

    def _of_peer(self, peer: Peer, place: Place, sizes: argparse.Namespace) -> Iterator[OutboxResult]:
        """Drain and latency. Its failure is its own."""
        try:
            yield place.drained_by(peer, int(sizes.rows * peer.share))
            for rate in sizes.rates[:2]:
                yield place.latency(rate, sizes.seconds, peer)
        except (Failed, psycopg.Error) as error:
            yield OutboxResult("all that follows", peer.name, 0, f"failed: {error}")

    def in_short(self, found: OutboxResult) -> str:
        p99 = f", p99 {found.p99:,.1f}" if found.p99 else ""
        figure = f"{found.value:,.2f} {found.unit}{p99}"
        return f"{self.name} {found.round}, {found.what}, {found.system}: {found.fault or figure}"

    def tables(self, found: Sequence[OutboxResult]) -> list[Table]:
        columns = ["figure", "p99", "unit", "processor time, us each", "doubled", "right"]
        shown = table(f"An outbox: {of_rounds(found)}; {loads(found)}", ["what", "of"], columns)
        for what in _whats(found):
            of_it = [one for one in found if one.what == what]
            for system in names(of_it):
                mine = of_system(of_it, system)
                kept = right(mine)
                form = ",.0f" if max((one.value for one in kept), default=0) > 100 else ".2f"
                shown.add_row(
                    what,
                    system,
                    spread((one.value for one in kept), form),
                    spread((one.p99 for one in kept if one.p99), ".1f"),
                    next((one.unit for one in kept), ""),
                    spread((one.cpu_us for one in kept if one.cpu_us), ".1f"),
                    f"{sum(one.doubled for one in kept):,}",
                    verdict(mine),
                )
        return [shown]

    def aims(self, found: Sequence[OutboxResult]) -> list[Aim]:
        """Those of the design."""
        ours = {what: right(one for one in found if (one.what, one.system) == (what, OURS)) for what in _whats(found)}
        aims: list[Aim] = []
        drains = {one.round: one.value for one in ours.get(DRAIN, ())}
        if drains:
            aims.append(at_least("outbox: drain, of 20,000 rows/s", 1, [rate / 20_000 for rate in drains.values()]))
        for peer, least in (("goharvest", 5), ("debezium", 1)):
            if shares := ratios([one for one in found if one.what == DRAIN], OURS, peer, lambda one: one.value):
                aims.append(at_least(f"outbox: drain, of that of {peer}", least, shares))
        for what, least in ((HOT_KEY, 0.5), (SNAPSHOT, 0.7)):
            shares = [one.value / drains[one.round] for one in ours.get(what, ()) if one.round in drains]
            if shares:
                aims.append(at_least(f"outbox: {what}, of the drain", least, shares))
        if steady := ours.get("latency at 1,000/s"):
            aims.append(at_most("outbox: 1,000 tx/s, p50", 25, [one.value for one in steady], "ms"))
            aims.append(at_most("outbox: 1,000 tx/s, p99", 80, [one.p99 for one in steady], "ms"))
        if first := ours.get("after a pause"):
            aims.append(at_most("outbox: first row after a pause, p99", 60, [one.p99 for one in first], "ms"))
        shares = ratios([one for one in found if one.what == "writers, 16 clients"], OURS, BARE, lambda one: one.value)
        if shares:
            aims.append(at_least("outbox: tx/s with stash, of those with a bare INSERT, 16 clients", 0.8, shares))
        for how, most in MOST_SECONDS.items():
            if moved := ours.get(how):
                aims.append(at_most(f"outbox: silence, {how}", most, [one.value for one in moved], "s"))
        for what, most, unit in ((IDLE, 1, "% of a core"), (QUERIES, 2, "a second and shard")):
            if idle := ours.get(what):
                aims.append(at_most(f"outbox: {what}", most, [one.value for one in idle], unit))
        return aims


def _able(bench: Bench) -> list[Peer]:
    """Return the peers that can be had here; the report has the reasons for the others."""
    found = []
    for peer in PEERS:
        try:
            bench.facts.setdefault("peers", {})[peer.name] = peer.prepare(bench.now)
        except Unavailable as error:
            bench.facts.setdefault("not measured", {})[peer.name] = str(error)
            bench.say(f"[red]not measured:[/] {peer.name}: {error}")
        else:
            found.append(peer)
    return found


def _probe_topic(job: OutboxJob) -> str:
    return f"{job.name}-probe"


def _whats(found: Sequence[OutboxResult]) -> list[str]:
    return list(dict.fromkeys(one.what for one in found))


class Place:
    """Servers, and the steps of the measure on them. Each raises ``Failed``, ``StreamsError``, ``psycopg.Error``."""

    def __init__(self, postgres: Postgres, cluster: Cluster) -> None:
        self._postgres, self._cluster = postgres, cluster
        self._number = 0

    def _job(self, shards: int = 1) -> OutboxJob:
        """Make an outbox, and its topic."""
        job = self._empty_job()
        apply(config_of(job), shards)
        return job

    def _job_of(self, peer: Peer) -> OutboxJob:
        """Make the table of another relay, and its topics."""
        job = msgspec.structs.replace(self._empty_job(), insert=peer.insert)
        for topic in (_probe_topic(job), f"{job.name}-leader"):
            self._cluster.source(topic, 1)
        with psycopg.connect(job.database) as db:
            db.execute(peer.table.encode())
        return job

    def _empty_job(self) -> OutboxJob:
        self._number += 1
        name = f"outbox-{id(self):x}-{self._number}"
        topic = self._cluster.source(f"{name}-rows")
        self._cluster.set_topic(topic, {"message.timestamp.type": "LogAppendTime"})
        servers = self._cluster.bootstrap_servers
        return OutboxJob("relay", name, self._postgres.database(), servers, topic, session_seconds=SESSION_SECONDS)

    def _prober(self, job: OutboxJob) -> Callable[[Child], None]:
        """Return a function that makes a row for another topic, and waits until it has come."""
        probing = msgspec.structs.replace(job, topic=_probe_topic(job))

        def probe(child: Child) -> None:
            with psycopg.connect(job.database) as db:
                stash(Outbox(), db, probing, [Record(probing.topic, b"0", b"probe")])
            _until(child, lambda: self._cluster.ends(probing.topic) > 0, "the relay sends a row")

        return probe

    def drained(self, what: str, way: str, rows: int, keys: int = KEYS, *, is_held: bool = False) -> OutboxResult:
        """Have waiting rows moved."""
        job = msgspec.structs.replace(self._job(), what="relay" if way == OURS else BY_HAND, rows=rows, keys=keys)
        with psycopg.connect(job.database) as held:
            if is_held:
                held.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                held.execute("SELECT count(*) FROM kes_outbox")  # begins its transaction, and takes the snapshot
            self._fill(job)
            with running("benchmarks.outbox.work", job) as child:
                figures = msgspec.json.decode(child.result(PATIENCE_SECONDS), type=OutboxFigures)
        return self._drain(what, way, job, figures.cpu_seconds)

    def drained_by(self, peer: Peer, rows: int) -> OutboxResult:
        """Have waiting rows moved by another relay."""
        job = msgspec.structs.replace(self._job_of(peer), rows=rows)
        with peer.relaying(job, self._prober(job), lambda: self._fill(job)) as child:
            began = child.sample(0.0, 0).cpu
            until = time.monotonic() + PATIENCE_SECONDS
            while self._cluster.ends(job.topic) < rows or self._judged(job).rows < rows:
                child.check()
                if time.monotonic() > until:
                    break  # the judgement says how many are there
                time.sleep(0.2)
            spent = child.sample(0.0, 0).cpu - began
        return self._drain(DRAIN, peer.name, job, spent, once=peer.is_once)

    def _fill(self, job: OutboxJob) -> None:
        """Make the rows of a job: each is its number, padded."""
        outbox, padding = Outbox(), b" " * VALUE_BYTES
        with psycopg.connect(job.database) as db:
            for start in range(0, job.rows, STASHED_AT_ONCE):
                numbers = range(start, min(start + STASHED_AT_ONCE, job.rows))
                values = (
                    (b"key-%d" % (number % job.keys), (b"%d" % number + padding)[:VALUE_BYTES]) for number in numbers
                )
                with db.transaction():
                    stash(outbox, db, job, [Record(job.topic, value, key) for key, value in values])

    def _judged(self, job: OutboxJob) -> Judged:
        return judged(map(parts, self._cluster.records(job.topic, PARTITIONS)))

    def _drain(self, what: str, way: str, job: OutboxJob, cpu: float, *, once: bool = True) -> OutboxResult:
        """Judge what is there."""
        times: list[int] = []

        def records() -> Iterator[tuple[bytes, float]]:
            for message in self._cluster.records(job.topic, PARTITIONS):
                times.append(message.timestamp()[1])
                yield parts(message)

        found = judged(records())
        seconds = (max(times, default=0) - min(times, default=0)) / 1e3
        rate, cpu_us = found.rows / max(seconds, 1e-3), cpu / job.rows * 1e6
        fault = found.fault(job.rows, once=once)
        return OutboxResult(what, way, 0, fault, rate, "rows/s", doubled=found.doubled, cpu_us=cpu_us)

    def latency(self, rate: int, seconds: float, peer: Peer | None = None) -> OutboxResult:
        """Write at a rate, and read; by another relay, if there is one."""
        job = self._job(PARTITIONS) if peer is None else self._job_of(peer)
        relaying = self._relaying(job, PARTITIONS) if peer is None else peer.relaying(job, self._prober(job))
        with relaying, Arrivals(job) as arrivals:
            writing = msgspec.structs.replace(job, what="write", rate=rate, seconds=seconds)
            with running("benchmarks.outbox.work", writing) as writer:
                written = msgspec.json.decode(writer.result(PATIENCE_SECONDS), type=OutboxFigures)
            arrivals.wait_for(written.rows)
        p50, p99, _ = percentiles(arrivals.delays())
        found = arrivals.judged()
        fault = found.fault(written.rows, once=peer is None or peer.is_once)
        if written.rows < rate * seconds * 0.95:
            fault = fault or f"the writers made {written.rows / written.seconds:,.0f} in a second"
        system = OURS if peer is None else peer.name
        return OutboxResult(f"latency at {rate:,}/s", system, 0, fault, p50, "ms", p99, found.doubled)

    def after_pauses(self, samples: int) -> OutboxResult:
        """Write single rows after pauses."""
        job = self._job()
        outbox = Outbox()
        with self._relaying(job), Arrivals(job) as arrivals, psycopg.connect(job.database) as db:
            for number in range(samples):
                time.sleep(PAUSE_SECONDS)
                with db.transaction():
                    outbox.stash_many(db, [Record(job.topic, b"%.6f" % time.time(), b"k")])
                arrivals.wait_for(number + 1)
        p50, p99, _ = percentiles(arrivals.delays())
        return OutboxResult("after a pause", OURS, 0, "", p50, "ms", p99)

    def writers(self, clients: int, seconds: float) -> Iterator[OutboxResult]:
        """Count transactions of ``pgbench`` with and without a row for the outbox, while a relay runs."""
        value = "jsonb_build_object('cents', :key)"
        row = "convert_to('key-' || :key, 'UTF8')", f"convert_to({value}::text, 'UTF8')"
        by_arrays = (
            f"SELECT kes_stash_rows(ARRAY['TOPIC'], ARRAY[{row[0]}], ARRAY[{row[1]}], ARRAY[NULL]::integer[], "
            f"ARRAY[1], ARRAY['{TYPE_HEADER}'], ARRAY['Ordered'::bytea], ORDERED);"
        )
        statements = {
            NO_ROW: "",
            BARE: "INSERT INTO kes_outbox (topic, key, value, header_names, header_values) "
            f"VALUES ('TOPIC', {row[0]}, {row[1]}, ARRAY['{TYPE_HEADER}'], ARRAY['Ordered'::bytea]);",
            OURS: f"SELECT kes_stash('TOPIC', 'Ordered', 'key-' || :key, {value});",
            BY_ARRAYS: by_arrays.replace("ORDERED", "true"),
            UNORDERED: by_arrays.replace("ORDERED", "false"),
        }
        for system, statement in statements.items():
            yield self._written(system, statement, clients, seconds)

    def _written(self, system: str, statement: str, clients: int, seconds: float) -> OutboxResult:
        """Count transactions of ``pgbench`` with an INSERT and this statement."""
        job = self._job(PARTITIONS)
        with psycopg.connect(job.database, autocommit=True) as db:
            db.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, cents int, note text)")
        insert = "\\set key random(1, 10000)\nBEGIN;\nINSERT INTO orders (cents, note) VALUES (:key, 'a note');\n"
        with self._relaying(job, PARTITIONS), tempfile.TemporaryDirectory(prefix="kes-pgbench-") as folder:
            Path(folder).chmod(0o755)
            script = Path(folder) / "transaction.sql"
            script.write_text(f"{insert}{statement.replace('TOPIC', job.topic)}\nCOMMIT;\n")
            words = ["-n", "-f", str(script), "-c", str(clients), "-j", str(min(clients, 2)), "-T", str(int(seconds))]
            said = self._postgres.run("pgbench", *words, "-d", job.database)
        found = _RATE.search(said)
        fault = "" if found else f"pgbench says no rate: {said[-200:]}"
        rate = float(found.group(1)) if found else 0.0
        return OutboxResult(f"writers, {clients} clients", system, 0, fault, rate, "tx/s")

    def moved(self, how: str) -> OutboxResult:
        """Have a shard move from one relay to another, and return the longest silence."""
        job = self._job()
        with tempfile.TemporaryDirectory(prefix="kes-outbox-") as folder, Arrivals(job) as arrivals:
            notes = Path(folder) / "notes"
            first = msgspec.structs.replace(job, notes=str(notes))
            with running("benchmarks.outbox.work", first) as owner:
                _until(owner, lambda: _lines(notes) > 0, "the relay has its shard")
                with running("benchmarks.outbox.work", job) as successor:
                    writing = msgspec.structs.replace(job, what="write", rate=100, seconds=SESSION_SECONDS + 12)
                    with running("benchmarks.outbox.work", writing) as writer:
                        _until(successor, lambda: len(arrivals.at) > 300, "rows arrive")
                        began = time.time()
                        if how == "PostgreSQL restarted":
                            self._postgres.restart()
                        else:
                            owner.send(signal.SIGTERM if how == "planned stop" else signal.SIGKILL)
                        if how == "supervised death":
                            while owner.is_alive:
                                time.sleep(0.001)
                            _remove(job, notes.read_text().strip())
                        written = msgspec.json.decode(writer.result(PATIENCE_SECONDS), type=OutboxFigures)
                        arrivals.wait_for(written.rows)
                        silence = arrivals.gap_since(began)
        return OutboxResult(how, OURS, 0, "", silence, "s")

    def idle(self, seconds: float) -> Iterator[OutboxResult]:
        """Look at a relay that sleeps."""
        job = self._job(PARTITIONS)
        with running("benchmarks.outbox.work", job) as child:
            time.sleep(8.0)  # it has joined, and is asleep
            before, queries, began = child.sample(0.0, 0).cpu, self._transactions(job), time.monotonic()
            time.sleep(max(seconds, 5.0))
            passed = time.monotonic() - began
            share = (child.sample(0.0, 0).cpu - before) / passed * 100
            made = (self._transactions(job) - queries) / passed / PARTITIONS
        yield OutboxResult(IDLE, OURS, 0, "", share, "% of a core")
        yield OutboxResult(QUERIES, OURS, 0, "", made, "a second and shard")

    def _transactions(self, job: OutboxJob) -> int:
        with psycopg.connect(job.database, autocommit=True) as db:
            text = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
            row = db.execute(text).fetchone()
        return int(row[0]) if row else 0

    @contextmanager
    def _relaying(self, job: OutboxJob, shards: int = 1) -> Iterator[Child]:
        """Run a relay that has all shards when the block begins."""
        with tempfile.TemporaryDirectory(prefix="kes-outbox-") as folder:
            notes = Path(folder) / "notes"
            with running("benchmarks.outbox.work", msgspec.structs.replace(job, notes=str(notes))) as child:
                _until(child, lambda: _lines(notes) >= shards, "the relay has its shards")
                yield child


def _remove(job: OutboxJob, member_id: str) -> None:
    """Take a dead relay out of its group, as a supervisor has it done."""
    topic = positions_name(job.name)
    remove_dead_member(ClientSettings(job.bootstrap_servers), topic, topic, member_id, 10.0)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _until(child: Child, is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not is_so():
        child.check()
        if time.monotonic() > until:
            raise Failed(f"not within a minute: {what}")
        time.sleep(0.005)


MEASURES = (Outboxes(),)
