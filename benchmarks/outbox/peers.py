"""Other projects' relays of an outbox: goharvest, and Debezium's connector for PostgreSQL in a worker of Kafka Connect.

Each has a table of its own, as its documentation shows it, and rows of text.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks.jars import NoJar, jars
from benchmarks.outbox.postgres import free_port
from benchmarks.outbox.work import OutboxJob
from benchmarks.peers.programs import SOURCES, go_program
from benchmarks.systems import Child, Failed, Unavailable
from streams.sak.cache import cache_folder
from streams.sak.java import JavaError, find_java

_START_SECONDS: Final = 90.0
_LOOK_SECONDS: Final = 0.02
Fill = Callable[[], None]
Probe = Callable[[Child], None]


class Peer(ABC):
    """A relay. ``table`` makes its table, ``insert`` a row of topic, key and value. ``is_once``: it promises each row
    once. ``reads_log``: of a server with ``wal_level=logical``. It gets a ``share`` of the rows of a drain."""

    name: str
    table: str
    insert: str
    is_once = False
    reads_log = False
    share = 1.0

    @abstractmethod
    def prepare(self, say: Callable[[str], None]) -> dict[str, str]:
        """Fetch or build its parts the first time; return their versions. Raises ``Unavailable``."""

    @abstractmethod
    def relaying(self, job: OutboxJob, probe: Probe, fill: Fill | None = None) -> AbstractContextManager[Child]:
        """Run it for a job. ``fill`` makes the rows that wait at its start; without, it relays when the block begins.
        ``probe`` makes a row, and waits until it has come."""


class Goharvest(Peer):
    """With its own defaults. Its rows are deleted one by one, so it gets a tenth of them."""

    name = "goharvest"
    table = """CREATE TABLE outbox (
        id bigserial PRIMARY KEY, create_time timestamptz NOT NULL, kafka_topic varchar(249) NOT NULL,
        kafka_key varchar(100) NOT NULL, kafka_value varchar(10000), kafka_header_keys text[] NOT NULL,
        kafka_header_values text[] NOT NULL, leader_id uuid)"""
    insert = "INSERT INTO outbox VALUES (DEFAULT, now(), %s, %s, %s, '{}', '{}', NULL)"
    share = 0.1

    def prepare(self, say: Callable[[str], None]) -> dict[str, str]:
        """Build our program."""
        self._program, versions = go_program(self.name, {"goharvest": "github.com/obsidiandynamics/goharvest"}, say)
        return versions

    @contextmanager
    def relaying(self, job: OutboxJob, probe: Probe, fill: Fill | None = None) -> Iterator[Child]:
        """Run our program."""
        address = make_conninfo(job.database, sslmode="disable")
        if fill is not None:
            fill()
        with Child(self.name, [str(self._program)], msgspec.structs.replace(job, database=address)) as child:
            if fill is None:
                probe(child)
            yield child


class Debezium(Peer):
    """One distributed worker, exactly-once support on, a transaction per poll, the event router. It polls its queue
    every 10 ms; its default of 500 would be its latency. The worker stops while the table is filled: what waits for it
    is in the log."""

    name = "debezium"
    table = "CREATE TABLE events (id bigserial PRIMARY KEY, topic text NOT NULL, key text, value text)"
    insert = "INSERT INTO events (topic, key, value) VALUES (%s, %s, %s)"
    is_once = True
    reads_log = True

    def prepare(self, say: Callable[[str], None]) -> dict[str, str]:
        """Fetch connector and worker."""
        say("fetching Debezium and Kafka Connect")
        listed = dict(line.split() for line in (SOURCES / "debezium" / "jars.txt").read_text().splitlines())
        try:
            self._java = find_java()
            self._jars = jars(listed, cache_folder() / "peers" / "debezium")
        except (JavaError, NoJar) as error:
            raise Unavailable(str(error)) from error
        versions = {coordinates.split(":")[1]: coordinates.split(":")[2] for coordinates in listed}
        return {name: versions[name] for name in ("debezium-connector-postgres", "connect-runtime")}

    @contextmanager
    def relaying(self, job: OutboxJob, probe: Probe, fill: Fill | None = None) -> Iterator[Child]:
        """Run a worker with the one connector."""
        with tempfile.TemporaryDirectory(prefix="kes-connect-") as folder:
            settings, worker = Path(folder) / "worker.properties", Worker(free_port())
            settings.write_text(
                "".join(f"{name}={value}\n" for name, value in worker_settings(job, worker.port).items())
            )
            flags = ["-Xms512m", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
            command = [str(self._java.binary), *flags, "-cp", os.pathsep.join(map(str, self._jars))]
            command += ["org.apache.kafka.connect.cli.ConnectDistributed", str(settings)]
            try:
                with Child(self.name, command, None) as child:
                    worker.until(child, "PUT", "/connectors/outbox/config", connector_settings(job))
                    worker.until_state(child, "RUNNING")
                    probe(child)
                    if fill is not None:
                        worker.until(child, "PUT", "/connectors/outbox/stop")
                        worker.until_state(child, "STOPPED")
                        fill()
                        worker.until(child, "PUT", "/connectors/outbox/resume")
                    yield child
            finally:
                drop_slots(job.database)


def worker_settings(job: OutboxJob, port: int) -> dict[str, str]:
    """The worker: its own topics, and converters that pass text."""
    text = "org.apache.kafka.connect.storage.StringConverter"
    topics = {f"{kind}.storage.topic": f"{job.name}-{kind}" for kind in ("config", "offset", "status")}
    factors = {f"{kind}.storage.replication.factor": "1" for kind in ("config", "offset", "status")}
    return {
        "bootstrap.servers": job.bootstrap_servers,
        "group.id": job.name,
        "listeners": f"http://127.0.0.1:{port}",
        "key.converter": text,
        "value.converter": text,
        "exactly.once.source.support": "enabled",
        "plugin.discovery": "service_load",
        "offset.storage.partitions": "1",
        "status.storage.partitions": "1",
        **topics,
        **factors,
    }


def connector_settings(job: OutboxJob) -> dict[str, str]:
    """The connector, and its event router."""
    place = conninfo_to_dict(job.database)
    router = {
        "type": "io.debezium.transforms.outbox.EventRouter",
        "table.field.event.key": "key",
        "table.field.event.payload": "value",
        "route.by.field": "topic",
        "route.topic.replacement": "${routedByValue}",
    }
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "database.hostname": str(place["host"]),
        "database.port": str(place["port"]),
        "database.user": str(place["user"]),
        "database.password": "any",
        "database.dbname": str(place["dbname"]),
        "topic.prefix": job.name,
        "plugin.name": "pgoutput",
        "slot.name": job.name.replace("-", "_"),
        "publication.autocreate.mode": "filtered",
        "table.include.list": "public.events",
        "snapshot.mode": "no_data",
        "poll.interval.ms": "10",
        "exactly.once.support": "required",
        "transaction.boundary": "poll",
        "transforms": "outbox",
        **{f"transforms.outbox.{name}": value for name, value in router.items()},
    }


class Worker:
    """The HTTP interface of a worker."""

    def __init__(self, port: int) -> None:
        self.port = port

    def until(self, child: Child, method: str, path: str, body: object = None) -> Any:
        """Ask until it is done: a worker that starts or rebalances refuses. Raises ``Failed``."""
        until = time.monotonic() + _START_SECONDS
        data = json.dumps(body).encode() if body is not None else None
        request = Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        while True:
            child.check()
            try:
                with urlopen(request, timeout=10) as answer:
                    return json.loads(answer.read() or b"null")
            except HTTPError as error:
                problem = f"{error}: {error.read().decode(errors='replace')[:500]}"
            except (URLError, OSError) as error:
                problem = str(error)
            if time.monotonic() > until:
                raise Failed(f"{method} {path}: {problem}")
            time.sleep(0.1)

    def until_state(self, child: Child, wanted: str) -> None:
        """Wait until the connector is so, and its task too, if it has one then. Raises ``Failed``."""
        until = time.monotonic() + _START_SECONDS
        while True:
            found = self.until(child, "GET", "/connectors/outbox/status")
            tasks = [task["state"] for task in found["tasks"]]
            if found["connector"]["state"] == wanted and tasks == ([wanted] if wanted == "RUNNING" else []):
                return
            if "FAILED" in tasks or time.monotonic() > until:
                raise Failed(f"the connector is not {wanted}: {json.dumps(found)[:1_000]}")
            time.sleep(_LOOK_SECONDS)


def drop_slots(database: str) -> None:
    """Drop the replication slots of a database: they keep the log, and a server has only some."""
    until = time.monotonic() + 20
    with psycopg.connect(database, autocommit=True) as db:
        while time.monotonic() < until:
            text = "SELECT slot_name, active FROM pg_replication_slots WHERE database = current_database()"
            slots = db.execute(text).fetchall()
            for name, active in slots:
                if not active:
                    db.execute("SELECT pg_drop_replication_slot(%s)", [name])
            if not any(active for _, active in slots):
                return
            time.sleep(0.1)


PEERS: Final = (Goharvest(), Debezium())
