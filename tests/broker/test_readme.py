"""The commands of the README and the tutorial, as they are written there, against a broker of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Message

from streams.testing.fixtures import OwnBroker

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0


class Shell:
    """Runs blocks of the README in the checkout; every process that is started ends with the test."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "KES_BOOTSTRAP_SERVERS": servers, "PATH": path}

    def start(self, script: str) -> subprocess.Popen[str]:
        script = script.replace("127.0.0.1:9092", self.servers)
        return subprocess.Popen(
            ["bash", "-euc", script], cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE
        )

    def run(self, script: str) -> str:
        process = self.start(script)
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, script
        return out


@pytest.fixture
def shell(own_broker: OwnBroker) -> Shell:
    return Shell(own_broker(start_timeout=150.0).bootstrap_servers)


def commands(page: str) -> list[str]:
    """Return the blocks of shell commands of a page."""
    return re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def blocks() -> tuple[str, str, str, str]:
    """(Before the workers, the workers, the events, the lag), each as it stands in the README."""
    first, second = commands("README.md")
    lines = first.splitlines()
    assert lines[0] == "source .venv/bin/activate"  # here: the interpreter of the tests
    assert lines[1].startswith("kes broker start")  # here: a broker of the test
    assert lines[-1].startswith("kes run examples.bank:source")
    feed, lag = second.split("\nEND\n")
    return "\n".join(lines[2:-1]), lines[-1], f"{feed}\nEND\n", lag.partition("#")[0]


def read(servers: str, topic: str) -> Iterator[Message]:
    """What committed readers see in the topic, until nothing comes any more."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic])
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                yield message
    finally:
        consumer.close()


@pytest.mark.slow
def test_the_commands_of_the_readme_do_what_it_says(shell: Shell) -> None:
    prepare, run, feed, lag = blocks()
    shell.run(prepare)
    workers = shell.start(f"exec {run}")
    try:
        shell.run(feed)
        paid, balances = (list(islice(read(shell.servers, f"bank-{name}"), 3)) for name in ("events", "balances"))
        assert [json.loads(message.value() or b"")["cents"] for message in balances] == [500, 750, 650]
        placed = {(message.key(), message.partition()) for message in (*paid, *balances)}
        assert len(placed) == 1, "the producer puts the key into another partition than the event source"
        once = json.loads(shell.run(lag.replace("--watch", "--json")))
        assert sum(entry["committed"] or 0 for entry in once["partitions"]) == 3
        assert once["lag"] == 0
        workers.send_signal(signal.SIGINT)
        assert workers.wait(PATIENCE) == 0
    finally:
        if workers.poll() is None:
            workers.kill()
        workers.communicate(timeout=60)


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(shell: Shell) -> None:
    broker, work, produce, feed = commands("docs/tutorial.md")
    assert broker.startswith("kes broker start")  # here: a broker of the test
    *prepare, run = work.splitlines()
    shell.run("\n".join(prepare))
    workers = shell.start(f"exec {run}")
    try:
        assert shell.run(produce).count("in partition ") == 3
        assert "to the cent" in shell.run(feed)
        killing = re.search(r"```\nkill -9 \d+\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL)
        assert killing is not None
        first, *_ = sorted(psutil.Process(workers.pid).children(), key=lambda child: child.pid)
        assert "to the cent" in shell.run(f"kill -9 {first.pid}\n{killing[1]}")
        workers.send_signal(signal.SIGINT)
        assert workers.wait(PATIENCE) == 0
    finally:
        if workers.poll() is None:
            workers.kill()
        workers.communicate(timeout=60)


@pytest.mark.nightly
def test_the_recording_of_the_readme_can_be_made_again(shell: Shell, tmp_path: Path) -> None:
    """The same lines, but for numbers and their order."""
    spec = importlib.util.spec_from_file_location("recording", ROOT / "docs" / "recording.py")
    assert spec is not None
    assert spec.loader is not None
    recording = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recording)
    assert recording.shape(recording.record(shell.servers, tmp_path / "log")) == recording.shape(recording.shown())
