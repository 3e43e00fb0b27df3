"""A Spark standalone cluster, a master and two workers out of the pip package: what a real cluster does to a sink."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.testing.fixtures import BrokerAddress
from tests.spark.cluster_job import ROWS
from tests.spark.cluster_kit import ROOT, SPECULATION, StandaloneCluster
from tests.spark.conftest import MakeTopic
from tests.spark.proof_kit import Trial
from tests.spark.proof_points import Strike

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

EVENTS = 12_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_a_batch_write_with_files_in_a_shared_folder(
    cluster: StandaloneCluster, kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path
) -> None:
    trial = Trial(kafka_broker.bootstrap_servers, tmp_path, topic_prefix, EVENTS)
    staging = tmp_path / "staging"
    staging.mkdir()
    with contextlib.closing(trial):
        options = {"stagingDir": str(staging), "stagingThreshold": "0"}
        strike = Strike("stage.after", 0, "raise")  # a task that has staged its file is tried again: the file is left
        spec = trial.spec(write="batch", settings=cluster.settings, write_options=options)
        trial.start(strike, spec=spec).must_finish()
        assert trial.struck(strike)
        trial.must_be_exact()
        assert [str(path.relative_to(staging)) for path in staging.rglob("*")] == []


def test_executors_killed_while_they_write(
    cluster: StandaloneCluster, kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path
) -> None:
    """By SIGKILL, half way through the rows of a task, in every second batch; and a straggler whose copy is quicker."""
    trial = Trial(kafka_broker.bootstrap_servers, tmp_path, topic_prefix, EVENTS)
    with contextlib.closing(trial):
        settings = {**cluster.settings, **SPECULATION}
        faults = ("kill-executor", "slow")
        spec = trial.spec(rows_per_batch=EVENTS // 5, settings=settings, task_faults=faults, slow_seconds=30.0)
        trial.start(spec=spec).must_finish()
        assert len(list(tmp_path.glob("task-kill-executor-*"))) == 1
        assert len(list(tmp_path.glob("task-slow-*"))) == 1
        assert list(tmp_path.glob("again-slow-*"))  # the copy, or two where the machine is slow
        assert trial.must_be_exact().aborted == 0


def test_upcasters_and_handlers_run_on_the_workers(
    cluster: StandaloneCluster, kafka_broker: BrokerAddress, make_topic: MakeTopic
) -> None:
    """Classes and handlers are imported there: they are installed with the package, or lie on the workers' path."""
    arguments = [json.dumps(cluster.settings), kafka_broker.bootstrap_servers, make_topic(partitions=2)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.spark.cluster_job", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    cents = sum(range(ROWS))
    assert found == {"typed": ROWS, "errors": [], "replayed": ROWS, "outputs": ROWS, "cents": cents}
