"""Nothing is written that does not come back: types and values after public reports, by all ways to write."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, time
from decimal import Decimal
from typing import Any, cast

from streams import Table
from streams.codecs import JsonCodec, MsgpackCodec, PydanticCodec
from streams.errors import ConfigError, EncodeError
from streams.events import EventType
from streams.model.losses import names_of
from streams.model.round_trips import everything_read_back
from streams.records import Change, TopicPartition
from tests.unit import public_models, public_types


def test_each_value_comes_back_or_is_refused() -> None:
    rows = [(name, said, type_, value) for name, said, type_, value in public_types.ROWS]
    found = [(name, said, _fate(JsonCodec, *row) + _fate(MsgpackCodec, *row)) for name, said, *row in rows]
    made = [(name, said, type_, _made(type_, fields)) for name, said, type_, fields in public_models.ROWS]
    found += [(name, said, _fate(PydanticCodec, *row)) for name, said, *row in made]
    assert len(found) > 154 * 2
    assert [row for row in found if row[1] != row[2]] == []


def _made(type_: Any, fields: dict[str, Any]) -> Any:
    """Make a value that nothing has checked, as one that was changed later."""
    return getattr(type_, "model_construct", type_)(**fields)


def _fate(make: Callable[[Any], Any], type_: Any, value: Any) -> str:
    """What becomes of a value, in a letter, as ``public_types`` has them."""
    try:
        codec = make(type_)
    except ConfigError:
        return "T"

    def put(value: Any) -> bytes:
        table = Table.factory(key=str, value=object, value_codec=codec)(TopicPartition("t", 0))
        journal: list[Change] = []
        table.begin(journal)
        table.put("k", value)
        return cast(bytes, journal[0].value)

    ways = [codec.encode, EventType(type_, "E", 1, codec, {}).encode, *([] if value is None else [put])]
    (fate,) = {_fate_of(codec, write, value) for write in ways}
    return fate


def _fate_of(codec: Any, write: Callable[[Any], bytes], value: Any) -> str:
    try:
        data = write(value)
    except EncodeError:
        return "!"
    if _is_same(value, codec.decode(data)):  # a DecodeError is what must not happen
        return "="
    try:
        with everything_read_back():
            codec.encode(value)
    except EncodeError:
        return "?"
    return "~"


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return str(a) == str(b)
    if isinstance(a, Decimal):
        return str(a) == str(b)
    if isinstance(a, datetime | time):
        return a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.utcoffset() == b.utcoffset()
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_is_same, a, b)) and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if (names := names_of(type(a))) is not None:
        same = all(_is_same(getattr(a, name), getattr(b, name)) for name in names)
        return same and getattr(a, "__pydantic_extra__", None) == getattr(b, "__pydantic_extra__", None)
    return bool(a == b)
