"""Writes whose tasks encode in Java (``streams/spark/jvm``): the same records, markers and guards as by Python's half,
whichever of the two a run takes, and whatever dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.spark.running.pipeline import _sentence
from tests.spark import proof_committing
from tests.spark.conftest import MakeTopic, Read
from tests.spark.log_kit import Log, until
from tests.spark.proof_kit import Trial, job_processes
from tests.spark.proof_points import COMMIT_POINTS, Strike
from tests.spark.test_stream_writing import Job, ids

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(600)]

JAVA = {"tasks": "java"}


@pytest.fixture(autouse=True)
def _jar(kes_jar: Path | None) -> None:
    if kes_jar is None:
        pytest.skip("there is no JDK")


@pytest.fixture
def job(spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Path) -> Job:
    made = Job(spark, servers, tmp_path, make_topic(partitions=2), read)
    made.options |= JAVA
    return made


def committer() -> psutil.Process:
    """The process that commits, of this test's Java."""
    (found,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and any("committing" in word for word in child.cmdline())
    ]
    return found


def mixed(spark: SparkSession, *topics: str) -> DataFrame:
    """Rows of all kinds, in four tasks."""
    names = f"element_at(array({', '.join(map(repr, topics))}), cast(id % {len(topics)} as int) + 1)"
    return spark.range(0, 3_000, 1, 4).selectExpr(
        f"{names} topic",
        "cast(id as string) key",
        "if(id % 11 = 0, null, encode(repeat(cast(id as string), cast(id % 40 as int)), 'utf-8')) value",
        "if(id % 3 = 0, null, concat('T', id % 4)) type",
        "if(id % 5 = 0, null, id % 3) version",
        "if(id % 7 = 0, null, array(struct('x' as key, encode(cast(id as string), 'utf-8') as value))) headers",
        "if(id % 13 = 0, 0, null) partition",
        "timestamp_millis(1700000000000 + id) timestamp",
    )


def test_batch_writes(spark: SparkSession, servers: str, make_topic: MakeTopic, log: Log, tmp_path: Path) -> None:
    """The same records as by Python, in their partitions and order; through files and several topics; written once;
    nothing of a write that is refused."""
    found = {}
    for tasks, codec in (("python", "zstd"), ("java", "zstd"), ("java", "lz4")):
        topics = [make_topic(f"{tasks}-{codec}-{number}", number) for number in (1, 3)]
        staging = tmp_path / f"{tasks}-{codec}"
        options = {
            "markerTopic": topics[0],
            "tasks": tasks,
            "stagingDir": str(staging),
            "stagingThreshold": "100",
            "kafka.compression.type": codec,
            "kafka.batch.size": "4000",
        }
        for again in (False, True):
            rows = mixed(spark, *topics)
            result = kes_spark.write(rows, write_id="all kinds", servers=servers, options=options)
            assert (result.written, result.rows) == (not again, 3_000)
        assert not list(staging.rglob("*.batches"))
        found[tasks, codec] = [
            sorted(
                (m.partition(), m.key(), m.value(), tuple(m.headers() or ()), m.timestamp()) for m in log.records(topic)
            )
            for topic in topics
        ]
    assert sum(map(len, found["python", "zstd"])) == 3_000
    assert found["java", "zstd"] == found["python", "zstd"]
    assert found["java", "lz4"] == found["python", "zstd"]

    store = spark._jsparkSession.sharedState().statusStore()  # type: ignore[attr-defined]
    shown = store.executionsList().last().metrics().toString()
    assert "bytes of record batches" in shown
    assert "number of record batches" in shown
    assert "milliseconds of the commit" in shown

    topic = make_topic("refused", 2)
    large = spark.range(0, 2_000, 1, 2).selectExpr("'k' key", "if(id = 1999, repeat('v', 2000), 'v') value")
    options = {**JAVA, "kafka.message.max.bytes": "1500", "stagingDir": str(tmp_path), "stagingThreshold": "0"}
    with pytest.raises(Exception, match=rf"{topic}\[\d\], key b'k': the record has 2\d\d\d bytes, and kafka.message"):
        kes_spark.write(large, topic=topic, write_id="large", servers=servers, options=options)
    (tmp_path / "file").touch()
    options = {**JAVA, "stagingDir": str(tmp_path / "file"), "stagingThreshold": "0"}
    with pytest.raises(Exception, match=r"cannot stage rows in .*file.* \(option stagingDir\)"):
        kes_spark.write(large.where("id < 9"), topic=topic, write_id="w", servers=servers, options=options)
    for columns, wrong in (
        (["key"], "column value is missing"),
        (["key", "value", "1 as other"], "column other is no part"),
        (["key", "value", "value"], "already exists|column value is there 2 times"),
        (["key", "array(value) as value"], "column value must be binary or string"),
    ):
        with pytest.raises(Exception, match=wrong):
            kes_spark.write(large.selectExpr(*columns), topic=topic, write_id="w", servers=servers, options=JAVA)
    writer = large.write.format("grt").options(**JAVA, topic=topic, writeId="w").option("bootstrap.servers", servers)
    with pytest.raises(Exception, match="cannot overwrite"):
        writer.mode("overwrite").save()
    with pytest.raises(Exception, match="option tasks must be java or python"):
        kes_spark.write(large, topic=topic, write_id="w", servers=servers, options={"tasks": "scala"})
    assert not list(log.records(topic))
    assert not list(tmp_path.rglob("*.batches"))


def test_a_stream_goes_from_one_half_to_the_other(job: Job) -> None:
    """On one checkpoint; its committing process is killed between two runs, and a batch fails once in a task."""
    job.add(10)
    job.add(10)
    query = job.start()
    assert query.awaitTermination(120)
    assert job.written() == ids(0, 1)
    shown = query.lastProgress["sink"]["metrics"]
    assert (shown["rows"], shown["recordBatches"]) == ("10", "2")
    assert int(shown["bytes"]) > 0
    assert int(shown["commitMs"]) > 0
    job.add(10)
    assert job.run(tasks="python") == ""
    job.add(10)
    assert job.run(tasks="python") == ""
    committer().send_signal(signal.SIGKILL)
    job.add(10)
    failing = job.rows().withColumn("value", f.expr("if(value = '4009', raise_error('upstream'), value)"))
    assert "upstream" in job.run(failing, stagingThreshold="0", stagingDir=str(job.folder / "staged"))
    assert not list((job.folder / "staged").rglob("*.batches"))
    assert job.run() == ""
    assert job.written() == ids(0, 1, 2, 3, 4)
    assert job.sent() == 50
    (job.folder / "first" / "commits" / "4").unlink()
    (job.folder / "first" / "commits" / ".4.crc").unlink()
    assert job.run() == ""  # as after a kill between Kafka's commit and Spark's
    job.checkpoint = "second"
    kind, said = _sentence(RuntimeError(job.run()))
    assert kind == "ConfigError", "by which a pipeline knows that a new start is no help"
    assert "replaceQuery=" in said
    assert job.sent() == 50


def test_micro_batches_of_foreach_batch(job: Job) -> None:
    job.add(10)
    job.add(10)
    options = {name: value for name, value in job.options.items() if name not in ("topic", "sink")}

    def write(batch: DataFrame, number: int) -> None:
        kes_spark.write_batch(batch, number, sink=job.topic, topic=job.topic, options=options)

    writer = job.rows().writeStream.foreachBatch(write).option("checkpointLocation", str(job.folder / "first"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert job.written() == ids(0, 1)
    assert job.sent() == 20


def test_a_table_of_a_catalog(spark: SparkSession, servers: str, make_topic: MakeTopic, tmp_path: Path) -> None:
    """It has the options that were given when it was made, each for what knows it; a statement's own win."""
    topic, other = make_topic("table", 2), make_topic("other", 1)
    table = f"kes_{abs(hash(topic))}"
    given = {"subscribe": topic, "topic": topic, "kafka.bootstrap.servers": servers, "startingOffsets": "earliest"}
    options = ", ".join(f"'{name}' '{value}'" for name, value in {**given, "maxOffsetsPerTrigger": "6", **JAVA}.items())
    spark.sql(f"CREATE TABLE {table} USING grt OPTIONS ({options})")
    insert = (
        f"INSERT INTO {table} {{}} SELECT cast(id as string) key, cast(id as string) value, 'T' type FROM range(10)"
    )
    try:
        for _ in range(2):
            spark.sql(insert.format("WITH ('writeId' = 'first')"))
        assert sorted(row.key.decode() for row in spark.table(table).where("type = 'T'").collect()) == [*"0123456789"]
        assert spark.read.option("types", "U").table(table).count() == 0
        spark.sql(insert.format(f"WITH ('writeId' = 'first', 'topic' = '{other}')"))
        assert spark.sql(f"SELECT * FROM {table} WITH ('subscribe' = '{other}')").count() == 10
        with pytest.raises(Exception, match="option writeId is missing"):
            spark.sql(insert.format(""))
        with pytest.raises(Exception, match=r"cannot overwrite"):
            spark.sql(insert.format("WITH ('writeId' = 'second')").replace("INTO", "OVERWRITE"))
        copied = spark.readStream.table(table).select("key", "value").writeStream.option("sink", "copy")
        copied = copied.option("topic", other).option("checkpointLocation", str(tmp_path / "copy"))
        query = copied.trigger(availableNow=True).toTable(table)
        assert query.awaitTermination(120)
        assert query.lastProgress["batchId"] == 1, "of two batches"
        assert spark.sql(f"SELECT * FROM {table} WITH ('subscribe' = '{other}')").count() == 20
    finally:
        spark.sql(f"DROP TABLE {table}")


# ------------------------------------------------------------------------------------------------- under attack


@pytest.fixture
def in_java(trial: Trial, kes_jar: Path, tmp_path: Path) -> Callable[..., Any]:
    """``in_java(...)``: the spec of a job whose tasks encode in Java, with the points of the proof in its commit."""

    def spec(**changes: Any) -> Any:
        settings = proof_committing.settings(tmp_path, kes_jar)
        return trial.spec(settings=settings, write_options={**JAVA, "stagingThreshold": "0"}, **changes)

    return spec


@pytest.mark.nightly
def test_drivers_killed_in_their_commit(trial: Trial, in_java: Callable[..., Any]) -> None:
    spec = in_java(rows_per_batch=trial.events // 4)
    trial.start(Strike("commit.before", 1), spec=spec).must_be_killed()
    assert trial.open_transaction
    assert trial.committed_rows() == spec.rows_per_batch
    trial.start(Strike("commit.after", 2), spec=spec).must_be_killed()
    trial.start(spec=spec).must_finish()
    assert trial.must_be_exact().aborted == spec.rows_per_batch


@pytest.mark.nightly
def test_the_process_that_commits_dies_at_every_point(trial: Trial, in_java: Callable[..., Any]) -> None:
    """The query fails and is started again, in the same Spark, which starts another committing process."""
    strikes = [Strike(point, batch, "raise" if batch % 3 == 2 else "exit") for batch, point in enumerate(COMMIT_POINTS)]
    spec = in_java(rows_per_batch=trial.events // len(strikes), restarts=len(strikes))
    job = trial.start(*strikes, spec=spec)
    job.must_finish(500)
    assert all(trial.struck(strike) for strike in strikes)
    trial.must_be_exact()


@pytest.mark.nightly
def test_the_process_that_commits_stands_still(trial: Trial, in_java: Callable[..., Any]) -> None:
    """It is found to be frozen, and killed; the query that failed is started again in the same Spark."""
    points = ("init.after", "produce.half", "commit.before", "commit.after")
    strikes = [Strike(point, batch, "stand") for batch, point in enumerate(points)]
    spec = in_java(rows_per_batch=trial.events // 5, restarts=len(strikes))
    job = trial.start(*strikes, spec=spec)
    job.must_finish(500)
    assert all(trial.struck(strike) for strike in strikes)
    assert job.said("that commits writes was killed: it gave no sign of life for 15 s (spark.kes.committer.timeout)")
    trial.must_be_exact()
    until(lambda: not job_processes(job.process.pid), "nothing is left of the job", 30)


@pytest.mark.nightly
def test_the_process_that_commits_ends_with_its_driver(trial: Trial, in_java: Callable[..., Any]) -> None:
    """In the transaction, whichever process of the driver dies."""
    spec = in_java(rows_per_batch=trial.events // 5)
    strikes = Strike("commit.before", 1, "orphan"), Strike("commit.before", 2, "hold")
    first = trial.start(strikes[0], spec=spec)
    trial.wait_struck(strikes[0])
    until(lambda: not job_processes(first.process.pid), "the process that commits has ended", 30)
    second = trial.start(strikes[1], spec=spec)
    trial.wait_struck(strikes[1])
    (java,) = [found for pid in job_processes(second.process.pid) if (found := psutil.Process(pid)).name() == "java"]
    java.kill()
    until(lambda: not job_processes(second.process.pid), "all of the driver's processes have ended", 60)
    trial.start(spec=spec).must_finish()
    trial.must_be_exact()


@pytest.mark.nightly
def test_tasks_fail_die_and_are_slow(trial: Trial, in_java: Callable[..., Any]) -> None:
    """Half way through their rows, which are in the encoder and in a file by then."""
    spec = in_java(task_faults=("raise", "exit", "slow"), slow_seconds=2.0)
    trial.start(spec=spec).must_finish(500)
    trial.must_be_exact()


@pytest.mark.nightly
def test_drivers_killed_at_any_time(trial: Trial, in_java: Callable[..., Any]) -> None:
    """While tasks encode, stage and wait: as it falls."""
    spec = in_java(rows_per_batch=trial.events // 20)
    for done in (1, 4, 7, 11):
        job = trial.start(spec=spec)
        since = time.monotonic()
        while job.running and (trial.batches_done < done or time.monotonic() < since + 0.05 * (done % 4)):
            since = time.monotonic() if trial.batches_done < done else since
            time.sleep(0.01)
        job.kill()
    trial.start(spec=spec).must_finish()
    trial.must_be_exact(kills=4)
