"""The oracle of the proof can say no: to a sink that looks right and is wrong, and to each fault by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.spark.proof_kit import Trial, key_of, value_of
from tests.spark.proof_points import Strike

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(600)]

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
