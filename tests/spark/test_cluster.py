"""A Spark standalone cluster, a master and two workers out of the pip package: what a real cluster does to a sink."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from tests.spark.cluster_job import ROWS
from tests.spark.cluster_kit import ROOT, SPECULATION, StandaloneCluster
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log
from tests.spark.proof_kit import Trial
from tests.spark.proof_points import BATCH_WRITE, Strike
from tests.spark.test_known_everywhere import run_program

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def staging(tmp_path: Path) -> dict[str, str]:
    """Options that stage every row in files."""
    (tmp_path / "staging").mkdir()
    return {"stagingDir": str(tmp_path / "staging"), "stagingThreshold": "0"}


def test_a_batch_write_with_files_in_a_shared_folder(
    cluster: StandaloneCluster, trial: Trial, staging: dict[str, str]
) -> None:
    strike = Strike("stage.after", BATCH_WRITE, "raise")  # a task that has staged its file is tried again: it is left
    spec = trial.spec(write="batch", settings=cluster.settings, write_options=staging)
    trial.start(strike, spec=spec).must_finish()
    assert trial.struck(strike)
    trial.must_be_exact()
    assert list(Path(staging["stagingDir"]).rglob("*")) == []


@pytest.mark.parametrize("in_files", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_executors_killed_while_they_write(
    cluster: StandaloneCluster, trial: Trial, staging: dict[str, str], in_files: bool
) -> None:
    """By SIGKILL, half way through the rows of a task, in every second batch; and a straggler whose copy is quicker."""
    spec = trial.spec(
        rows_per_batch=trial.events // 5,
        settings={**cluster.settings, **SPECULATION},
        task_faults=("kill-executor", "slow"),
        slow_seconds=60.0,  # at most: the copy ends it
        write_options=staging if in_files else {},
    )
    trial.start(spec=spec).must_finish(900)
    assert len(list(trial.folder.glob("task-kill-executor-*"))) == 1
    assert len(list(trial.folder.glob("task-slow-*"))) == 1
    assert list(trial.folder.glob("again-slow-*"))  # the copy, or two where the machine is slow
    assert trial.must_be_exact().aborted == 0
    assert list(Path(staging["stagingDir"]).rglob("*.batches")) == []


def test_a_jar_on_the_driver_only(cluster: StandaloneCluster, trial: Trial, kes_jar: Path | None) -> None:
    """Tasks do not have its classes: the write fails, with the name of one, and nothing of it is there. With the jar on
    executors, too, it goes through."""
    if kes_jar is None:
        pytest.skip("there is no JDK")
    java = {"tasks": "java"}
    spec = trial.spec(settings={**cluster.settings, "spark.driver.extraClassPath": str(kes_jar)}, write_options=java)
    job = trial.start(spec=spec)
    assert job.wait() != 0
    assert job.said("java.lang.ClassNotFoundException: kes.spark."), job.tail()
    assert trial.committed_rows() == 0
    trial.start(
        spec=trial.spec(settings={**cluster.settings, "spark.jars": str(kes_jar)}, write_options=java)
    ).must_finish()
    trial.must_be_exact()


def test_upcasters_and_handlers_run_on_the_workers(
    cluster: StandaloneCluster, servers: str, make_topic: MakeTopic
) -> None:
    """Classes and handlers are imported there: they are installed with the package, or lie on the workers' path."""
    arguments = [json.dumps(cluster.settings), servers, make_topic(partitions=2)]
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


def test_spark_submit(
    cluster: StandaloneCluster, servers: str, log: Log, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """A pipeline as the guide submits it; and once more, when nothing is left to be done."""
    source, target = make_topic(partitions=3), make_topic("target", partitions=3)
    log.send(source, range(ROWS), 3)
    (tmp_path / "staging").mkdir()
    settings = [word for setting in cluster.settings.items() for word in ("--conf", "{}={}".format(*setting))]
    job = [str(ROOT / "tests" / "spark" / "submitted_job.py"), servers, source, target, str(tmp_path)]
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    for _ in range(2):
        said = run_program([str(submit), "--master", cluster.url, *settings, *job], tmp_path)
        assert f"master {cluster.url}" in said
        assert sorted(int(message.value() or b"") for message in log.records(target)) == list(range(ROWS))
