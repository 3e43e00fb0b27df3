"""Events with the fields filled in that a test leaves out."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import uuid
from typing import Annotated, Any, Literal

import msgspec
import pytest

from streams.errors import ConfigError
from streams.events import event_type, event_type_of
from streams.testing.event_factory import EventFactory


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(msgspec.Struct, frozen=True):
    city: str
    since: datetime.date


@event_type("made.Order")
class Order(msgspec.Struct, frozen=True):
    customer: str
    amount: int
    price: float
    exact: decimal.Decimal
    paid: bool
    at: datetime.datetime
    within: datetime.timedelta
    id: uuid.UUID
    raw: bytes
    colour: Colour
    kind: Literal["a", "b"]
    place: Place
    tags: list[str]
    counts: dict[str, int]
    pair: tuple[int, str]
    maybe: str | None
    several: int | str
    code: Annotated[str, msgspec.Meta(min_length=12, max_length=14)]
    percent: Annotated[int, msgspec.Meta(ge=5, lt=8)]
    debt: Annotated[int, msgspec.Meta(le=-10, multiple_of=10)]
    note: str = "none"


@event_type("made.Plain")
@dataclasses.dataclass(frozen=True)
class Plain:
    name: str
    amount: int
    extra: list[int] = dataclasses.field(default_factory=list)


def test_all_fields_are_filled_and_can_be_encoded() -> None:
    order = EventFactory()(Order)
    assert (order.customer, order.note, order.maybe, order.place.city) == ("customer-0", "none", None, "city-0")
    assert 12 <= len(order.code) <= 14
    assert 5 <= order.percent < 8
    assert order.debt <= -10
    assert order.debt % 10 == 0
    described = event_type_of(Order)
    assert described.decode(described.encode(order)) == order


def test_what_is_given_stands() -> None:
    make = EventFactory()
    assert make(Plain, amount=-7, name="ann") == Plain("ann", -7)
    assert make(Order, customer="bob", note="x").customer == "bob"


def test_the_same_seed_gives_the_same_events_whatever_else_is_made() -> None:
    first, second = EventFactory(3), EventFactory(3)
    second(Order)
    assert first.many(Plain, 5) == second.many(Plain, 5)
    assert len({plain.name for plain in first.many(Plain, 5)}) == 5
    assert EventFactory(3)(Order) == EventFactory(3)(Order)
    assert EventFactory(3)(Order) != EventFactory(4)(Order)


def made(name: str, field: Any) -> type[msgspec.Struct]:
    return event_type(f"made.{name}")(msgspec.defstruct(name, [("field", field)], frozen=True))


Strict = made("Strict", Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")])
Impossible = made("Impossible", Annotated[int, msgspec.Meta(ge=3, le=2)])
Odd = made("Odd", msgspec.Raw)


@pytest.mark.parametrize(
    ("cls", "fields", "text"),
    [
        (Plain, {"amout": 1}, "Plain has no field amout; its fields are name, amount, extra"),
        (Plain, {"amount": "much"}, "Expected `int`, got `str`"),
        (Strict, {}, "Strict.field has to match .* give it a value"),
        (Strict, {"field": "abc"}, "matching regex"),
        (Impossible, {}, "Impossible.field has bounds that no whole number fits"),
        (Odd, {}, "Odd.field is of a type that cannot be made up"),
        (int, {}, "int is neither a msgspec.Struct nor a dataclass"),
    ],
)
def test_what_cannot_be_is_told(cls: type, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EventFactory()(cls, **fields)
