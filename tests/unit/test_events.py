from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pydantic
import pytest

from streams.codecs import JsonCodec, MsgpackCodec, bytes_codec
from streams.errors import DecodeError, EncodeError, RegistrationError
from streams.events import EventType, event_type, event_type_of, parse_version, upcaster
from streams.records import VERSION_HEADER
from tests.unit import bad_input
from tests.unit.bad_input import BadRecord, Sample


@event_type("Deposited", version=3)
class Deposited(msgspec.Struct, frozen=True):
    account: str
    cents: int
    currency: str
    rate: float | None = None


@upcaster(Deposited, from_version=1)
def amount_in_cents(old: dict[str, Any]) -> dict[str, Any]:
    old["cents"] = old.pop("amount") * 100
    return old


@upcaster(Deposited, from_version=2)
def add_currency(old: dict[str, Any]) -> dict[str, Any]:
    return old | {"currency": "EUR"}


@event_type
@dataclass
class Bare:
    n: int
    tags: list[str] = field(default_factory=list)


class Unmarked(msgspec.Struct):
    n: int = 0


class Model(pydantic.BaseModel):
    n: int
    wide: float = pydantic.Field(default=0.0, alias="w")


def test_names_versions_and_headers() -> None:
    deposited = event_type_of(Deposited)
    assert (deposited.name, deposited.version, deposited.cls) == ("Deposited", 3, Deposited)
    assert deposited.headers == [("__grt__", b"Deposited"), ("__grv__", b"3")]
    assert event_type_of(Bare).headers == [("__grt__", b"Bare")]
    assert event_type_of(Unmarked).name == "Unmarked"
    assert event_type_of(Deposited) is deposited


@pytest.mark.parametrize(
    "event",
    [Deposited("Zürich \U0001f600", -(2**70), "", 1e9), Bare(1, ["x"]), Unmarked(), Model(n=1, w=2)],
    ids=repr,
)
def test_round_trip(event: object) -> None:
    kind = event_type_of(type(event))
    assert kind.decode(kind.encode(event), kind.version) == event


@pytest.mark.parametrize(
    ("value", "version", "says"),
    [
        (b"{}", 4, "newer than version 3"),
        (b"{}", 0, "versions start at 1"),
        (b"{}", -1, "versions start at 1"),
        (None, 3, "null"),
        (None, 1, "null"),
        (b"{}", 1, "upcaster from version 1 failed: KeyError"),
        (b'{"account":"a","amount":"x"}', 2, "did not make a Deposited"),
        (b"[]", 1, "not an older Deposited"),
        (b"{", 2, "not an older Deposited"),
        (b"{", 3, "not a Deposited"),
        (b"[" * 10_000, 1, "not an older Deposited"),
    ],
)
def test_what_cannot_be_decoded_says_why(value: bytes | None, version: int, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        event_type_of(Deposited).decode(value, version)


def test_a_missing_step_and_a_wrong_result_are_decode_errors() -> None:
    @event_type(version=3)
    class Moved(msgspec.Struct):
        n: int

    kind = event_type_of(Moved)
    with pytest.raises(DecodeError, match=r"no upcaster for it: @upcaster\(Moved, from_version=1\)"):
        kind.decode(b'{"n":1}', 1)
    upcaster(Moved, from_version=1)(lambda old: None)  # type: ignore[type-var]
    with pytest.raises(DecodeError, match="returned NoneType, not a dict"):
        kind.decode(b'{"n":1}', 1)


@pytest.mark.parametrize("base", [msgspec.Struct, pydantic.BaseModel])
def test_upcasting_a_custom_codec_and_a_pydantic_model(base: type) -> None:
    class Step(base):  # type: ignore[misc]
        n: int

    event_type(version=2, codec=MsgpackCodec(Step) if base is msgspec.Struct else None)(Step)
    upcaster(Step, from_version=1)(lambda old: {"n": old["m"]})
    kind = event_type_of(Step)
    old = msgspec.msgpack.encode({"m": 7}) if base is msgspec.Struct else b'{"m":7}'
    assert kind.decode(old, 1) == Step(n=7)
    assert kind.decode(kind.encode(Step(n=8)), 2) == Step(n=8)
    with pytest.raises(DecodeError):
        kind.decode(b"\xc1", 1)
    with pytest.raises(DecodeError, match="upcaster from version 1 failed"):
        kind.decode(msgspec.msgpack.encode({}) if base is msgspec.Struct else b"{}", 1)


def test_an_upcaster_that_raises_a_cancellation_is_the_values_problem() -> None:
    """Passed on, it would end the task of the partition."""

    @event_type(version=2)
    class Stepped(msgspec.Struct):
        n: int

    @upcaster(Stepped, from_version=1)
    def step(old: dict[str, Any]) -> dict[str, Any]:
        raise asyncio.CancelledError

    with pytest.raises(DecodeError, match="upcaster from version 1 failed: CancelledError"):
        event_type_of(Stepped).decode(b"{}", 1)


def test_pydantic_errors_do_not_show_the_input() -> None:
    with pytest.raises(DecodeError) as caught:
        event_type_of(Model).decode(b'{"n":"hunter2"}')
    assert "n: " in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


class Plain:
    pass


class Holder(msgspec.Struct):
    inner: Plain


def test_registration_is_checked() -> None:
    def refuses(words: str, cls: type, *name: str, **settings: Any) -> None:
        with pytest.raises(RegistrationError, match=words):
            event_type(*name, **settings)(cls) if name or settings else event_type_of(cls)

    class Used(msgspec.Struct):
        pass

    for cls in (Plain, int, type("Sub", (Bare,), {"__annotations__": {"extra": int}, "extra": 0})):
        refuses("no dataclass", cls)
    refuses("no dataclass", Plain, "Plain")
    refuses("cannot be decoded", Holder)
    refuses("is an event type already: 'Deposited'", Deposited, "Again")
    event_type_of(Used)
    refuses("was used as an event before", Used, "Later")
    for version in (0, -1, True, 1.5, "2"):
        refuses("integers from 1", type("V", (msgspec.Struct,), {}), "V", version=version)
    for name in ("", "x" * 256, "a\nb", "\ud800"):
        refuses("printable", type("N", (msgspec.Struct,), {}), name)
    with pytest.raises(RegistrationError, match="stands above @dataclass"):

        @dataclass
        @event_type
        class Wrong:
            n: int


def test_upcasters_are_checked() -> None:
    with pytest.raises(RegistrationError, match="has no versions"):
        upcaster(Unmarked, from_version=1)
    for step in (0, 3, 4, True, "1"):
        with pytest.raises(RegistrationError, match="from version 1 to 2"):
            upcaster(Deposited, from_version=step)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="already"):
        upcaster(Deposited, from_version=1)(lambda old: old)

    @event_type("Opaque", version=2, codec=bytes_codec)
    class Opaque:
        pass

    with pytest.raises(RegistrationError, match="no dict form"):
        upcaster(Opaque, from_version=1)


def test_two_classes_may_have_one_name() -> None:
    kinds = [event_type_of(event_type("Twin")(type("Twin", (msgspec.Struct,), {}))) for _ in range(2)]
    assert kinds[0].name == kinds[1].name == "Twin"
    assert kinds[0].cls is not kinds[1].cls


@event_type
class Early(msgspec.Struct):
    later: Later


class Later(msgspec.Struct):
    n: int


def test_annotations_are_resolved_at_first_use() -> None:
    kind = event_type_of(Early)
    assert kind.decode(b'{"later":{"n":1}}') == Early(Later(1))


def test_an_unserialisable_event_is_an_encode_error() -> None:
    encode = event_type_of(Deposited).encode
    for wrong, words in ((Deposited("a", 1, "EUR", float("nan")), "nan"), (Deposited("\ud800", 1, "EUR"), "Deposited")):
        with pytest.raises(EncodeError, match=words):
            encode(wrong)
    assert encode(Deposited("null", 1, "EUR")).count(b"null") == 2


def decode_as_the_engine_does(kind: EventType[Any], record: BadRecord) -> object:
    incoming = record.incoming()
    if incoming.record_type != kind.name:
        return "no route"
    versions = [value for name, value in incoming.headers or () if name == VERSION_HEADER]
    return kind.decode(incoming.value, parse_version(versions[-1]) if versions else 1)


@pytest.mark.parametrize("record", list(bad_input.records()), ids=lambda record: record.name.replace(" ", "-"))
def test_bad_input_ends_as_the_corpus_says(record: BadRecord) -> None:
    length = 0
    try:
        result = decode_as_the_engine_does(event_type_of(Sample), record)
    except DecodeError as refusal:
        result, length = "refused", len(str(refusal))
    assert ("decoded" if isinstance(result, Sample) else result) == record.ending
    assert length < 500, "errors must not carry a stranger's megabytes"


@pytest.mark.parametrize("codec", [None, MsgpackCodec(Sample)], ids=["json", "msgpack"])
def test_nothing_is_imported_by_what_is_in_the_data(codec: MsgpackCodec[Sample] | None) -> None:
    decode = event_type_of(Sample).decode if codec is None else codec.decode
    with pytest.raises(DecodeError):
        decode(b"")
    before = set(sys.modules)
    for record in bad_input.records():
        if record.value is not None:
            try:
                decode(record.value)
            except DecodeError:
                continue
    assert set(sys.modules) == before


def test_odd_values_that_are_decoded() -> None:
    decode = JsonCodec(Sample).decode
    assert decode(b'{"account":"a","cents":1,"cents":2}') == Sample("a", 2)
    assert decode(b'{"account":"a","cents":18446744073709551616}').cents == 2**64
    assert decode(b'{"account":"\\u0000"}').account == "\x00"
