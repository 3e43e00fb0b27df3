"""The flights demo, the whole way, on a part of the year: right numbers, clean ends, two at once."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("matplotlib")

from examples.flights import ingest
from tests.broker.embedded_kit import alive
from tests.broker.gate import gate
from tests.unit.waiting import wait_until

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

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._messages = folder / "messages.txt"
        with self._messages.open("wb") as messages:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "examples.flights", "--out", str(folder), *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._messages.read_text()

    def wait_for(self, text: str) -> None:
        """Until ``text`` is said."""
        wait_until(lambda: text in self.said or self.process.poll() is not None, text, 300.0)
        assert text in self.said

    def children(self) -> list[psutil.Process]:
        """All processes that it has started, and those they have."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[Demo]:
    run = Demo(folder, *arguments)
    with run.process:  # its pipe is closed at the end
        try:
            yield run
        finally:
            run.process.terminate()


def all_are_gone(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(alive(each.pid) for each in processes), processes, END_SECONDS)


@pytest.mark.parametrize("flights", gate([2_000, 20_000], 2_000))
def test_every_number_is_right(tmp_path: Path, flights: int) -> None:
    with demo(tmp_path, "--events", str(flights), "--json") as run:
        out, _ = run.process.communicate(timeout=900)
    code, found = run.process.returncode, msgspec.json.decode(out or b"{}")
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
    with demo(tmp_path, "--events", "20000") as run:  # enough that it is not over before the signal
        run.wait_for(phase)
        children = run.children()
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(END_SECONDS) == 130, run.said
        all_are_gone(children)
        assert "Traceback" not in run.said
        assert "interrupted; everything is stopped" in run.said


@pytest.mark.nightly
def test_nothing_outlives_a_killed_demo(tmp_path: Path) -> None:
    with demo(tmp_path, "--events", "3000") as run:
        run.wait_for("folding flights")
        children = run.children()
        assert len(children) > 3
        run.process.kill()
        run.process.wait(END_SECONDS)
        all_are_gone(children)


@pytest.mark.nightly
def test_a_second_demo_in_the_same_folder_says_so(tmp_path: Path) -> None:
    with demo(tmp_path, "--events", "3000") as first:
        first.wait_for("starting Kafka")
        second = subprocess.run(
            [sys.executable, "-m", "examples.flights", "--out", str(tmp_path)],
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
        [sys.executable, "-m", "examples.flights", "--out", str(file / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
    )
    assert run.returncode == 1
    assert str(file / "out") in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr
