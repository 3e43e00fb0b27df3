"""The metrics of all workers of ``kes run`` at one address, and probes that ask each of them.

The supervisor's process serves them, so they are there whatever happens to a worker: one that was killed, or does not
answer, has ``kes_worker_up`` 0 until the one that is started in its place answers. Each worker serves its own metrics
on a port of the loopback address, which it names over the channel.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from streams.observability import HttpServer
from streams.observability.catalogue import WORKER_STARTS, WORKER_UP
from streams.observability.health import Verdict
from streams.observability.http_server import metrics_application

SCRAPE_SECONDS: Final = 3.0
"""The wait for a worker's metrics. It waits for its own loop for less."""
PROBE_SECONDS: Final = 0.8
"""The same for a probe."""
SILENT_SECONDS: Final = 60.0
"""A worker that answers no probe for so long is not live. (One whose loop alone stands still says so itself.)"""
_MOST_THREADS: Final = 64


@dataclass
class _WorkerProcess:
    starts: int = 0
    port: int | None = None  # while the process runs and serves
    secret: str = ""
    silent_since: float | None = None


class _Answer(NamedTuple):
    status: int
    text: str


class WorkerMetrics:
    """``noted`` is called by the supervisor; the rest by threads of the server."""

    def __init__(self, names: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._processes = {name: _WorkerProcess() for name in names}
        # Two for each worker: a probe does not wait behind the scrape of a worker that is frozen.
        threads = min(2 * max(len(names), 1), _MOST_THREADS)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kes-worker-metrics")
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def serve(self, address: str) -> HttpServer:
        """Serve until the server is closed. Raises ``ConfigError``."""
        probes = {"/live": self.live, "/ready": self.ready}
        return HttpServer(address, metrics_application(self.registry), probes)

    def noted(self, status: dict[str, Any]) -> None:
        """Take note of what happened to a worker."""
        match status["event"]:
            case "started":
                self._processes[status["worker"]].starts = status["starts"]
            case "serving":
                self._processes[status["worker"]].port = status["port"]
                self._processes[status["worker"]].secret = status.get("secret", "")
            case "exited":
                process = self._processes[status["worker"]]
                process.port = process.silent_since = None
            case _:
                pass

    def addresses(self) -> dict[str, tuple[int | None, str, int]]:
        """Return the port of each worker that serves, its secret, and its number of starts, by name."""
        return {name: (process.port, process.secret, process.starts) for name, process in self._processes.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the workers that answer, each sample with the label ``worker``."""
        up = GaugeMetricFamily(WORKER_UP.name, WORKER_UP.help, labels=["worker"])
        starts = CounterMetricFamily(WORKER_STARTS.name, WORKER_STARTS.help, labels=["worker"])
        families: dict[str, Metric] = {}
        for name, answer in self._ask("/metrics", SCRAPE_SECONDS).items():
            text = answer.text if answer is not None and answer.status == 200 else None
            up.add_metric([name], float(text is not None))
            starts.add_metric([name], self._processes[name].starts)
            for family in text_string_to_metric_families(text or ""):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, "worker": name}))
        yield up
        yield starts
        yield from families.values()

    def live(self, query: dict[str, str]) -> Verdict:
        """Not live: the loop of a worker stands still for too long, or a worker has not answered for a minute. One that
        is being started again is the supervisor's business."""
        return Verdict.of([self._live(*one) for one in self._ask("/live", PROBE_SECONDS).items()])

    def ready(self, query: dict[str, str]) -> Verdict:
        """Not ready: a worker is not. ``max_lag`` and ``max_lag_seconds`` of the query are passed on."""
        bounds = {"max_lag": int, "max_lag_seconds": float}
        given = "&".join(f"{name}={kind(query[name])}" for name, kind in bounds.items() if name in query)
        lag = f"?{given}" if given else ""
        answers = self._ask(f"/ready{lag}", PROBE_SECONDS)
        return Verdict.of(
            [
                Verdict(False, f"{name}: does not run, or does not answer")
                if answer is None
                else Verdict(answer.status == 200, f"{name}: {answer.text.strip()}")
                for name, answer in answers.items()
            ]
        )

    def _live(self, name: str, answer: _Answer | None) -> Verdict:
        process = self._processes[name]
        if answer is not None:
            process.silent_since = None
            return Verdict(answer.status == 200, f"{name}: {answer.text.strip()}")
        if process.port is None:
            return Verdict(True, f"{name}: is being started")
        process.silent_since = process.silent_since or self._now()
        silent = self._now() - process.silent_since
        return Verdict(silent <= SILENT_SECONDS, f"{name}: has not answered for {silent:.0f} s")

    def _ask(self, path: str, seconds: float) -> dict[str, _Answer | None]:
        """Ask all workers at the same time; ``None``: no answer."""
        asked = {name: self._threads.submit(_get, process, path, seconds) for name, process in self._processes.items()}
        return {name: answer.result() for name, answer in asked.items()}


def _get(process: _WorkerProcess, path: str, seconds: float) -> _Answer | None:
    if process.port is None:
        return None
    with contextlib.closing(HTTPConnection("127.0.0.1", process.port, timeout=seconds)) as connection:
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {process.secret}"})
            answer = connection.getresponse()
            return _Answer(answer.status, answer.read().decode())
        except (OSError, HTTPException, ValueError):
            return None
