"""The same handlers on Spark: what a replay gives is what the running source sent, stored and gave up on."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams import EventSource, EventSourceConfig
from streams.clients.admin import Watermarks
from streams.records import IncomingRecord
from streams.runtime.dead_letters import PREFIX
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec
from tests.broker.engine_kit import Lab
from tests.spark.replay_kit import by_key, encoded, moves, produce, ran, state_of, stores_of
from tests.spark.replay_sources import PARTITIONS, Account, Moved, bank

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(400)]
SEED = int(os.environ.get("SEED", "0")) or random.randrange(1, 10**6)
EVENTS = 3_000


class Production:
    """A bank that ran over all kinds of events, and what it left behind."""

    def __init__(self, lab: Lab, prefix: str, spark: SparkSession) -> None:
        self.lab, self.prefix, self._spark = lab, prefix, spark
        self.source = bank(prefix, bootstrap_servers=lab.bootstrap)
        self.topic, self.changelog = self.source.config.topic, self.source.config.changelog
        self.outputs = [f"{prefix}stood", f"{prefix}closed"]
        made = [TopicSpec(name=name, partitions=2, replication_factor=1) for name in self.outputs]
        lab.admin.create([*self.source.specs(), *made], 30.0)
        last = encoded(Moved("a1", 5, "EUR"))  # whatever the seed: a1 is there in the end, and holds what came in last
        produce(lab.bootstrap, self.topic, [*moves(EVENTS - 1, partitions=PARTITIONS, seed=SEED), (1, b"a1", *last)])
        ran(self.source, lab)

    @property
    def ends(self) -> dict[int, int]:
        marks: dict[int, Watermarks] = self.lab.admin.watermarks(self.topic)
        return {number: mark.end for number, mark in marks.items()}

    def read(self, *topics: str, **options: str) -> DataFrame:
        reader = self._spark.read.format("grt").option("kafka.bootstrap.servers", self.lab.bootstrap)
        return reader.option("includeHeaders", "true").option("subscribe", ",".join(topics)).options(**options).load()

    def records(self, *topics: str) -> list[IncomingRecord]:
        return [record for name in topics for record in self.lab._records(name, None)]


@pytest.fixture(scope="module")
def production(kafka_broker: BrokerAddress, spark: SparkSession) -> Production:
    print(f"SEED={SEED}")
    prefix = f"replay-{os.getpid()}-{random.randrange(10**9)}-"
    return Production(Lab(kafka_broker.bootstrap_servers, prefix, PARTITIONS), prefix, spark)


@pytest.fixture(scope="module")
def replayed(production: Production) -> Iterator[kes_spark.Replay]:
    with kes_spark.replay(bank(production.prefix), production.read(production.topic)) as found:
        yield found


def test_outputs_are_the_same_bytes_in_the_same_order(production: Production, replayed: kes_spark.Replay) -> None:
    sent = production.records(*production.outputs)
    assert len(sent) > EVENTS / 2
    assert by_key(replayed.outputs.collect()) == by_key(sent)


def test_positions_are_those_of_the_source(production: Production, replayed: kes_spark.Replay) -> None:
    assert replayed.offsets == production.ends
    assert {row.partition: row.offset for row in replayed.positions.collect()} == production.ends
    assert replayed.records == EVENTS


def test_a_store_is_rebuilt_from_history(production: Production, replayed: kes_spark.Replay) -> None:
    """Byte for byte what the changelog holds, by a hash of each partition."""

    def hashes(state: dict[int, dict[bytes, bytes]]) -> dict[int, str]:
        return {
            number: hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()
            for number, contents in state.items()
        }

    numbers = range(PARTITIONS)
    changelog = {number: state_of(production.lab, production.changelog, number) for number in numbers}
    assert all(changelog.values())
    assert hashes({number: stores_of(replayed.stores, number) for number in numbers}) == hashes(changelog)
    with kes_spark.changelog_state(production.read(production.changelog)) as state:
        assert {row.partition: row.offset for row in state.positions.collect()} == production.ends
        assert kes_spark.compare(state.stores, replayed.stores).is_equal


def test_stores_are_read_with_their_codecs(production: Production, replayed: kes_spark.Replay) -> None:
    rows = replayed.table(key=str, value=Account).collect()
    assert len(rows) == replayed.stores.count()
    assert [row for row in rows if row._error is not None] == []
    assert sum(row.value.events for row in rows) > 0


def test_dead_letters_are_the_same_but_for_their_time(production: Production, replayed: kes_spark.Replay) -> None:
    def without_time(rows: list[object]) -> dict[object, object]:
        return {
            key: [(value, [each for each in headers if each[0] != f"{PREFIX}failed_at_ms"]) for value, headers in found]
            for key, found in by_key(rows).items()
        }

    written = production.records(production.source.config.dead_letters)
    assert len(written) > EVENTS / 50
    letters = replayed.dead_letters.collect()
    assert without_time(letters) == without_time(written)  # type: ignore[arg-type]
    assert {(row.partition, row.cause.partition) for row in letters} == {(n, n) for n in range(PARTITIONS)}
    failures = replayed.failures.collect()
    assert {(row.partition, row.offset) for row in failures} == {(r.cause.partition, r.cause.offset) for r in letters}
    assert {row.response for row in failures} == {"dead_letter"}


def test_each_output_names_the_record_that_it_comes_from(production: Production, replayed: kes_spark.Replay) -> None:
    rows = replayed.outputs.where(f.col("topic") == production.outputs[0]).collect()
    for row in rows:
        assert {header.key: bytes(header.value) for header in row.headers}["offset"] == b"%d" % row.cause.offset
        assert (row.type, row.version, row.cause.number) == ("Stood", 3, 0)


def test_everything_is_computed_once(spark: SparkSession, production: Production, tmp_path: Path) -> None:
    """Outputs, stores and all the rest are views of one result."""
    marks = str(tmp_path)

    @f.udf("long")
    def counted(offset):  # annotations would ask for an Arrow function
        with open(os.path.join(marks, f"{os.getpid()}"), "a") as file:
            file.write("x")
        return offset

    rows = production.read(production.topic).where("partition = 0").limit(100)
    with kes_spark.replay(bank(production.prefix), rows.withColumn("offset", counted("offset"))) as found:
        for df in (found.outputs, found.stores, found.dead_letters, found.failures, found.positions):
            df.collect()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 100


def test_files_are_as_good_as_the_topic(
    spark: SparkSession, production: Production, replayed: kes_spark.Replay, tmp_path: Path
) -> None:
    """Parquet in many files, in any order, read in tasks of any size."""
    folder = str(tmp_path / "log")
    production.read(production.topic).repartition(7, f.rand(seed=1)).write.parquet(folder)
    with kes_spark.replay(bank(production.prefix), spark.read.parquet(folder)) as from_files:
        assert from_files.offsets == replayed.offsets
        assert kes_spark.compare(replayed.outputs, from_files.outputs).is_equal
        assert kes_spark.compare(replayed.stores, from_files.stores).is_equal
        letters = kes_spark.compare(
            replayed.dead_letters, from_files.dead_letters, ignore_headers=[f"{PREFIX}failed_at_ms"]
        )
        assert letters.is_equal
        assert letters.same == replayed.dead_letters.count()


@pytest.mark.parametrize("half", ["replay", "changelog"])
def test_it_goes_on_from_a_state(production: Production, replayed: kes_spark.Replay, half: str) -> None:
    rows = production.read(production.topic)
    middle = {number: end // 2 for number, end in production.ends.items()}
    below = f.lit(False)
    for number, offset in middle.items():
        below = below | ((f.col("partition") == number) & (f.col("offset") < offset))
    with kes_spark.replay(bank(production.prefix), rows.where(below)) as first:
        assert first.offsets == middle
        state: kes_spark.State = first
        if half == "changelog":  # written and read again, as a changelog would be
            state = kes_spark.State(first.stores.repartition(5), first.positions)
        with kes_spark.replay(bank(production.prefix), rows, state=state) as second:
            assert second.records == replayed.records - first.records
            assert second.offsets == replayed.offsets
            assert kes_spark.compare(replayed.stores, second.stores).is_equal
            both = first.outputs.unionByName(second.outputs)
            assert kes_spark.compare(replayed.outputs, both).is_equal


def test_a_state_alone_stays_what_it_is(production: Production, replayed: kes_spark.Replay) -> None:
    nothing = production.read(production.topic).where("false")
    with kes_spark.replay(bank(production.prefix), nothing, state=replayed) as same:
        assert (same.records, same.offsets) == (0, replayed.offsets)
        assert kes_spark.compare(replayed.stores, same.stores).is_equal
        assert same.outputs.count() == 0


def test_partitions_are_spread_over_tasks(production: Production, replayed: kes_spark.Replay) -> None:
    spread = replayed.outputs.select(f.spark_partition_id().alias("task"), "cause.partition").distinct().collect()
    assert len(spread) == len({row.task for row in spread}) == PARTITIONS


def test_replayed_outputs_can_be_written(
    production: Production, replayed: kes_spark.Replay, make_topic: Callable[..., str]
) -> None:
    topic = make_topic("again", 2)
    one = replayed.outputs.where(f.col("topic") == production.outputs[0]).withColumn("topic", f.lit(topic))
    kes_spark.write(
        one.drop("cause"), write_id="again", servers=production.lab.bootstrap, options={"markerTopic": topic}
    )
    as_it_was = production.read(production.outputs[0]).withColumn("topic", f.lit(topic))
    with kes_spark.compare(as_it_was, production.read(topic)) as compared:
        assert compared.is_equal
        assert compared.same == one.count()


# ------------------------------------------------------------------------------------------------- comparing


def test_a_changed_handler_is_seen_before_it_goes_live(production: Production) -> None:
    changed = bank(production.prefix, bonus=1)  # for account a1 only
    with kes_spark.replay(changed, production.read(production.topic)) as other:
        with kes_spark.compare(production.read(*production.outputs), other.outputs) as outputs:
            assert not outputs.is_equal
            assert (outputs.missing, outputs.extra) == (0, 0)
            rows = outputs.differences.collect()
            assert {bytes(row.key) for row in rows} == {b"a1"}
            assert len(rows) == outputs.different > 0
            first = min(rows, key=lambda row: row.number)
            assert bytes(first.expected.value) != bytes(first.actual.value)
            assert first.actual.cause.offset >= 0
        state = kes_spark.changelog_state(production.read(production.changelog))
        with state, kes_spark.compare(state.stores, other.stores) as stores:
            keys = {bytes(row.key) for row in stores.differences.collect()}
            assert keys == {b"a1"}
            assert stores.same == other.stores.count() - stores.different


def test_missing_and_extra_rows(spark: SparkSession) -> None:
    columns = "topic string, key binary, value binary, partition int, offset long"
    base = [("t", b"a", b"1", 0, 1), ("t", b"a", b"2", 0, 5), ("t", b"b", b"1", 1, 1), ("t", None, b"n", 0, 9)]
    expected = spark.createDataFrame(base, columns)
    rows = [("t", b"a", b"1", 3, 40), ("t", b"b", b"1", 0, 2), ("t", b"b", b"3", 0, 7), ("t", None, b"m", 0, 1)]
    with kes_spark.compare(expected, spark.createDataFrame(rows, columns)) as found:
        assert (found.same, found.missing, found.extra, found.different) == (2, 1, 1, 1)
        told = {(row.difference, row.key, row.number) for row in found.differences.collect()}
        assert told == {("missing", b"a", 1), ("extra", b"b", 1), ("different", None, 0)}
    with kes_spark.compare(expected, expected) as found:
        assert (found.is_equal, found.same) == (True, 4)


def test_without_order_rows_are_a_multiset(spark: SparkSession) -> None:
    columns = "topic string, key binary, value binary, partition int, offset long"
    one = spark.createDataFrame([("t", b"a", value, 0, n) for n, value in enumerate([b"1", b"2", b"2"])], columns)
    other = spark.createDataFrame([("t", b"a", value, 0, n) for n, value in enumerate([b"2", b"1", b"1"])], columns)
    with kes_spark.compare(one, other) as in_order:
        assert (in_order.same, in_order.different) == (0, 3)
    with kes_spark.compare(one, other, order="none") as found:
        assert (found.same, found.missing, found.extra, found.different) == (2, 1, 1, 0)


def test_headers_count_unless_they_are_left_out(spark: SparkSession) -> None:
    headers = "headers array<struct<key: string, value: binary>>"
    columns = f"topic string, key binary, value binary, {headers}, partition int, offset long"
    x, first, second = ("x", b"1"), ("y", b"2"), ("y", b"3")
    one = spark.createDataFrame([("t", b"a", b"1", [x, first], 0, 0), ("t", b"b", b"1", [], 0, 1)], columns)
    other = spark.createDataFrame([("t", b"a", b"1", [x, second], 0, 0), ("t", b"b", b"1", None, 0, 1)], columns)
    for ignored, different in ((False, 1), (["x"], 1), (["y"], 0), (True, 0)):
        with kes_spark.compare(one, other, ignore_headers=ignored) as found:
            assert (found.different, found.same) == (different, 2 - different)


def test_two_kinds_are_not_compared(production: Production, replayed: kes_spark.Replay) -> None:
    with pytest.raises(Exception, match="one side has a column topic"):
        kes_spark.compare(replayed.outputs, replayed.stores)


# ------------------------------------------------------------------------------------------------- sources


def test_a_source_without_state(production: Production) -> None:
    config = EventSourceConfig(group_id="g", topic=production.topic, num_partitions=PARTITIONS)
    source: EventSource[None] = EventSource(config)
    source.register_default_handler(_forward)
    with kes_spark.replay(source, production.read(production.topic)) as found:
        assert (found.outputs.count(), found.stores.count()) == (EVENTS, 0)


def _forward(ctx, value):  # type: ignore[no-untyped-def]
    from tests.spark.replay_sources import Stood

    ctx.forward("elsewhere", Stood("x", len(value or b"")), key=ctx.input.key)
