"""``df.write.format("grt")``: every row once, or none, whatever happens on the way."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.errors import StagingError, StreamsError
from streams.sak.murmur2 import partition_of
from streams.spark.writing.sink import BatchWriter, find_write, target_of
from streams.spark.writing.write_options import write_options
from tests.spark.conftest import MakeTopic, Read
from tests.spark.log_kit import Log

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(240)]
ROWS = 3000


class Row(msgspec.Struct):
    id: int
    who: str


def encoded(spark: SparkSession, rows: int = ROWS) -> DataFrame:
    df = spark.range(0, rows, numPartitions=3).selectExpr("id", "cast(id % 50 as string) who")
    return kes_spark.encode(df, Row, key="who", keep=["id"])


def test_a_second_run_writes_nothing_and_says_so(spark: SparkSession, servers: str, make_topic: MakeTopic) -> None:
    topic, other = make_topic("a", 4), make_topic("b")
    rows = encoded(spark).drop("id")
    first = kes_spark.write(rows, topic=topic, write_id="w", servers=servers)
    again = kes_spark.write(rows.limit(5), topic=topic, write_id="w", servers=servers)
    assert (first.written, first.rows) == (True, ROWS)
    assert (again.written, again.rows, again.committed_at_ms) == (False, ROWS, first.committed_at_ms)
    seen = kes_spark.read_events(spark, Row, topic=topic, servers=servers, on_error="fail")
    assert sorted(row.id for row in seen.collect()) == list(range(ROWS))
    # Another name, or another topic, is another write.
    assert kes_spark.write(rows.limit(5), topic=topic, write_id="w2", servers=servers).written
    assert kes_spark.write(rows.limit(5), topic=other, write_id="w", servers=servers).written
    counts = [kes_spark.read_events(spark, Row, topic=each, servers=servers).count() for each in (topic, other)]
    assert counts == [ROWS + 5, 5]
    assert seen.count() == ROWS  # a DataFrame keeps the ends of its first action


def test_records_as_given(spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read) -> None:
    topic = make_topic(partitions=3)
    columns = (
        "key string, value binary, type string, version int, headers array<struct<key: string, value: binary>>, "
        "partition int, timestamp timestamp"
    )
    data = [
        ("k", b"v", "A", 1, [("x", b"1"), ("__grt__", b"old"), ("x", None)], 2, None),
        (None, None, None, None, [("__grt__", b"kept")], 0, None),
        ("", b"", "B", 7, None, 1, None),
    ]
    rows = spark.createDataFrame(data, columns).withColumn("timestamp", f.expr("timestamp'2026-01-02 03:04:05.678'"))
    kes_spark.write(rows, topic=topic, write_id="w", servers=servers)
    tombstone, empty, first = read(topic).orderBy("partition").collect()
    assert (first.key, first.value, first.type, first.version) == (b"k", b"v", "A", 1)
    assert [tuple(header) for header in first.headers] == [("__grt__", b"A"), ("x", b"1"), ("x", None)]
    assert (tombstone.key, tombstone.value, tombstone.type) == (None, None, "kept")
    assert (empty.key, empty.value, empty.type, empty.version) == (b"", b"", "B", 7)
    assert {row.timestamp.microsecond for row in (first, empty, tombstone)} == {678_000}
    # What was read can be written as it is.
    copy = make_topic("copy", 3)
    kes_spark.write(read(topic), topic=copy, write_id="copy", servers=servers)
    assert sorted(map(str, read(copy).drop("topic").collect())) == sorted(map(str, read(topic).drop("topic").collect()))


def test_large_writes_are_staged_in_files_that_go_away(
    spark: SparkSession,
    servers: str,
    make_topic: MakeTopic,
    read: Read,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a thread of the driver's program writes."""
    staged, elsewhere = tmp_path / "staged", tmp_path / "elsewhere"  # the default place serves other writes, too
    staged.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    topic = make_topic()
    options = {"stagingDir": str(staged), "stagingThreshold": "0"}
    rows = encoded(spark).drop("id")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(kes_spark.write, rows, topic=topic, write_id="w", servers=servers, options=options)
        assert job.result(120).written
    assert read(topic).count() == ROWS
    assert list(staged.iterdir()) == []  # nor an empty folder
    assert not list(elsewhere.rglob("*.batches"))


def test_a_task_that_fails_and_is_tried_again_writes_once(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Path
) -> None:
    """One raises, the worker process of another ends. What they had staged is not even sent."""
    topic = make_topic(partitions=2)
    folder = str(tmp_path)

    @f.udf("long")
    def fail_once(value):  # annotations would ask for an Arrow function
        mark = Path(folder, str(value))
        if value in (500, 1500) and not mark.exists():
            mark.touch()
            if value == 1500:
                os._exit(9)
            raise RuntimeError("first attempt")
        return value

    df = spark.range(0, ROWS, numPartitions=3).select(fail_once("id").alias("id"), f.lit("k").alias("who"))
    kes_spark.write(kes_spark.encode(df, Row, key="who"), topic=topic, write_id="w", servers=servers)
    assert {path.name for path in tmp_path.iterdir()} == {"500", "1500"}
    seen = kes_spark.read_events(spark, Row, topic=topic, servers=servers)
    assert Counter(row.id for row in seen.collect()) == Counter(range(ROWS))
    assert read(topic, isolation="read_uncommitted").count() == ROWS


def test_a_write_that_fails_upstream_shows_nothing_and_can_be_run_again(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read
) -> None:
    """The iterator of the failing task ends cleanly, with part of the rows: nothing may be made of that."""
    topic = make_topic(partitions=2)
    bad = spark.range(0, 60_000, numPartitions=2).selectExpr(
        "id", "case when id = 59990 then cast(raise_error('upstream') as string) else 'k' end who"
    )
    with pytest.raises(Exception, match="upstream"):
        kes_spark.write(kes_spark.encode(bad, Row, key="who"), topic=topic, write_id="w", servers=servers)
    assert read(topic).count() == 0
    assert read(topic, isolation="read_uncommitted").count() == 0  # not even sent
    good = encoded(spark).drop("id")
    assert kes_spark.write(good, topic=topic, write_id="w", servers=servers).written
    assert read(topic).count() == ROWS


def test_mistakes_are_named(spark: SparkSession, servers: str, make_topic: MakeTopic) -> None:
    """Those of options: ``test_options.py``; of rows: ``test_batch_encoding.py``."""
    topic = make_topic()
    rows = encoded(spark, 10)
    good = rows.drop("id")
    for df, more, mode, problem in (
        (good, {}, "overwrite", "cannot overwrite"),
        (good, {"topic": topic + "x"}, "append", f"topic '{topic}x' does not exist"),
        (rows, {}, "append", "column id is no part of a record; drop it"),
    ):
        writer = df.write.format("grt").option("bootstrap.servers", servers)
        with pytest.raises(Exception, match=problem):
            writer.options(**{"topic": topic, "writeId": "w", **more}).mode(mode).save()


def test_a_marker_that_goes_between_planning_and_commit_is_no_write_of_nothing(
    spark: SparkSession, log: Log, make_topic: MakeTopic
) -> None:
    """The tasks staged nothing, because the write was done."""
    topic = make_topic()
    servers = log.servers
    rows = encoded(spark, 10).drop("id")
    kes_spark.write(rows, topic=topic, write_id="w", servers=servers)
    options = write_options({"bootstrap.servers": servers, "topic": topic, "writeId": "w"})
    planned = BatchWriter(options, rows.schema, one_machine=True)
    message = planned.write(iter(()))
    planned.commit([message])
    log.forget_group(target_of(options).identity)
    with pytest.raises(StreamsError, match="its marker has gone since"):
        planned.commit([message])
    assert find_write(options) is None


def test_staged_bytes_that_are_altered_are_noticed_before_kafka_takes_them(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Path
) -> None:
    """Kafka would: the checksum in a batch's head is made anew when the batch is sent."""
    given = {"bootstrap.servers": servers, "topic": make_topic(), "writeId": "w"}
    options = write_options({**given, "stagingDir": str(tmp_path), "stagingThreshold": "0"})
    writer = BatchWriter(options, spark.createDataFrame([], "value binary").schema, one_machine=True)
    messages = [writer.write(iter([pa.record_batch({"value": [b"x" * 100] * 10})])) for _ in range(2)]
    path = next(tmp_path.rglob(str(messages[1].name)))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StagingError, match=r"are not the ones that were staged .*Nothing was written"):
        writer.commit(messages)
    assert read(given["topic"]).count() == 0
    assert find_write(options) is None
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_writes_its_file_twice_and_one_that_comes_after_the_commit(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Path
) -> None:
    """Two attempts with a file each, a file with everything twice, and a zombie's."""
    given = {"bootstrap.servers": servers, "topic": make_topic(), "writeId": "w"}
    options = write_options({**given, "stagingDir": str(tmp_path), "stagingThreshold": "0"})
    schema = spark.createDataFrame([], "value binary").schema
    writer = BatchWriter(options, schema, one_machine=True)
    attempts = [writer.write(iter([pa.record_batch({"value": [b"x" * 100] * 10})])) for _ in range(5)]
    doubled = next(tmp_path.rglob(str(attempts[1].name)))
    doubled.write_bytes(doubled.read_bytes() * 2)
    writer.commit([attempts[1], attempts[3]])
    zombie = writer.write(iter([pa.record_batch({"value": [b"x" * 100] * 10})]))
    assert list(tmp_path.rglob(str(zombie.name)))
    assert read(given["topic"]).count() == 20
    again = BatchWriter(options, schema, one_machine=True)
    again.commit([again.write(iter(()))])
    assert read(given["topic"], isolation="read_uncommitted").count() == 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.slow
def test_one_row_in_each_of_400_partitions(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read
) -> None:
    topic = make_topic(partitions=400)
    rows = spark.range(400).selectExpr("cast(id as string) value", "cast(id as int) partition")
    assert kes_spark.write(rows, topic=topic, write_id="w", servers=servers).rows == 400
    found = read(topic).selectExpr("cast(cast(value as string) as int) value", "partition").collect()
    assert sorted((row.value, row.partition) for row in found) == [(number, number) for number in range(400)]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tasks", ["python", "java"])
def test_a_million_keys_of_100_bytes_in_400_partitions(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tasks: str, kes_jar: Path | None
) -> None:
    """Each row once, with its value, where its key belongs; by files, because no message is as large."""
    if tasks == "java" and kes_jar is None:
        pytest.skip("there is no JDK")
    count, partitions = 1_000_000, 400
    topic = make_topic(partitions=partitions)
    rows = spark.range(0, count, 1, 4).selectExpr("rpad(cast(id as string), 100, '.') key", "cast(id as string) value")
    options = {"tasks": tasks}
    result = kes_spark.write(rows, topic=topic, write_id="w", servers=servers, options=options)
    assert (result.written, result.rows) == (True, count)
    found = read(topic).selectExpr("cast(key as string) key", "cast(cast(value as string) as long) id", "partition")
    found = found.where("key = rpad(cast(id as string), 100, '.')").persist()
    summed = found.agg(f.count("*"), f.countDistinct("id"), f.countDistinct("partition"), f.max("id")).collect()[0]
    assert tuple(summed) == (count, count, partitions, count - 1)
    some = found.where("id % 997 = 0").collect()
    assert [row.partition for row in some] == [partition_of(row.key.encode(), partitions) for row in some]
    found.unpersist()


def test_a_run_that_fails_leaves_the_files_of_another_alone(
    spark: SparkSession, servers: str, make_topic: MakeTopic, read: Read, tmp_path: Path
) -> None:
    given = {"bootstrap.servers": servers, "topic": make_topic(), "writeId": "w"}
    options = write_options({**given, "stagingDir": str(tmp_path), "stagingThreshold": "0"})
    batch = pa.record_batch({"value": pa.array([b"x"] * 10)})
    schema = spark.createDataFrame([], "value binary").schema
    first, second = (BatchWriter(options, schema, one_machine=True) for _ in range(2))
    messages = [writer.write(iter([batch])) for writer in (first, second)]
    first.abort([messages[0]])
    second.commit([messages[1]])
    assert read(given["topic"]).count() == 10
    assert list(tmp_path.iterdir()) == []
