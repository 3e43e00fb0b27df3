"""Event classes that the workers import: with upcasters, with codecs of their own."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid
from decimal import Decimal
from typing import Any

import msgspec
import pydantic

from streams.codecs import MsgpackCodec
from streams.events import event_type, upcaster


@event_type("Deposited", version=3)
class Deposited(msgspec.Struct, frozen=True):
    account: str
    cents: int
    currency: str


@upcaster(Deposited, from_version=1)
def to_cents(old: dict[str, Any]) -> dict[str, Any]:
    return {"account": old["account"], "cents": round(old["euros"] * 100)}


@upcaster(Deposited, from_version=2)
def with_currency(old: dict[str, Any]) -> dict[str, Any]:
    if old["account"] == "a list, please":
        return []  # type: ignore[return-value]
    return old | {"currency": "EUR"}


@event_type("Withdrawn")
class Withdrawn(msgspec.Struct, frozen=True):
    account: str
    cents: int


@event_type("opened.v2", version=2)
class Opened(msgspec.Struct, frozen=True):
    """Has versions, but no upcaster."""

    account: str


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Point(msgspec.Struct, rename="camel"):
    x_pos: float
    names: dict[str, int] = {}


class Packed(msgspec.Struct):
    ident: uuid.UUID
    raw: bytes
    at: dt.datetime
    day: dt.date
    price: Decimal
    level: Level
    points: list[Point]
    first: Point | None = None
    count: int = 0


event_type("Packed", version=2, codec=MsgpackCodec(Packed))(Packed)


@upcaster(Packed, from_version=1)
def with_count(old: dict[str, Any]) -> dict[str, Any]:
    return old | {"count": 41}


@dataclasses.dataclass
class Reversed:
    """Written as JSON, backwards: by no codec that the JVM knows."""

    text: str
    inner: Point


class ReversedCodec:
    def encode(self, value: Reversed, /) -> bytes:
        return msgspec.json.encode(value)[::-1]

    def decode(self, data: bytes, /) -> Reversed:
        from streams.errors import DecodeError

        try:
            return msgspec.json.decode(data[::-1], type=Reversed)
        except msgspec.DecodeError as error:
            raise DecodeError(str(error)) from error


event_type("Reversed", codec=ReversedCodec())(Reversed)


class Balance(msgspec.Struct):
    cents: int
    owner: str | None = None


class Profile(pydantic.BaseModel):
    name: str = pydantic.Field(alias="Name")
    since: dt.date
