"""The command of the benchmarks from end to end, on tiny sizes: measured, judged, written, made into a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.report import Run
from benchmarks.systems import REFERENCE

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command_measures_and_makes_its_page(tmp_path: Path) -> None:
    sizes = ["--drain-records", "3000", "--latency-rates", "200", "--latency-seconds", "1"]
    sizes += ["--async-records", "20000", "--async-seconds", "1"]
    words = [sys.executable, "-m", "benchmarks", "drain", "latency", "async", "--quick", *sizes]
    done = subprocess.run(
        [*words, "--systems", REFERENCE, "engine", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    run = Run.read(path)
    assert [len(run.measured[name]) for name in ("drain", "latency", "async")] == [2, 2, 3]
    assert {entry.found.fault for entries in run.measured.values() for entry in entries} == {""}
    assert {"kafka", "java", "commit", "librdkafka", "seed"} <= set(run.facts)
    assert str(tmp_path) not in path.read_text()
    assert page.main([str(path), "--docs", str(tmp_path)]) == 0
    assert (tmp_path / "results" / "drain.svg").exists()
