"""A sink's transaction against a real broker, without Spark: its answers, its fence, and what is on the wire
afterwards."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from streams.errors import ConfigError, RecordRefused, StreamsError, TopicError, TransactionFailed
from streams.kafka.writing import forwarding
from streams.kafka.writing.forwarding import BatchForwarder
from streams.kafka.writing.made_batch import MadeBatch
from streams.sak.murmur2 import partition_of
from streams.spark.writing.batch_encoding import BatchEncoder
from streams.spark.writing.markers import BatchRequest
from streams.spark.writing.placing import topic_shapes
from streams.spark.writing.sink import target_of
from streams.spark.writing.sink_transaction import WriteTarget, read_marker, settle, write_once
from streams.spark.writing.write_options import stream_write_options
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log, seed
from tests.spark.test_batch_encoding import SHAPES, any_table, expected, place_of

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(120)]


class Told(Exception):
    """Ends an attempt in the middle of its transaction."""


def dies(forwarder: BatchForwarder) -> None:
    raise Told


class Topic:
    def __init__(self, log: Log, name: str, *, topic_of_rows: str | None = "") -> None:
        self.log, self.servers, self.name = log, log.servers, name
        self.topic_of_rows = name if topic_of_rows == "" else topic_of_rows
        self.target = WriteTarget(
            identity=f"kes.spark.stream.{name}", marker_topic=name, kafka={"bootstrap.servers": log.servers}
        )

    def ask(self, batch: int, rows: int, query: str = "q") -> BatchRequest:
        return BatchRequest(sink=self.name, identity=self.target.identity, query=query, batch=batch, rows=rows)

    def write(self, batch: int, *tables: dict[str, Any], query: str = "q") -> bool:
        """Whether this call wrote the batch."""
        made, rows = self.made(*tables)
        _, written = write_once(self.target, self.ask(batch, rows, query), lambda: made, size=0)
        return written

    def made(self, *tables: dict[str, Any]) -> tuple[list[MadeBatch], int]:
        """As a task makes them."""
        encoder = BatchEncoder(self.topic_of_rows, self.target.kafka, "test", topic_shapes(self.target.kafka))
        return list(encoder.encode(pa.record_batch(table) for table in tables)), encoder.rows

    def records(self, topic: str | None = None, *, committed: bool = True) -> list[Any]:
        """Everything in the topic, in the order of its partitions and offsets."""
        settle(self.target, self.ask(0, 0))
        found = self.log.records(topic or self.name, committed=committed)
        return sorted(found, key=lambda message: (message.partition() or 0, message.offset() or 0))

    def keep_markers(self, partitions: int = 1, policy: str = "compact") -> str:
        name = self.name + ".markers"
        self.log.create(name, partitions, **{"cleanup.policy": policy})
        self.target = dataclasses.replace(self.target, marker_log=name)
        return name


@pytest.fixture
def topic(log: Log, make_topic: MakeTopic) -> Topic:
    return Topic(log, make_topic(partitions=2))


def values(records: list[Any]) -> list[bytes]:
    return sorted(record.value() for record in records)


def test_batches_one_after_the_other_and_each_once(topic: Topic) -> None:
    assert read_marker(topic.target, "test") is None
    assert topic.write(0, {"value": [b"a", b"b"]})
    assert not topic.write(0, {"value": [b"a", b"b"]})
    assert topic.write(1, {"value": pa.array([], pa.binary())})  # an empty batch moves the marker too
    assert topic.write(2)
    assert topic.write(3, {"value": [b"c"]})
    with pytest.raises(StreamsError, match="is in Kafka with 1 rows, and has 2 now"):
        topic.write(3, {"value": [b"not", b"the same"]})
    assert values(topic.records()) == [b"a", b"b", b"c"]
    marker = read_marker(topic.target, "test")
    assert marker is not None
    assert marker.offset == 4


def test_order_is_that_of_the_batches_and_keys_go_where_java_puts_them(topic: Topic) -> None:
    rows = [(str(number % 7), str(number).encode()) for number in range(5000)]
    tables = [
        {"key": [key for key, _ in part], "value": [value for _, value in part]}
        for part in (rows[:1], rows[1:2500], rows[2500:])
    ]
    topic.write(0, *tables)
    by_key: dict[bytes, list[int]] = {}
    places = set()
    for record in topic.records():
        by_key.setdefault(record.key(), []).append(int(record.value()))
        places.add((record.key(), record.partition()))
    assert by_key == {str(key).encode(): list(range(key, 5000, 7)) for key in range(7)}
    assert places == {(key, partition_of(key, 2)) for key in by_key}
    assert len({place for _, place in places}) == 2


def test_rows_that_name_their_topics(log: Log, make_topic: MakeTopic) -> None:
    first, second = make_topic("first"), make_topic("second", 3)
    both = Topic(log, first, topic_of_rows=None)
    both.write(0, {"topic": [first, second, second], "value": [b"a", b"b", b"c"], "partition": [0, 2, None]})
    assert (values(both.records()), values(both.records(second))) == ([b"a"], [b"b", b"c"])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"topic": [second, None], "value": [b"x", b"y"]}, "a row has null in its column topic"),
        ({"topic": [second, first], "value": [b"x", b"y"], "partition": [0, -1]}, "partition -1 of .* which has 1"),
        ({"topic": [second, first + "-no"], "value": [b"x", b"y"]}, "does not exist"),
    ]
    for table, problem in wrong:
        with pytest.raises((RecordRefused, TopicError), match=problem):
            both.write(1, table)
    assert (len(both.records()), len(both.records(second))) == (1, 2)


def test_what_the_broker_refuses_for_good_is_not_tried_again(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Counting(BatchForwarder):
        def init_transactions(self, seconds: float) -> None:
            tried.append(1)
            super().init_transactions(seconds)

    monkeypatch.setattr(forwarding, "BatchForwarder", Counting)
    year_9999 = pa.array([dt.datetime(9999, 1, 1, tzinfo=dt.UTC)], pa.timestamp("us", "UTC"))
    with pytest.raises(RecordRefused, match=r"\[[01]\]: a batch of 1 records .*out of range"):
        topic.write(0, {"value": [b"x"], "timestamp": year_9999})
    assert len(tried) == 1
    assert topic.records() == []


def test_batches_are_as_large_as_their_topic_takes(log: Log, topic_prefix: str) -> None:
    """A row that is larger is named, among many."""
    topic = Topic(log, topic_prefix + "small")
    log.create(topic.name, 2, **{"max.message.bytes": "20000"})
    large = random.Random(seed()).randbytes(25_000)
    rows = [b"%d" % number * 50 for number in range(1000)]
    topic.target.kafka["compression.type"] = "none"
    for table in ({"key": [b"k"] * 1001, "value": [*rows, large]}, {"key": [b"k"], "value": [large]}):
        with pytest.raises(
            RecordRefused, match=rf"{topic.name}\[\d\], key b'k': the record makes a batch of 25\d+ bytes"
        ):
            topic.write(0, table)
    topic.target.kafka["message.max.bytes"] = "24000"
    with pytest.raises(
        RecordRefused, match=r"key b'k': the record has 25037 bytes, and kafka\.message\.max\.bytes is 24000"
    ):
        topic.write(0, {"key": [b"k"], "value": [large]})
    assert topic.write(0, {"value": rows})
    assert values(topic.records()) == sorted(rows)
    topic.target.kafka.update({"message.max.bytes": "1000000", "compression.type": "zstd"})
    made, count = topic.made({"value": [b"x" * 300_000] * 4})
    assert count == len(made) == 4, "a batch of one row may be larger than the topic's limit before it is compressed"


def test_rows_that_were_placed_by_other_partitions_are_not_written(topic: Topic) -> None:
    made, rows = topic.made({"value": [b"a"]})
    topic.log.grow(topic.name, 3)
    with pytest.raises(StreamsError, match="had 2 partitions when the rows were placed, and has 3 now"):
        write_once(topic.target, topic.ask(0, rows), lambda: made, size=0)
    assert topic.write(0, {"value": [b"a"]})
    assert values(topic.records()) == [b"a"]


def test_a_topic_that_is_gone_when_its_rows_are_sent(topic: Topic, make_topic: MakeTopic) -> None:
    other = Topic(topic.log, make_topic("other"))
    made, rows = other.made({"value": [b"a"]})
    topic.log.delete(other.name)
    with pytest.raises(TopicError, match="does not exist"):
        write_once(topic.target, topic.ask(0, rows), lambda: made, size=0)
    assert read_marker(topic.target, "test") is None


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_is_read_by_other_clients(topic: Topic, codec: str) -> None:
    topic.target.kafka["compression.type"] = codec
    rows = [b"%d %s" % (number, b"." * 80) for number in range(3000)]
    assert topic.write(0, {"key": [row[:3] for row in rows], "value": rows})
    assert values(topic.records()) == sorted(rows)


def test_any_mixture_of_columns_is_read_by_librdkafka(log: Log, make_topic: MakeTopic) -> None:
    """The tables of ``test_batch_encoding.py``, many in one transaction, compressed."""
    rng = random.Random(seed())
    names = {short: make_topic(short, shape.partitions) for short, shape in SHAPES.items()}
    target = Topic(log, names["t"]).target
    shapes = topic_shapes(target.kafka)
    made: list[MadeBatch] = []
    wanted: dict[tuple[str, int], list[Any]] = {}
    count = 0
    for _ in range(60):
        topic, rows, table = any_table(rng)
        columns = {name: table.column(name) for name in table.schema.names if name != "timestamp"}
        if "topic" in columns:
            columns["topic"] = pa.array([names[row["topic"]] for row in rows], pa.string())
        encoder = BatchEncoder(None if topic is None else names[topic], target.kafka, "test", shapes)
        made += encoder.encode([pa.record_batch(columns)])
        count += encoder.rows
        for row in rows:
            short, partition = place_of(row, topic)
            wanted.setdefault((names[short], partition), []).append(expected(row))
    request = BatchRequest(sink="s", identity=target.identity, query="q", batch=0, rows=count)
    assert write_once(target, request, lambda: made, size=0)[1]
    settle(target, "test")
    found: dict[tuple[str, int], list[Any]] = {}
    for name in names.values():
        for record in log.records(name):
            content = record.key(), record.value(), tuple(record.headers() or ())
            found.setdefault((name, record.partition() or 0), []).append(content)
    assert found == wanted


def test_a_topic_of_many_partitions(log: Log, make_topic: MakeTopic) -> None:
    topic = Topic(log, make_topic("many", 100))
    rows = [b"%d" % number for number in range(5000)]
    assert topic.write(0, {"key": [*rows, None], "value": [*rows, b"one"]})
    seen = topic.records()
    assert values(seen) == sorted([*rows, b"one"])
    assert {(row.key(), row.partition()) for row in seen if row.key()} == {
        (row, partition_of(row, 100)) for row in rows
    }


def test_fewer_rows_than_were_staged_are_not_written(topic: Topic) -> None:
    with pytest.raises(StreamsError, match="3 rows were staged, 2 were found"):
        write_once(topic.target, topic.ask(0, 3), lambda: topic.made({"value": [b"a", b"b"]})[0], size=0)
    assert topic.records() == []
    assert read_marker(topic.target, "test") is None


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_without_a_clear_answer_is_answered_by_the_marker(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    commits = []

    class Doubtful(BatchForwarder):
        def commit(self) -> None:
            commits.append(1)
            if len(commits) > 1 or committed:
                super().commit()
            if len(commits) == 1:
                raise TransactionFailed("commit_transaction", "_TRANSPORT", "unknown", "no answer")

    monkeypatch.setattr(forwarding, "BatchForwarder", Doubtful)
    assert topic.write(0, {"value": [b"a", b"b"]})
    assert values(topic.records()) == [b"a", b"b"]
    assert len(commits) == (1 if committed else 2)


def test_an_attempt_that_is_overtaken_writes_nothing(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen driver: its transaction has all rows, then another run takes the target and writes the same batch."""

    class Slow(BatchForwarder):
        def commit(self) -> None:
            monkeypatch.undo()
            assert topic.write(0, {"value": [b"a"]})
            super().commit()

    monkeypatch.setattr(forwarding, "BatchForwarder", Slow)
    with pytest.raises(TransactionFailed) as fenced:
        topic.write(0, {"value": [b"a"]})
    assert fenced.value.kind == "fenced"
    assert values(topic.records()) == [b"a"]
    assert values(topic.records(committed=False)) == [b"a", b"a"]
    assert not topic.write(0, {"value": [b"a"]})


def test_the_marker_is_read_behind_the_fence(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else writes the batch in the last moment before this attempt's fence: a marker read earlier would not
    know."""

    class Late(BatchForwarder):
        def init_transactions(self, seconds: float) -> None:
            monkeypatch.undo()
            assert topic.write(0, {"value": [b"a"]})
            super().init_transactions(seconds)

    monkeypatch.setattr(forwarding, "BatchForwarder", Late)
    assert not topic.write(0, {"value": [b"a"]})
    assert values(topic.records()) == [b"a"]


def of_sink(topic: Topic, name: str) -> Topic:
    topic.target = target_of(
        stream_write_options({"bootstrap.servers": topic.servers, "topic": topic.name, "sink": name})
    )
    return topic


def in_commit(act: Callable[[], object]) -> type[BatchForwarder]:
    """A producer that stands still in its first commit while ``act`` is done; those after it do not."""
    acts = [act]

    class Standing(BatchForwarder):
        def commit(self) -> None:
            if acts:
                acts.pop()()
            super().commit()

    return Standing


def test_one_name_over_two_topics_is_two_sinks(
    topic: Topic, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither fences the other in the middle of its transaction."""
    first, second = of_sink(topic, topic.name), of_sink(Topic(topic.log, make_topic("other")), topic.name)
    for batch in range(2):
        other = partial(second.write, batch, {"value": [b"b"]}, query="other")
        monkeypatch.setattr(forwarding, "BatchForwarder", in_commit(other))
        assert first.write(batch, {"value": [b"a"]})
    assert (values(first.records()), values(second.records())) == ([b"a", b"a"], [b"b", b"b"])


def test_what_a_dead_run_left_open_is_aborted(topic: Topic) -> None:
    dead = topic.log.transaction(topic.target.identity)
    dead.begin_transaction()
    dead.produce(topic.name, b"half")
    dead.flush(30)
    assert topic.write(0, {"value": [b"a"]})
    assert values(topic.records()) == [b"a"]
    assert values(topic.records(committed=False)) == [b"a", b"half"]


def test_a_marker_log_keeps_what_the_group_has_forgotten(topic: Topic, make_topic: MakeTopic) -> None:
    log = topic.keep_markers(3)
    other = Topic(topic.log, make_topic("other"))
    other.target = dataclasses.replace(other.target, marker_log=log)
    for batch in range(3):
        assert topic.write(batch, {"value": [b"%d" % batch]})
    assert other.write(0, {"value": [b"x"]})
    topic.log.forget_group(topic.target.identity)
    assert not topic.write(2, {"value": [b"2"]})
    assert topic.write(3, {"value": [b"3"]})
    assert not topic.write(3, {"value": [b"3"]})  # its fence waits for the end of the transaction before
    assert read_marker(topic.target, "test") is not None  # and the group knows again
    assert values(topic.records()) == [b"0", b"1", b"2", b"3"]


def test_a_marker_behind_another_sinks_open_transaction_is_waited_for(topic: Topic) -> None:
    """Committed records end before it at the moment; a read that stopped there would find an older marker, or none."""
    log = topic.keep_markers()
    assert topic.write(0, {"value": [b"0"]})
    dead = topic.log.transaction(topic.name + ".dead")
    dead.begin_transaction()
    dead.produce(log, b"half", b"another")
    dead.flush(30)
    assert topic.write(1, {"value": [b"1"]})
    topic.log.forget_group(topic.target.identity)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(topic.write, 1, {"value": [b"1"]})
        with pytest.raises(TimeoutError):
            again.result(3)
        dead.abort_transaction(30)
        assert again.result(60) is False
    assert values(topic.records()) == [b"0", b"1"]


def test_a_marker_log_must_be_compacted_and_nothing_else(topic: Topic) -> None:
    log = topic.keep_markers(policy="compact,delete")
    with pytest.raises(ConfigError, match="must be compact, and nothing else"):
        topic.write(0, {"value": [b"0"]})
    topic.target = dataclasses.replace(topic.target, marker_log=log + "-no")
    with pytest.raises(StreamsError, match="option markerLog"):
        topic.write(0, {"value": [b"0"]})
