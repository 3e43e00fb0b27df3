"""Shapes of event classes; what no column has, and values that no column takes. No session of Spark, no broker."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import re
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest
from msgspec import UNSET, UnsetType

import streams.spark as kes_spark
from streams.errors import ConfigError
from streams.events import EventType, event_type, event_type_of
from streams.spark.typed import json_decoding
from streams.spark.typed.event_format import EventBatches, EventsDataSource, _EventsReader
from streams.spark.typed.python_codec import EventReference
from streams.spark.typed.shapes import Scalar, shape_of
from tests.spark.typed_kit import read_batch
from tests.unit.test_round_trips import TYPES

pytestmark = pytest.mark.spark


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Defaults(msgspec.Struct):
    fixed: int = 5
    tags: list[str] = msgspec.field(default_factory=lambda: ["x"])
    ident: uuid.UUID = msgspec.field(default_factory=uuid.uuid4)
    at: dt.datetime = msgspec.field(default_factory=now)
    absent: int | UnsetType = UNSET


class OfPydantic(pydantic.BaseModel):
    fixed: int = 5
    tags: list[str] = pydantic.Field(default_factory=lambda: ["x"])
    ident: uuid.UUID = pydantic.Field(default_factory=uuid.uuid4)
    at: dt.datetime = pydantic.Field(default_factory=now)


@pytest.mark.parametrize("cls", [Defaults, OfPydantic], ids=lambda cls: cls.__name__)
def test_a_default_that_is_another_one_each_time_is_nobodys(cls: type) -> None:
    """It would be the same in all rows of a DataFrame: one identity for many records. A row without it is an error."""
    fields = {field.name: field for field in shape_of(cls).fields}
    assert {name: field.default for name, field in fields.items() if name != "absent"} == {
        "fixed": "5", "tags": '["x"]', "ident": None, "at": None,
    }  # fmt: skip
    assert not any(field.required for field in fields.values()), "a writer may leave it out: the reader makes it"


@pytest.mark.parametrize(
    ("kind", "default", "text"),
    [
        (tuple[str, ...], (), "[]"),
        (frozenset[int], frozenset({5}), "[5]"),
        (dict[str, float], {"a": 1e22}, '{"a":1e22}'),
        (bytes, b"\xff", '"/w=="'),
        (uuid.UUID, uuid.UUID(int=7), '"00000000-0000-0000-0000-000000000007"'),
        (Decimal, Decimal("1.50"), '"1.50"'),
        (dt.datetime, dt.datetime(2026, 1, 2, tzinfo=dt.UTC), '"2026-01-02T00:00:00Z"'),
        (int, -(2**63), "-9223372036854775808"),
        (bool, True, "true"),
    ],
)
def test_a_default_is_known_by_its_json(kind: Any, default: Any, text: str) -> None:
    made = msgspec.defstruct("Made", [("value", kind, msgspec.field(default_factory=lambda: default))])
    assert shape_of(made).fields[0].default == text


def test_a_field_that_may_be_absent_is_null_then() -> None:
    *_, absent = shape_of(Defaults).fields
    assert (absent.default, absent.required, absent.shape.nullable) == ("null", False, False)
    assert kes_spark.schema_of(Defaults)["absent"].nullable
    assert not kes_spark.schema_of(Defaults)["fixed"].nullable


def test_none_among_the_values_of_a_literal_is_optional() -> None:
    made: Any = msgspec.defstruct("Choice", [("size", Literal["s", None])])
    assert shape_of(made).fields[0].shape == Scalar(kind="str", nullable=True, allowed=("s",))


@pytest.mark.parametrize("zoned", [True, False, None])
def test_whether_a_time_has_a_zone_is_asked_as_the_class_asks(zoned: bool | None) -> None:
    kind: Any = Annotated[dt.datetime, msgspec.Meta(tz=zoned)]
    made = shape_of(msgspec.defstruct("Timed", [("at", kind)])).fields[0].shape
    assert made == Scalar(kind="local_datetime" if zoned is False else "datetime", zoned=bool(zoned))
    patterns = json_decoding._ZONED, json_decoding._TIME, json_decoding._LOCAL
    for text, matching in (("2026-01-02T03:04:05Z", "110"), ("2026-01-02 03:04:05.5-0130", "110"),
                           ("2026-01-02T03:04:05", "011"), ("2026-01-02T03:04:05Z?", "000")):  # fmt: skip
        found = [re.search(pattern.replace(r"\z", r"\Z"), text) is not None for pattern in patterns]  # Java's word
        assert "".join(str(int(one)) for one in found) == matching, text


class Mixed(enum.Enum):
    TEXT = "a"
    NUMBER = 2


@dataclasses.dataclass
class WithInit:
    value: int
    more: dataclasses.InitVar[int] = 7


@pytest.mark.parametrize(
    ("kind", "default", "problem"),
    [
        (Mixed, None, "Enums must contain either all str or all int"),
        (Literal["a", 1], None, "the values of an enum or Literal must be all text or all integers"),
        (float, math.inf, r"Made\.value: the default inf is none of a column's"),
        (float, math.nan, r"Made\.value: the default nan is none of a column's"),
        (int, 2**63, r"Made\.value: the default 9223372036854775808 is none of a column's"),
        (list[float], [math.inf], r"the default \[inf\] is none of a column's"),
        (int | str, None, r"Made\.value: a union of"),
        (dict[int, str], None, r"Made\.value: a dict in JSON has text keys"),
    ],
)
def test_what_no_column_has_is_refused_by_name(kind: Any, default: Any, problem: str) -> None:
    field: Any = ("value", kind) if default is None else ("value", kind, msgspec.field(default_factory=lambda: default))
    with pytest.raises(ConfigError, match=problem):
        kes_spark.schema_of(msgspec.defstruct("Made", [field]))


class Tree(msgspec.Struct):
    children: list[Tree]


class PydanticBytes(pydantic.BaseModel):
    value: bytes


class OneSided(pydantic.BaseModel):
    value: int = pydantic.Field(default=0, serialization_alias="number")


class FurtherNames(pydantic.BaseModel):
    value: int = pydantic.Field(default=0, validation_alias=pydantic.AliasChoices("number", "value"))


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (OneSided, r"OneSided\.value: it is written as 'number' and read as 'value'"),
        (FurtherNames, r"FurtherNames\.value: is read by other names, too"),
        (Tree, "contains itself"),
        (msgspec.defstruct("AsArray", [("value", int)], array_like=True), "array_like"),
        (PydanticBytes, r"PydanticBytes\.value: pydantic writes bytes as text"),
        (msgspec.defstruct("TwoCases", [("value", int), ("Value", int)]), "differ only in case"),
        (WithInit, "WithInit: dataclasses with `InitVar`"),
    ],
)
def test_a_class_that_no_row_can_be_is_refused_by_name(cls: type, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kes_spark.schema_of(cls)


class Loose:
    """A codec that takes more than msgspec: half surrogate pairs."""

    def encode(self, value: Counts) -> bytes:
        return json.dumps({"by_name": value.by_name}).encode()

    def decode(self, data: bytes) -> Counts:
        return Counts(**json.loads(data))


class Counts(msgspec.Struct):
    by_name: dict[str, int]


class Sighting(msgspec.Struct):
    at: dt.datetime
    number: int | UnsetType = UNSET


@event_type("Paid, at last")
class PaidAtLast(msgspec.Struct):
    cents: int


def rows(event: EventType[Any], values: list[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = EventBatches(event).of(read_batch(event.name, values)).to_pylist()
    return found


@pytest.mark.parametrize("far", [b"0001-01-01T00:00:00+14:00", b"9999-12-31T23:59:59-14:00"])
def test_a_time_that_utc_does_not_have(far: bytes) -> None:
    good, bad = rows(event_type_of(Sighting), [b'{"at":"2026-01-02T03:04:05+02:00"}', b'{"at":"%s"}' % far])
    assert good["at"] == dt.datetime(2026, 1, 2, 1, 4, 5, tzinfo=dt.UTC)
    assert (bad["at"], bad["_error"]) == (None, "at: a time that is outside of the years 1 to 9999 in UTC")


def test_a_field_that_is_absent_is_null() -> None:
    found = rows(
        event_type_of(Sighting), [b'{"at":"2026-01-02T03:04:05Z"}', b'{"at":"2026-01-02T03:04:05Z","number":7}']
    )
    assert [(row["number"], row["_error"]) for row in found] == [(None, None), (7, None)]


def test_half_a_surrogate_pair_in_a_name() -> None:
    event = event_type_of(event_type("counts", codec=Loose())(Counts))
    good, bad = rows(event, [b'{"by_name":{"a":1}}', b'{"by_name":{"\\ud800":1}}'])
    assert (good["by_name"], good["_error"]) == ([("a", 1)], None)
    assert (bad["by_name"], bad["_error"]) == (None, "by_name{}: half of a surrogate pair")


def test_a_name_with_a_comma_is_one_name() -> None:
    """In the option ``types`` it would be two, and nothing would be read."""
    reference = EventReference.of(event_type_of(PaidAtLast), "this test")
    options = {"event": str(reference), "subscribe": "t", "bootstrap.servers": "b:1"}
    source = EventsDataSource(options)
    reader = source.reader(source.schema())
    assert isinstance(reader, _EventsReader)
    assert reader._options.types == {"Paid, at last"}


def test_what_an_event_source_refuses_has_no_columns() -> None:
    """By the same table, and in the same words."""
    for type_, lost in TYPES:
        if lost and lost != "OneSided.n":  # a dataclass of pydantic, which has no columns at all
            with pytest.raises(ConfigError, match=f"^{lost}: .*so it would not come back as it was written"):
                shape_of(type_)
