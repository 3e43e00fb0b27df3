"""The steps of the measure ``outbox``: each makes an outbox of its own on these servers, and returns figures."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psycopg

from benchmarks.cluster import Cluster
from benchmarks.outbox.arrivals import Arrivals, Judged, judged, parts
from benchmarks.outbox.peers import Peer
from benchmarks.outbox.postgres import Postgres
from benchmarks.outbox.work import PARTITIONS, OutboxFigures, OutboxJob, config_of, stash
from benchmarks.reader import percentiles
from benchmarks.systems import Child, Failed, running
from streams import Outbox, Record
from streams.kafka.settings import ClientSettings
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


def _probe_topic(job: OutboxJob) -> str:
    return f"{job.name}-probe"


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
