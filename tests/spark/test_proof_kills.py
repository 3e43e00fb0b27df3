"""Kafka to Kafka through ``format("grt")``, exactly once: drivers killed in their commit, tasks that fail, workers that
die. The short form; ``test_proof_soak.py`` has the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.testing.fixtures import BrokerAddress
from tests.spark.proof_kit import Trial, job_processes, wait_until
from tests.spark.proof_points import Strike

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

EVENTS = 20_000


@pytest.fixture
def trial(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(kafka_broker.bootstrap_servers, tmp_path, topic_prefix, EVENTS)
    yield trial
    trial.close()


def test_drivers_killed_at_points_of_the_commit(trial: Trial) -> None:
    """Behind the fence, with half of the rows sent, with all of them sent, and committed without Spark's knowing."""
    spec = trial.spec(rows_per_batch=EVENTS // 5)
    for strike in (Strike("marker.after", 0), Strike("produce.half", 1), Strike("commit.before", 2)):
        trial.start(strike, spec=spec).must_be_killed()
        assert trial.committed_rows() == strike.batch * spec.rows_per_batch
    strike = Strike("commit.after", 3)
    trial.start(strike, spec=spec).must_be_killed()
    wait_until(lambda: not trial.open_transaction, "the markers of the commit are written")
    assert trial.committed_rows() == 4 * spec.rows_per_batch
    assert trial.batches_done == 3
    trial.start(spec=spec).must_finish()
    report = trial.must_be_exact()
    assert report.aborted > spec.rows_per_batch  # two of the killed had sent rows


def test_tasks_that_fail_and_workers_that_die(trial: Trial) -> None:
    """Half way through their rows, which a sink's iterator shows as its end; Spark tries them again."""
    trial.start(spec=trial.spec(task_faults=("raise", "exit"), rows_per_batch=EVENTS // 5)).must_finish()
    assert len(list(trial.folder.glob("task-raise-*"))) == 1
    assert len(list(trial.folder.glob("task-exit-*"))) == 1
    assert trial.must_be_exact().aborted == 0  # what a task does not finish is not even sent


def test_a_query_stopped_half_way_through_a_batch(trial: Trial) -> None:
    """``query.stop()`` with the transaction open, and the query started again at once in the same process: whatever
    the process that commits does meanwhile, rows are written once."""
    strike = Strike("commit.before", 1, "hold")
    job = trial.start(strike, spec=trial.spec(rows_per_batch=EVENTS // 4, stop_at=strike.mark))
    job.must_finish()
    assert job.said("STOPPED")
    trial.must_be_exact()


def test_a_batch_write_killed_in_its_commit(trial: Trial) -> None:
    strike = Strike("commit.before", 0)
    trial.start(strike, spec=trial.spec(write="batch")).must_be_killed()
    assert trial.open_transaction
    assert not job_processes(trial.jobs[0].process.pid)
    trial.start(strike, spec=trial.spec(write="batch")).must_finish()
    assert trial.must_be_exact().aborted == EVENTS
