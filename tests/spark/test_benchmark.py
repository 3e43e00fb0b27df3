"""The Spark benchmark runs, on tiny sizes: every job does the right thing, and a wrong one is told.

The session of the tests has no connector on board, so this is our side alone; ``make bench ARGS="spark --quick"`` runs
both.
"""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from benchmarks.cluster import Cluster
from benchmarks.spark.figures import BATCHES, Sizes
from benchmarks.spark.run import Bench, session, versions
from benchmarks.spark.sides import Grt
from streams.testing.fixtures import BrokerAddress

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(500)]

SIZES = Sizes(rows=2_000, batch=400, repeats=1, partitions=(2,))


@pytest.fixture
def bench(spark: SparkSession, kafka_broker: BrokerAddress) -> Bench:
    return Bench(spark, Cluster(kafka_broker.bootstrap_servers), None, SIZES, connector=False)


def test_every_measure_runs_and_is_right(bench: Bench) -> None:
    said: list[str] = []
    found = list(bench.runs(said.append))
    assert {(run.what, run.system) for run in found} == {
        ("read", "grt"), ("write", "grt"), ("stream", "grt"), ("stream", "grt, typed"), ("encode", "grt"),
        ("decode", "grt: raw"), ("decode", "grt: events"), ("decode", "grt: by codec"),
    }  # fmt: skip
    assert [run.fault for run in found] == [""] * len(found) == [""] * 16
    assert all(run.per_second > 0 and run.cpu.java > 0 for run in found)
    assert {len(run.batch_ms) for run in found if run.what == "stream"} == {BATCHES}
    assert said


def test_a_side_that_loses_rows_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Grt.write
    source, due = bench._input(SIZES.rows, 2)
    monkeypatch.setattr(Grt, "write", lambda side, rows, topic: write(side, rows.where(f.rand(3) > 0.01), topic))
    wrong = bench._write(bench.sides[-1], 1, 2, due, source)
    assert f"instead of {SIZES.rows}" in wrong.fault


def test_a_session_without_the_connector_says_so(spark: SparkSession) -> None:
    same, missing = session()
    assert same is spark
    assert str(versions(spark, missing)["connector"]).startswith("not measured: ")
