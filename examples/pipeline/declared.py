"""The declarative pipeline at work: a driver, and runs of ``spark-pipelines`` on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

from examples.flights.fleet import DemoFailed
from examples.pipeline.driver import kill_session

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Path(__file__).with_name("project")
STOP_SECONDS = 30.0


class Declared:
    """One pipeline, its files below ``folder``. One thread. ``stop`` it, whatever has happened."""

    def __init__(self, folder: Path, servers: str, log: IO[bytes]) -> None:
        self._folder, self._log = folder, log
        self._path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._environment = {**os.environ, "KES_BOOTSTRAP_SERVERS": servers, "PYTHONPATH": self._path}
        self._driver: subprocess.Popen[bytes] | None = None
        self._run: subprocess.Popen[bytes] | None = None
        self.url = ""
        project = folder / "project"
        shutil.copytree(PROJECT, project, dirs_exist_ok=True)
        self._spec = project / "spark-pipeline.yml"
        self._spec.write_text(self._spec.read_text().replace("FOLDER", str(folder)))

    def start_driver(self) -> None:
        """Start Spark, if it does not run. Takes some ten seconds. Raises ``DemoFailed``."""
        if self._driver is not None and self._driver.poll() is None:
            return
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "examples.pipeline.driver", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._folder,  # the catalog writes its log there
            env=self._environment,
            start_new_session=True,  # one session with its Java and its workers, to be killed together
        )
        assert self._driver.stdout is not None
        port = self._driver.stdout.readline().decode().strip()
        if not port.isdecimal():
            raise DemoFailed(f"Spark does not start; its log is {self._log.name}")
        self.url = f"sc://127.0.0.1:{port}"

    def begin_run(self) -> None:
        """Begin a run: what ``spark-pipelines run --remote URL --spec FILE`` does."""
        self._run = subprocess.Popen(
            [sys.executable, "-m", "examples.pipeline.client", "--spec", str(self._spec)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            cwd=self._folder,
            env={**self._environment, "SPARK_REMOTE": self.url},
            start_new_session=True,
        )

    def ended(self) -> int | None:
        """The exit code of the run, if it is over."""
        return None if self._run is None else self._run.poll()

    def kill(self) -> None:
        """SIGKILL to the driver with all it has started, and to the run, which would wait for it for long."""
        for process in (self._driver, self._run):
            if process is not None:
                kill_session(process.pid)
                process.wait(STOP_SECONDS)
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()
        self._driver = self._run = None

    stop = kill
    """Nothing of it needs to be ended gently: every stage is made to be killed."""
