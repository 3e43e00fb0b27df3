from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import Any, NewType, cast

import msgspec
import pydantic
import pytest

from streams.codecs import (
    FixedIntCodec,
    JsonCodec,
    MsgpackCodec,
    PydanticCodec,
    StrCodec,
    TupleCodec,
    bytes_codec,
    codec_for,
    decimal_int_codec,
    int32_codec,
    int64_codec,
    int_codec,
    str_codec,
)
from streams.errors import ConfigError, DecodeError, EncodeError
from streams.events import event_type, event_type_of
from streams.model.shortcuts import bare_decoder, bare_encoder, encoder_of, shortcut_of
from streams.protocols import Codec
from streams.records import TopicPartition
from streams.stores.simple import SimpleStore
from streams.stores.table import Table


class Point(msgspec.Struct):
    x: float = 0.0
    label: str | None = None


class Tree(msgspec.Struct):
    children: list[Tree] = []
    weight: float = 0.0


@dataclass
class Plain:
    n: int
    any: Any = None


class Model(pydantic.BaseModel):
    x: float = pydantic.Field(default=0.0, alias="ex")


@pytest.mark.parametrize("type_", [dict, dict[str, Any]])
def test_plain_dicts_are_written_by_orjson_and_read_as_before(type_: Any) -> None:
    codec: Codec[Any] = codec_for(type_)
    values: list[Any] = [
        {"account": "adä", "cents": 2**64 - 1, "late": 1.5, "tags": ["x", None, True], "more": {"deep": []}},
        {"long": 10**40, "large": 1e300},  # more than 64 bits: msgspec writes them
        {"deep": reduce(lambda inner, _: [inner], range(400), 0)},  # more than orjson nests
    ]
    for value in values:
        assert codec.decode(codec.encode(value)) == value == codec.decode(msgspec.json.encode(value))
    assert codec.encode({"large": 1e300}) == b'{"large":1e+300}'  # orjson's way to write it
    assert codec.encode({"when": datetime(2026, 1, 2)}) == b'{"when":"2026-01-02T00:00:00"}'  # msgspec's
    for wrong in ({"x": float("nan")}, {"x": "\ud800"}, {"x": object()}):
        with pytest.raises(EncodeError):
            codec.encode(wrong)


def test_bytes_on_the_wire_are_fixed() -> None:
    assert int_codec.encode(0) == b"\x80" + b"\x00" * 7
    assert int_codec.encode(-1) == b"\x7f" + b"\xff" * 7
    assert int32_codec.encode(-2) == b"\xff\xff\xff\xfe"
    assert int64_codec.encode(258) == b"\x00" * 6 + b"\x01\x02"
    assert [decimal_int_codec.encode(number) for number in (0, -2, 2**63 - 1)] == [b"0", b"-2", b"9223372036854775807"]
    assert [decimal_int_codec.decode(text) for text in (b"007", b"+5", b"-9223372036854775808")] == [7, 5, -(2**63)]
    assert str_codec.encode("ü") == b"\xc3\xbc"
    assert JsonCodec(Point).encode(Point(1.5, "a")) == b'{"x":1.5,"label":"a"}'
    assert TupleCodec(str, int).encode(("a\x00", 0)) == b"a\x01\x01\x00\x80" + b"\x00" * 7


def each(codec: Codec[Any], *values: object) -> list[tuple[Codec[Any], object]]:
    return [(codec, value) for value in values]


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        *each(int_codec, 2**63, -(2**63) - 1, 1.0, None, "1"),
        *each(int32_codec, 2**31),
        *each(int64_codec, 2**63, None),
        *each(decimal_int_codec, 2**63, 1.0, None, "1"),
        *each(str_codec, "\ud800", b"x", None),
        *each(bytes_codec, "x", bytearray(b"x"), None),
        *each(TupleCodec(str, int), ("a",), ("a", "b"), ["a", 1]),
        *each(TupleCodec(bytes), ("a",)),
        *each(JsonCodec(Point), Plain(1), {"x": 1.0}, None),
        *each(JsonCodec(Point), Point(float("nan")), Point(float("inf")), Point(0.0, "\ud800")),
        *each(JsonCodec(Tree), Tree([Tree([Tree([], float("-inf"))])])),
        *each(JsonCodec(Plain), Plain(1, {"deep": [1.0, (float("nan"),)]}), Plain(1, object()), Plain(10**5000)),
        *each(JsonCodec(list[float]), [float("nan")]),
        *each(MsgpackCodec(Plain), Plain(2**64), Plain(1, object())),
        *each(PydanticCodec(Model), Model(ex=float("nan")), Point(), Model.model_construct(x="text")),
    ],
)
def test_what_could_not_be_read_back_is_not_written(codec: Codec[Any], value: object) -> None:
    with pytest.raises(EncodeError):
        codec.encode(value)


def test_cycles_and_depth_are_encode_errors() -> None:
    cycle = Tree()
    cycle.children = [cycle]
    for codec in (JsonCodec(Tree), MsgpackCodec(Tree)):
        with pytest.raises(EncodeError, match="recursion"):
            codec.encode(cycle)


def test_what_looks_lost_is_not() -> None:
    for codec, point in ((JsonCodec(Point), Point(1.0, "null")), (MsgpackCodec(Point), Point(float("nan")))):
        assert str(codec.decode(codec.encode(point))) == str(point)


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise KeyError(self.n)


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        *each(int_codec, b"", b"\x80" * 7, b"\x80" * 9),
        *each(int32_codec, b"\x00" * 8),
        *each(int64_codec, b"\x00" * 4),
        *each(decimal_int_codec, b"", b"-", b" 1", b"1_0", b"1.0", b"9223372036854775808", b"1" * 5_000, "١".encode()),
        *each(str_codec, b"\xff"),
        *each(TupleCodec(str, int), b"", b"a\x00"),
        *each(TupleCodec(str), b"a\x01\x03\x00", b"a\x01\x00", b"a\x00a\x00", b"\xff\x00"),
        *each(JsonCodec(Strict), b'{"n":-1}', b'{"' + b"x" * 1_000 + b'":1}'),
        *each(MsgpackCodec(Strict), b"\x81\xa1n\xff"),
        *each(PydanticCodec(Model), b"", b'{"ex":"\xff"}', b"[" * 10_000),
        *each(MsgpackCodec(Plain), b"\x82\xa1n\x01\xa3any" + b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff"),
    ],
)
def test_bad_bytes_are_decode_errors_of_a_few_words(codec: Codec[Any], data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        codec.decode(data)
    assert len(str(caught.value)) < 400


def test_codec_for() -> None:
    assert [codec_for(kind) for kind in (bytes, str, int)] == [bytes_codec, str_codec, int_codec]
    assert isinstance(codec_for(tuple[str, int]), TupleCodec)
    for kind in (tuple[str, float], bool, Point, Plain, dict[str, list[datetime]]):
        assert isinstance(codec_for(kind), JsonCodec)
    assert isinstance(codec_for(Model), PydanticCodec)

    @pydantic.dataclasses.dataclass
    class Checked:
        n: pydantic.PositiveInt

    with pytest.raises(DecodeError, match="greater than 0"):
        codec_for(Checked).decode(b'{"n":-1}')


def test_codec_for_refuses_what_cannot_come_back() -> None:
    class Opaque:
        pass

    @dataclass
    class Holder:
        inner: dict[str, Opaque]

    Unknown = NewType("Unknown", Opaque)
    for type_ in (Opaque, Holder, list[Opaque], Unknown, tuple[Opaque, ...]):
        with pytest.raises(ConfigError):
            codec_for(type_)
    for make in (TupleCodec, lambda: TupleCodec(float), lambda: FixedIntCodec(16)):
        with pytest.raises(ConfigError):
            make()


def test_what_a_subclass_adds_is_not_passed_over_on_hot_paths() -> None:
    class Lower(StrCodec):
        def encode(self, value: str, /) -> bytes:
            return super().encode(value.lower())

        def decode(self, data: bytes, /) -> str:
            return super().decode(data).upper()

    class Longer(JsonCodec[list[int]]):
        def decode(self, data: bytes, /) -> list[int]:
            return [*super().decode(data), 0]

    assert bare_encoder(Lower())("KEY") == b"key"
    assert bare_decoder(Lower())(b"key") == "KEY"
    assert bare_decoder(Longer(list[int]))(b"[1]") == [1, 0]
    assert bare_decoder(int_codec)(int_codec.encode(7)) == 7
    assert bare_decoder(StrCodec()) is bytes.decode


def test_a_shortcut_makes_the_same_bytes_and_is_not_taken_past_what_a_subclass_adds() -> None:
    class Reading(msgspec.Struct):
        value: float = 0.5
        note: str | None = None

    class Louder(JsonCodec[Reading]):
        def encode(self, value: Reading, /) -> bytes:
            return super().encode(Reading(value.value * 2))

    codec, value = JsonCodec(Reading), Reading()
    shortcut = shortcut_of(codec)
    assert (shortcut.of, shortcut.encode(value)) == (Reading, codec.encode(value))
    assert shortcut.kinds == (("value", float, ()), ("note", str, (type(None),)))
    louder = shortcut_of(Louder(Reading))
    assert (louder.of, louder.kinds) == (None, ())
    with pytest.raises(EncodeError, match=r"^Louder does not come back .*: value comes back as another float"):
        louder.encode(value)
    assert [shortcut_of(other).of for other in (StrCodec(), JsonCodec(list[float]))] == [None, None]
    codec.encode = lambda value: b"spied"  # type: ignore[method-assign]
    assert (shortcut_of(codec).of, shortcut_of(codec).encode(value)) == (None, b"spied")


@pytest.mark.parametrize("returned", [bytearray(b"1"), memoryview(b"1"), "1", None])
def test_a_codec_of_the_users_must_return_bytes(returned: Any) -> None:
    """A buffer that is used again would change what was stored."""

    class Returning:
        def encode(self, value: object, /) -> bytes:
            return cast(bytes, returned)

        def decode(self, data: bytes, /) -> object:
            return data

    codec, partition = Returning(), TopicPartition("t", 0)
    table = Table.factory(key=str, value=object, value_codec=codec)(partition)
    items = SimpleStore.factory(Point, key=lambda point: point.label, codec=cast(Codec[Point], codec))(partition)
    for store in (table, items):
        store.begin([])
    event = event_type("Returned", codec=codec)(type("Returned", (), {}))
    for write in (
        encoder_of(codec),
        bare_encoder(codec),
        shortcut_of(codec).encode,
        lambda value: table.put("k", value),
        lambda _: items.put(Point(1.0, "a")),
        lambda _: event_type_of(event).encode(event()),
    ):
        with pytest.raises(EncodeError, match=f"encode returned {type(returned).__name__}, not bytes"):
            write("value")
    assert table.get("k") is None
