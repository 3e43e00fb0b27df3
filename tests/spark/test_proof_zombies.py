"""Runs that come back: a frozen driver, a process that commits on its own after its driver died, two runs at once."""

from __future__ import annotations

import pytest

from tests.spark.proof_kit import Trial, job_processes, wait_until
from tests.spark.proof_points import Strike

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

EVENTS = 12_000


def test_a_driver_frozen_in_its_transaction(trial: Trial) -> None:
    """A second run on the same checkpoint does its work. Nothing that the first does afterwards is ever visible."""
    spec = trial.spec(rows_per_batch=EVENTS // 4)
    strike = Strike("commit.before", 1, "freeze")
    first = trial.start(strike, spec=spec)
    trial.wait_struck(strike)
    wait_until(lambda: first.frozen, "the whole job is frozen")
    assert trial.open_transaction
    trial.start(strike, spec=spec).must_finish()
    trial.must_be_exact()
    first.thaw()
    assert first.wait() != 0, first.tail()  # it finds out that it has been replaced
    assert trial.must_be_exact().aborted == spec.rows_per_batch


def test_a_commit_that_outlives_its_driver(trial: Trial) -> None:
    """Driver and Java are dead, the Python process that commits is not. It was too slow: it is fenced."""
    spec = trial.spec(rows_per_batch=EVENTS // 4)
    strike = Strike("commit.before", 1, "orphan")
    first = trial.start(strike, spec=spec)
    trial.wait_struck(strike)
    first.wait()
    wait_until(lambda: len(job_processes(first.process.pid)) == 1, "only the orphan is left", 30)
    trial.start(strike, spec=spec).must_finish()
    assert len(job_processes(first.process.pid)) == 1  # it was there all the time
    trial.release()
    wait_until(lambda: not job_processes(first.process.pid), "the orphan ends")
    assert trial.must_be_exact().aborted == spec.rows_per_batch


def test_two_runs_of_one_query_at_once(trial: Trial) -> None:
    """Spark has no lock on a checkpoint: the second run fails, or the first, or both. The first is held in its commit
    until the second has done that batch, so that they do meet."""
    spec = trial.spec(rows_per_batch=EVENTS // 6)
    strike = Strike("marker.after", 1, "hold")
    trial.start(strike, spec=spec)
    trial.wait_struck(strike)
    second = trial.start(strike, spec=spec)
    wait_until(lambda: trial.batches_done >= 2 or not second.running, "the second run has done the batch")
    trial.release()
    assert trial.jobs[0].wait() != 0, "it has gone on although the other was quicker"
    second.wait()
    trial.start(spec=spec).must_finish()
    trial.must_be_exact()
