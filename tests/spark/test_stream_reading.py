"""``spark.readStream.format("grt")`` on a real broker: nothing twice, nothing lost, and what is gone is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from streams.testing.fixtures import OwnBroker
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log, until

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(300)]

Rows = list[tuple[str, int, int, str]]


class Stream:
    """Runs of one query on one checkpoint; ``batches`` holds what each batch gave (the last time it was done)."""

    def __init__(self, spark: SparkSession, servers: str, checkpoint: Path) -> None:
        self._spark = spark
        self._servers = servers
        self._checkpoint = checkpoint
        self.batches: dict[int, Rows] = {}
        self.done: list[int] = []
        self.fail_in: int | None = None
        self.progress: list[Any] = []
        self.planned: Callable[[], None] = lambda: None
        """Called when a batch is planned, before its tasks read."""

    def start(self, trigger: dict[str, Any] | None = None, **options: str) -> StreamingQuery:
        given = {"kafka.bootstrap.servers": self._servers, "startingOffsets": "earliest", **options}
        frame = self._spark.readStream.format("grt").options(**given).load()
        writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self._checkpoint))
        return writer.trigger(**(trigger or {"availableNow": True})).start()

    def run(self, **options: str) -> None:
        """To the end of what is there now. Raises what the query raises."""
        query = self.start(**options)
        try:
            assert query.awaitTermination(120), "the query does not end"
        finally:
            query.stop()
            self.progress = list(query.recentProgress)

    def values(self) -> list[str]:
        return [row[3] for number in sorted(self.batches) for row in self.batches[number]]

    def _take(self, frame: DataFrame, number: int) -> None:
        self.planned()
        rows = [
            (row.topic, row.partition, row.offset, bytes(row.value).decode())
            for row in frame.select("topic", "partition", "offset", "value").collect()
        ]
        if number == self.fail_in:
            self.fail_in = None
            self.batches[-1] = rows  # what was seen before it failed
            raise RuntimeError("failed on purpose")
        self.batches[number] = rows
        self.done.append(number)


@pytest.fixture
def stream(spark: SparkSession, servers: str, tmp_path: Path) -> Stream:
    return Stream(spark, servers, tmp_path / "checkpoint")


def texts(values: range) -> list[str]:
    return sorted(str(value) for value in values)


def test_runs_on_one_checkpoint_read_everything_once_within_their_limits(
    stream: Stream, log: Log, make_topic: MakeTopic, topic_prefix: str, servers: str
) -> None:
    topic, group = make_topic(partitions=3), topic_prefix + "lag"
    options = {"subscribe": topic, "maxOffsetsPerTrigger": "40", "commitOffsetsTo": group, "minPartitions": "5"}
    log.send(topic, range(100), 3)
    stream.run(**options)
    assert [len(rows) for rows in stream.batches.values()] == [40, 40, 20]
    first = stream.progress[0]["sources"][0]
    assert sum(json.loads(first["latestOffset"])["topics"][topic]["offsets"].values()) == 100
    assert sum(json.loads(first["endOffset"])["topics"][topic]["offsets"].values()) == 40
    log.send(topic, range(100, 130), 3)
    stream.run(**options)
    stream.run(**options)  # nothing to do
    assert sorted(stream.values()) == texts(range(130))
    assert stream.done == sorted(set(stream.done))
    tool = Consumer({"bootstrap.servers": servers, "group.id": group})
    committed = tool.committed([TopicPartition(topic, number) for number in range(3)], 30)
    tool.close()
    assert sum(place.offset for place in committed) == 130


def test_a_batch_that_failed_is_done_again_with_the_same_records(
    stream: Stream, log: Log, make_topic: MakeTopic
) -> None:
    topic = make_topic(partitions=2)
    log.send(topic, range(50), 2)
    stream.fail_in = 1
    with pytest.raises(Exception, match="failed on purpose"):
        stream.run(subscribe=topic, maxOffsetsPerTrigger="20")
    log.send(topic, range(50, 60), 2)
    stream.run(subscribe=topic, maxOffsetsPerTrigger="20")
    seen_before = stream.batches.pop(-1)
    assert sorted(seen_before) == sorted(stream.batches[1])
    assert sorted(stream.values()) == texts(range(60))


def test_partitions_and_topics_that_come_later_are_read_from_their_beginning(
    stream: Stream, log: Log, make_topic: MakeTopic, topic_prefix: str
) -> None:
    topic = make_topic("first")
    log.send(topic, range(5))
    query = stream.start(
        {"processingTime": "100 milliseconds"}, subscribePattern=topic_prefix + ".*", startingOffsets="latest"
    )
    try:
        until(lambda: bool(stream.done) or not query.isActive, "the first batch")
        log.send(topic, range(10, 12))
        log.grow(topic, 2)
        for number in range(20, 25):
            log.produce(topic, str(number), partition=1)
        log.flush()
        log.send(make_topic("second"), range(30, 33))
        wanted = texts(range(10, 12)) + texts(range(20, 25)) + texts(range(30, 33))
        until(lambda: len(stream.values()) >= len(wanted) or not query.isActive, "all of it")
        assert query.exception() is None
        assert sorted(stream.values()) == sorted(wanted)
    finally:
        query.stop()


@pytest.mark.nightly
def test_a_topic_made_again_after_a_batch_was_planned_is_not_read_as_the_old_one(
    stream: Stream, log: Log, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    log.send(topic, range(10))

    def make_again() -> None:
        stream.planned = lambda: None
        log.make_again(topic)
        log.send(topic, range(100, 130))

    stream.planned = make_again
    for _ in range(2):  # the batch is in Spark's log now, and so is the id of its topic
        with pytest.raises(Exception, match=r"was deleted and recreated \(id .* then, .* now\)") as told:
            stream.run(subscribe=topic)
        assert "Nothing was skipped" not in str(told.value)
        assert stream.values() == []
    stream.run(subscribe=topic, failOnDataLoss="false")
    assert sorted(stream.values()) == texts(range(100, 130))


@pytest.mark.nightly
def test_a_broker_that_restarts_is_waited_for(spark: SparkSession, own_broker: OwnBroker, tmp_path: Path) -> None:
    broker = own_broker()
    log = Log(broker.bootstrap_servers)
    log.create("t", 2)
    stream = Stream(spark, broker.bootstrap_servers, tmp_path / "checkpoint")
    log.send("t", range(100), 2)
    query = stream.start({"processingTime": "50 milliseconds"}, subscribe="t", maxOffsetsPerTrigger="30")
    try:
        for round_ in range(2):
            until(lambda: bool(stream.done) or not query.isActive, "the first batch")
            broker.kill()
            broker.restart()
            log.send("t", range(100 + 50 * round_, 150 + 50 * round_), 2)
            count = 150 + 50 * round_
            until(lambda count=count: len(stream.values()) >= count or not query.isActive, "all of it")
        assert query.exception() is None
        assert sorted(stream.values()) == texts(range(200))
    finally:
        with contextlib.suppress(Exception):
            query.stop()
