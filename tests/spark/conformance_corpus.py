"""Bad input, and input that only looks bad, with what the two sides disagree about."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from typing import Annotated, Literal

import msgspec
from hypothesis import strategies as st

from tests.spark.conformance_values import UTC, Colour, Level, Place, Tagged


class Kinds(msgspec.Struct):
    """Every kind of field, none of them required, so that each bad input is about one of them."""

    text: str = ""
    number: int = 0
    ratio: float = 0.0
    flag: bool = False
    raw: bytes = b""
    at: dt.datetime = dt.datetime(2000, 1, 1, tzinfo=UTC)
    wall: Annotated[dt.datetime, msgspec.Meta(tz=False)] = dt.datetime(2000, 1, 1)
    day: dt.date = dt.date(2000, 1, 1)
    price: Decimal = Decimal(1)
    ident: uuid.UUID = uuid.UUID(int=0)
    colour: Colour = Colour.RED
    level: Level = Level.LOW
    size: Literal["s", "1"] = "s"
    note: str | None = "n"
    texts: list[str] = []
    numbers: list[int] = []
    some: set[int] = set()
    names: dict[str, str] = {}
    place: Place = msgspec.field(default_factory=lambda: Place("x"))
    places: list[Place] = []
    tagged: Tagged | None = None


FINITE = st.floats(allow_nan=False, allow_infinity=False)
EXACT = st.integers(-(10**38) + 1, 10**38 - 1).map(
    lambda digits: Decimal((digits < 0, tuple(map(int, str(abs(digits)))), -9))
)
SOME_PLACE = st.builds(Place, st.text(), st.none() | FINITE, st.lists(EXACT, max_size=2))
SOME_TIME = st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30))
EVERYTHING = st.builds(
    Kinds,
    text=st.text(),
    number=st.integers(-(2**63), 2**63 - 1),
    ratio=FINITE,
    flag=st.booleans(),
    raw=st.binary(),
    at=SOME_TIME.map(lambda time: time.replace(tzinfo=UTC)),
    wall=SOME_TIME,
    day=st.dates(dt.date(1, 1, 2)),
    price=EXACT,
    ident=st.uuids(),
    colour=st.sampled_from(Colour),
    level=st.sampled_from(Level),
    note=st.none() | st.text(),
    texts=st.lists(st.text(), max_size=3),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    names=st.dictionaries(st.text(), st.text(), max_size=3),
    place=SOME_PLACE,
    places=st.lists(SOME_PLACE, max_size=2),
)
"""Objects with any values; not of sets, which have no order to compare."""

WIDE = "integers beyond 64 bits are refused"
EXACTLY = "decimals beyond 29 digits or 9 places, NaN and infinite ones, and other digits than ASCII's are refused"
TWICE = "a dict with the same key twice is refused"
FAR = "zones further than 18 hours from UTC are refused"
FINE = "fractions of a second finer than a microsecond are cut, not rounded"
LOST = "null instead of a value that has a default is taken as the default inside of lists and dicts"
DUPLICATE_TEXT = "text that looks like a number is refused when the JSON has duplicate keys"
NO_TAG = "null instead of a tag is taken as no tag"
UNKNOWN = "broken text and numbers of more than 1,000 digits are refused in fields, too, that the class does not have"
LAST = "of duplicate keys only the last value is looked at"
ODD_NAME = (
    "in fields whose name in JSON has a space or one of . [ ] ' \" ? $, a number is taken as its text, "
    "and null as no value"
)
MUCH = "text that looks like a number is refused in a JSON text of more than 16 MiB"

VALUES = {
    "some": "[1,1,2] [1,null]",
    "text": (
        r'5 -1.5 true [1] {"a":1} null "5" "true" "null" "[1]" "\ud800" "\udc00\ud800" "\ud83d\ude00" '
        r'"\\ud800" "\\\ud800" "\uD83D\uDE00\uDE00" "\u00zz" "\x41" "\u0000"'
    ),
    "TEXT": "5",
    "Text": '"x"',
    "note": "5 null",
    "texts": '["a",5] ["5"] [true] [null] "a" null {}',
    "names": '{"a":5} {"a":"5"} {"a":null} [] null',
    "number": '9223372036854775807 1.0 1e2 "1" true -0 01 +1 0x1 null',
    "numbers": '[1,"2"] [1,null]',
    "ratio": '1 1e400 -1e400 1e-400 123456789012345678901234567890 "1" NaN "NaN" Infinity .5 1. 1e true',
    "flag": '1 "true" True null',
    "price": (
        '1.5 1e2 "1e2" "+1" ".5" "1." "" "x" "0x1" "-0" true [] "1d" "1,5" "1.5e-99999999999999999999" '
        '"1.50E-7" "-2.5e-8" "0e-400" "1.10e+3" "1.1234567891e5" 1.5E-7 "1.0000000000" "1.5\\n" "1e2\\n"'
    ),
    "at": (
        '"2026-01-02T03:04:05Z" "2026-01-02T03:04:05" "2026-01-02t03:04:05+0130" "2026-01-02T03:04:05-17:59" '
        '"2026-01-02T03:04:05.1Z" "2026-01-02T03:04Z" "2026-01-02" "2026" "12:30" "T12:30" "2026-1-2T3:4:5Z" '
        '"now" "today" "epoch" "2026-01-02T03:04:60Z" "2026-01-02T24:00:00Z" "2026-02-29T00:00:00Z" '
        '"0000-01-01T00:00:00Z" "+12026-01-02T03:04:05Z" "2026-01-02T03:04:05[Europe/Rome]" '
        '"2026-01-02T03:04:05.Z" "2026-01-02T03:04:05,5Z" "2026-01-02T03:04:05+25:00" '
        '"2026-01-02T03:04:05+1:00" "2026-01-02T03:04:05+01" "" 1700000000 null '
        r'"2026-01-02T03:04:05\n" "2026-01-02T03:04:05Z\n" "2026-01-02T03:04:05+01:30\n"'
    ),
    "wall": (
        '"2026-01-02T03:04:05" "2026-01-02T03:04:05Z" "2026-01-02" 0 "2026-01-02t03:04:05" '
        r'"2026-01-02T03:04:05\n"'
    ),
    "day": (
        '"2026-01-02" "2026-1-2" "2026" "2026-01" "2026-01-02T00:00:00" "2026-02-30" "0000-01-01" "today" '
        '"10000-01-01" "" 20260102 null "2026-01-02\\n" "2026-01-02\\u2028"'
    ),
    "ident": (
        '"12345678-1234-5678-1234-567812345678" "12345678123456781234567812345678" '
        '"12345678-1234-5678-1234-56781234567A" "x" "" "{12345678-1234-5678-1234-567812345678}" '
        '"1234567812345678-1234-567812345678" "12345678-1234-5678-1234-56781234567g" '
        '"123456781234-5678-1234-5678-12345678" "urn:uuid:12345678-1234-5678-1234-567812345678" '
        r'12345678123456781234567812345678 5 "12345678-1234-5678-1234567812345678\n"'
    ),
    "raw": (
        r'"YQ==" "" "YQ" "YQ==YQ==" "-_==" "a=bc" "Y\nQ==" "YQ=\n" "YWJ\n" "YWJj" [97] 97 "=" '
        '"====" "Y===" 9797 "9797" true null'
    ),
    "colour": '"red" "RED" 1 null',
    "level": '1 3 1.0 "1"',
    "size": '"1" 1 "m"',
    "place": (
        '{"postCode":"x"} {} null {"post_code":"x"} {"postCode":5} {"postCode":"5"} {"postCode":null} [] '
        '{"postCode":"x","metresUp":"1"} {"postCode":"x","prices":null}'
    ),
    "places": (
        '[{"postCode":"x"},{"postCode":5}] [{"postCode":"5"}] [{}] [null] [{"postCode":"x","prices":["a"]}] '
        '{"postCode":"x"} [{"postCode":"x","metresUp":1e999}]'
    ),
    "tagged": '{"value":1} {"kind":"tagged!","value":1} {"kind":"x","value":1} {"kind":5,"value":1}',
}
"""Field of ``Kinds`` to values in JSON, between blanks: each is the only field of an input."""


def inputs(field: str, values: str) -> list[bytes]:
    return [f'{{"{field}":{value}}}'.encode() for value in values.split()]


WHOLE = r"""
{"text":"b","text":5} { {"text":"a 5 null [] "{}" [{}] {} {}x {},{} {}] {}],"v":[{} {}} {"text":"a"}{"text":"b"}
{},null null,{} {'text':'a'} {text:1} {"text":"a",} {,"text":"a"} {/**/"text":"a"} {"text":}
{"unknown":[1,{"a":null}]} {"unknown":nope} {"unknown":"\ud800"} {"\udc00":1} {"text":"a","text":"b"}
"""
"""Inputs that hold no blank, between blanks."""

SAME: list[bytes | None] = [
    *(each for field, values in VALUES.items() for each in inputs(field, values)),
    *(each.encode() for each in WHOLE.split()),
    None,
    b"",
    b" ",
    b" \t\r\n{ } \n",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00}\x00",
    b"{} x",
    b"{} {}",
    b"{}\x00",
    b'{"text":"a" "number":1}',
    b'{"text":"a"}// x',
    b'{"text" "a"}',
    b'{"unknown":' + b"[" * 10000 + b"]" * 10000 + b"}",
    b'{"places":' + b"[" * 10000 + b"]" * 10000 + b"}",
    b'{"unknown":' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"unknown":"\x01"}',
    b'{"text":"\xff"}',
    b'{"text":"\xc0\x80"}',
    b'{"text":"\xed\xa0\x80"}',
    b'{"text":"\n"}',
    b'{"text":"' + b"a" * (8 << 20) + b'"}',
    b'{"ratio":' + b"9" * 400 + b"}",
    b'{"price":" 1 "}',
    b'{"at":"2026-01-02 03:04:05z"}',
    b'{"at":" 2026-01-02T03:04:05Z"}',
    b'{"at":"2026-01-02T03:04:05Z "}',
    b'{"at":"2026-01-02T03:04:05 UTC"}',
    b'{"day":" 2026-01-02"}',
    b'{"raw":"Y Q=="}',
]
"""Both sides refuse it, or both take it for the same."""

DIFFERENT: dict[str, list[bytes]] = {
    DUPLICATE_TEXT: [b'{"text":"b","text":"5"}'],
    UNKNOWN: [b'{"unknown":"\xff"}', b'{"unknown":' + b"9" * 5000 + b"}"],
    LAST: [b'{"text":5,"text":"b"}'],
    TWICE: [b'{"names":{"a":"x","a":"y"}}'],
    WIDE: [b'{"number":9223372036854775808}', b'{"number":' + b"9" * 4000 + b"}"],
    EXACTLY: inputs(
        "price",
        '"NaN" "Infinity" "1_0" "\u0661" "1e30" "1e-10" 0.0000000001 "1e-1000000" "1e-99999999999" "1.5e-2147483647" '
        '"1.0000000001" "1.12345678901234e2" "12345678901234567890.1234567891e-1"',
    ),
    FAR: [b'{"at":"2026-01-02T03:04:05+19:00"}'],
    LOST: [b'{"places":[{"postCode":"x","prices":null}]}'],
    NO_TAG: [b'{"tagged":{"kind":null,"value":1}}'],
}
"""One side refuses it, by the reason."""
