"""The table of classes and values that both sides write and read, and how their bytes may differ."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
import pydantic

from streams.events import event_type

UTC = dt.UTC


class Colour(enum.Enum):
    RED = "red"
    ODD = 'o"d\\'


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2**40


class Place(msgspec.Struct, rename="camel"):
    post_code: str
    metres_up: float | None = None
    prices: list[Decimal] = []


class Choice(msgspec.Struct):
    colour: Colour
    level: Level
    size: Literal["s", "m"]
    step: Literal[1, -1]


class Maybe(msgspec.Struct):
    text: str | None
    number: int | None = None
    five: int | None = 5
    tags: list[str] = msgspec.field(default_factory=lambda: ["x"])
    place: Place | None = None


class Renamed(msgspec.Struct, rename={"value": "the value", "other": "ö.$'x"}):
    value: str
    other: int = 1


class Kebab(msgspec.Struct, rename="kebab"):
    post_code: str
    note_of_it: str | None = "n"


class Tagged(msgspec.Struct, tag_field="kind", tag="tagged!"):
    value: int


class Lists(msgspec.Struct):
    texts: list[str]
    holes: list[int | None]
    deep: list[list[float]]
    several: tuple[bool, ...]
    days: list[dt.date]
    idents: list[uuid.UUID]
    counts: dict[str, int]
    inner: dict[str, list[Place]]
    places: list[Place]
    tagged: list[Tagged]


@event_type("plain-one", version=7)
@dataclasses.dataclass
class Plain:
    text: str
    at: dt.datetime
    place: Place
    note: str | None = None


class Inner(pydantic.BaseModel):
    price: Decimal
    names: list[str] = []


class Model(pydantic.BaseModel):
    text: str = pydantic.Field(alias="Text")
    ratio: float
    at: dt.datetime
    inner: Inner
    more: list[Inner] = [Inner(price=Decimal(1))]
    note: str | None = None


TEXTS = [
    "", "a", "5", "true", "[1]", '{"a":1}', "-", "null", "é漢😀",
    '"\\/\b\f\n\r\t', "\x00\x01\x1f\x7f", "\u2028\u2029", "a" * 5000,
]  # fmt: skip
INTEGERS = [0, -1, 2**63 - 1, -(2**63), 2**53 + 1]
FLOATS = [
    0.0, -0.0, 1.0, 0.1, -1.5, 1e308, 1.7976931348623157e308, 5e-324, 2.2250738585072014e-308, 1e16, 1e22, 1e-5,
    123456789.125, 2**53 + 2.0,
]  # fmt: skip
DECIMALS = [
    Decimal(text)
    for text in ("0", "1", "-1.5", "0.000000001", "99999999999999999999999999999.999999999", "1.500", "1E+3", "-0.1")
]
TIMES = [
    dt.datetime(2026, 1, 2, 3, 4, 5, 678901),
    dt.datetime(1, 1, 2),
    dt.datetime(9999, 12, 30, 23, 59, 59, 999999),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
    dt.datetime(2026, 3, 29, 2, 30),
    dt.datetime(1582, 10, 10),
    dt.datetime(2000, 2, 29, 12, 0, 0, 120000),
]
AWARE = [time.replace(tzinfo=UTC) for time in TIMES] + [
    dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=-9, minutes=-30)))
]
PLACE = Place("5", -0.0, [Decimal("1.5"), Decimal(0)])

FLOAT = "floats: 1.0E22 is written for 1e22 (the same number)"
FRACTION = "times: always six digits of the second's fraction, and always UTC (the same instant)"
PLACES = "decimals: always nine places, 1.500000000 for 1.5 (the same number)"
HEX = "control characters: \\u001F for \\u001f (the same text)"

Case = tuple[type, list[Any], frozenset[str]]


def columns(name: str, fields: dict[str, tuple[Any, list[Any]]], *differences: str) -> Case:
    """A class of these fields, and objects that have all of their values, the shorter columns' again and again."""
    cls = msgspec.defstruct(name, [(field, kind) for field, (kind, _) in fields.items()])
    values = [values for _, values in fields.values()]
    rows = [[column[row % len(column)] for column in values] for row in range(max(map(len, values)))]
    return cls, [cls(*row) for row in rows], frozenset(differences)


SAME_BYTES: dict[str, tuple[Any, list[Any]]] = {
    "number": (int, INTEGERS),
    "flag": (bool, [True, False]),
    "raw": (bytes, [b"", b"\x00", b"\xff\xfe", b"abc", bytes(range(256))]),
    "ident": (uuid.UUID, [uuid.UUID(int=value) for value in (0, 7, 2**128 - 1)]),
    "day": (dt.date, [time.date() for time in TIMES]),
}
SAME_MEANING: dict[str, tuple[Any, list[Any]]] = {
    "text": (str, TEXTS),
    "ratio": (float, FLOATS),
    "price": (Decimal, DECIMALS),
    "instant": (dt.datetime, AWARE),
    "wall": (Annotated[dt.datetime, msgspec.Meta(tz=False)], TIMES),
}
TABLE: list[Case] = [
    columns("SameBytes", SAME_BYTES),
    columns("SameMeaning", SAME_MEANING, HEX, FLOAT, PLACES, FRACTION),
    (Choice, [Choice(Colour.RED, Level.HIGH, "s", -1), Choice(Colour.ODD, Level.LOW, "m", 1)], frozenset()),
    (Maybe, [Maybe(None), Maybe("", 0, None, [], PLACE), Maybe("x", None, 7, ["5", "é"])], frozenset({PLACES})),
    (Renamed, [Renamed("5", 2), Renamed("x")], frozenset()),
    (Kebab, [Kebab("5", None), Kebab("x")], frozenset()),
    (Tagged, [Tagged(5)], frozenset()),
    (
        Lists,
        [
            Lists([], [], [], (), [], [], {}, {}, [], []),
            Lists(
                ["", "5", "é"],
                [None, 1, None],
                [[], [-0.0, 1e308]],
                (True, False),
                [dt.date(1, 1, 2)],
                [uuid.UUID(int=5)],
                {"": 1, "a.b": 2, "5": -1},
                {"x": [PLACE], "y": []},
                [PLACE, Place("x")],
                [Tagged(1), Tagged(2)],
            ),
        ],
        frozenset({FLOAT, PLACES}),
    ),
    (Plain, [Plain("5", AWARE[0], PLACE, "n"), Plain("", AWARE[1], Place(""))], frozenset({FRACTION, PLACES})),
    (
        Model,
        [Model(Text="5", ratio=1e22, at=AWARE[0], inner=Inner(price=Decimal("1.5"), names=["5"]))],
        frozenset({FRACTION, PLACES, FLOAT}),
    ),
]
