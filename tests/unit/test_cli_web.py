"""``kes run --http`` and ``kes web``: one page for all workers, whatever becomes of them. No broker: a source waits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.observability import PrometheusMetrics
from tests.unit.cli_kit import forget_modules, kes_with
from tests.unit.cli_run_kit import ROOT, Kes, kes
from tests.unit.private_kit import private
from tests.unit.waiting import wait_until
from tests.unit.web_kit import ACT, TOKENS, ask, source_of

from streams.web.facts import SourceFacts  # isort: skip
from streams.web.workers import facts_probe  # isort: skip

__all__ = ["kes"]  # the fixture

SOURCE = """
from streams import EventSource, EventSourceConfig

source = EventSource(EventSourceConfig(group_id="shop", topic="t", num_partitions=4, bootstrap_servers="127.0.0.1:1"))
"""


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    (tmp_path / "waits.py").write_text(SOURCE)
    path = private(tmp_path / "tokens.toml", TOKENS)
    return str(path)


def test_the_pages_of_a_supervisor_show_each_worker_and_outlive_it(
    kes: Callable[..., Kes], tokens: str, tmp_path: Path
) -> None:
    running = kes("waits:source", "-n", "2", "--http", "127.0.0.1:0", "--http-tokens", tokens, "--max-crashes", "100")
    address = running.until("monitor")["address"]
    port = int(address.rstrip("/").rpartition(":")[2])
    pids = {started["worker"]: started["pid"] for started in (running.until("started"), running.until("started"))}

    def members() -> dict[str, Any]:
        facts = json.loads(ask(port, "/api/v1/group").text)
        return {each["name"]: (each["answers"], each["says"]) for each in facts["members"]}

    both = {"w-0": (True, ""), "w-1": (True, "")}
    wait_until(lambda: members() == both, "both answer", step=0.1)
    starting = "w-0: shop: the source is starting\nw-1: shop: the source is starting\n"
    wait_until(lambda: ask(port, "/ready").text == starting, "both are starting", step=0.1)
    assert 'worker="w-1"' in ask(port, "/metrics").text
    assert "waits" not in ask(port, "/live", None).text

    os.kill(pids["w-0"], signal.SIGSTOP)
    wait_until(lambda: members()["w-0"] == (False, "no answer within 0.9 s"), "it is silent", step=0.1)
    assert members()["w-1"] == (True, "")
    assert "No answer from w-0." in ask(port, "/", Accept="text/html").text
    os.kill(pids["w-0"], signal.SIGCONT)
    wait_until(lambda: members() == both, "it is back", step=0.1)
    os.kill(pids["w-1"], signal.SIGKILL)
    wait_until(lambda: members()["w-1"] == (True, "start 2"), "its successor answers", step=0.1)

    arguments = Path(f"/proc/{running.process.pid}/cmdline")
    assert not arguments.exists() or ACT not in arguments.read_text()
    complaints = running.close_and_read()
    assert running.process.returncode == 0, (running.seen, complaints)
    assert ACT not in complaints + str(running.seen)


def test_what_a_worker_serves_is_for_its_supervisor() -> None:
    """Another user of the machine reaches its port, and so does a page whose name leads to the loopback address."""
    source = source_of()
    further = {"/facts": facts_probe(SourceFacts(source))}
    with PrometheusMetrics(source).serve("127.0.0.1:0", further, "the secret") as server:
        for path in ("/metrics", "/live", "/ready", "/facts", "/facts?secret=the%20secret", "/nowhere"):
            for given in (
                {},
                *({"Authorization": text} for text in ("", "the secret", "Bearer the secre", "Bearer \xff")),
            ):
                reply = ask(server.port, path, None, **given)
                assert (reply.status, reply.text) == (401, "this is for the supervisor\n"), (path, given)
        assert ask(server.port, "/live", "the secret", Host="evil.example").status == 200
        facts = json.loads(ask(server.port, "/facts", "the secret").text)
        assert facts["statistics"]["state"] == "created"


@pytest.mark.parametrize("command", [("run", "waits:source"), ("web", "waits:source"), ("web", "--group", "g")])
def test_a_start_that_cannot_be_says_why(
    command: tuple[str, ...], tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    answer = kes_with(capsys)(*command, "--http", "127.0.0.1:0", code=1)
    assert "standard error is not a terminal" in answer.words
    answer = kes_with(capsys)(*command, "--http", "127.0.0.1:0", "--http-tokens", "nowhere.toml", code=1)
    assert "the token file nowhere.toml cannot be read: No such file" in answer.words
    answer = kes_with(capsys)(*command, "--http", "0.0.0.0:0", "--http-tokens", tokens, code=1)
    assert "does not serve at 0.0.0.0:0 without TLS" in answer.words
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        answer = kes_with(capsys)(*command, "--http", place, "--http-tokens", tokens, code=1)
        assert f"the monitor cannot be served at {place}: Address already in use; stop the process" in answer.words


def test_kes_web_wants_a_source_or_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("a:b", "--group", "g")):
        assert "name either MODULE:SOURCE or --group GROUP" in kes_with(capsys)("web", *words, code=2).words


def test_kes_web_ends_by_ctrl_c(tokens: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streams", "web", "--group", "g", "--http", "127.0.0.1:0", "--http-tokens", tokens]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "KES_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        port = int(line.strip().rstrip("/").rpartition(":")[2])
        assert json.loads(ask(port, "/api/v1/group").text)["group"] == "g"
        assert ask(port, "/metrics").status == 404
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert (process.wait(60), rest) == (0, "")


def test_without_the_extra_the_message_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bank.py").write_text("source = None")
    monkeypatch.chdir(tmp_path)
    forget_modules(monkeypatch, "streams.web", "streams.cli.web")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for words in (("run", "bank:source"), ("web", "bank:source")):
        answer = kes_with(capsys)(*words, "--http", "0", "--http-tokens", "t", code=1)
        assert "pip install 'kafka-event-source[web]'" in answer.words
