"""The command of the benchmarks from end to end, on tiny sizes: measured, judged, written, made into a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.report import Run
from benchmarks.systems import REFERENCE

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def test_the_command_measures_and_makes_its_page(tmp_path: Path) -> None:
    sizes = ["--quick", "--records", "3000", "--rates", "200", "--seconds", "1"]
    sizes += ["--where-rates", "200", "--where-seconds", "1"]
    words = [sys.executable, "-m", "benchmarks", "drain", "latency", "where", *sizes, "--systems", REFERENCE, "engine"]
    done = subprocess.run([*words, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    run = Run.read(path)
    assert [len(run.measured[name]) for name in ("drain", "latency", "where")] == [2, 2, 2]
    assert {entry.found.fault for entries in run.measured.values() for entry in entries} == {""}
    for entry in run.measured["where"]:
        assert entry.found.events == 200
        assert sum(stretch.middle for stretch in entry.found.stretches.values()) > 0
    assert {"kafka", "java", "commit", "librdkafka", "seed"} <= set(run.facts)
    assert str(tmp_path) not in path.read_text()
    assert page.main([str(path), "--docs", str(tmp_path)]) == 0
    assert (tmp_path / "results" / "drain.svg").exists()
