"""The command of the benchmarks from end to end, on tiny sizes: measured, judged, written, made into a page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.cluster import Cluster
from benchmarks.drain import drain
from benchmarks.report import Run
from benchmarks.systems import REFERENCE, System
from streams.testing.fixtures import BrokerAddress

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SEED, EVENTS = 3, 2_000


def test_a_system_is_drained_and_judged(kafka_broker: BrokerAddress) -> None:
    cluster = Cluster(kafka_broker.bootstrap_servers, prefix="drained")
    source = cluster.source("drained-in")
    cluster.fill(source, SEED, EVENTS)
    found = drain(cluster, System.parse("engine"), source, SEED, EVENTS, os.getpid())
    assert found.fault == ""
    assert min(found.per_second, found.cpu_us_per_record) > 0
    wrong = drain(cluster, System.parse("engine"), source, SEED + 1, EVENTS, os.getpid())
    assert wrong.fault
    cluster.delete(source)


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
