"""``df.writeStream.format("grt")``: each micro-batch once, all of it at one instant, whatever happens in between."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from streams.spark import source
from streams.spark.writing.markers import BatchRequest
from streams.spark.writing.sink import StreamWriter, target_of
from streams.spark.writing.sink_transaction import read_marker, settle
from streams.spark.writing.write_options import stream_write_options
from tests.spark.conftest import MakeTopic, Read
from tests.spark.log_kit import Log, until

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(300)]


class Job:
    """A query from parquet files to a topic: one file is one batch. Run it, add files, run it again."""

    def __init__(self, spark: SparkSession, servers: str, folder: Path, topic: str, read: Read) -> None:
        self.spark = spark
        self.read = read
        self.folder = folder
        self.topic = topic
        self.options = {"bootstrap.servers": servers, "topic": topic, "sink": topic}
        self.checkpoint = "first"
        self._files = 0
        (folder / "in").mkdir()

    def add(self, count: int) -> None:
        """One more file; its ids begin at 1000 times its number."""
        first = 1000 * self._files
        self.spark.range(first, first + count, 1, 1).write.parquet(str(self.folder / "new"))
        (part,) = (self.folder / "new").glob("part-*.parquet")
        part.rename(self.folder / "in" / f"{self._files:03d}.parquet")
        for left in (self.folder / "new").iterdir():
            left.unlink()
        (self.folder / "new").rmdir()
        self._files += 1

    def rows(self) -> DataFrame:
        ids = self.spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(self.folder / "in"))
        return ids.selectExpr("cast(id % 7 as string) key", "cast(id as string) value", "'T' type")

    def start(self, df: DataFrame | None = None, *, format: str = "grt", **options: str) -> Any:
        df = self.rows() if df is None else df
        writer = df.writeStream.format(format).options(**{**self.options, **options})
        writer = writer.option("checkpointLocation", str(self.folder / self.checkpoint))
        return writer.trigger(availableNow=True).start()

    def run(self, df: DataFrame | None = None, **options: str) -> str:
        """To the end of what is there; returns what it failed with, or ''."""
        query = self.start(df, **options)
        deadline = time.monotonic() + 120
        while query.isActive and time.monotonic() < deadline:
            try:
                query.awaitTermination(10)
            except Exception as error:
                return str(error)
        assert not query.isActive
        return ""

    def written(self) -> Counter[str]:
        """What readers of committed records see, once it has settled."""
        settle(
            target_of(stream_write_options(self.options)),
            BatchRequest(sink="test", identity="", query="", batch=0, rows=0),
        )
        return Counter(bytes(row.value).decode() for row in self.read(self.topic).select("value").collect())

    def sent(self) -> int:
        """Records in the topic, those of aborted transactions too."""
        return self.read(self.topic, isolation="read_uncommitted").count()


def ids(*files: int, rows: int = 10) -> Counter[str]:
    return Counter(str(1000 * file + row) for file in files for row in range(rows))


def register(spark: SparkSession, format: str, writer_class: type[StreamWriter]) -> None:
    """``format("grt")`` under another name, with a writer of its own."""

    class Source(source.LocalGrtDataSource):
        @classmethod
        def name(cls) -> str:
            return format

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            writer = super().streamWriter(schema, overwrite)
            writer.__class__ = writer_class
            return writer

    spark.dataSource.register(Source)


@pytest.fixture
def job(spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Path) -> Job:
    return Job(spark, servers, tmp_path, make_topic(partitions=2), read)


@pytest.mark.slow
def test_batches_restarts_and_new_checkpoints(job: Job) -> None:
    """One query's life: batches, a restart, an accident with its checkpoint, a successor, and the return of the old."""
    job.add(10)
    job.add(10)
    assert job.run() == ""
    assert job.written() == ids(0, 1)
    job.add(10)
    assert job.run() == ""  # goes on where it was
    nothing = job.rows().where("false")
    job.add(10)
    assert job.run(nothing) == ""  # an empty batch counts, too
    job.add(10)
    assert job.run() == ""
    assert job.written() == ids(0, 1, 2, 4)
    marker = read_marker(target_of(stream_write_options(job.options)), "test")
    assert marker is not None
    assert marker.offset == 5
    first = marker.metadata.split('"query":"')[1].split('"')[0]

    job.checkpoint = "second"
    problem = job.run()
    assert f"give option replaceQuery={first};" in problem
    assert "replaceQuery=somebody" not in job.run(replaceQuery="somebody")  # the wrong one is refused, too
    assert job.written() == ids(0, 1, 2, 4)
    assert job.sent() == 40
    assert job.run(replaceQuery=first) == ""
    assert job.written() == ids(0, 1, 2, 4) + ids(0, 1, 2, 3, 4)

    job.checkpoint = "first"
    job.add(10)
    assert "has replaced this one" in job.run()
    assert "has replaced this one" in job.run(replaceQuery=first)
    assert job.written() == ids(0, 1, 2, 4) + ids(0, 1, 2, 3, 4)


def _query_id(job: Job) -> str:
    return (job.folder / job.checkpoint / "metadata").read_text().split('"id":"')[1].split('"')[0]


@pytest.mark.parametrize("how", ["expired", pytest.param("recreated topic", marks=pytest.mark.nightly)])
def test_a_lost_marker_stops_the_query_until_somebody_says_what_is_there(job: Job, log: Log, how: str) -> None:
    job.add(10)
    job.add(10)
    assert job.run() == ""
    assert job.written() == ids(0, 1)
    if how == "expired":
        log.forget_group(target_of(stream_write_options(job.options)).identity)
    else:
        log.make_again(job.topic, 2)
    job.add(10)
    problem = job.run()
    query = _query_id(job)
    assert "the marker of what was written before is missing" in problem
    assert f"lastWrittenBatch={query}:2 (it is) or {query}:1 (it is not)" in problem
    before = ids(0, 1) if how == "expired" else Counter()
    assert job.written() == before
    assert "is missing (option lastWrittenBatch=" in job.run(lastWrittenBatch=f"{query}:7")
    assert job.run(lastWrittenBatch=f"{query}:1") == ""
    job.add(10)
    assert job.run(lastWrittenBatch=f"{query}:1") == ""  # left over: no harm while there is a marker
    assert job.written() == before + ids(2, 3)


def test_a_checkpoint_that_has_forgotten_its_last_batches(job: Job) -> None:
    """A batch whose commit Spark has not noted, as after a kill between Kafka's commit and Spark's, is planned again
    and not written again. An older copy of the checkpoint is refused."""
    for _ in range(3):
        job.add(10)
    assert job.run() == ""

    def forget(batch: int, *logs: str) -> None:
        for log in logs:
            (job.folder / "first" / log / str(batch)).unlink()
            (job.folder / "first" / log / f".{batch}.crc").unlink(missing_ok=True)

    forget(2, "commits")
    job.add(10)
    assert job.run() == ""
    assert job.written() == ids(0, 1, 2, 3)
    assert job.sent() == 40
    forget(3, "commits", "offsets")
    fewer = job.rows().where("value != '3000'")  # as if it were planned with other rows
    problem = job.run(fewer)
    assert "is in Kafka with 10 rows, and has 9 now" in problem
    assert job.run(fewer, lastWrittenBatch=f"{_query_id(job)}:3") == ""  # somebody has looked
    forget(2, "commits", "offsets")
    forget(3, "commits", "offsets")
    assert "this query has written up to batch 3 already" in job.run()
    assert job.written() == ids(0, 1, 2, 3)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_copied_checkpoint_and_its_original_do_not_both_go_on(job: Job) -> None:
    """They have one query id. Whichever writes two batches more leaves the other one behind, for good."""

    def copied_as(name: str) -> None:
        shutil.copytree(job.folder / job.checkpoint, job.folder / name)

    job.add(10)
    assert job.run() == ""
    copied_as("copy")
    for _ in range(2):
        job.add(10)
    assert job.run() == ""
    job.checkpoint = "copy"
    assert "this query has written up to batch 2 already" in job.run()
    job.checkpoint = "first"
    copied_as("successor")
    job.checkpoint = "successor"
    for _ in range(2):
        job.add(10)
    assert job.run() == ""
    for behind in ("first", "copy"):
        job.checkpoint = behind
        assert "this query has written up to batch 4 already" in job.run()
    job.checkpoint = "successor"
    job.add(10)
    assert job.run() == ""
    assert job.written() == ids(0, 1, 2, 3, 4, 5)
    assert job.sent() == 60


def test_a_query_that_wrote_to_another_sink_does_not_come_back_unasked(job: Job, log: Log) -> None:
    """The batches in between are known to nobody here: somebody has to say that they are there."""
    job.add(10)
    assert job.run() == ""
    job.add(10)
    elsewhere = job.rows().writeStream.format("noop").option("checkpointLocation", str(job.folder / job.checkpoint))
    elsewhere.trigger(availableNow=True).start().awaitTermination(60)
    job.add(10)
    problem = job.run()
    assert "the last batch written is 0, so batches in between are missing: they went to another sink" in problem
    assert (job.written(), job.sent()) == (ids(0), 10)
    said = re.search(r"delete that group, and start once with option lastWrittenBatch=(\S+):1", problem)
    assert said is not None
    log.forget_group(target_of(stream_write_options(job.options)).identity)
    assert job.run(lastWrittenBatch=f"{said[1]}:1") == ""
    assert job.written() == ids(0, 2)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tasks", ["python", "java"])
def test_ten_sinks_in_one_session(job: Job, tasks: str, kes_jar: Path | None) -> None:
    """Into one topic, at once, from one folder. Some are stopped at any moment; all come to the end of it later."""
    if tasks == "java" and kes_jar is None:
        pytest.skip("there is no JDK")
    sinks = [f"{job.topic}-{number}" for number in range(10)]

    def started(sink: str) -> Any:
        job.checkpoint = sink
        return job.start(sink=sink, tasks=tasks)

    for _ in range(3):
        job.add(10)
    queries = [started(sink) for sink in sinks]
    for query in queries[::3]:
        query.stop()
    job.add(10)
    for query in [query for query in queries if query.isActive]:
        assert query.awaitTermination(240)
    for query in [started(sink) for sink in sinks]:
        assert query.awaitTermination(240)
        assert query.exception() is None
    for sink in sinks:
        target = target_of(stream_write_options({**job.options, "sink": sink}))
        settle(target, BatchRequest(sink=sink, identity="", query="", batch=0, rows=0))
    assert job.written() == Counter(dict.fromkeys(ids(0, 1, 2, 3), len(sinks)))


class Interrupted(StreamWriter):
    """Its first attempt fails after its rows are staged."""

    def write(self, iterator: Any) -> Any:
        staged = super().write(iterator)
        mark = Path(self._options.staging_dir or "") / "failed-once"
        if not mark.exists():
            mark.touch()
            raise RuntimeError("first attempt")
        return staged


def test_tasks_that_are_tried_again_large_batches_in_files_and_what_is_left_of_them(job: Job, tmp_path: Path) -> None:
    register(job.spark, "interrupted", Interrupted)
    staging = tmp_path / "staging"
    staging.mkdir()
    job.add(1000)
    df = job.rows().repartition(3)
    query = job.start(df, format="interrupted", stagingDir=str(staging), stagingThreshold="0")
    query.awaitTermination(120)
    assert (staging / "failed-once").exists()
    assert job.written() == ids(0, rows=1000)
    assert [path.name for path in staging.iterdir()] == ["failed-once"]  # not even an empty folder


class Slow(StreamWriter):
    """Stands still in its tasks, after some rows, until somebody makes the file ``go``."""

    def write(self, iterator: Any) -> Any:
        folder = Path(self._options.staging_dir or "")

        def slowly() -> Any:
            for batch in iterator:
                yield batch
                (folder / "waiting").touch()
                deadline = time.monotonic() + 60
                while not (folder / "go").exists() and time.monotonic() < deadline:
                    time.sleep(0.02)

        return super().write(slowly())


def test_a_query_that_is_stopped_half_way_through_a_batch_shows_nothing_of_it(job: Job, tmp_path: Path) -> None:
    """Nor one that fails upstream: the iterator of a task ends cleanly in both, with part of the rows."""
    register(job.spark, "slow", Slow)
    job.add(10)
    assert job.run() == ""
    job.add(10)
    bad = job.rows().withColumn("value", f.expr("if(value = '1007', raise_error('upstream'), value)"))
    assert "upstream" in job.run(bad.repartition(3))
    assert (job.written(), job.sent()) == (ids(0), 10)
    query = job.start(format="slow", stagingDir=str(tmp_path))
    until((tmp_path / "waiting").exists, "a task has some rows", 60)
    query.stop()
    (tmp_path / "go").touch()
    assert (job.written(), job.sent()) == (ids(0), 10)
    assert job.run() == ""
    assert job.written() == ids(0, 1)


PROGRESS = {"asyncProgressTrackingEnabled": "true"}
UNCHECKED = {**PROGRESS, "_asyncProgressTrackingOverrideSinkSupportCheck": "true"}


@pytest.mark.parametrize(
    ("mode", "trigger", "options", "checked", "problem"),
    [
        ("complete", {"availableNow": True}, {}, True, "cannot replace what is in a topic"),
        ("update", {"availableNow": True}, {}, True, "does not support Update"),
        ("update", {"realTime": "5 seconds"}, {}, True, "not in the sink allowlist"),
        ("update", {"realTime": "5 seconds"}, {}, False, "."),
        ("append", {"realTime": "5 seconds"}, {}, False, "."),
        ("append", {"processingTime": "0 seconds"}, PROGRESS, True, "does not support async progress"),
        ("append", {"processingTime": "0 seconds"}, UNCHECKED, True, "asyncProgressTrackingEnabled"),
    ],
)
def test_modes_that_cannot_be_exact_are_refused_even_when_sparks_own_check_is_off(
    job: Job, mode: str, trigger: dict[str, Any], options: dict[str, str], checked: bool, problem: str
) -> None:
    """Rows that would be replaced, real time, progress that is noted later."""
    rows = job.spark.readStream.format("rate").load().selectExpr("cast(value as string) value")
    if "availableNow" in trigger:
        job.add(10)
        rows = job.rows().groupBy("key").count().selectExpr("key", "cast(count as string) value")
    writer = rows.writeStream.format("grt").options(**job.options, **options).outputMode(mode)
    writer = writer.option("checkpointLocation", str(job.folder / "refused")).trigger(**trigger)
    job.spark.conf.set("spark.sql.streaming.realTimeMode.allowlistCheck", str(checked).lower())
    try:
        with pytest.raises(Exception, match=problem):
            writer.start().awaitTermination(60)
    finally:
        job.spark.conf.unset("spark.sql.streaming.realTimeMode.allowlistCheck")
    assert job.sent() == 0


class Observed(StreamWriter):
    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        try:
            super().commit(messages, batchId)
        except Exception as error:
            (Path(self._options.staging_dir or "") / "refused").write_text(str(error))
            raise


def test_continuous_mode_writes_nothing_and_says_why(job: Job, tmp_path: Path) -> None:
    """Spark never calls the sink with rows there, and goes on after a commit that failed: the reason is in the log."""
    register(job.spark, "observed", Observed)
    rate = job.spark.readStream.format("rate").load().selectExpr("cast(value as string) value")
    writer = rate.writeStream.format("observed").options(**job.options, stagingDir=str(tmp_path))
    writer = writer.option("checkpointLocation", str(job.folder / "continuous"))
    query = writer.trigger(continuous="1 second").start()
    try:
        until((tmp_path / "refused").exists, "the commit is refused")
    finally:
        query.stop()
    assert "trigger(continuous=...)" in (tmp_path / "refused").read_text()
    assert job.sent() == 0
