"""Streams that keep state, and whose events change, before the sink: each row once, whatever is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.events import event_type
from tests.spark import proof_stateful
from tests.spark.conftest import MakeTopic, Read
from tests.spark.proof_kit import Trial
from tests.spark.proof_points import Strike
from tests.spark.test_stream_writing import Job
from tests.spark.typed_events import Deposited

pytestmark = [
    pytest.mark.spark, pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900),
]  # fmt: skip


@pytest.mark.parametrize("operator", ["deduplicated", "numbered"])
def test_drivers_killed_behind_an_operator_with_state(trial: Trial, operator: str) -> None:
    """In the transaction, behind it and in a task. Of the duplicates each comes batches behind its first, so it is
    known by a state that has survived the kills."""
    if operator == "deduplicated":
        trial.load()
    spec = trial.spec(operator=operator, settings=proof_stateful.SETTINGS, rows_per_batch=trial.events // 4)
    for strike in (Strike("commit.before", 1), Strike("commit.after", 2), Strike("stage.after", 3)):
        trial.start(strike, spec=spec).must_be_killed()
    trial.start(spec=spec).must_finish()
    assert trial.must_be_exact().aborted > 0


@event_type("Deposited", version=2)
class Before(msgspec.Struct):
    """``Deposited`` as a program knows it that has not been updated yet."""

    account: str
    cents: int


def test_events_that_change_between_two_batches(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Path
) -> None:
    """A program stops at the first event of a version that it does not know, with nothing of that batch written; the
    updated one goes on there, on the same checkpoint, also where the old one was killed behind its commit."""
    source = make_topic("source", 1)
    job = Job(spark, servers, tmp_path, make_topic("target", 2), read)

    def give(cls: type, first: int, *columns: Any) -> None:
        rows = spark.range(first, first + 10, 1, 1).select(
            f.format_string("a-%d", "id").alias("account"), f.col("id").cast("bigint").alias("cents"), *columns
        )
        encoded = kes_spark.encode(rows, cls, key="account")
        kes_spark.write(encoded, topic=source, write_id=f"{cls.__name__}-{first}", servers=servers)

    def run(cls: type, *more: str) -> str:
        stream = spark.readStream.format("grt").option("bootstrap.servers", servers).option("subscribe", source)
        events = kes_spark.events(stream.option("startingOffsets", "earliest").load(), cls, on_error="fail")
        values = f.concat_ws(" ", "account", *more)
        return job.run(events.select(f.col("account").alias("key"), values.alias("value")))

    give(Before, 0)
    assert run(Before) == ""
    give(Before, 10)
    assert run(Before) == ""
    (tmp_path / "first" / "commits" / "1").unlink()
    (tmp_path / "first" / "commits" / ".1.crc").unlink()
    assert run(Deposited, "currency") == ""
    wanted = {f"a-{number}" for number in range(20)}
    assert job.written() == dict.fromkeys(wanted, 1), "what is written is not written again, in whatever form"
    give(Deposited, 20, f.lit("EUR").alias("currency"))
    said = run(Before)
    assert "version 3 is newer than 2, the newest known here: update this program" in said
    assert source in said
    assert job.written() == dict.fromkeys(wanted, 1)
    assert run(Deposited, "currency") == ""
    assert job.written() == dict.fromkeys(wanted | {f"a-{number} EUR" for number in range(20, 30)}, 1)
