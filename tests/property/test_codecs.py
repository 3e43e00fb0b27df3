from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams.codecs import (
    JsonCodec,
    MsgpackCodec,
    PydanticCodec,
    TupleCodec,
    bytes_codec,
    decimal_int_codec,
    int32_codec,
    int64_codec,
    int_codec,
    str_codec,
)
from streams.errors import DecodeError, EncodeError
from streams.protocols import Codec

INT64 = st.integers(-(2**63), 2**63 - 1)
TUPLES = st.tuples(st.text(max_size=4), INT64, st.binary(max_size=4))
TUPLE_CODEC = TupleCodec(str, int, bytes)


class Leaf(msgspec.Struct):
    """Something of everything."""

    text: str
    number: int
    rate: float
    raw: bytes
    maybe: float | None
    counts: dict[str, int]
    inner: list[Leaf]


@dataclass
class Loose:
    anything: Any


class Model(pydantic.BaseModel):
    text: str
    rate: float | None


LEAVES: st.SearchStrategy[Leaf] = st.recursive(
    st.builds(
        Leaf,
        text=st.text(),
        number=st.integers(),
        rate=st.floats(),
        raw=st.binary(max_size=10),
        maybe=st.none() | st.floats(),
        counts=st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
        inner=st.just([]),
    ),
    lambda inner: st.builds(
        Leaf,
        text=st.text(max_size=3),
        number=INT64,
        rate=st.floats(),
        raw=st.just(b""),
        maybe=st.none(),
        counts=st.just({}),
        inner=st.lists(inner, max_size=3),
    ),
    max_leaves=5,
)

JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)


def floats_in(value: Any) -> list[float]:
    if isinstance(value, Leaf):
        return floats_in([value.rate, value.maybe, value.inner])
    if isinstance(value, Loose | Model):
        return floats_in(list(vars(value).values()))
    if isinstance(value, dict):
        return floats_in(list(value.values()))
    if isinstance(value, list):
        return [number for each in value for number in floats_in(each)]
    return [value] if isinstance(value, float) else []


def integers_in(leaf: Leaf) -> list[int]:
    return [leaf.number, *leaf.counts.values(), *(number for each in leaf.inner for number in integers_in(each))]


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        (bytes_codec, st.binary()),
        (str_codec, st.text()),
        (int_codec, INT64),
        (int64_codec, INT64),
        (decimal_int_codec, INT64),
        (int32_codec, st.integers(-(2**31), 2**31 - 1)),
        (TUPLE_CODEC, TUPLES),
    ],
)
def test_round_trip_of_plain_codecs(codec: Codec[Any], values: st.SearchStrategy[Any]) -> None:
    @given(values)
    def check(value: Any) -> None:
        assert codec.decode(codec.encode(value)) == value

    check()


MODELS = st.builds(Model.model_construct, text=st.text(), rate=st.none() | st.floats())


@pytest.mark.parametrize(
    ("codec", "values"),
    [(JsonCodec(Leaf), LEAVES), (JsonCodec(Loose), st.builds(Loose, JSON_LIKE)), (PydanticCodec(Model), MODELS)],
    ids=["struct", "anything", "pydantic"],
)
def test_json_gives_back_what_it_took_and_refuses_the_rest(codec: Codec[Any], values: st.SearchStrategy[Any]) -> None:
    @given(values)
    def check(value: Any) -> None:
        if all(map(math.isfinite, floats_in(value))):
            assert codec.decode(codec.encode(value)) == value
        else:
            with pytest.raises(EncodeError):
                codec.encode(value)

    check()


@given(LEAVES)
def test_msgpack_gives_back_what_it_took(leaf: Leaf) -> None:
    codec = MsgpackCodec(Leaf)
    try:
        data = codec.encode(leaf)
    except EncodeError:
        assert not all(-(2**63) <= number < 2**64 for number in integers_in(leaf)), "only wide integers are refused"
        return
    assert repr(codec.decode(data)) == repr(leaf)


@given(INT64, INT64)
@example(255, 256)
@example(-1, 0)
def test_order_of_integers(a: int, b: int) -> None:
    assert (int_codec.encode(a) < int_codec.encode(b)) == (a < b)


@given(st.text(), st.text())
@example("\U00010000", "\uffff")
def test_order_of_text(a: str, b: str) -> None:
    assert (str_codec.encode(a) < str_codec.encode(b)) == (a < b)


@given(TUPLES, TUPLES)
@example(("a", 2**63 - 1, b""), ("a\x00", -(2**63), b""))
@example(("a\x01", 0, b""), ("a\x00", 0, b""))
def test_order_of_tuples(a: tuple[str, int, bytes], b: tuple[str, int, bytes]) -> None:
    assert (TUPLE_CODEC.encode(a) < TUPLE_CODEC.encode(b)) == (a < b)
    for length in range(4):
        assert TUPLE_CODEC.encode(a).startswith(TUPLE_CODEC.encode_prefix(b[:length])) == (a[:length] == b[:length])


ALL: list[Codec[Any]] = [
    bytes_codec,
    str_codec,
    int_codec,
    int32_codec,
    int64_codec,
    TUPLE_CODEC,
    TupleCodec(str, bytes),
    JsonCodec(Leaf),
    JsonCodec(Loose),
    JsonCodec(list[int]),
    MsgpackCodec(Leaf),
    MsgpackCodec(Loose),
    PydanticCodec(Model),
]


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: type(codec).__name__)
def test_rubbish_is_refused_and_nothing_else(codec: Codec[Any]) -> None:
    @given(st.binary(max_size=60))
    def check(data: bytes) -> None:
        try:
            value = codec.decode(data)
        except DecodeError:
            return
        if getattr(codec, "order_preserving", False):
            assert codec.encode(value) == data, "a key has one spelling only"

    check()


@pytest.mark.parametrize("codec", [JsonCodec(Leaf), MsgpackCodec(Leaf)], ids=["json", "msgpack"])
def test_damaged_values_are_refused_or_read_and_nothing_else(codec: Codec[Leaf]) -> None:
    @given(LEAVES, st.integers(0, 2000), st.integers(0, 20), st.binary(max_size=5))
    def check(leaf: Leaf, at: int, cut: int, put: bytes) -> None:
        try:
            data = codec.encode(leaf)
        except EncodeError:
            return
        at %= len(data) + 1
        try:
            assert isinstance(codec.decode(data[:at] + put + data[at + cut :]), Leaf)
        except DecodeError:
            return

    check()
