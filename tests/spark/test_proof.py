"""Kafka to Kafka through ``format("grt")``, exactly once, while drivers, tasks, runs and the broker fail.

The change gate has one kill, the nightly run one case of each fault. The long form, every fault at every point with
200,000 events and more, is ``pytest -m soak tests/spark`` (``KES_PROOF_EVENTS``, ``KES_PROOF_KILLS``, ``SEED``).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from streams.testing.faults import KafkaProxy, Rule
from streams.testing.fixtures import OwnBroker
from tests.spark.log_kit import seed, until
from tests.spark.proof_job import write_batch
from tests.spark.proof_kit import Trial, job_processes, key_of, kill_in_transactions, run_to_the_end, value_of
from tests.spark.proof_points import BATCH_WRITE, COMMIT_POINTS, POINTS, Strike

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(3000)]


def at(short: str, *long: str) -> pytest.MarkDecorator:
    """Cases by point: one for the nightly run, the others for the long form."""
    return pytest.mark.parametrize("point", [short, *(pytest.param(each, marks=pytest.mark.soak) for each in long)])


def or_long(name: str, short: Any, long: Any) -> pytest.MarkDecorator:
    """One value for the nightly run, one for the long form."""
    return pytest.mark.parametrize(name, [short, pytest.param(long, marks=pytest.mark.soak)])


# ------------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("write", ["batch", pytest.param("stream", marks=pytest.mark.nightly)])
def test_drivers_killed_in_their_commit(spark: SparkSession, trial: Trial, write: str) -> None:
    """With all of the rows sent, and committed without Spark's knowing."""
    stream = write == "stream"
    spec = trial.spec(write=write, rows_per_batch=trial.events // 4)
    trial.start(Strike("commit.before", 1 if stream else BATCH_WRITE), spec=spec).must_be_killed()
    assert trial.open_transaction
    assert trial.committed_rows() == (spec.rows_per_batch if stream else 0)
    trial.start(Strike("commit.after", 2 if stream else BATCH_WRITE), spec=spec).must_be_killed()
    until(lambda: not trial.open_transaction, "the markers of the commit are written")
    assert trial.committed_rows() == (3 * spec.rows_per_batch if stream else trial.events)
    if stream:
        assert trial.batches_done == 2
        trial.start(spec=spec).must_finish()
    else:
        write_batch(spark, spec)
    assert trial.must_be_exact().aborted == (spec.rows_per_batch if stream else trial.events)


@pytest.mark.soak
@pytest.mark.parametrize("half", [0, 1])
def test_killed_at_every_point(trial: Trial, half: int) -> None:
    """One after the other, one batch later each, on one checkpoint. In two tests, for the points by turns."""
    for batch, point in enumerate(POINTS[half::2]):
        trial.start(Strike(point, batch)).must_be_killed()
    trial.start().must_finish()
    trial.must_be_exact()


@pytest.mark.soak
def test_killed_in_open_transactions(trial: Trial) -> None:
    kills = int(os.environ.get("KES_PROOF_KILLS") or 12)
    hits = kill_in_transactions(trial, kills, random.Random(seed()), trial.spec(rows_per_batch=trial.events // 20))
    trial.start().must_finish()
    trial.must_be_exact(kills=kills, hits=hits)
    assert hits >= kills // 2


@pytest.mark.nightly
@or_long("times", 1, 3)
def test_the_process_that_commits_dies_at_every_point(trial: Trial, times: int) -> None:
    """The query fails and is started again, in the same Spark: at each point, one batch after the other. By the end of
    the process, and at every third by an exception."""
    points = COMMIT_POINTS * times
    strikes = [Strike(point, batch, "raise" if batch % 3 == 2 else "exit") for batch, point in enumerate(points)]
    spec = trial.spec(rows_per_batch=trial.events // len(strikes), restarts=len(strikes))
    job = trial.start(*strikes, spec=spec)
    job.must_finish(900)
    assert [strike for strike in strikes if not trial.struck(strike)] == []
    assert job.log.read_text().count("FAILED") == len(strikes)
    trial.must_be_exact()


@pytest.mark.nightly
@or_long("batches", 5, 20)
def test_tasks_that_fail_and_workers_that_die(trial: Trial, batches: int) -> None:
    """Half way through their rows, which a sink's iterator shows as its end; Spark tries them again."""
    spec = trial.spec(task_faults=("raise", "exit"), rows_per_batch=trial.events // batches)
    trial.start(spec=spec).must_finish()
    faults = [len(list(trial.folder.glob(f"task-{kind}-*"))) for kind in spec.task_faults]
    assert faults == [batches // 4] * 2
    assert trial.must_be_exact(faults=sum(faults)).aborted == 0  # what a task does not finish is not even sent


@pytest.mark.nightly
@at("commit.before", "stage.half", "init.after", "produce.half", "commit.after")
def test_a_query_stopped_half_way_through_a_batch(trial: Trial, point: str) -> None:
    """``query.stop()`` in the middle of a batch, and the query started again at once in the same process: whatever
    the process that commits does meanwhile, rows are written once."""
    strike = Strike(point, 1, "hold")
    job = trial.start(strike, spec=trial.spec(rows_per_batch=trial.events // 4, stop_at=strike.mark))
    job.must_finish()
    assert job.said("STOPPED")
    trial.must_be_exact()


# ------------------------------------------------------------------------------------------------- runs that come back


@pytest.mark.nightly
@at("commit.before", "init.after", "marker.after", "produce.half", "commit.after")
def test_a_driver_frozen_in_its_transaction(trial: Trial, point: str) -> None:
    """A second run on the same checkpoint does its work. Nothing that the first does afterwards is ever visible."""
    spec = trial.spec(rows_per_batch=trial.events // 4)
    strike = Strike(point, 1, "freeze")
    first = trial.start(strike, spec=spec)
    trial.wait_struck(strike)
    until(lambda: first.frozen, "the whole job is frozen")
    assert trial.open_transaction or point != "commit.before"
    trial.start(strike, spec=spec).must_finish()
    trial.must_be_exact()
    first.thaw()
    code = first.wait()
    report = trial.must_be_exact(exit_code=code)
    if point == "commit.before":
        assert code != 0, first.tail()  # it finds out that it has been replaced
        assert report.aborted == spec.rows_per_batch


@pytest.mark.nightly
@at("commit.before", "init.before", "marker.after", "offsets.after")
def test_a_commit_that_outlives_its_driver(trial: Trial, point: str) -> None:
    """Driver and Java are dead, the Python process that commits is not. It was too slow: it is fenced. In the long form
    it goes on in the middle of the next run's work."""
    spec = trial.spec(rows_per_batch=trial.events // 4)
    strike = Strike(point, 1, "orphan")
    first = trial.start(strike, spec=spec)
    trial.wait_struck(strike)
    first.wait()
    until(lambda: len(job_processes(first.process.pid)) == 1, "only the orphan is left", 30)
    second = trial.start(strike, spec=spec)
    if point == "commit.before":
        second.must_finish()
        assert len(job_processes(first.process.pid)) == 1  # it was there all the time
    until(lambda: trial.batches_done >= 2 or not second.running, "the second run is at work")
    trial.release()
    until(lambda: not job_processes(first.process.pid), "the orphan ends")
    run_to_the_end(trial, spec)
    report = trial.must_be_exact()
    assert point != "commit.before" or report.aborted == spec.rows_per_batch


@pytest.mark.nightly
def test_two_runs_of_one_query_at_once(trial: Trial) -> None:
    """Spark has no lock on a checkpoint: the second run fails, or the first, or both. The first is held in its commit
    until the second has done that batch, so that they do meet."""
    spec = trial.spec(rows_per_batch=trial.events // 6)
    strike = Strike("marker.after", 1, "hold")
    trial.start(strike, spec=spec)
    trial.wait_struck(strike)
    second = trial.start(strike, spec=spec)
    until(lambda: trial.batches_done >= 2 or not second.running, "the second run has done the batch")
    trial.release()
    assert trial.jobs[0].wait() != 0, "it has gone on although the other was quicker"
    second.wait()
    trial.start(spec=spec).must_finish()
    trial.must_be_exact()


@pytest.mark.soak
def test_a_commit_that_comes_after_the_next_run(trial: Trial) -> None:
    """A zombie's EndTxn, and its last rows, held on the line while the next run does that batch."""
    with KafkaProxy(trial.servers) as proxy:
        for api in ("EndTxn", "TxnOffsetCommit", "Produce"):
            held = proxy.add(Rule(apis={api}, on="request", action="hold", nth=2, times=1))
            job = trial.start(spec=trial.spec(servers=proxy.bootstrap_servers))
            assert held.wait_struck(seconds=240)
            job.kill()
            second = trial.start()
            before = trial.batches_done
            until(lambda: trial.batches_done >= before + 2 or not second.running, "the next run works")  # noqa: B023
            held.release()
            second.kill()
    trial.start().must_finish()
    trial.must_be_exact(kills=6)


# ------------------------------------------------------------------------------------------------- the broker's side


@pytest.mark.nightly
@or_long("points", ["commit.before"], ["init.before", "marker.after", "produce.half", "commit.before", "commit.after"])
def test_a_broker_killed_while_the_batch_is_committed(
    own_broker: OwnBroker, make_trial: Callable[[str], Trial], points: list[str]
) -> None:
    broker = own_broker(durable=True)
    trial = make_trial(broker.bootstrap_servers)
    spec = trial.spec(rows_per_batch=trial.events // 8)
    for batch, point in enumerate(points, 1):
        strike = Strike(point, batch, "hold")
        trial.start(strike, spec=spec)
        trial.wait_struck(strike)
        broker.kill()
        trial.release()
        broker.restart()
        if point != points[-1]:
            until(lambda: trial.batches_done > batch or not trial.jobs[-1].running, "it goes on, or has failed")  # noqa: B023
            trial.jobs[-1].kill()
            (trial.folder / "go").unlink()
    run_to_the_end(trial, spec)
    trial.must_be_exact(broker_kills=len(points))


@pytest.mark.nightly
def test_replies_that_are_lost(trial: Trial) -> None:
    """The broker has done it, the driver does not know: for each kind of request of a commit, twice."""
    with KafkaProxy(trial.servers) as proxy:
        rules = [
            proxy.add(Rule(apis={api}, on="reply", action="drop", nth=2, times=2))
            for api in ("InitProducerId", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
        ]
        spec = trial.spec(servers=proxy.bootstrap_servers, rows_per_batch=trial.events // 4)
        run_to_the_end(trial, spec)
        assert all(rule.struck == 2 for rule in rules), rules
        trial.must_be_exact()


@pytest.mark.soak
def test_replies_lost_and_late(trial: Trial) -> None:
    number = seed()
    apis = ("InitProducerId", "AddOffsetsToTxn", "AddPartitionsToTxn", "TxnOffsetCommit", "EndTxn", "OffsetFetch")
    often: dict[str, Any] = {"probability": 0.15, "times": 6}
    with KafkaProxy(trial.servers) as proxy:
        lost = [
            proxy.add(Rule(apis={api}, on="reply", action="drop", seed=number + index, **often))
            for index, api in enumerate((*apis, "Produce"))
        ]
        late = [
            proxy.add(Rule(apis={api}, on=side, action="delay", seconds=(0.5, 4), seed=number, **often))
            for api in apis
            for side in ("request", "reply")
        ]
        spec = trial.spec(servers=proxy.bootstrap_servers, rows_per_batch=trial.events // 25)
        failed = run_to_the_end(trial, spec, runs=20)
        struck = {f"{'/'.join(rule.rule.apis)} lost": rule.struck for rule in lost}
        struck["delayed"] = sum(rule.struck for rule in late)
    trial.must_be_exact(failed=failed, struck=struck)


@pytest.mark.soak
def test_a_marker_that_expires(own_broker: OwnBroker, make_trial: Callable[[str], Trial]) -> None:
    """The broker forgets the offsets of a group at rest. Never silently again, never silently on: the query stops, and
    goes on where an operator says what has been written."""
    properties = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "2000"}
    trial = make_trial(own_broker(properties=properties).bootstrap_servers)
    trial.start(Strike("returned", 1)).must_be_killed()
    rested = time.monotonic() + 75
    while time.monotonic() < rested:
        time.sleep(0.5)
    stopped = trial.start()
    assert stopped.wait() == 1
    assert stopped.said("the marker of what was written before is missing"), stopped.tail()
    trial.start(spec=trial.spec(write_options={"lastWrittenBatch": f"{trial.query}:1"})).must_finish()
    trial.must_be_exact()


COPIED = [("__grt__", b"Copied")]


def test_the_oracle_tells_every_kind_of_fault(servers: str, topic_prefix: str, tmp_path: Path) -> None:
    trial = Trial(servers, tmp_path, topic_prefix, 1000, partitions=2)
    settings = {"bootstrap.servers": servers, "partitioner": "murmur2_random"}
    good = [number for number in range(1000) if number not in (7, 400, 999)]
    numbers = [*good[:300], 12, *good[300:], 400]  # 7 and 999 are missing, 12 is doubled, 400 late
    producer = Producer(settings)
    for number in numbers:
        value = value_of(number) + (b"!" if number == 500 else b"")  # another value
        producer.produce(trial.target, value, key_of(number), headers=COPIED)
    producer.flush(30)
    report = trial.check()
    assert (report.events, report.rows, report.aborted) == (1000, 999, 0)
    assert (report.missing, report.duplicated, report.changed) == (2, 1, 1)
    assert report.out_of_order == 2  # the second 12, and 400 after 800
    assert not report.exact
    open_one = Producer({**settings, "transactional.id": topic_prefix + "open"})
    open_one.init_transactions(60)
    open_one.begin_transaction()
    open_one.produce(trial.target, b"0 open", b"k")
    open_one.flush(30)
    assert trial.open_transaction
    assert len(trial.check(patience_seconds=0).hanging) == 1
    open_one.abort_transaction(60)
    trial.close()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_naive_sink_is_caught(servers: str, topic_prefix: str, tmp_path: Path) -> None:
    """Rows of a task committed in ``write``: a task that is tried again, and a driver that dies between the commit and
    Spark's, write twice. Of the task that failed, a part is visible, as if that were all."""
    trial = Trial(servers, tmp_path, topic_prefix, 20_000)
    try:
        spec = trial.spec(write="naive", task_faults=("raise",), rows_per_batch=5000)
        strike = Strike("returned", 2)
        trial.start(strike, spec=spec).must_be_killed()
        trial.start(strike, spec=spec).must_finish()
        report = trial.check()
        print(report)
        assert report.duplicated >= 5000  # a whole batch, and what of a failed attempt had come through
        assert report.missing == 0
        assert not report.exact
    finally:
        trial.close()
