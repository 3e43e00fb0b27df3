"""``kes run --metrics``: one address for all workers, which answers whatever happens to them. No broker: the source
waits for one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streams.broker.probe import free_port
from streams.cli.worker_metrics import SCRAPE_SECONDS, SILENT_SECONDS, WorkerMetrics
from streams.observability import HttpServer
from streams.observability.health import Verdict
from tests.unit.cli_kit import forget_modules, kes_with
from tests.unit.cli_run_kit import Kes, get, kes
from tests.unit.waiting import wait_until

__all__ = ["kes"]  # the fixture

SOURCE = """
from streams import EventSource, EventSourceConfig

source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=4, bootstrap_servers="127.0.0.1:1"))
"""


def by_worker(port: int, name: str) -> dict[str, float]:
    """The sum of the samples of this name, by worker."""
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(get(port, "/metrics")[1]):
        for sample in family.samples:
            if sample.name == name:
                sums[sample.labels["worker"]] += sample.value
    return dict(sums)


def test_one_address_serves_all_workers_and_outlives_each(kes: Callable[..., Kes], tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(SOURCE)
    port = free_port()
    running = kes("waits:source", "--workers", "2", "--metrics", f"127.0.0.1:{port}", "--max-crashes", "100")
    pids = {started["worker"]: started["pid"] for started in (running.until("started"), running.until("started"))}
    up, both = lambda: by_worker(port, "kes_worker_up"), {"w-0": 1.0, "w-1": 1.0}
    wait_until(lambda: up() == both, "both serve", step=0.05)
    assert get(port, "/live")[0] == 200
    starting = (503, "w-0: g: the source is starting\nw-1: g: the source is starting\n")
    wait_until(lambda: get(port, "/ready") == starting, "both load the engine, and start", step=0.05)
    assert by_worker(port, "kes_group_generation") == {"w-0": -1.0, "w-1": -1.0}
    assert set(by_worker(port, "process_resident_memory_bytes")) == {"w-0", "w-1"}
    text = get(port, "/metrics")[1]
    assert text.count("# TYPE kes_group_generation gauge") == 1
    assert 'kes_source_state{group="g",state="starting",worker="w-0"} 1.0' in text

    os.kill(pids["w-0"], signal.SIGSTOP)
    wait_until(lambda: up() == {"w-0": 0.0, "w-1": 1.0}, "one does not answer", step=0.05)
    assert SCRAPE_SECONDS < 9.0, "below a scraper's ten seconds"
    code, text = get(port, "/ready")
    assert (code, text.splitlines()[0]) == (503, "w-0: does not run, or does not answer")
    assert get(port, "/live")[0] == 200, "it may come back"
    os.kill(pids["w-0"], signal.SIGCONT)
    wait_until(lambda: up() == both, "it is back", step=0.05)

    os.kill(pids["w-1"], signal.SIGKILL)
    running.times("exited", "w-1", 1)
    assert by_worker(port, "kes_worker_starts_total")["w-0"] == 1.0, "the other one is served meanwhile"
    wait_until(lambda: up() == both, "the next one serves", step=0.05)
    assert by_worker(port, "kes_worker_starts_total") == {"w-0": 1.0, "w-1": 2.0}
    running.process.terminate()
    assert running.ended() == 0
    assert not [seen for seen in running.seen if seen["event"] == "serving"], "that is the supervisor's own business"


def test_a_port_that_is_taken_starts_no_worker(kes: Callable[..., Kes]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        running = kes("dummy:source", "--metrics", f"127.0.0.1:{taken.getsockname()[1]}")
        assert running.ended() == 1
    assert running.seen == []
    said = " ".join(running.complaints.split())
    assert "kes: config error: metrics cannot be served at 127.0.0.1:" in said
    assert "Address already in use; stop the process that has it, or name another port" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("source", "address", "message"),
    [
        ("dummy:source", "0", "--metrics needs an EventSource; the source is Source"),
        ("dummy:source", "nine", "the address 'nine' is none: use HOST:PORT or PORT"),
    ],
)
def test_what_has_no_metrics_is_told(kes: Callable[..., Kes], source: str, address: str, message: str) -> None:
    running = kes(source, "--metrics", address)
    assert running.ended() == 1
    said = " ".join(running.complaints.split())
    assert message in said
    assert "Traceback" not in said


def test_without_the_extra_the_message_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bank.py").write_text("source = None")
    monkeypatch.chdir(tmp_path)
    forget_modules(monkeypatch, "streams.observability", "streams.cli.worker_metr")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = kes_with(capsys)("run", "bank:source", "--metrics", "0", code=1)
    assert "pip install 'kafka-event-source[prometheus]'" in answer.words


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def worker() -> Any:
    """A worker's own server, which says what it is told to."""
    said = {"live": Verdict(True, "g: live"), "ready": Verdict(True, "g: ready")}
    queries: list[dict[str, str]] = []

    def ready(query: dict[str, str]) -> Verdict:
        queries.append(query)
        return said["ready"]

    server = HttpServer("127.0.0.1:0", lambda *_: [], {"/live": lambda query: said["live"], "/ready": ready})
    with server:
        yield server, said, queries


def test_a_worker_whose_metrics_fail_is_down_and_takes_no_other_ones_away() -> None:
    def failing(_environ: Any, start: Any) -> list[bytes]:
        start("500 Internal Server Error", [])
        return [b"A server error occurred."]

    board = WorkerMetrics(["w-0"])
    with HttpServer("127.0.0.1:0", failing, {}) as server:
        board.noted({"event": "serving", "worker": "w-0", "port": server.port})
        assert b'kes_worker_up{worker="w-0"} 0.0' in generate_latest(board.registry)


def test_the_probes_of_the_supervisor(worker: Any) -> None:
    server, said, queries = worker
    clock = Clock()
    board = WorkerMetrics(["w-0", "w-1"], clock)
    assert board.live({}) == (True, "w-0: is being started\nw-1: is being started")
    assert not board.ready({}).is_good
    for name in ("w-0", "w-1"):
        board.noted({"event": "started", "worker": name, "pid": 1, "starts": 1})
        board.noted({"event": "serving", "worker": name, "port": server.port})
    assert board.live({}) == (True, "w-0: g: live\nw-1: g: live")
    assert board.ready({"max_lag": "7"}) == (True, "w-0: g: ready\nw-1: g: ready")
    assert queries == [{"max_lag": "7"}] * 2
    with pytest.raises(ValueError, match="invalid literal"):
        board.ready({"max_lag": "7&x=y"})
    said["live"] = Verdict(False, "g: the event loop has stood still for 20 s")
    assert not board.live({}).is_good
    said["live"] = Verdict(True, "g: live")

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        board.noted({"event": "serving", "worker": "w-1", "port": silent.getsockname()[1]})
        assert board.live({}) == (True, "w-0: g: live\nw-1: has not answered for 0 s")
        clock.now += SILENT_SECONDS + 1
        assert board.live({}) == (False, "w-0: g: live\nw-1: has not answered for 61 s")
        board.noted({"event": "exited", "worker": "w-1", "pid": 1, "code": -9, "reason": "killed"})
    assert board.live({}) == (True, "w-0: g: live\nw-1: is being started")
    board.noted({"event": "serving", "worker": "w-1", "port": server.port})
    assert board.live({}).is_good
