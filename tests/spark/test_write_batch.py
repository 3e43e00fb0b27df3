"""``write_batch`` in ``foreachBatch``: the marker and the guards of a streaming sink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from streams.errors import ConfigError
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(300)]


class Job:
    """A query over files, each a batch, whose function is given at each start."""

    def __init__(self, spark: SparkSession, folder: Path, servers: str, topic: str) -> None:
        self.spark, self.folder, self.topic = spark, folder, topic
        self.given: dict[str, Any] = {"sink": "sorted", "topic": topic, "servers": servers}
        (folder / "in").mkdir()

    def add(self, name: str, *values: str) -> None:
        (self.folder / "new").write_text("\n".join(values))
        (self.folder / "new").rename(self.folder / "in" / name)

    def run(self, function: Any, checkpoint: str = "checkpoint") -> str:
        """To the end of what is there; what it failed with, or ''."""
        values = self.spark.readStream.option("maxFilesPerTrigger", 1).text(str(self.folder / "in"))
        writer = values.writeStream.foreachBatch(function).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.folder / checkpoint)).start()
        try:
            query.awaitTermination()
        except Exception as error:
            return str(error)
        return ""

    def write(self, batch: DataFrame, number: int, **more: Any) -> None:
        kes_spark.write_batch(batch, number, **{**self.given, **more})


@pytest.fixture
def job(spark: SparkSession, servers: str, make_topic: MakeTopic, tmp_path: Path) -> Job:
    return Job(spark, tmp_path, servers, make_topic())


@pytest.mark.slow
def test_a_batch_that_is_repeated_is_written_once(job: Job, log: Log) -> None:
    """The function fails behind the write: Spark repeats the batch. A query that is another one is refused."""

    def fails_behind(batch: DataFrame, number: int) -> None:
        job.write(batch, number)
        if number == 1:
            raise RuntimeError("behind the write")

    job.add("0", "a", "b")
    job.add("1", "c")
    assert "behind the write" in job.run(fails_behind)
    assert [message.value() for message in log.records(job.topic)] == [b"a", b"b", b"c"]
    job.add("2", "d")
    assert job.run(job.write) == ""
    assert [message.value() for message in log.records(job.topic)] == [b"a", b"b", b"c", b"d"]
    assert "give option replaceQuery=" in job.run(job.write, "another")


@pytest.mark.slow
def test_a_sink_is_written_once_in_a_batch(job: Job, log: Log) -> None:
    """A second write of as many rows would look like the first one, repeated: it would be left out, silently."""

    def twice(batch: DataFrame, number: int) -> None:
        job.write(batch, number)
        job.write(batch, number, sink="other")
        job.write(batch, number)

    job.add("0", "a")
    assert "was written in this call of foreachBatch already" in job.run(twice)
    assert [message.value() for message in log.records(job.topic)] == [b"a", b"a"]
    assert "its tasks are of batch 0" in job.run(lambda batch, number: job.write(batch, number + 1, sink="third"))


def test_what_is_refused_before_any_job(job: Job) -> None:
    rows = job.spark.createDataFrame([("a",)], "value string")
    with pytest.raises(ConfigError, match="is for the function of foreachBatch"):
        job.write(rows, 0)
    with pytest.raises(ConfigError, match="option sink is missing"):
        job.write(rows, 0, sink="")
    with pytest.raises(ConfigError, match="unknown option writeid"):
        job.write(rows, 0, options={"writeId": "x"})
