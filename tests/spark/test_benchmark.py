"""The Spark benchmark runs, on tiny sizes: every job does its work.

The session of the tests has no connector on board, so this is our side alone; ``make bench ARGS="spark --quick"`` runs
both.
"""

from __future__ import annotations

from argparse import Namespace

import pytest
from pyspark.sql import SparkSession

from benchmarks.cluster import Cluster
from benchmarks.spark.measure import BACK_TO_BACK, BARE, EVERY, FLOOR, IDLE, NOTHING
from benchmarks.spark.paced import TRIGGERS, PacedBench
from benchmarks.spark.run import SparkBench
from streams.testing.fixtures import BrokerAddress

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(500)]

SIZES = Namespace(rows=2_000, batch=400, partitions=[2], rounds=1)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_measure_runs_and_is_right(spark: SparkSession, kafka_broker: BrokerAddress) -> None:
    bench = SparkBench(spark, Cluster(kafka_broker.bootstrap_servers), None, SIZES, connector=False)
    said: list[str] = []
    found = list(bench.runs(said.append))
    assert {(run.what, run.system) for run in found} == {
        ("read", "grt"), ("decode", "grt"), ("decode", "grt, typed"),
        ("write", "grt"), ("stream", "grt"), ("stream", "grt, typed"), ("driver", "grt"),
    }  # fmt: skip
    assert [run.fault for run in found] == [""] * len(found) == [""] * 14
    assert all(run.per_second > 0 and run.cpu_us > 0 for run in found)
    assert said


@pytest.mark.slow
@pytest.mark.nightly
def test_queries_under_a_load_are_timed_and_right(spark: SparkSession, kafka_broker: BrokerAddress) -> None:
    sizes = Namespace(rate=100, seconds=2, rounds=1)
    bench = PacedBench(spark, Cluster(kafka_broker.bootstrap_servers), None, sizes, connector=False)
    found = {(run.what, run.system): run for run in bench.runs(lambda _: None)}
    assert list(found) == [
        *((BACK_TO_BACK, floor) for floor in (FLOOR, BARE)),
        (IDLE, NOTHING),
        *((what, "grt") for what in TRIGGERS),
    ]
    assert [run.fault for run in found.values()] == [""] * len(found)
    assert all(run.batch_ms > 0 for (what, _), run in found.items() if what != IDLE)
    assert all(0 < run.p50 <= run.p99 for what in (BACK_TO_BACK, EVERY) if (run := found[what, "grt"]))
    assert all(run.cpu_share > 0 for run in found.values())
