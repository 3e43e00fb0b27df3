"""Kafka to Kafka through ``format("grt")``, exactly once: drivers killed in their commit, tasks that fail, workers that
die. The short form; ``test_proof_soak.py`` has the long one."""

from __future__ import annotations

import pytest

from tests.spark.proof_kit import Trial, wait_until
from tests.spark.proof_points import COMMIT_POINTS, Strike

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

EVENTS = 20_000


def test_drivers_killed_in_their_commit(trial: Trial) -> None:
    """With all of the rows sent, and committed without Spark's knowing."""
    spec = trial.spec(rows_per_batch=EVENTS // 4)
    strike = Strike("commit.before", 1)
    trial.start(strike, spec=spec).must_be_killed()
    assert trial.open_transaction
    assert trial.committed_rows() == spec.rows_per_batch
    strike = Strike("commit.after", 2)
    trial.start(strike, spec=spec).must_be_killed()
    wait_until(lambda: not trial.open_transaction, "the markers of the commit are written")
    assert trial.committed_rows() == 3 * spec.rows_per_batch
    assert trial.batches_done == 2
    trial.start(spec=spec).must_finish()
    assert trial.must_be_exact().aborted == spec.rows_per_batch


def test_the_process_that_commits_dies_at_every_point(trial: Trial) -> None:
    """It ends without a word, the query fails and is started again: at each point, one batch after the other."""
    strikes = [Strike(point, batch, "exit") for batch, point in enumerate(COMMIT_POINTS)]
    spec = trial.spec(rows_per_batch=EVENTS // len(strikes), restarts=len(strikes))
    job = trial.start(*strikes, spec=spec)
    job.must_finish()
    assert [strike for strike in strikes if not trial.struck(strike)] == []
    assert job.log.read_text().count("FAILED") == len(strikes)
    trial.must_be_exact()


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
