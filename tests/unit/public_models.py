"""Models of pydantic and values after public reports of what was written and not read again, or read as another.

Of each: its name, what becomes of the value (by its codec), its type, and its fields. ``=``: it comes back, to the
sign of a zero; ``~``: in the class that its field has (a list for a tuple); ``!``: refused with the value, ``T`` with
the type; ``?``: in a field of any class it comes back as plain data, which is logged, and refused in tests.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import pydantic
from pydantic import (
    AliasGenerator,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    FutureDatetime,
    Json,
    PastDate,
    PrivateAttr,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    StrictInt,
    alias_generators,
    computed_field,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass as pdc
from typing_extensions import TypedDict


def model_of(_c: Any = None, **f: Any) -> Any:
    return pydantic.create_model("M", __config__=_c, **f)


def one(t: Any, v: Any, **config: Any) -> tuple[Any, Any]:
    return model_of(ConfigDict(**config), v=(t, ...)), {"v": v}


def camel(generator: Any) -> Any:
    return model_of(ConfigDict(alias_generator=generator), my_field=(int, 0))


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Inner(BaseModel):
    n: int = 0


class More(Inner):
    more: int = 1


class A1(BaseModel):
    kind: Literal["a"] = "a"
    x: int = 0


class B1(BaseModel):
    kind: Literal["b"] = "b"
    y: int = 0


class Priv(BaseModel):
    n: int = 0
    _p: int = PrivateAttr(default=3)


class Extra(BaseModel, extra="allow"):
    n: int = 0


class Comp(BaseModel):
    n: int = 0

    @computed_field
    @property
    def d(self) -> int:
        return self.n * 2


class CompAlias(BaseModel):
    n: int = 0

    @computed_field(alias="n")
    @property
    def d(self) -> int:
        return self.n * 2


class CompF(BaseModel, extra="forbid"):
    n: int = 0

    @computed_field
    @property
    def d(self) -> int:
        return self.n * 2


class ValIdem(BaseModel):
    s: str = ""

    @field_validator("s")
    @classmethod
    def strip(cls, v):
        return v.strip()


class MSer(BaseModel):
    n: int = 0

    @model_serializer
    def ser(self):
        return {"m": self.n}


class MSerWrap(BaseModel):
    n: int = 0

    @model_serializer(mode="wrap")
    def ser(self, h):
        return {**h(self), "extra": 1}


class FSer(BaseModel):
    d: Decimal = Decimal("1.234")

    @field_serializer("d")
    def ser(self, v):
        return f"{v:.1f}"


class Root(RootModel[list[int]]):
    pass


T = TypeVar("T")


class G(BaseModel, Generic[T]):
    v: T


class Rec(BaseModel):
    n: int = 0
    kids: list[Rec] = []


@pdc
class PD:
    a: int = 0
    b: float = 0.5


@pdc
class PDInit:
    a: int = 0
    b: int = dataclasses.field(default=7, init=False)

    @classmethod
    def model_construct(cls, a: int, b: int = 7) -> PDInit:
        made = cls(a)
        made.b = b
        return made


class TD(TypedDict):
    a: int


class NT(NamedTuple):
    a: int
    b: str


class SubAlias(Inner):
    n: int = Field(default=0, serialization_alias="N")


class Late(BaseModel):
    v: LateInner


class LateInner(BaseModel):
    n: int = Field(default=0, serialization_alias="N")


class DefData(BaseModel):
    a: int = 1
    b: int = Field(default_factory=lambda data: data["a"] + 1)


class MVal(BaseModel):
    a: int = 0
    b: int = 0

    @model_validator(mode="after")
    def s(self):
        self.b = self.a + self.b
        return self


class MBefore(BaseModel):
    a: int = 0

    @model_validator(mode="before")
    @classmethod
    def s(cls, d):
        return {"a": d.get("a", 0) + 1} if isinstance(d, dict) else d


class Post(BaseModel):
    a: int = 0

    def model_post_init(self, c):
        self.a += 1


AMS = ZoneInfo("Europe/Amsterdam")

ROWS: list[tuple[Any, ...]] = [
    ("int", "=", *one(int, 5)),
    ("bool in int", "~", *one(int, True)),
    ("huge int", "=", *one(int, 10**30)),
    ("None in int", "!", *one(int, None)),
    ("float", "=", *one(float, 0.1)),
    ("nan", "!", *one(float, math.nan)),
    ("inf", "!", *one(float, math.inf)),
    ("int in float", "!", *one(float, 2**53 + 1)),
    ("-0.0", "=", *one(float, -0.0)),
    ("nan in opt", "!", *one(float | None, math.nan)),
    ("nan in Any", "!", *one(Any, math.nan)),
    ("str", "=", *one(str, "é\0")),
    ("surrogate", "!", *one(str, "\ud800")),
    ("None in str", "!", *one(str, None)),
    ("bytes in str", "!", *one(str, b"a")),
    ("bytes", "=", *one(bytes, b"abc")),
    ("bytes non utf8", "!", *one(bytes, b"\xff")),
    ("bytearray", "!", *one(bytes, bytearray(b"a"))),
    ("date", "=", *one(date, date(2026, 1, 1))),
    ("dt in date", "!", *one(date, datetime(2026, 1, 1, 5))),
    ("dt midnight in date", "!", *one(date, datetime(2026, 1, 1))),
    ("date in dt", "!", *one(datetime, date(2026, 1, 1))),
    ("utc", "=", *one(datetime, datetime(2026, 1, 1, tzinfo=UTC))),
    ("zone", "=", *one(datetime, datetime(2026, 7, 1, tzinfo=AMS))),
    ("secs", "!", *one(datetime, datetime(1920, 1, 1, tzinfo=AMS))),
    ("secs list", "!", *one(list[datetime], [datetime(1920, 1, 1, tzinfo=AMS)])),
    ("time secs", "!", *one(time, time(1, tzinfo=timezone(timedelta(minutes=19, seconds=32))))),
    ("td float", "=", *one(timedelta, timedelta(days=3650, microseconds=1), ser_json_timedelta="float")),
    ("dec", "=", *one(Decimal, Decimal("1.50"))),
    ("dec nan", "!", *one(Decimal, Decimal("NaN"))),
    ("enum", "=", *one(Color, Color.RED)),
    ("enum values", "~", *one(Color, Color.BLUE, use_enum_values=True)),
    ("literal bad", "!", *one(Literal["a"], "b")),
    ("tuple in list", "!", *one(list[int], (1, 2))),
    ("namedtuple", "=", *one(NT, NT(1, "a"))),
    ("td typed", "=", *one(TD, {"a": 1})),
    ("dict", "=", *one(dict[str, int], {"a": 1})),
    ("dict tuple", "T", *one(dict[tuple[int, int], int], {(1, 2): 3})),
    ("dict none", "T", *one(dict[str | None, int], {None: 3})),
    ("dict str|int", "!", *one(dict[str | int, int], {1: 3, "1": 4})),
    ("dict int|str", "!", *one(dict[int | str, int], {1: 3, "1": 4})),
    ("dict Any", "?", *one(dict[Any, Any], {1: 2})),
    ("dict int", "=", *one(dict[int, int], {1: 2})),
    ("Any tuple", "?", *one(Any, (1, 2))),
    ("Any dt", "?", *one(Any, datetime(2026, 1, 1))),
    ("Any model", "?", *one(Any, Inner(n=3))),
    ("object", "?", *one(object, (1,))),
    ("union int|str", "=", *one(int | str, "5")),
    ("union str|int", "=", *one(str | int, 5)),
    ("union date|datetime", "=", *one(date | datetime, datetime(2026, 1, 1))),
    ("union str|date", "!", *one(date | str, "2026-01-01")),
    ("union str|uuid", "!", *one(uuid.UUID | str, str(uuid.UUID(int=1)))),
    ("union str|decimal", "!", *one(Decimal | str, "1.5")),
    ("union of enum", "!", *one(list[Color | str], [Color.RED])),
    ("union str|enum", "=", *one(Color | str, "r")),
    ("union of Any", "?", *one(Decimal | Any, datetime(2026, 1, 1))),
    ("union bytes|str", "=", *one(bytes | str, b"a")),
    ("union str|bytes", "!", *one(str | bytes, b"a")),
    ("union models", "=", *one(A1 | B1, B1(y=2))),
    ("union base", "=", *one(Inner | More, More(n=1))),
    ("disc", "=", *one(Annotated[A1 | B1, Field(discriminator="kind")], B1(y=3))),
    ("bool|int", "=", *one(bool | int, 1)),
    ("secret", "T", *one(SecretStr, SecretStr("x"))),
    ("secretbytes", "T", *one(SecretBytes, SecretBytes(b"x"))),
    ("secret gen", "T", *one(Secret[int], Secret(5))),
    ("json", "T", *one(Json[list[int]], [1])),
    ("json any", "T", *one(Json, {"a": 1})),
    ("b64", "=", *one(Base64Bytes, b"abc")),
    ("ser b64 one side", "!", *one(bytes, b"\xff", ser_json_bytes="base64")),
    ("ser b64 both", "=", *one(bytes, b"\xff", ser_json_bytes="base64", val_json_bytes="base64")),
    ("nested", "=", *one(Inner, Inner(n=3))),
    ("nested sub", "!", *one(Inner, More(n=3))),
    ("sera", "!", *one(SerializeAsAny[Inner], More(n=3))),
    ("priv", "=", Priv, {"n": 1}),
    ("extra", "=", Extra, {"n": 1, "z": 5}),
    ("extra dt", "?", Extra, {"n": 1, "z": datetime(2026, 1, 1)}),
    ("comp", "=", Comp, {"n": 1}),
    ("compF", "T", CompF, {"n": 1}),
    ("val idem", "!", ValIdem, {"s": " a "}),
    ("mser", "!", MSer, {"n": 1}),
    ("mser wrap", "=", MSerWrap, {"n": 1}),
    ("fser", "!", FSer, {}),
    ("root", "=", Root, {"root": [1]}),
    ("gen", "=", G[int], {"v": 3}),
    ("rec", "=", Rec, {"n": 1, "kids": [Rec(n=2)]}),
    ("pdc", "=", PD, {"a": 1}),
    ("pdc init", "=", PDInit, {"a": 1}),
    ("pdc init changed", "!", PDInit, {"a": 1, "b": 5}),
    ("strip", "!", *one(str, " a ", str_strip_whitespace=True)),
    ("inf null", "!", *one(float, math.inf, ser_json_inf_nan="null")),
    ("inf const", "=", *one(float, math.inf, ser_json_inf_nan="constants")),
    ("inf str", "=", *one(float, math.nan, ser_json_inf_nan="strings")),
    ("alias", "=", model_of(i=(Inner, Field(alias="I", default=Inner()))), {"i": Inner(n=3), "I": Inner(n=3)}),
    ("same alias", "T", model_of(a=(int, Field(0, alias="n")), b=(int, Field(0, alias="n"))), {"n": 3}),
    ("crossed", "=", model_of(a=(int, Field(0, alias="b")), b=(int, Field(0, alias="a"))), {"a": 3, "b": 4}),
    ("comp alias", "T", CompAlias, {"n": 1}),
    ("gn", "=", camel(alias_generators.to_camel), {"my_field": 3, "myField": 3}),
    ("gnval", "T", camel(AliasGenerator(validation_alias=alias_generators.to_camel)), {"my_field": 3}),
    ("gnser", "T", camel(AliasGenerator(serialization_alias=alias_generators.to_camel)), {"my_field": 3}),
    ("subalias", "T", SubAlias, {"n": 3}),
    ("late", "T", Late, {"v": LateInner(n=3)}),
    ("serbyname", "=", model_of(ConfigDict(serialize_by_alias=False), n=(int, Field(default=0, alias="N"))), {"n": 3}),
    ("exclif", "!", model_of(n=(int, Field(default=3, exclude_if=lambda v: v == 5))), {"n": 5}),
    ("init", "=", model_of(n=(int, Field(default=3, init=False))), {}),
    ("deffac", "=", model_of(n=(uuid.UUID, Field(default_factory=uuid.uuid4))), {"n": uuid.UUID(int=5)}),
    ("defdata", "=", DefData, {"a": 4}),
    ("mval", "!", MVal, {"a": 1, "b": 2}),
    ("mbefore", "!", MBefore, {"a": 1}),
    ("post", "!", Post, {"a": 1}),
    ("ge", "!", *one(Annotated[int, Field(ge=0)], -1)),
    ("unicode key", "!", *one(dict[str, int], {"\ud800": 1})),
    ("future", "T", *one(FutureDatetime | None, None)),
    ("past", "=", *one(PastDate, date(2026, 1, 1))),
    ("aware", "!", *one(AwareDatetime, datetime(2026, 1, 1))),
    ("strictint", "~", *one(StrictInt, True)),
]
