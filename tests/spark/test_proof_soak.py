"""The proof at length (``pytest -m soak tests/spark/test_proof_soak.py``): 200,000 events and more in each, kills that
hit open transactions, zombies at every point, a broker that goes, replies that are lost and late.

``KES_PROOF_REPORT`` names a file that a line of JSON is added to for each test: what was done, and what the oracle saw.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import msgspec
import pytest

from streams.testing.faults import KafkaProxy, Rule
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.spark.cluster_kit import SPECULATION, StandaloneCluster
from tests.spark.proof_kit import Report, Trial, kill_in_transactions, run_to_the_end, seed, wait_until
from tests.spark.proof_points import COMMIT_POINTS, POINTS, Strike

pytestmark = [pytest.mark.soak, pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(3000)]

EVENTS = int(os.environ.get("KES_PROOF_EVENTS") or 200_000)


def noted(what: str, trial: Trial, report: Report, began: float, **facts: object) -> None:
    """A line of the report."""
    line = {
        "what": what,
        **msgspec.to_builtins(report),
        "runs": len(trial.jobs),
        **facts,
        "seconds": round(time.monotonic() - began),
        "load": round(os.getloadavg()[1], 1),
    }
    text = msgspec.json.encode(line).decode()
    print(text)
    if name := os.environ.get("KES_PROOF_REPORT"):
        with Path(name).open("a") as file:
            file.write(text + "\n")


@pytest.mark.parametrize("half", [0, 1])
def test_killed_at_every_point(trial: Trial, half: int) -> None:
    """One after the other, one batch later each, on one checkpoint. In two tests, for the points by turns."""
    began, points = time.monotonic(), POINTS[half::2]
    for batch, point in enumerate(points):
        strike = Strike(point, batch)
        trial.start(strike).must_be_killed()
    trial.start().must_finish()
    noted("killed at points", trial, trial.must_be_exact(), began, kills=len(points), points=points)


def test_the_process_that_commits_dies_again_and_again(trial: Trial) -> None:
    """Three times at every point, by the end of the process and by an exception, in the same Spark."""
    began = time.monotonic()
    points = [*COMMIT_POINTS, *COMMIT_POINTS, *COMMIT_POINTS]
    strikes = [Strike(point, batch, "raise" if batch % 3 == 2 else "exit") for batch, point in enumerate(points)]
    spec = trial.spec(rows_per_batch=EVENTS // len(points), restarts=len(points))
    trial.start(*strikes, spec=spec).must_finish(900)
    struck = sum(map(trial.struck, strikes))
    assert struck == len(strikes)
    noted("commit process dies at every point", trial, trial.must_be_exact(), began, struck=struck)


def test_killed_in_open_transactions(trial: Trial) -> None:
    began, draw = time.monotonic(), random.Random(seed())
    kills = int(os.environ.get("KES_PROOF_KILLS") or 12)
    hits = kill_in_transactions(trial, kills, draw, trial.spec(rows_per_batch=EVENTS // 20))
    trial.start().must_finish()
    report = trial.must_be_exact()
    noted("random kills", trial, report, began, kills=kills, hits=hits)
    assert hits >= kills // 2


@pytest.mark.parametrize("point", ["init.after", "marker.after", "produce.half", "commit.before", "commit.after"])
def test_frozen_at(trial: Trial, point: str) -> None:
    began, strike = time.monotonic(), Strike(point, 2, "freeze")
    first = trial.start(strike)
    trial.wait_struck(strike)
    wait_until(lambda: first.frozen, "the whole job is frozen")
    trial.start(strike).must_finish()
    before = trial.must_be_exact()
    first.thaw()
    code = first.wait()
    report = trial.must_be_exact()
    assert report.rows == before.rows
    noted("frozen, replaced, thawed", trial, report, began, point=point, exit_code=code)


@pytest.mark.parametrize("point", ["init.before", "marker.after", "offsets.after", "commit.before"])
def test_orphan_at(trial: Trial, point: str) -> None:
    """The Python process that commits lives on without driver and Java, and goes on while the next run works."""
    began, strike = time.monotonic(), Strike(point, 1, "orphan")
    first = trial.start(strike)
    trial.wait_struck(strike)
    first.wait()
    second = trial.start(strike)
    wait_until(lambda: trial.batches_done >= 2 or not second.running, "the second run is at work")
    trial.release()
    run_to_the_end(trial, trial.spec())
    noted("orphan that goes on beside the next run", trial, trial.must_be_exact(), began, point=point)


def test_tasks_and_workers(trial: Trial) -> None:
    began = time.monotonic()
    trial.start(spec=trial.spec(task_faults=("raise", "exit"), rows_per_batch=EVENTS // 20)).must_finish()
    faults = len(list(trial.folder.glob("task-*")))
    noted("tasks fail, workers die", trial, trial.must_be_exact(), began, faults=faults)


def test_stopped_at_points(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> None:
    for point in ("stage.half", "init.after", "produce.half", "commit.after"):
        began, folder = time.monotonic(), tmp_path / point
        folder.mkdir()
        trial = Trial(kafka_broker.bootstrap_servers, folder, f"{topic_prefix}{point}-", EVENTS // 4)
        with contextlib.closing(trial):
            strike = Strike(point, 2, "hold")
            trial.start(strike, spec=trial.spec(stop_at=strike.mark)).must_finish()
            noted("query.stop() half way", trial, trial.must_be_exact(), began, point=point)


def test_two_runs_at_once(trial: Trial) -> None:
    """Again and again: both run until one of them has all."""
    began, failed = time.monotonic(), 0
    for _ in range(4):
        both = [trial.start(spec=trial.spec(rows_per_batch=EVENTS // 20))]
        before = trial.batches_done
        wait_until(lambda: trial.batches_done > before or not both[0].running, "the first is at work")  # noqa: B023
        both.append(trial.start(spec=trial.spec(rows_per_batch=EVENTS // 20)))
        codes = [job.wait() for job in both]
        failed += sum(code != 0 for code in codes)
        if 0 in codes:
            break
    run_to_the_end(trial, trial.spec())
    noted("two runs at once", trial, trial.must_be_exact(), began, failed=failed)


def test_a_broker_that_goes(own_broker: OwnBroker, tmp_path: Path) -> None:
    began, broker = time.monotonic(), own_broker(durable=True)
    trial = Trial(broker.bootstrap_servers, tmp_path, "broker-", EVENTS)
    points = ("init.before", "marker.after", "produce.half", "commit.before", "commit.after")
    with contextlib.closing(trial):
        failed = 0
        for batch, point in enumerate(points):
            strike = Strike(point, batch, "hold")
            trial.start(strike)
            trial.wait_struck(strike)
            broker.kill()
            trial.release()
            broker.restart()
            wait_until(
                lambda: trial.batches_done > batch or not trial.jobs[-1].running,  # noqa: B023
                "it goes on, or has failed",
            )
            failed += not trial.jobs[-1].running
            trial.jobs[-1].kill()
            (tmp_path / "go").unlink()
        run_to_the_end(trial, trial.spec())
        noted("broker killed in the commit", trial, trial.must_be_exact(), began, broker_kills=5, failed=failed)


def test_replies_lost_and_late(trial: Trial) -> None:
    began, number = time.monotonic(), seed()
    apis = ("InitProducerId", "AddOffsetsToTxn", "AddPartitionsToTxn", "TxnOffsetCommit", "EndTxn", "OffsetFetch")
    with KafkaProxy(trial.servers) as proxy:
        lost = [
            proxy.add(Rule(apis={api}, on="reply", action="drop", probability=0.15, times=6, seed=number + index))
            for index, api in enumerate((*apis, "Produce"))
        ]
        late = [
            proxy.add(
                Rule(apis={api}, on=side, action="delay", seconds=(0.5, 4), probability=0.15, times=5, seed=number)
            )
            for api in apis
            for side in ("request", "reply")
        ]
        spec = trial.spec(servers=proxy.bootstrap_servers, rows_per_batch=EVENTS // 25)
        failed = run_to_the_end(trial, spec, runs=20)
        struck = {f"{'/'.join(rule.rule.apis)} lost": rule.struck for rule in lost}
        struck["delayed"] = sum(rule.struck for rule in late)
    noted("replies lost and late", trial, trial.must_be_exact(), began, failed=failed, struck=struck)


def test_a_commit_that_comes_after_the_next_run(trial: Trial) -> None:
    """A zombie's EndTxn, and its last rows, held on the line while the next run does that batch."""
    began = time.monotonic()
    with KafkaProxy(trial.servers) as proxy:
        for api in ("EndTxn", "TxnOffsetCommit", "Produce"):
            held = proxy.add(Rule(apis={api}, on="request", action="hold", nth=2, times=1))
            job = trial.start(spec=trial.spec(servers=proxy.bootstrap_servers))
            assert held.wait_struck(seconds=240)
            job.kill()
            second = trial.start()
            before = trial.batches_done
            wait_until(lambda: trial.batches_done >= before + 2 or not second.running, "the next run works")  # noqa: B023
            held.release()
            second.kill()
    trial.start().must_finish()
    noted("requests that come after the next run", trial, trial.must_be_exact(), began, kills=6)


def test_a_marker_that_expires(own_broker: OwnBroker, tmp_path: Path) -> None:
    """For real: the broker forgets the offsets of a group at rest."""
    began = time.monotonic()
    properties = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "2000"}
    trial = Trial(own_broker(properties=properties).bootstrap_servers, tmp_path, "expired-", EVENTS // 4)
    with contextlib.closing(trial):
        strike = Strike("returned", 1)
        trial.start(strike).must_be_killed()
        rested = time.monotonic() + 75
        while time.monotonic() < rested:
            time.sleep(0.5)
        stopped = trial.start()
        assert stopped.wait() == 1
        assert stopped.said("the marker of what was written before is missing"), stopped.tail()
        trial.start(spec=trial.spec(write_options={"lastWrittenBatch": f"{trial.query}:1"})).must_finish()
        noted("marker expired", trial, trial.must_be_exact(), began, kills=1)


def test_on_a_cluster(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> None:
    """Executors killed while they write, and stragglers with a copy on the other host."""
    began = time.monotonic()
    staging = tmp_path / "staging"
    staging.mkdir()
    trial = Trial(kafka_broker.bootstrap_servers, tmp_path, topic_prefix, EVENTS)
    with StandaloneCluster(tmp_path) as cluster, contextlib.closing(trial):
        spec = trial.spec(
            settings={**cluster.settings, **SPECULATION},
            task_faults=("kill-executor", "slow"),
            slow_seconds=40.0,
            write_options={"stagingDir": str(staging), "stagingThreshold": "0"},
        )
        trial.start(spec=spec).must_finish(900)
        facts = {
            name: len(list(tmp_path.glob(f"{name}-*"))) for name in ("task-kill-executor", "task-slow", "again-slow")
        }
        noted("cluster", trial, trial.must_be_exact(), began, **facts)
        assert list(staging.rglob("*.arrow")) == []
