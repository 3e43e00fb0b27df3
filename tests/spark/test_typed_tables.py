"""Tables, points in time and version numbers of changelogs and compacted topics."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.codecs import MsgpackCodec, TupleCodec, codec_for, int32_codec, int64_codec
from streams.errors import ConfigError
from streams.records import TopicPartition
from streams.runtime.changelog import OFFSET_KEY, RELEASE_KEY
from streams.stores import Heap, Index, NamedTable, Stores, Table
from streams.stores.simple import SimpleStore
from tests.spark.log_kit import seed
from tests.spark.typed_events import Balance, Profile, Withdrawn

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
COLUMNS = "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary"
START = dt.datetime(2026, 1, 1)
Row = tuple[str, int, int, dt.datetime, bytes | None, bytes | None]


def changelog(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(rows, COLUMNS)


def records(changes: list[tuple[bytes | None, bytes | None]], partition: int = 0, first: int = 0) -> list[Row]:
    """Changes as records, one a second, with holes between the offsets as transactions leave them."""
    return [
        ("t.changelog", partition, first + 3 * at, START + dt.timedelta(seconds=first + at), key, value)
        for at, (key, value) in enumerate(changes)
    ]


def as_python(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else value


def test_the_changelog_of_a_store_becomes_the_store(spark: SparkSession) -> None:
    """A real store's journal, read by naming the store's types: the same keys and values."""
    rng = random.Random(seed())
    rows: list[Row] = []
    expected: dict[tuple[str, int], tuple[int, str | None]] = {}
    for partition in range(3):
        store = Table.factory(key=tuple[str, int], value=Balance)(TopicPartition("t", partition))
        changes: list[Any] = []
        for _ in range(200):
            journal: list[Any] = []
            store.begin(journal)
            key = (rng.choice(["a", "b\x00c", "é\x01", ""]) + str(partition), rng.randrange(-3, 3))
            if rng.random() < 0.3:
                store.delete(key)
            else:
                store.put(key, Balance(rng.randrange(-(2**63), 2**63), rng.choice([None, "x"])))
            store.end()
            changes += [(change.key, change.value) for change in journal]
            if rng.random() < 0.1:
                changes += [(OFFSET_KEY, b'{"offset":1}'), (None, b"no key"), (RELEASE_KEY, None)]
        rows += records(changes, partition)
        expected |= {key: (value.cents, value.owner) for key, value in store.items()}
    rng.shuffle(rows)
    found = kes_spark.table(changelog(spark, rows).repartition(3), key=tuple[str, int], value=Balance).collect()
    assert {tuple(row.key): tuple(row.value) for row in found} == expected
    assert len(found) == len(expected)
    assert {row._error for row in found} == {None}
    last = {(row[4], row[1]): row[2] for row in sorted(rows, key=lambda row: row[2])}
    codec = TupleCodec(str, int)
    assert all(row._meta.offset == last[codec.encode(tuple(row.key)), row._meta.partition] for row in found)


def test_one_structure_of_several_is_a_table_like_any_other(spark: SparkSession) -> None:
    """Also where its values have a time in front; and of replayed stores."""

    class Bank(Stores):
        balances = NamedTable.of(str, Balance, expires=3600)
        names = NamedTable.of(int, str)
        queue = Heap.of(tuple[str, int], int, priority=Index(int, lambda value: value))
        raw = NamedTable.of(bytes, str)

    bank, journal = Bank(TopicPartition("t", 0)), list[Any]()
    bank.begin(journal)
    bank.balances.put("early", Balance(1, None))  # before there is a time
    bank.advance(1_700_000_000_000)
    for number in range(3):
        bank.balances.put(f"b{number}", Balance(number, "x"))
        bank.names.put(-number, f"n{number}")
        bank.queue.put(("q", number), -number)
    bank.names.delete(-2)
    bank.raw.put(OFFSET_KEY, "behind a prefix it is a key like any other")
    bank.end()
    log = changelog(spark, records([(change.key, change.value) for change in journal]))
    rows = (
        ("balances", str, Balance, dict(bank.balances.items())),
        ("names", int, str, dict(bank.names.items())),
        ("queue", tuple[str, int], int, dict(bank.queue.items())),
        ("raw", bytes, str, dict(bank.raw.items())),
        ("nothing", str, str, {}),
    )
    for name, key, value, expected in rows:
        for read in (kes_spark.table(log, key=key, value=value, structure=name),
                     kes_spark.changelog_state(log).table(key=key, value=value, structure=name)):  # fmt: skip
            found = read.collect()
            keys = [bytes(row.key) if key is bytes else as_python(row.key) for row in found]
            values = dict(zip(keys, [row.value for row in found], strict=True))
            assert len(values) == len(found)
            wanted = {k: (v.cents, v.owner) if isinstance(v, Balance) else v for k, v in expected.items()}
            assert values == wanted, name
            assert {row._error for row in found} <= {None}
    deleted = kes_spark.changes(log, key=int, value=str, structure="names").where("deleted").collect()
    assert [row.key for row in deleted] == [-2]


@pytest.mark.parametrize(
    ("key", "value", "pairs", "codecs"),
    [
        (str, int, [("a", 1), ("é\x00", -1), ("", -(2**63)), ("b", 2**63 - 1)], {}),
        (int, str, [(0, ""), (-1, "😀"), (2**63 - 1, "x")], {}),
        (bytes, bytes, [(b"\x00\xff", b""), (b"", b"\xff\xfe")], {}),
        (int, int, [(-1, 1), (2**31 - 1, -(2**31))], {"key_codec": int32_codec, "value_codec": int64_codec}),
        (int, int, [(-(2**31), 0), (5, 2**63 - 1)], {"key_codec": int32_codec, "value_codec": int64_codec}),
        (tuple[bytes, str], float, [((b"\x00\x01", "x"), -0.0), ((b"", ""), 1e308)], {}),
        (str, list[int], [("a", []), ("b", [1, 2])], {}),
        (str, dict[str, bool], [("a", {}), ("b", {"x": True})], {}),
        (str, float | None, [("a", 1.5)], {}),
        (str, bool, [("a", True), ("b", False)], {}),
        (str, dt.date, [("a", dt.date(2020, 2, 29))], {}),
        (str, Withdrawn, [("a", Withdrawn("x", 1))], {"value_codec": MsgpackCodec(Withdrawn)}),
    ],
)
def test_keys_and_values_of_every_kind_that_stores_take(
    spark: SparkSession, key: Any, value: Any, pairs: list[tuple[Any, Any]], codecs: dict[str, Any]
) -> None:
    keys, values = codecs.get("key_codec") or codec_for(key), codecs.get("value_codec") or codec_for(value)
    rows = records([(keys.encode(k), values.encode(v)) for k, v in pairs])
    found = kes_spark.table(changelog(spark, rows), key=key, value=value, **codecs).collect()
    got = {as_python(row.key) if not isinstance(row.key, bytearray) else bytes(row.key): row.value for row in found}
    expected = {k: (v.account, v.cents) if isinstance(v, Withdrawn) else v for k, v in pairs}
    assert {k: as_python(v) for k, v in got.items()} == expected
    assert [row._error for row in found] == [None] * len(pairs)
    if value is float:
        assert str(got[b"\x00\x01", "x"]) == "-0.0"


def test_a_simple_store_and_a_pydantic_value(spark: SparkSession) -> None:
    store = SimpleStore.factory(Profile, key=lambda profile: profile.name)(TopicPartition("t", 0))
    journal: list[Any] = []
    store.begin(journal)
    store.put(Profile(Name="ann", since=dt.date(2020, 1, 1)))
    store.put(Profile(Name="bob", since=dt.date(2021, 1, 1)))
    store.delete("ann")
    rows = records([(change.key, change.value) for change in journal])
    found = kes_spark.table(changelog(spark, rows), key=str, value=Profile).select("key", "value.*").collect()
    assert [tuple(row) for row in found] == [("bob", "bob", dt.date(2021, 1, 1))]


def test_changes_of_a_changelog_one_by_one(spark: SparkSession, tmp_path: Any) -> None:
    """As a batch and as a stream: tombstones are changes, the toolkit's own records are none."""
    key, value = codec_for(str), codec_for(Balance)
    rows = records(
        [
            (key.encode("a"), value.encode(Balance(1, None))),
            (OFFSET_KEY, b'{"offset": 3}'),
            (key.encode("a"), None),
            (RELEASE_KEY, b"x"),
            (key.encode("b"), b"no json"),
            (None, b"no key"),
        ]
    )
    expected = [
        ("a", 1, False, None, 0),
        ("a", None, True, None, 6),
        ("b", None, False, "value: corrupt", 12),
    ]
    changelog(spark, rows).write.parquet(str(tmp_path / "log"))
    stream = spark.readStream.schema(COLUMNS).parquet(str(tmp_path / "log"))
    found = kes_spark.changes(stream, key=str, value=Balance)
    query = found.writeStream.format("memory").queryName("changes").trigger(availableNow=True).start()
    query.awaitTermination()
    for each in (kes_spark.changes(changelog(spark, rows), key=str, value=Balance), spark.table("changes")):
        error = f.left("_error", f.lit(len("value: corrupt")))
        shown = each.orderBy("_meta.offset").select("key", "value.cents", "deleted", error, "_meta.offset")
        assert [tuple(row) for row in shown.collect()] == expected
    good = kes_spark.changes(changelog(spark, rows[:4]), key=str, value=Balance, on_error="fail")
    assert [row.deleted for row in good.select("deleted").collect()] == [False, True]
    strict = kes_spark.changes(changelog(spark, rows), key=str, value=Balance, on_error="fail")
    for column in ("key", "value", "deleted", "_meta.offset"):
        with pytest.raises(Exception, match=r"changes: t.changelog\[0\] offset 12: value: corrupt"):
            strict.select(column).collect()
    with pytest.raises(ConfigError, match="on_error must be null or fail, not 'deadletter'"):
        kes_spark.changes(changelog(spark, rows), key=str, value=Balance, on_error="deadletter")  # type: ignore[arg-type]


def test_bytes_of_other_types_have_an_error(spark: SparkSession) -> None:
    rows = records([(b"\xff", b"1"), (b"a", b"{}"), (b"b", b"[1"), (b"c", b'"5"'), (b"d", b"5 6"), (b"e", b"5")])
    found = kes_spark.table(changelog(spark, rows), key=str, value=float).orderBy("_meta.offset").collect()
    assert [(row.key, row.value, row._error) for row in found] == [
        (None, 1.0, "key: not UTF-8"),
        *[(key, None, "value: corrupt: not JSON of its type, or a field of another type") for key in "abcd"],
        ("e", 5.0, None),
    ]
    numbers = kes_spark.table(changelog(spark, rows), key=bytes, value=int).collect()
    assert {row._error for row in numbers} == {f"value: 8 bytes expected, got {size}" for size in (1, 2, 3)}


def test_a_key_in_two_partitions_fails_or_goes_by_time_when_asked(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    old = records([(b"a", b"1"), (b"b", b"1")], 0, first=100)
    new = records([(b"a", b"2")], 1, first=500)  # a later time, as offset 500
    late = [("t.changelog", 1, 1, START + dt.timedelta(days=1), b"a", b"3")]  # later still, at a lower offset
    df = changelog(spark, old + new + late)
    problem = r"t\.changelog: a key has records in the partitions 0 and 1"
    for refused in (kes_spark.table(df, key=str, value=float), kes_spark.sequence(df)):
        with pytest.raises(Exception, match=problem):
            refused.collect()
    assert "order by record time" not in caplog.text
    found = kes_spark.table(df, key=str, value=float, moved_keys="newest").collect()
    assert {row.key: row.value for row in found} == {"a": 3.0, "b": 1.0}
    assert "in order by record time" in caplog.text
    numbered = kes_spark.sequence(df, moved_keys="newest").collect()
    assert {(row.value, row.sequence) for row in numbered if row.key == b"a"} == {(b"1", 1), (b"2", 2), (b"3", 3)}


def test_records_of_two_topics_are_refused(spark: SparkSession) -> None:
    rows = records([(b"a", b"1")])
    other = [("u", *row[1:]) for row in rows]
    with pytest.raises(Exception, match=r"records of one topic only, not of t\.changelog and u"):
        kes_spark.table(changelog(spark, rows + other), key=str, value=float).collect()  # type: ignore[operator]


def test_a_table_as_it_was(spark: SparkSession) -> None:
    rows = records([(b"a", b"1"), (b"a", b"2"), (b"a", None), (b"a", b"4")]) + records([(b"b", b"1")], 1)
    df = changelog(spark, rows)

    def at(**point: Any) -> dict[str, float]:
        found = kes_spark.table(kes_spark.as_of(df, **point), key=str, value=float)
        return {row.key: row.value for row in found.collect()}

    def moment(seconds: int) -> dt.datetime:
        return (START + dt.timedelta(seconds=seconds)).replace(tzinfo=dt.UTC)

    assert at(timestamp=moment(-1)) == {}
    assert at(timestamp=moment(1)) == {"a": 2.0, "b": 1.0}
    assert at(timestamp=moment(1).astimezone(dt.timezone(dt.timedelta(hours=5)))) == {"a": 2.0, "b": 1.0}
    assert at(timestamp=moment(2)) == {"b": 1.0}
    assert at(offsets={"t.changelog": {0: 4}}) == {"a": 2.0}, "offset 3 is in it, offset 4 is not"
    assert at(offsets={"t.changelog": {0: 3, 1: 1}}) == {"a": 1.0, "b": 1.0}
    for wrong, problem in (
        ({}, "one of timestamp and offsets"),
        ({"timestamp": START}, "has no zone"),
        ({"offsets": {"t": {0: -2}}}, r"t\[0\] has the offset -2"),
    ):
        with pytest.raises(ConfigError, match=problem):
            kes_spark.as_of(df, **wrong)  # type: ignore[arg-type]


def test_versions_of_a_key_are_numbered(spark: SparkSession) -> None:
    rows = records([(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (None, b"x"), (b"a", None)])
    df = changelog(spark, rows)
    assert [(row.key, row.sequence) for row in kes_spark.sequence(df).orderBy("offset").collect()] == [
        (b"a", 1), (b"b", 1), (b"a", 2), (None, None), (b"a", 3),
    ]  # fmt: skip
    described = df.selectExpr("*", "'Withdrawn' type", "1 version")
    typed = kes_spark.sequence(kes_spark.events(described, Withdrawn))
    assert [row.sequence for row in typed.orderBy("_meta.offset").collect()] == [1, 1, 2, None, 3]
    with pytest.raises(ConfigError, match="a column sequence already"):
        kes_spark.sequence(typed)
    with pytest.raises(ConfigError, match="neither records' columns nor _meta"):
        kes_spark.sequence(df.select("key"))


def test_tables_of_streams_are_refused(spark: SparkSession, tmp_path: Any) -> None:
    changelog(spark, records([(b"a", b"1")])).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(COLUMNS).parquet(str(tmp_path / "in"))
    for make in (lambda: kes_spark.table(stream, key=str, value=float), lambda: kes_spark.sequence(stream)):
        with pytest.raises(ConfigError, match="read in batch"):
            make()
    assert kes_spark.as_of(stream, offsets={}).isStreaming
    with pytest.raises(ConfigError, match="moved_keys must be fail or newest"):
        kes_spark.table(changelog(spark, []), key=str, value=float, moved_keys="x")  # type: ignore[arg-type]
