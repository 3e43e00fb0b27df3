"""Typed events: what Spark writes is what ``streams.events`` reads, and the other way round."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import os
import random
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import streams.spark as kes_spark
from streams.errors import ConfigError
from streams.events import event_type, event_type_of
from tests.spark.typed_kit import frame, records

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]
UTC = dt.UTC
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(msgspec.Struct, rename="camel"):
    post_code: str
    metres_up: float | None = None
    prices: list[Decimal] = []


@event_type("thing-happened", version=3)
class Thing(msgspec.Struct):
    text: str
    number: int
    ratio: float
    flag: bool
    raw: bytes
    at: dt.datetime
    wall: Annotated[dt.datetime, msgspec.Meta(tz=False)]
    day: dt.date
    price: Decimal
    ident: uuid.UUID
    colour: Colour
    size: Literal["s", "m"]
    note: str | None
    tags: list[str]
    holes: list[int | None]
    counts: dict[str, int]
    place: Place
    places: list[Place]
    by_name: dict[str, Place]
    maybe: Place | None = None


@dataclasses.dataclass
class Plain:
    text: str
    price: Decimal
    inner: list[Place]
    note: str | None = None


class Inner(pydantic.BaseModel):
    price: Decimal
    names: list[str] = []


class Model(pydantic.BaseModel):
    text: str = pydantic.Field(alias="Text")
    price: Decimal
    at: dt.datetime
    inner: Inner
    more: list[Inner] = [Inner(price=Decimal(1))]
    note: str | None = None


def some_text(rng: random.Random) -> str:
    return "".join(rng.choice('aZ0 "\\\n\t/{}[]<&é漢😀\u2028\x7f') for _ in range(rng.randrange(8)))


def some_decimal(rng: random.Random) -> Decimal:
    digits = rng.choice([0, 1, 10**9, 10**37, rng.randrange(10**38)])
    sign = rng.randrange(2)
    return Decimal((sign, tuple(map(int, str(digits))), -9))  # 38 digits: arithmetic would round them


def some_place(rng: random.Random) -> Place:
    return Place(some_text(rng), rng.choice([None, 0.0, -1e-300, rng.random()]), [some_decimal(rng) for _ in range(2)])


def some_time(rng: random.Random) -> dt.datetime:
    return dt.datetime(rng.randrange(1950, 2100), 3, 31, 1, 59, 59, rng.randrange(10**6), UTC)


def some_thing(rng: random.Random) -> Thing:
    return Thing(
        text=some_text(rng), number=rng.choice([0, 2**63 - 1, -(2**63), rng.randrange(10**6)]),
        ratio=rng.choice([0.0, 1e300, 5e-324, -0.1, rng.random()]), flag=rng.random() < 0.5,
        raw=rng.randbytes(rng.randrange(5)),
        at=some_time(rng), wall=some_time(rng).replace(tzinfo=None), day=some_time(rng).date(), price=some_decimal(rng),
        ident=uuid.UUID(int=rng.getrandbits(128)), colour=rng.choice(list(Colour)), size=rng.choice(["s", "m"]),
        note=rng.choice([None, "", some_text(rng)]), tags=[some_text(rng) for _ in range(rng.randrange(3))],
        holes=[1, None], counts={some_text(rng): 1}, place=some_place(rng), places=[some_place(rng)],
        by_name={"x": some_place(rng)}, maybe=rng.choice([None, some_place(rng)]),
    )  # fmt: skip


def seen(value: Any) -> Any:
    """A collected cell in the same form. Times come back naive, in UTC: the session's zone and the process's."""
    if isinstance(value, tuple | list):
        made = [seen(each) for each in value]
        return tuple(made) if isinstance(value, tuple) else made
    return {name: seen(each) for name, each in value.items()} if isinstance(value, dict) else value


CASES = {
    Thing: some_thing,
    Plain: lambda rng: Plain(some_text(rng), some_decimal(rng), [some_place(rng)], rng.choice([None, "x"])),
    Model: lambda rng: Model(
        Text=some_text(rng), price=some_decimal(rng), at=some_time(rng), inner=Inner(price=some_decimal(rng))
    ),
}


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_what_spark_writes_the_event_source_reads(spark: SparkSession, cls: type) -> None:
    print(f"SEED={SEED}")
    rng = random.Random(SEED)
    objects = [CASES[cls](rng) for _ in range(60)]
    event = event_type_of(cls)
    rows = kes_spark.encode(frame(spark, objects), cls, key="text").collect()
    assert [event.decode(bytes(row.value), row.version) for row in rows] == objects
    assert {(row.type, row.version) for row in rows} == {(event.name, event.version)}
    assert [bytes(row.key).decode() for row in rows] == [each.text for each in objects]


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_what_an_event_source_writes_spark_reads(spark: SparkSession, cls: type) -> None:
    print(f"SEED={SEED}")
    rng = random.Random(SEED)
    objects = [CASES[cls](rng) for _ in range(60)]
    values: list[bytes | None] = [event_type_of(cls).encode(each) for each in objects]
    decoded = kes_spark.events(records(spark, cls, values), cls)
    assert decoded.where("_error is not null").count() == 0
    columns = [name for name in decoded.columns if not name.startswith("_")]
    # Compared in the JVM's own form too: a DataFrame made of the objects has the same rows, field by field.
    ours, theirs = decoded.select(columns), frame(spark, objects)
    assert ours.schema.simpleString() == theirs.schema.simpleString()
    as_text = [f.to_json(f.struct("*"), {"ignoreNullFields": "false"}).alias("row")]
    assert [row.row for row in ours.select(as_text).collect()] == [row.row for row in theirs.select(as_text).collect()]
    assert [seen(tuple(row)) for row in ours.collect()] == [seen(tuple(row)) for row in theirs.collect()]


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
    both = records(spark, Small, [good]).union(records(spark, Plain, [b"{}"])).union(records(spark, Small, [good], 2))
    assert [row._error for row in kes_spark.events(both, Small).orderBy("_meta.version").collect()] == [
        None,
        "version 2 is newer than 1, the newest known here: update this program",
    ]
    assert set(kes_spark.split(both, [Small, Plain])) == {Small, Plain}


def test_on_error_fail_names_the_record(spark: SparkSession) -> None:
    with pytest.raises(Exception, match=r"cannot read Small at t\[0\]@0: missing field: name"):
        kes_spark.events(records(spark, Small, [b"{}"]), Small, on_error="fail").collect()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("cast(null as string) name, 1 count", "Small.name: null"),
        ("'a' name, 1 count, 'green' colour", "Small.colour: not one of"),
        ("'a' name, 1 count, array('x', null) tags", r"Small.tags\[\]: null"),
        ("'a' name, 1 count, date'12345-01-01' day", "Small.day: year"),
    ],
)
def test_a_row_that_nobody_could_read_back_fails_the_job(spark: SparkSession, columns: str, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        kes_spark.encode(spark.sql(f"select {columns}"), Small, key="name").collect()


class Measured(msgspec.Struct):
    value: float


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_fail_the_job(spark: SparkSession, value: str) -> None:
    with pytest.raises(Exception, match=r"Measured\.value: NaN or infinite"):
        kes_spark.encode(spark.sql(f"select double('{value}') value"), Measured, key=None).collect()


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
    df = spark.sql("select 'a' name, 1 count, 7 number, X'00ff' raw")
    assert kes_spark.encode(df, Small, key="raw").collect()[0].key == b"\x00\xff"
    assert kes_spark.encode(df, Small, key=f.col("number").cast("string")).collect()[0].key == b"7"
    assert kes_spark.encode(df, Small, key=None).collect()[0].key is None
    with pytest.raises(ConfigError, match="key is int; cast it to string"):
        kes_spark.encode(df, Small, key="number")
    with pytest.raises(ConfigError, match="key='nobody' is no column"):
        kes_spark.encode(df, Small, key="nobody")


class Tree(msgspec.Struct):
    children: list[Tree]


class Either(msgspec.Struct):
    value: int | str


class ByNumber(msgspec.Struct):
    value: dict[int, str]


class AsArray(msgspec.Struct, array_like=True):
    value: int


class PydanticBytes(pydantic.BaseModel):
    value: bytes


class TwoCases(msgspec.Struct):
    value: int
    Value: int


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (Tree, "contains itself"),
        (Either, r"Either\.value: a union of"),
        (ByNumber, r"ByNumber\.value: a dict in JSON has text keys"),
        (AsArray, "array_like"),
        (PydanticBytes, r"PydanticBytes\.value: pydantic writes bytes as text"),
        (TwoCases, "differ only in case"),
    ],
)
def test_types_that_spark_cannot_hold_exactly_are_refused_by_name(cls: type, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kes_spark.schema_of(cls)
