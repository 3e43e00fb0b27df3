"""A Spark standalone cluster on one machine, out of the pip package: a master and workers on addresses of their own.

Each worker has an address of its own (127.0.0.1, 127.0.0.2, ...), because Spark never starts the speculative copy of a
task on the host that the straggler is on. All processes end with the one that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import pyspark

from streams.sak.java import spark_java_home
from tests.spark.proof_points import signal_job

ROOT: Final = Path(__file__).parents[2]
SPECULATION: Final = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "200ms",
}
"""A copy of a task that takes a little longer than the others."""
_WORKERS, _CORES, _MEMORY_MB = 2, 2, 700
_START_SECONDS: Final = 90.0
_QUICK_START: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


class Daemon:
    """One process of the cluster, in a session of its own; what it starts (executors) is in it too."""

    def __init__(self, name: str, folder: Path, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        home = Path(pyspark.__file__).parent
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), *arguments],
                cwd=folder,
                env={**os.environ, "JAVA_HOME": str(spark_java_home()), "SPARK_HOME": str(home), **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_the_parent,
            )

    def wait_said(self, pattern: str) -> str:
        """The first group of the pattern, when its log has it."""
        deadline = time.monotonic() + _START_SECONDS
        while (found := re.search(pattern, self.log.read_text(errors="replace"))) is None:
            text = self.log.read_text(errors="replace")[-2000:]
            assert self.process.poll() is None, f"{self.name} has ended: {text}"
            assert time.monotonic() < deadline, f"{self.name} does not say {pattern!r}: {text}"
            time.sleep(0.05)
        return found[1]

    def kill(self) -> None:
        """SIGKILL, to its executors too. Safe to repeat."""
        signal_job(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


class StandaloneCluster:
    """Workers, and with that executors, have this Python and this checkout, as with the package installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[Daemon] = []
        self.url = ""

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a session that uses this cluster: an executor on each worker."""
        return {
            "spark.master": self.url,
            "spark.executor.memory": f"{_MEMORY_MB - 200}m",
            "spark.executor.cores": str(_CORES),
            "spark.executor.extraJavaOptions": _QUICK_START,
            "spark.cores.max": str(_CORES * _WORKERS),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.pyspark.python": sys.executable,
        }

    def __enter__(self) -> Self:
        quick = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": _QUICK_START}
        try:
            # Master and workers say what the kit waits for at the level INFO, which is theirs by default.
            arguments = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
            master = self._start("master", ["org.apache.spark.deploy.master.Master", *arguments], quick)
            self.url = master.wait_said(r"(?:Starting Spark master at|started at) (spark://\S+:\d+)")
            for number in range(1, _WORKERS + 1):
                limits = ["-c", str(_CORES), "-m", f"{_MEMORY_MB}m", "-d", str(self._folder / f"w{number}")]
                where = ["--host", f"127.0.0.{number}", "--webui-port", "0"]
                worker = ["org.apache.spark.deploy.worker.Worker", *limits, *where, self.url]
                self._start(f"worker-{number}", worker, {**quick, "PYTHONPATH": str(ROOT)})
            for daemon in self._daemons[1:]:
                daemon.wait_said(r"(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self, name: str, arguments: list[str], environment: Mapping[str, str]) -> Daemon:
        daemon = Daemon(name, self._folder, arguments, environment)
        self._daemons.append(daemon)
        return daemon

    def stop(self) -> None:
        """End everything. Safe to repeat."""
        for daemon in reversed(self._daemons):
            daemon.kill()

    def __exit__(self, *error: object) -> None:
        self.stop()


def _end_with_the_parent() -> None:
    """Where the system can (Linux): a test run that is killed leaves no cluster behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
