"""Typed events: what cannot be read or written is named (what can: ``test_conformance.py``)."""

from __future__ import annotations

import datetime as dt
import enum
from decimal import Decimal
from typing import Annotated

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.errors import ConfigError
from streams.events import event_type_of
from tests.spark.typed_kit import records

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Other(msgspec.Struct):
    text: str


class Small(msgspec.Struct):
    name: str
    count: int
    price: Decimal = Decimal("1.5")
    colour: Colour = Colour.RED
    tags: list[str] = []
    day: dt.date | None = None


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "tombstone": (None, "null value"),
    "empty": (b"", "empty value"),
    "not JSON": (b'{"name": "a', "corrupt"),
    "an array": (b"[1, 2]", "corrupt"),
    "a number": (b"7", "corrupt"),
    "null": (b"null", "corrupt"),
    "not UTF-8": (b'{"name":"\xff","count":1}', "corrupt: not UTF-8"),
    "text for a number": (b'{"name":"a","count":"x"}', "corrupt"),
    "fraction for a whole number": (b'{"name":"a","count":1.5}', "corrupt"),
    "more than 64 bits": (b'{"name":"a","count":%d}' % 2**70, "corrupt"),
    "single quotes": (b"{'name':'a','count':1}", "corrupt"),
    "text after the value": (b'{"name":"a","count":1} x', "corrupt"),
    "missing": (b'{"name":"a"}', "missing field: count"),
    "null for a value": (b'{"name":null,"count":1}', "missing field: name"),
    "decimal of ten places": (b'{"name":"a","count":1,"price":"0.1234567891"}', "price: not a decimal"),
    "tiny decimal": (b'{"name":"a","count":1,"price":"1e-10"}', "price: not a decimal"),
    "no decimal": (b'{"name":"a","count":1,"price":"x"}', "price: not a decimal"),
    "huge decimal": (b'{"name":"a","count":1,"price":"1e40"}', "price: not a decimal"),
    "no such colour": (b'{"name":"a","count":1,"colour":"green"}', "colour: not one of red, blue"),
    "null in a list": (b'{"name":"a","count":1,"tags":["x",null]}', "null in tags[]"),
    "no date": (b'{"name":"a","count":1,"day":"yesterday"}', "day: not a date in ISO 8601"),
}


def test_what_cannot_be_read_says_why_and_shows_nothing(spark: SparkSession) -> None:
    decoded = kes_spark.events(records(spark, Small, [value for value, _ in BROKEN.values()]), Small)
    rows = decoded.orderBy("_meta.offset").collect()
    wrong = {
        case: row._error
        for row, (case, (_, reason)) in zip(rows, BROKEN.items(), strict=True)
        if not (row._error or "").startswith(reason)
    }
    assert wrong == {}
    assert all(value is None for row in rows for value in row[:6])


def test_defaults_fill_in_what_older_writers_left_out(spark: SparkSession) -> None:
    values: list[bytes | None] = [
        b'{"name":"a","count":1,"from_the_future":[1]}',
        b'{"name":"b","count":2,"price":1E-7}',
    ]
    first, second = kes_spark.events(records(spark, Small, values), Small).orderBy("_meta.offset").collect()
    assert tuple(first[:7]) == ("a", 1, Decimal("1.5"), "red", [], None, None)
    assert (second.price, second._error) == (Decimal("1e-7"), None)


class Zoned(msgspec.Struct):
    at: Annotated[dt.datetime, msgspec.Meta(tz=True)]


def test_a_time_that_must_say_its_zone(spark: SparkSession) -> None:
    values: list[bytes | None] = [b'{"at":"2026-01-02T03:04:05+02:00"}', b'{"at":"2026-01-02T03:04:05"}']
    first, second = kes_spark.events(records(spark, Zoned, values), Zoned).orderBy("_meta.offset").collect()
    assert first._error is None
    assert (second.at, second._error) == (None, "at: not a datetime with a zone in ISO 8601")


def test_other_types_are_left_out_and_other_versions_are_errors(spark: SparkSession) -> None:
    good = event_type_of(Small).encode(Small("a", 1))
    both = records(spark, Small, [good]).union(records(spark, Other, [b"{}"])).union(records(spark, Small, [good], 2))
    assert [row._error for row in kes_spark.events(both, Small).orderBy("_meta.version").collect()] == [
        None,
        "version 2 is newer than 1, the newest known here: update this program",
    ]
    assert set(kes_spark.split(both, [Small, Other])) == {Small, Other}


def test_on_error_fail_names_the_record(spark: SparkSession) -> None:
    with pytest.raises(Exception, match=r"cannot read Small at t\[0\]@0: missing field: name"):
        kes_spark.events(records(spark, Small, [b"{}"]), Small, on_error="fail").collect()


class Measured(msgspec.Struct):
    value: float


@pytest.mark.parametrize(
    ("cls", "columns", "problem"),
    [
        (Small, "cast(null as string) name, 1 count", "Small.name: null"),
        (Small, "'a' name, 1 count, 'green' colour", "Small.colour: not one of"),
        (Small, "'a' name, 1 count, array('x', null) tags", r"Small.tags\[\]: null"),
        (Small, "'a' name, 1 count, date'12345-01-01' day", "Small.day: year"),
        (Measured, "double('NaN') value", r"Measured\.value: NaN or infinite"),
        (Measured, "double('-Infinity') value", r"Measured\.value: NaN or infinite"),
    ],
)
def test_a_row_that_nobody_could_read_back_fails_the_job(
    spark: SparkSession, cls: type, columns: str, problem: str
) -> None:
    with pytest.raises(Exception, match=problem):
        kes_spark.encode(spark.sql(f"select {columns}"), cls, key=None).collect()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("'a' name", r"Small\.count has no column; there are name"),
        ("'a' name, 1.5D count", r"Small\.count is bigint, but the column is double; cast the column"),
        ("'a' name, 1 count, array(1) tags", r"Small\.tags\[\] is string, but the column is int"),
        ("1 name, 1 count", r"Small\.name is string"),
    ],
)
def test_columns_that_do_not_fit_are_named(spark: SparkSession, columns: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kes_spark.encode(spark.sql(f"select {columns}"), Small, key=None)


def test_keys_must_be_columns_of_text_or_bytes(spark: SparkSession) -> None:
    df = spark.sql("select 'é漢' name, 1 count, 7 number, X'00ff' raw")
    assert kes_spark.encode(df, Small, key="name").collect()[0].key == "é漢".encode()
    assert kes_spark.encode(df, Small, key="raw").collect()[0].key == b"\x00\xff"
    assert kes_spark.encode(df, Small, key=f.col("number").cast("string")).collect()[0].key == b"7"
    assert kes_spark.encode(df, Small, key=None).collect()[0].key is None
    with pytest.raises(ConfigError, match="key is int; cast it to string"):
        kes_spark.encode(df, Small, key="number")
    with pytest.raises(ConfigError, match="key='nobody' is no column"):
        kes_spark.encode(df, Small, key="nobody")
