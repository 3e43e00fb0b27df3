"""The same handlers on Spark: what a replay gives is what the running source sent, stored and gave up on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams import EventSource, EventSourceConfig
from streams.runtime.partition.dead_letters import PREFIX
from tests.broker.engine_kit import Lab
from tests.spark.log_kit import seed
from tests.spark.replay_kit import Stage, by_key, encoded, produce
from tests.spark.replay_sources import PARTITIONS, Account, Moved, Stood, bank

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(400)]
EVENTS = 3_000


class Production(Stage):
    def __init__(self, lab: Lab, prefix: str, spark: SparkSession) -> None:
        super().__init__(lab, prefix, spark)
        self.produce(EVENTS - 1, seed())
        last = encoded(Moved("a1", 5, "EUR"))  # whatever the seed: a1 is there in the end, and holds what came in last
        produce(lab.bootstrap, self.topic, [(1, b"a1", *last)])
        self.run()


@pytest.fixture(scope="module")
def production(servers: str, spark: SparkSession) -> Production:
    prefix = f"replay-{os.getpid()}-"
    return Production(Lab(servers, prefix, PARTITIONS), prefix, spark)


@pytest.fixture(scope="module")
def replayed(production: Production) -> Iterator[kes_spark.Replay]:
    with kes_spark.replay(bank(production.prefix), production.read()) as found:
        yield found


def test_outputs_are_the_same_bytes_in_the_same_order(production: Production, replayed: kes_spark.Replay) -> None:
    """Each names the record that it comes from."""
    sent = production.records(*production.out)
    assert len(sent) > EVENTS / 2
    outputs = replayed.outputs.collect()
    assert by_key(outputs) == by_key(sent)
    for row in outputs:
        if row.topic == production.out[0]:
            assert {header.key: bytes(header.value) for header in row.headers}["offset"] == b"%d" % row.cause.offset
            assert (row.type, row.version, row.cause.number) == ("Stood", 3, 0)


def test_stores_and_positions_are_those_of_the_source(
    production: Production, replayed: kes_spark.Replay, spark: SparkSession, servers: str
) -> None:
    assert (replayed.records, replayed.offsets) == (EVENTS, production.ends)
    assert {row.partition: row.offset for row in replayed.positions.collect()} == production.ends
    production.must_have_stored(replayed.stores)
    stores = replayed.stores.collect()
    assert {row.partition for row in stores} == set(range(PARTITIONS))
    with kes_spark.read_state(spark, bank(production.prefix), servers=servers) as state:
        assert {row.partition: row.offset for row in state.positions.collect()} == production.ends
        assert kes_spark.compare(state.stores, replayed.stores).is_equal
    rows = replayed.table(key=str, value=Account).collect()
    assert len(rows) == len(stores)
    assert [row for row in rows if row._error is not None] == []
    assert sum(row.value.events for row in rows) > 0


def test_dead_letters_are_the_same_but_for_their_time(production: Production, replayed: kes_spark.Replay) -> None:
    """And but for the member: a replay has none."""
    of_the_run = {f"{PREFIX}failed_at_ms", f"{PREFIX}instance"}

    def without_time(rows: list[object]) -> dict[object, object]:
        return {
            key: [(value, [each for each in headers if each[0] not in of_the_run]) for value, headers in found]
            for key, found in by_key(rows).items()
        }

    written = production.records(production.config.dead_letters)
    assert len(written) > EVENTS / 50
    letters = replayed.dead_letters.collect()
    assert without_time(letters) == without_time(written)  # type: ignore[arg-type]
    assert {(row.partition, row.cause.partition) for row in letters} == {(n, n) for n in range(PARTITIONS)}
    failures = replayed.failures.collect()
    assert {(row.partition, row.offset) for row in failures} == {(r.cause.partition, r.cause.offset) for r in letters}
    assert {row.response for row in failures} == {"dead_letter"}


@pytest.mark.nightly
def test_everything_is_computed_once(spark: SparkSession, production: Production, tmp_path: Path) -> None:
    """Outputs, stores and all the rest are views of one result."""
    marks = str(tmp_path)

    @f.udf("long")
    def counted(offset):  # annotations would ask for an Arrow function
        with open(os.path.join(marks, f"{os.getpid()}"), "a") as file:
            file.write("x")
        return offset

    rows = production.read().where("partition = 0").limit(100)
    with kes_spark.replay(bank(production.prefix), rows.withColumn("offset", counted("offset"))) as found:
        for df in (found.outputs, found.stores, found.dead_letters, found.failures, found.positions):
            df.collect()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 100


@pytest.mark.nightly
def test_files_are_as_good_as_the_topic(
    spark: SparkSession, production: Production, replayed: kes_spark.Replay, tmp_path: Path
) -> None:
    """Parquet in many files, in any order, read in tasks of any size."""
    folder = str(tmp_path / "log")
    production.read().repartition(7, f.rand(seed=1)).write.parquet(folder)
    with kes_spark.replay(bank(production.prefix), spark.read.parquet(folder)) as from_files:
        assert from_files.offsets == replayed.offsets
        assert kes_spark.compare(replayed.outputs, from_files.outputs).is_equal
        assert kes_spark.compare(replayed.stores, from_files.stores).is_equal
        letters = kes_spark.compare(
            replayed.dead_letters, from_files.dead_letters, ignore_headers=[f"{PREFIX}failed_at_ms"]
        )
        assert letters.is_equal
        assert letters.same == replayed.dead_letters.count()


@pytest.mark.parametrize("half", ["replay", pytest.param("changelog", marks=pytest.mark.nightly)])
def test_it_goes_on_from_a_state(production: Production, replayed: kes_spark.Replay, half: str) -> None:
    rows = production.read()
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


@pytest.mark.nightly
def test_a_state_alone_stays_what_it_is(production: Production, replayed: kes_spark.Replay) -> None:
    nothing = production.read().where("false")
    with kes_spark.replay(bank(production.prefix), nothing, state=replayed) as same:
        assert (same.records, same.offsets) == (0, replayed.offsets)
        assert kes_spark.compare(replayed.stores, same.stores).is_equal
        assert same.outputs.count() == 0


def test_partitions_are_spread_over_tasks(production: Production, replayed: kes_spark.Replay) -> None:
    spread = replayed.outputs.select(f.spark_partition_id().alias("task"), "cause.partition").distinct().collect()
    assert len(spread) == len({row.task for row in spread}) == PARTITIONS


# ------------------------------------------------------------------------------------------------- comparing


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
    with kes_spark.replay(source, production.read()) as found:
        assert (found.outputs.count(), found.stores.count()) == (EVENTS, 0)


def _forward(ctx, value):  # type: ignore[no-untyped-def]
    ctx.forward("elsewhere", Stood("x", len(value or b"")), key=ctx.input.key)
