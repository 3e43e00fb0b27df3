"""``kes demo``, the whole way, on a part of the year: right numbers, clean ends, two at once."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("matplotlib")

from examples.flights import ingest
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1_000)]

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 90.0


@pytest.fixture(autouse=True)
def _data_is_there() -> None:
    try:
        ingest.dataset_file("flights.csv.zip")
    except ingest.DataMissing as missing:
        pytest.skip(str(missing))


class Demo:
    """One run as a process of its own, with what it says on stderr."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "streams", "demo", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, text: str, seconds: float = 300.0) -> None:
        """Until ``text`` is said."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or any(text in line for line in self.lines), seconds)
            assert any(text in line for line in self.lines), self.said

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def children(self) -> list[psutil.Process]:
        """All processes that it has started, and those they have."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, seconds: float) -> int:
        """Wait for the end of the process and of what it said; its exit code."""
        code = self.process.wait(seconds)
        self._listener.join(END_SECONDS)
        return code

    def close(self) -> None:
        """End it if it still runs, and let go of its pipes."""
        if self.process.poll() is None:
            self.process.terminate()
        self.end(END_SECONDS)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def demo(*arguments: str) -> Iterator[Demo]:
    run = Demo(*arguments)
    try:
        yield run
    finally:
        run.close()


def summary(run: Demo) -> dict[str, Any]:
    assert run.process.stdout is not None
    found: dict[str, Any] = msgspec.json.decode(run.process.stdout.read())
    return found


def gone(processes: list[psutil.Process], seconds: float = END_SECONDS) -> list[psutil.Process]:
    """Those that are still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        left = [each for each in processes if each.is_running() and _status(each) != psutil.STATUS_ZOMBIE]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("flights", gate([2_000, 20_000], 2_000))
def test_every_number_is_right(tmp_path: Path, flights: int) -> None:
    with demo("--events", str(flights), "--json", "--out", str(tmp_path)) as run:
        code = run.end(900)
        found = summary(run)
    assert code == 0, run.said
    assert found["right"]
    assert found["flights"] == flights
    assert [check["name"] for check in found["checks"] if check["wrong"]] == []
    assert all(check["compared"] for check in found["checks"])
    if found["killed"] is not None:  # so few flights may be over before it comes to that
        assert found["restarts"] == 1
    plot = tmp_path / "delays.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "flights.csv").exists()


@pytest.mark.parametrize("phase", ["starting Kafka", "Spark turns the file", "folding flights"])
@pytest.mark.nightly
def test_ctrl_c_ends_everything(tmp_path: Path, phase: str) -> None:
    with demo("--events", "20000", "--out", str(tmp_path)) as run:  # enough that it is not over before the signal
        run.wait_for(phase)
        children = run.children()
        run.process.send_signal(signal.SIGINT)
        assert run.end(END_SECONDS) == 130, run.said
        assert gone(children) == []
        assert "Traceback" not in run.said
        assert "interrupted; everything is stopped" in run.said


@pytest.mark.nightly
def test_nothing_outlives_a_killed_demo(tmp_path: Path) -> None:
    with demo("--events", "3000", "--out", str(tmp_path)) as run:
        run.wait_for("folding flights")
        children = run.children()
        assert len(children) > 3
        run.process.kill()
        run.end(END_SECONDS)
        assert gone(children) == []


@pytest.mark.nightly
def test_a_second_demo_in_the_same_folder_says_so(tmp_path: Path) -> None:
    with demo("--events", "3000", "--out", str(tmp_path)) as first:
        first.wait_for("starting Kafka")
        second = subprocess.run(
            [sys.executable, "-m", "streams", "demo", "--out", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=END_SECONDS,
        )
        assert second.returncode == 1
        assert "another demo writes to" in second.stderr
        assert "--out" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    run = subprocess.run(
        [sys.executable, "-m", "streams", "demo", "--out", str(file / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
    )
    assert run.returncode == 1
    assert str(file / "out") in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr
