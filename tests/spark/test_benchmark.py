"""The Spark benchmark runs, on tiny sizes: every job does its work, and a wrong one is shown.

The session of the tests has no connector on board, so this is our side alone; ``make bench ARGS="spark --quick"`` runs
both.
"""

from __future__ import annotations

from argparse import Namespace

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from benchmarks.cluster import Cluster
from benchmarks.spark.run import SparkBench, session, versions
from benchmarks.spark.sides import Grt
from streams.testing.fixtures import BrokerAddress

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(500)]

SIZES = Namespace(rows=2_000, batch=400, partitions=[2], rounds=1)


@pytest.fixture
def bench(spark: SparkSession, kafka_broker: BrokerAddress) -> SparkBench:
    return SparkBench(spark, Cluster(kafka_broker.bootstrap_servers), None, SIZES, connector=False)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_measure_runs_and_is_right(bench: SparkBench) -> None:
    said: list[str] = []
    found = list(bench.runs(said.append))
    assert {(run.what, run.system) for run in found} == {
        ("read", "grt"), ("decode", "grt"), ("decode", "grt, typed"),
        ("write", "grt"), ("stream", "grt"), ("stream", "grt, typed"),
    }  # fmt: skip
    assert [run.fault for run in found] == [""] * len(found) == [""] * 12
    assert all(run.per_second > 0 and run.cpu_us > 0 for run in found)
    assert said


@pytest.mark.nightly
def test_a_side_that_loses_rows_is_shown(
    bench: SparkBench, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Grt.write
    monkeypatch.setattr(Grt, "write", lambda side, rows, topic: write(side, rows.where(f.rand(3) > 0.01), topic))
    wrong = bench.write(bench.sides[-1], 1, 2)
    assert f"instead of {SIZES.rows}" in wrong.fault
    same, missing = session()
    assert same is spark
    assert str(versions(missing)["connector"]).startswith("not measured: ")
