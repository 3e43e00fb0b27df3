"""Types of msgspec and values after public reports of what was written and not read again, or read as another.

Of each: its name, what becomes of the value (in JSON, in MessagePack), its type, and the value. ``=``: it comes back,
to the sign of a zero; ``~``: in the class that its field has (a list for a tuple); ``!``: refused with the value, ``T``
with the type; ``?``: in a field of any class it comes back as plain data, which is logged, and refused in tests.
"""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import math
import pathlib
import uuid
from collections import OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType


def struct_of(**f: Any) -> Any:
    return msgspec.defstruct("S", list(f.items()), kw_only=True)


def one(t: Any, v: Any) -> tuple[Any, Any]:
    cls = struct_of(v=t)
    return cls, cls(v=v)


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Num(enum.IntEnum):
    ONE = 1
    TWO = 2


class StrE(enum.StrEnum):
    A = "a"
    B = "b"


class Fl(enum.Flag):
    A = 1
    B = 2


class IFl(enum.IntFlag):
    A = 1
    B = 2


MyInt, MyStr, MyList, MyDict, MyFloat, MyDate, MyDT = (
    type(f"My{of.__name__}", (of,), {}) for of in (int, str, list, dict, float, date, datetime)
)


class P(NamedTuple):
    x: int
    y: str = "q"


class TD(TypedDict):
    a: int
    b: NotRequired[str]


class Base(msgspec.Struct):
    n: int = 0


class Sub(Base):
    more: int = 1


class Tag1(msgspec.Struct, tag=True):
    n: int = 0


class Tag2(msgspec.Struct, tag=True):
    n: int = 0


class Arr(msgspec.Struct, array_like=True):
    a: int
    b: str = "x"


class Omit(msgspec.Struct, omit_defaults=True):
    a: int = 0
    many: list[int] = msgspec.field(default_factory=list)


class Ren(msgspec.Struct, rename="camel"):
    my_field: int = 0


class Ren2(msgspec.Struct):
    my_field: int = msgspec.field(default=0, name="other")


class Forb(msgspec.Struct, forbid_unknown_fields=True):
    a: int = 0


class Post(msgspec.Struct):
    a: int = 0

    def __post_init__(self):
        self.a += 1


class PostPure(msgspec.Struct):
    a: int = 0

    def __post_init__(self):
        if self.a < 0:
            raise ValueError("neg")


@dataclasses.dataclass
class DC:
    a: int = 0
    b: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class DCS:
    a: int = 0
    b: float = 0.5


@dataclasses.dataclass
class DCInit:
    a: int = 0
    b: int = dataclasses.field(default=7, init=False)


@dataclasses.dataclass
class DCPriv:
    _a: int = 0


@dataclasses.dataclass
class DCDefFac:
    a: list[int] = dataclasses.field(default_factory=list)


class Tree(msgspec.Struct):
    v: int
    kids: list[Tree] = []


T = TypeVar("T")


class Gen(msgspec.Struct, Generic[T]):
    v: T


NT = NewType("NT", int)


ROWS: list[tuple[Any, ...]] = [
    ("int", "==", *one(int, 5)),
    ("int 2**63", "==", *one(int, 2**63)),
    ("int 2**64", "=!", *one(int, 2**64)),
    ("int -2**63", "==", *one(int, -(2**63))),
    ("int 10**100", "=!", *one(int, 10**100)),
    ("bool in int", "!!", *one(int, True)),
    ("int in bool", "!!", *one(bool, 1)),
    ("str in int", "!!", *one(int, "5")),
    ("float in int", "!!", *one(int, 5.0)),
    ("float in int .5", "!!", *one(int, 5.5)),
    ("None in int", "!!", *one(int, None)),
    ("MyInt", "!!", *one(int, MyInt(5))),
    ("IntEnum in int", "~~", *one(int, Num.ONE)),
    ("float", "==", *one(float, 0.1)),
    ("float -0.0", "==", *one(float, -0.0)),
    ("nan", "!=", *one(float, math.nan)),
    ("inf", "!=", *one(float, math.inf)),
    ("-inf", "!=", *one(float, -math.inf)),
    ("float 1e308", "==", *one(float, 1.7976931348623157e308)),
    ("float 5e-324", "==", *one(float, 5e-324)),
    ("int in float", "~~", *one(float, 5)),
    ("int 2**53+1 in float", "!!", *one(float, 2**53 + 1)),
    ("huge int in float", "!!", *one(float, 10**400)),
    ("bool in float", "!!", *one(float, True)),
    ("Decimal in float", "!!", *one(float, Decimal("1.5"))),
    ("MyFloat", "!!", *one(float, MyFloat(1.5))),
    ("nan in list", "!=", *one(list[float], [math.nan])),
    ("nan in optional", "!=", *one(float | None, math.nan)),
    ("inf key", "==", *one(dict[float, int], {math.inf: 1})),
    ("float|int int", "==", *one(int | float, 2**60)),
    ("float|int 1.0", "==", *one(int | float, 1.0)),
    ("str", "==", *one(str, "é\u0000\U0001f600")),
    ("lone surrogate", "!!", *one(str, "\ud800")),
    ("str true", "==", *one(str, "true")),
    ("MyStr", "!!", *one(str, MyStr("a"))),
    ("StrEnum in str", "~~", *one(str, StrE.A)),
    ("bytes in str", "!!", *one(str, b"a")),
    ("bytes", "==", *one(bytes, b"\x00\xff")),
    ("bytearray in bytes", "~~", *one(bytes, bytearray(b"a"))),
    ("bytearray", "==", *one(bytearray, bytearray(b"a"))),
    ("memoryview", "==", *one(memoryview, memoryview(b"ab"))),
    ("str in bytes", "!!", *one(bytes, "YQ==")),
    ("bytes|None", "==", *one(bytes | None, b"x")),
    ("date", "==", *one(date, date(1, 1, 1))),
    ("datetime in date", "!!", *one(date, datetime(2026, 1, 2, 3))),
    ("date in datetime", "!!", *one(datetime, date(2026, 1, 2))),
    ("MyDate", "!!", *one(date, MyDate(2026, 1, 1))),
    ("naive", "==", *one(datetime, datetime(2026, 1, 2, 3, 4, 5, 6))),
    ("utc", "==", *one(datetime, datetime(2026, 1, 2, tzinfo=UTC))),
    ("offset", "=~", *one(datetime, datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=30))))),
    ("zone", "=~", *one(datetime, datetime(2026, 7, 2, tzinfo=ZoneInfo("Europe/Amsterdam")))),
    ("seconds offset", "!~", *one(datetime, datetime(1920, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam")))),
    ("micro offset", "!~", *one(datetime, datetime(1920, 1, 1, tzinfo=timezone(timedelta(microseconds=5))))),
    ("fold", "=~", *one(datetime, datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Amsterdam")))),
    ("naive fold", "==", *one(datetime, datetime(2026, 10, 25, 2, 30, fold=1))),
    ("dt min", "==", *one(datetime, datetime.min)),
    ("dt max", "==", *one(datetime, datetime.max)),
    ("dt max off", "=!", *one(datetime, datetime.max.replace(tzinfo=timezone(-timedelta(hours=5))))),
    ("dt min off", "=!", *one(datetime, datetime.min.replace(tzinfo=timezone(timedelta(hours=5))))),
    ("MyDT", "!!", *one(datetime, MyDT(2026, 1, 1))),
    ("seconds offset in list", "!~", *one(list[datetime], [datetime(1920, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam"))])),
    (
        "seconds offset key",
        "!~",
        *one(dict[datetime, int], {datetime(1920, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam")): 1}),
    ),
    ("time", "==", *one(time, time(1, 2, 3, 4))),
    ("time tz", "==", *one(time, time(1, 2, tzinfo=timezone(timedelta(hours=2))))),
    ("time sec", "!!", *one(time, time(1, 2, tzinfo=timezone(timedelta(minutes=19, seconds=32))))),
    ("time fold", "==", *one(time, time(1, fold=1))),
    ("timedelta", "==", *one(timedelta, timedelta(days=-1, microseconds=7))),
    ("timedelta max", "==", *one(timedelta, timedelta.max)),
    ("timedelta in float|td", "==", *one(timedelta, timedelta(microseconds=1))),
    ("decimal", "==", *one(Decimal, Decimal("1.50"))),
    ("decimal nan", "==", *one(Decimal, Decimal("nan"))),
    ("decimal inf", "==", *one(Decimal, Decimal("inf"))),
    ("decimal snan", "==", *one(Decimal, Decimal("sNaN"))),
    ("decimal -0", "==", *one(Decimal, Decimal("-0"))),
    ("decimal 1E+5", "==", *one(Decimal, Decimal("1E+5"))),
    ("int in decimal", "~~", *one(Decimal, 5)),
    ("float in decimal", "~~", *one(Decimal, 1.1)),
    ("uuid", "==", *one(uuid.UUID, uuid.UUID(int=5))),
    ("str in uuid", "!!", *one(uuid.UUID, "x")),
    ("ip", "TT", *one(ipaddress.IPv4Address, ipaddress.ip_address("1.2.3.4"))),
    ("path", "TT", *one(pathlib.Path, pathlib.Path("/x"))),
    ("complex", "TT", *one(complex, 1j)),
    ("fraction", "TT", *one(Fraction, Fraction(1, 3))),
    ("enum", "==", *one(Color, Color.RED)),
    ("intenum", "==", *one(Num, Num.TWO)),
    ("int in intenum", "~~", *one(Num, 2)),
    ("str in enum", "~~", *one(Color, "r")),
    ("strenum", "==", *one(StrE, StrE.B)),
    ("flag", "==", *one(Fl, Fl.A | Fl.B)),
    ("intflag", "==", *one(IFl, IFl.A | IFl.B)),
    ("literal", "==", *one(Literal["a", 1, None], "a")),
    ("literal wrong", "!!", *one(Literal["a"], "b")),
    ("literal True as 1", "!!", *one(Literal[1], True)),
    ("list", "==", *one(list[int], [1, 2])),
    ("tuple in list", "~~", *one(list[int], (1, 2))),
    ("bool in list", "!!", *one(list[int], [1, True])),
    ("MyList", "~~", *one(list[int], MyList([1]))),
    ("set in list", "~~", *one(list[int], {1, 2})),
    ("deque", "!!", *one(list[int], deque([1]))),
    ("set", "==", *one(set[int], {3, 1, 2})),
    ("frozenset", "==", *one(frozenset[str], frozenset("ab"))),
    ("list in set", "~~", *one(set[int], [1, 1, 2])),
    ("set of nan", "!!", *one(set[float], {math.nan})),
    ("set bool", "!!", *one(set[int], {True, 2})),
    ("tuple", "==", *one(tuple[int, str], (1, "a"))),
    ("tuple short", "!!", *one(tuple[int, str], (1,))),
    ("vartuple", "==", *one(tuple[int, ...], (1, 2))),
    ("list in tuple", "~~", *one(tuple[int, ...], [1, 2])),
    ("bare tuple", "??", *one(tuple, (1, (2,)))),
    ("namedtuple", "==", *one(P, P(1, "z"))),
    ("tuple in namedtuple", "~~", *one(P, (1, "z"))),
    ("namedtuple bool", "!!", *one(P, P(True))),
    ("typeddict", "==", *one(TD, {"a": 1, "b": "x"})),
    ("typeddict missing", "!!", *one(TD, {"b": "x"})),
    ("typeddict extra", "!!", *one(TD, {"a": 1, "c": 2})),
    ("typeddict bool", "!!", *one(TD, {"a": True})),
    ("dict", "==", *one(dict[str, int], {"a": 1})),
    ("dict int key", "==", *one(dict[int, str], {1: "a"})),
    ("dict bool key", "!!", *one(dict[int, str], {True: "a"})),
    ("dict bool key typed", "!=", *one(dict[bool, str], {True: "a"})),
    ("dict float key", "==", *one(dict[float, str], {1.5: "a"})),
    ("dict date key", "==", *one(dict[date, str], {date(2026, 1, 1): "a"})),
    ("dict uuid key", "==", *one(dict[uuid.UUID, str], {uuid.UUID(int=1): "a"})),
    ("dict enum key", "==", *one(dict[Color, str], {Color.RED: "a"})),
    ("dict intenum key", "==", *one(dict[Num, str], {Num.ONE: "a"})),
    ("dict tuple key", "!=", *one(dict[tuple[int, int], str], {(1, 2): "a"})),
    ("dict bytes key", "==", *one(dict[bytes, str], {b"a": "a"})),
    ("dict None key", "!=", *one(dict[str | None, str], {None: "a"})),
    ("dict str|int key", "!=", *one(dict[str | int, str], {1: "a", "1": "b"})),
    ("dict decimal key", "==", *one(dict[Decimal, str], {Decimal("1.0"): "a"})),
    ("OrderedDict", "~~", *one(dict[str, int], OrderedDict(a=1))),
    ("defaultdict", "~~", *one(dict[str, int], defaultdict(int, a=1))),
    ("MyDict", "~~", *one(dict[str, int], MyDict(a=1))),
    ("any dict int key", "?=", *one(dict[Any, Any], {1: 2})),
    ("plain dict int key", "?=", *one(dict, {1: 2})),
    ("dict dt in date key", "!!", *one(dict[date, int], {datetime(2026, 1, 1, 5): 1})),
    ("Any int", "==", *one(Any, 5)),
    ("Any tuple", "??", *one(Any, (1, 2))),
    ("Any set", "??", *one(Any, {1})),
    ("Any datetime", "??", *one(Any, datetime(2026, 1, 1))),
    ("Any nan", "!=", *one(Any, math.nan)),
    ("Any bytes", "?=", *one(Any, b"x")),
    ("Any struct", "??", *one(Any, Base(3))),
    ("Any int keys", "?=", *one(Any, {1: 2})),
    ("Any decimal", "??", *one(Any, Decimal("1.5"))),
    ("Any enum", "??", *one(Any, Color.RED)),
    ("Any bool keys", "!=", *one(Any, {True: 2})),
    ("object", "TT", *one(object, [1])),
    ("Any big int", "=!", *one(Any, 10**30)),
    ("Raw", "==", *one(Raw, Raw(b"1"))),
    ("Raw empty", "!!", *one(Raw, Raw())),
    ("Raw bad", "!!", *one(Raw, Raw(b"hello"))),
    ("Raw two", "!!", *one(Raw, Raw(b"1,2"))),
    ("Raw|None", "TT", *one(Raw | None, Raw(b"1"))),
    ("Raw spaces", "!!", *one(Raw, Raw(b" 1 "))),
    ("Raw list", "!!", *one(list[Raw], [Raw(b"1"), Raw(b"2,3")])),
    ("Unset", "!!", *one(int | UnsetType, UNSET)),
    ("Unset set", "==", *one(int | UnsetType, 5)),
    ("Unset bool", "!!", *one(int | UnsetType, True)),
    ("Unset|None", "==", *one(int | None | UnsetType, None)),
    ("meta ge ok", "==", *one(Annotated[int, Meta(ge=0)], 0)),
    ("meta ge", "!!", *one(Annotated[int, Meta(ge=0)], -1)),
    ("meta len", "!!", *one(Annotated[str, Meta(max_length=1)], "ab")),
    ("meta pattern", "!!", *one(Annotated[str, Meta(pattern="^a")], "b")),
    ("meta tz", "!!", *one(Annotated[datetime, Meta(tz=True)], datetime(2026, 1, 1))),
    ("meta mult", "!!", *one(Annotated[float, Meta(multiple_of=0.5)], 0.3)),
    ("meta list", "!!", *one(list[Annotated[int, Meta(lt=5)]], [6])),
    ("meta key", "!!", *one(dict[Annotated[str, Meta(min_length=1)], int], {"": 1})),
    ("meta opt", "!!", *one(Annotated[int, Meta(ge=0)] | None, -1)),
    ("nested", "==", *one(Base, Base(5))),
    ("nested sub", "!!", *one(Base, Sub())),
    ("nested bool", "!!", *one(Base, Base(True))),
    ("list sub", "!!", *one(list[Base], [Sub()])),
    ("nested None", "!!", *one(Base, None)),
    ("tagged union", "==", *one(Tag1 | Tag2, Tag2(3))),
    ("tag wrong", "!!", *one(Tag1 | Tag2, Base())),
    ("array like", "==", *one(Arr, Arr(1))),
    ("array bool", "!!", *one(Arr, Arr(True))),
    ("omit", "==", Omit, Omit()),
    ("omit bool", "!!", Omit, Omit(a=False)),
    ("omit l bool", "!!", Omit, Omit(many=[False])),
    ("rename", "==", Ren, Ren(5)),
    ("rename2", "==", Ren2, Ren2(5)),
    ("rename bool", "!!", Ren, Ren(True)),
    ("forbid", "==", Forb, Forb(1)),
    ("post changes", "!!", Post, Post(1)),
    ("post pure", "==", PostPure, PostPure(1)),
    ("dataclass", "==", DC, DC(1)),
    ("dc bool", "!!", DC, DC(True)),
    ("dc slots", "==", DCS, DCS(1)),
    ("dc slots bool", "!!", DCS, DCS(True)),
    ("dc init=False", "==", DCInit, DCInit(1)),
    ("dc private", "==", DCPriv, DCPriv(3)),
    ("dc factory", "==", DCDefFac, DCDefFac([1])),
    ("dc factory bool", "!!", DCDefFac, DCDefFac([True])),
    ("tree", "==", Tree, Tree(1, [Tree(2)])),
    ("tree bool", "!!", Tree, Tree(1, [Tree(True)])),
    ("generic", "==", Gen[int], Gen(5)),
    ("generic bool", "!!", Gen[int], Gen(True)),
    ("generic free", "??", Gen, Gen((1,))),
    ("newtype", "==", *one(NT, 5)),
    ("newtype bool", "!!", *one(NT, True)),
    ("top list", "==", list[int], [1]),
    ("top bool", "!!", list[int], [True]),
    ("top int|None", "==", int | None, None),
    ("top float", "!=", float, math.nan),
    ("top date", "!!", date, datetime(2026, 1, 1, 5)),
    ("nan in int|float", "!=", *one(int | float, math.nan)),
    ("inf in str|float", "!=", *one(str | float | None, math.inf)),
    ("top dict", "??", dict, {"a": (1, 2)}),
    ("top dict[str,Any]", "??", dict[str, Any], {"a": datetime(2026, 1, 1)}),
    ("top union", "!!", int | str, True),
    ("top Any", "??", Any, (1,)),
    ("top bool", "==", bool, True),
    ("top datetime sec", "!~", datetime, datetime(1920, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam"))),
    ("top tuple", "!!", tuple[float, str], (True, "a")),
    ("top Sub", "!!", Base, Sub()),
    ("Final", "==", Base, Base(5)),
]
