"""``spark.read.format("grt")``: what is committed, up to the end as it was, whatever lies between."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import SparkSession

import streams.spark as kes_spark
from streams.errors import TopicError
from tests.broker.gate import nightly
from tests.spark.conftest import MakeTopic, Read
from tests.spark.log_kit import Log

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(180)]


def test_everything_of_a_record_arrives(log: Log, make_topic: MakeTopic, read: Read) -> None:
    topic = make_topic()
    log.produce(topic, b"v", b"k", headers=[("__grt__", b"A"), ("__grv__", b"3"), ("x", None), ("x", b"\xff")])
    log.produce(topic, None, None)
    log.produce(topic, b"", b"", headers=[("__grv__", b"three"), ("__grt__", b"\xff")], timestamp=1_500_000_000_123)
    log.flush()
    records = read(topic)
    assert records.columns == [
        "key", "value", "type", "version", "headers", "topic", "partition", "offset", "timestamp", "timestampType",
    ]  # fmt: skip
    assert read(topic, includeHeaders="false").columns == [name for name in records.columns if name != "headers"]
    first, second, third = records.orderBy("offset").collect()
    assert (first.key, first.value, first.type, first.version) == (b"k", b"v", "A", 3)
    assert [tuple(header) for header in first.headers] == [
        ("__grt__", b"A"),
        ("__grv__", b"3"),
        ("x", None),
        ("x", b"\xff"),
    ]
    assert (first.topic, first.partition, first.offset) == (topic, 0, 0)
    assert (second.key, second.value, second.type, second.version, second.headers) == (None, None, None, 1, [])
    assert (third.key, third.value, third.type, third.version) == (b"", b"", None, None)
    assert (third.timestamp.microsecond, third.timestampType) == (123_000, 0)
    without_headers = read(topic, includeHeaders="false", types="B, A").collect()
    assert [(row.type, row.version) for row in without_headers] == [("A", 3)]


def test_committed_records_only_up_to_an_end_without_a_record_or_an_open_transaction(
    log: Log, make_topic: MakeTopic, read: Read, topic_prefix: str
) -> None:
    topic = make_topic(partitions=3)
    aborted = (["no"] * 3, False)  # the last offsets hold aborted records and a marker
    log.transactions(topic_prefix, topic, (["a", "b"], True), aborted, (["c"], True), aborted)
    log.transactions(topic_prefix, topic, (["no"], False), partition=1)
    assert [row.value for row in read(topic).orderBy("offset").collect()] == [b"a", b"b", b"c"]
    assert read(topic, isolation="read_uncommitted").count() == 10
    producer = log.transaction(topic_prefix + "open")
    producer.begin_transaction()
    producer.produce(topic, "open", partition=0)
    producer.flush(30)
    assert [row.value for row in read(topic).orderBy("offset").collect()] == [b"a", b"b", b"c"]
    producer.abort_transaction(30)


def test_offsets_by_partition(log: Log, make_topic: MakeTopic, read: Read) -> None:
    topic = make_topic(partitions=2)
    log.send(topic, range(20), 2)

    def offsets(first: int, second: int) -> str:
        return json.dumps({topic: {"0": first, "1": second}})

    got = read(topic, startingOffsets=offsets(3, -2), endingOffsets=offsets(5, -1)).collect()
    assert sorted((row.partition, row.offset) for row in got) == [(0, 3), (0, 4), *((1, at) for at in range(10))]
    assert read(topic, startingOffsets="latest").count() == 0
    assert read(topic, minPartitions="8").rdd.getNumPartitions() == 8
    assert read(topic, maxRecordsPerPartition="4").rdd.getNumPartitions() == 6
    with pytest.raises(Exception, match=r"has the offsets 0 to 10 now, not 11"):
        read(topic, endingOffsets=offsets(11, 1)).count()
    assert read(topic, endingOffsets=offsets(11, 1), failOnDataLoss="false").count() == 11
    with pytest.raises(Exception, match="says nothing about"):
        read(topic, startingOffsets=json.dumps({topic: {"0": 1}})).count()


def test_mistakes_are_named(spark: SparkSession, make_topic: MakeTopic, read: Read) -> None:
    """Those of options in general: ``test_options.py``."""
    topic = make_topic()
    assert read(topic).count() == 0
    with pytest.raises(Exception, match=f"topic '{topic}x' does not exist"):
        read(topic + "x").count()
    with pytest.raises(Exception, match=r"unknown option startingofset .* did you mean startingOffsets"):
        read(topic, startingOfset="latest").count()
    given = {"subscribe": topic, "bootstrap.servers": "x:1"}
    with pytest.raises(Exception, match="columns of its own"):
        spark.read.format("grt").schema("a int").options(**given).load().count()


def test_registering_twice_and_asking_for_a_second_session_is_harmless(spark: SparkSession) -> None:
    kes_spark.register(spark)
    assert kes_spark.local_session("another") is spark


def test_a_read_from_one_time_to_another(log: Log, make_topic: MakeTopic, read: Read) -> None:
    topic = make_topic(partitions=2)
    base = 1_700_000_000_000
    log.stamped(topic, {0: [base + n for n in range(10)], 1: [base + n for n in range(5)]})

    def got(**options: str) -> list[tuple[int, int]]:
        return sorted((row.partition, row.offset) for row in read(topic, **options).collect())

    assert got(startingTimestamp=str(base + 3), endingTimestamp=str(base + 5)) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    each = json.dumps({topic: {"0": base + 8, "1": base + 4}})
    assert got(startingOffsetsByTimestamp=each) == [(0, 8), (0, 9), (1, 4)]
    assert got(endingOffsetsByTimestamp=json.dumps({topic: {"0": base + 1, "1": base + 99}})) == [
        (0, 0),
        *((1, at) for at in range(5)),
    ]
    with pytest.raises(Exception, match=rf"option startingTimestamp: {topic}\[1\] has no record at or after"):
        got(startingTimestamp=str(base + 7))
    assert got(startingTimestamp=str(base + 7), startingOffsetsByTimestampStrategy="latest") == [(0, 7), (0, 8), (0, 9)]


def test_chosen_partitions_and_topics_by_pattern(
    spark: SparkSession, log: Log, make_topic: MakeTopic, topic_prefix: str
) -> None:
    first, second = make_topic("orders-a", 2), make_topic("orders-b")
    make_topic("other")
    log.stamped(first, {0: [1], 1: [2]})
    log.stamped(second, {0: [3]})

    def got(**options: str) -> set[tuple[str, int]]:
        given = {"kafka.bootstrap.servers": log.servers, **options}
        return {(row.topic, row.partition) for row in spark.read.format("grt").options(**given).load().collect()}

    assert got(subscribePattern=topic_prefix + "orders-.*") == {(first, 0), (first, 1), (second, 0)}
    assert got(subscribePattern=topic_prefix + "orders") == set(), "the whole name must fit"
    assert got(assign=json.dumps({first: [1], second: [0]})) == {(first, 1), (second, 0)}
    with pytest.raises(Exception, match=f"topic '{first}' has no partition 7"):
        got(assign=json.dumps({first: [7]}))


def test_ends_as_an_option_of_later_reads(log: Log, make_topic: MakeTopic, read: Read) -> None:
    first, second = make_topic("a", 2), make_topic("b")
    log.stamped(first, {0: [1, 2], 1: [3]})
    ends = kes_spark.end_offsets([first, second], servers=log.servers)
    assert json.loads(ends) == {first: {"0": 2, "1": 1}, second: {"0": 0}}
    log.stamped(first, {0: [4]})
    assert read(f"{first},{second}", endingOffsets=ends).count() == 3
    assert read(f"{first},{second}", startingOffsets=ends).count() == 1
    with pytest.raises(TopicError, match="does not exist"):
        kes_spark.end_offsets(first + "x", servers=log.servers)


FILTERS = [
    # the query's condition, and the ranges that are read for it, of five
    ("partition = 1", 1),
    ("partition in (0, 1) and offset < 2", 2),
    ("partition > 7", 0),
    ("offset >= 4 and offset <= 6", 5),
    ("offset > 4 and offset < 5", 0),
    ("offset in (0, 3)", 5),
    ("offset = 3 or key = 'k1'", 5),
    ("offset + 1 = 3", 5),
    ("offset <=> 3", 5),
    ("timestamp >= timestamp_millis(1700000000003)", 5),
    ("timestamp > timestamp_millis(1700000000999)", 0),
    ("timestamp < timestamp_millis(1700000000003)", 5),
    ("timestamp between timestamp_millis(1700000000002) and timestamp_micros(1700000000004999)", 5),
    ("key = X'6B31'", 5),
    ("key in (X'6B31', X'6B33')", 5),
    ("key is null", 5),
    ("key > X'6B32'", 5),
    ("type = 'A'", 5),
    ("type in ('A', 'B') and partition = 2", 1),
    ("type != 'A'", 5),
    ("type is null and offset < 3", 5),
    ("type like 'A%'", 5),
    ("value = X'33' and partition = 0", 1),
    ("not (partition = 0)", 5),
    ("partition = 0.5", 5),
]


@pytest.mark.parametrize("pushed", ["true", nightly("false")])
def test_filters_cut_what_is_read_and_give_what_spark_alone_gives(
    spark: SparkSession, log: Log, make_topic: MakeTopic, read: Read, pushed: str
) -> None:
    topic = make_topic(partitions=5)
    for number in range(50):
        log.produce(
            topic,
            str(number),
            None if number % 7 == 0 else f"k{number % 4}",
            partition=number % 5,
            headers=[("__grt__", [b"A", b"B", b"AB"][number % 3])] if number % 8 else [],
            timestamp=1_700_000_000_000 + number // 5 + (number % 2) * 3,
        )
    log.flush()
    whole = spark.createDataFrame(read(topic).collect(), read(topic).schema).cache()
    differ = []
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushed)
    try:
        for condition, ranges in FILTERS:
            found = read(topic).where(condition)
            ours, theirs = (
                sorted(df.select("partition", "offset").collect()) for df in (found, whole.where(condition))
            )
            if ours != theirs or (pushed == "true" and found.rdd.getNumPartitions() > max(1, ranges)):
                differ.append((condition, ours, theirs, found.rdd.getNumPartitions()))
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert differ == []
