"""One table of values and one of bad input, run through the event source's codecs and through Spark: the same bytes or
the same meaning, the same verdict, or a difference that is named here and in docs/reference/spark-types.md."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.errors import DecodeError
from streams.events import event_type_of
from streams.spark.typed.event_format import EventBatches
from tests.spark import log_kit
from tests.spark.conformance_corpus import DIFFERENT, EVERYTHING, EXACTLY, FINE, MUCH, ODD_NAME, SAME, WIDE, Kinds
from tests.spark.conformance_values import FLOAT, FRACTION, HEX, PLACES, TABLE, UTC
from tests.spark.typed_kit import frame, read_batch, records

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "spark-types.md"


def as_rows(df: Any) -> list[str]:
    """The rows in the JVM's own words: no conversion to Python in between."""
    return [
        row.row for row in df.select(f.to_json(f.struct("*"), {"ignoreNullFields": "false"}).alias("row")).collect()
    ]


def different_fields(found: list[str], expected: list[str]) -> list[tuple[str, Any, Any]]:
    """What differs first, by name: whole rows are too long to read."""
    wrong = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    rows = [(json.loads(ours), json.loads(theirs)) for ours, theirs in wrong[:1]]
    return [(name, row[name], other[name]) for row, other in rows for name in row if row[name] != other[name]]


def check(spark: SparkSession, cls: type, values: list[Any], *, may_differ: bool) -> None:
    event = event_type_of(cls)
    typed = frame(spark, values)
    by_python = [event.encode(value) for value in values]
    written = kes_spark.encode(typed, cls, key=None).collect()
    by_spark = [bytes(row.value) for row in written]
    assert {(row.type, row.version) for row in written} == {(event.name, event.version)}

    different = [(theirs, ours) for theirs, ours in zip(by_python, by_spark, strict=True) if theirs != ours]
    assert bool(different) <= may_differ, different[:3]
    # The event source reads both as what was meant ...
    assert [event.decode(data, event.version) for data in by_python] == values
    assert [event.decode(data, event.version) for data in by_spark] == values
    assert (
        repr([event.decode(data, event.version) for data in by_spark])
        == repr([event.decode(data, event.version) for data in by_python]).replace(
            "datetime.timezone(datetime.timedelta(days=-1, seconds=52200))", "datetime.timezone.utc"
        )
        or may_differ
    )
    # ... and so does Spark.
    both = kes_spark.events(records(spark, cls, [*by_python, *by_spark]), cls).orderBy("_meta.offset").drop("_meta")
    assert both.drop("_error").schema.simpleString() == typed.schema.simpleString()
    wanted = typed.withColumn("_error", f.lit(None).cast("string"))
    assert different_fields(as_rows(both), 2 * as_rows(wanted)) == []


@pytest.mark.parametrize(("cls", "values", "differences"), TABLE, ids=[cls.__name__ for cls, _, _ in TABLE])
def test_written_and_read_alike(spark: SparkSession, cls: type, values: list[Any], differences: frozenset[str]) -> None:
    check(spark, cls, values, may_differ=bool(differences))


def test_the_documented_differences_of_bytes_are_these() -> None:
    text = DOCS.read_text()
    assert [each for each in (FLOAT, FRACTION, PLACES, HEX) if each not in text] == []


@pytest.mark.nightly
def test_values_made_at_random_are_written_and_read_alike(spark: SparkSession) -> None:
    @seed(log_kit.seed())
    @settings(
        max_examples=int(os.environ.get("EXAMPLES", "4")),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(EVERYTHING, min_size=10, max_size=40))
    def run(values: list[Kinds]) -> None:
        check(spark, Kinds, values, may_differ=True)

    run()


CORPUS = [(data, None) for data in SAME] + [(data, why) for why, bad in DIFFERENT.items() for data in bad]


def verdict(data: bytes | None) -> bool:
    try:
        event_type_of(Kinds).decode(data)
    except DecodeError:
        return False
    return True


def test_bad_input_has_the_same_verdict_on_both_sides(spark: SparkSession) -> None:
    found = (
        kes_spark.events(records(spark, Kinds, [data for data, _ in CORPUS]), Kinds).orderBy("_meta.offset").collect()
    )
    wrong = []
    for row, (data, difference) in zip(found, CORPUS, strict=True):
        python, jvm = verdict(data), row._error is None
        if (python == jvm) == (difference is not None):
            wrong.append((data if data is None else data[:80], f"python {python}, spark {row._error!r}", difference))
        assert row._error is None or len(row._error) < 400
    assert wrong == [], "\n".join(map(str, wrong))


def test_decoding_where_it_is_read_has_the_verdict_of_the_event_source() -> None:
    """Only what a column cannot hold is refused beyond that, by a batch as by each record alone."""
    made = EventBatches(event_type_of(Kinds))
    data = [data for data, _ in CORPUS]
    every = made.of(read_batch("Kinds", data)).column("_error").to_pylist()
    alone = [made.of(read_batch("Kinds", [each])).column("_error").to_pylist()[0] for each in data]
    assert every == alone
    wrong = []
    for (value, difference), error in zip(CORPUS, every, strict=True):
        if (error is None) != (verdict(value) and difference not in (WIDE, EXACTLY)):
            wrong.append((value and value[:80], error, difference))
    tolerated = {b'{"price":"1_0"}', '{"price":"\u0661"}'.encode()}  # numbers like others, once they are Python's
    assert [each for each in wrong if each[0] not in tolerated] == []


@pytest.mark.nightly
def test_what_both_accept_means_the_same(spark: SparkSession) -> None:
    accepted = [data for data in SAME if verdict(data)]
    values = [event_type_of(Kinds).decode(data) for data in accepted]
    found = kes_spark.events(records(spark, Kinds, accepted), Kinds).orderBy("_meta.offset")  # type: ignore[arg-type]
    naive = [
        msgspec.structs.replace(value, at=value.at.replace(tzinfo=UTC)) if value.at.tzinfo is None else value
        for value in values
    ]
    assert different_fields(as_rows(found.drop("_error", "_meta")), as_rows(frame(spark, naive))) == []


def test_the_documented_differences_of_verdicts_are_these() -> None:
    text = DOCS.read_text()
    named = {*DIFFERENT, FINE, MUCH, ODD_NAME}
    assert [each for each in sorted(named) if each not in text] == []


def test_fractions_finer_than_a_microsecond_are_cut(spark: SparkSession) -> None:
    data = b'{"at":"2026-01-02T03:04:05.1234569Z"}'
    row = kes_spark.events(records(spark, Kinds, [data]), Kinds).collect()[0]
    assert (row.at.microsecond, event_type_of(Kinds).decode(data).at.microsecond) == (123456, 123457)


@pytest.mark.parametrize("zone", ["Asia/Kolkata", pytest.param("America/Los_Angeles", marks=pytest.mark.nightly)])
def test_the_sessions_zone_changes_nothing(spark: SparkSession, zone: str) -> None:
    data = [b'{"at":"2026-01-02T03:04:05"}', b'{"at":"2026-01-02T03:04:05Z"}', b'{"at":"2026-01-02T04:34:05+0130"}']
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", zone)
        found = kes_spark.events(records(spark, Kinds, list(data)), Kinds)
        assert [row.at for row in found.selectExpr("unix_seconds(at) at").collect()] == [1767323045] * 3
        again = kes_spark.encode(found, Kinds, key=None).collect()
        assert [event_type_of(Kinds).decode(bytes(row.value)).at for row in again] == [
            dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        ] * 3
        assert {bytes(row.value).split(b'"wall":')[1][:28] for row in again} == {b'"2000-01-01T00:00:00.000000"'}
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))
