"""Bad input as data: what a stranger may write to an event topic. Used by the tests of the decoder, and of the engine.

Every case says how it ends for ``Sample``: ``"decoded"``, ``"refused"`` (``DecodeError``, by the codec) or ``"no
route"`` (the type header names no event; the router's affair). Nothing else may happen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Retry, Table, event_type
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers, IncomingRecord

Ending = Literal["decoded", "refused", "no route"]


class Sample(msgspec.Struct, frozen=True):
    """The event that the cases are aimed at: one field of each kind that can go wrong."""

    account: str
    cents: int = 0
    rate: float = 0.0


EVENT_NAME = "Sample"
GOOD_VALUE = b'{"account":"a","cents":1,"rate":0.5}'
GOOD_HEADERS: Headers = [(TYPE_HEADER, b"Sample")]
GOOD_KEY = b"a"

TYPE_HEADERS: dict[str, tuple[Headers | None, Ending]] = {
    "no headers": (None, "no route"),
    "empty headers": ([], "no route"),
    "other headers only": ([("trace", b"1")], "no route"),
    "empty name": ([(TYPE_HEADER, b"")], "no route"),
    "null name": ([(TYPE_HEADER, None)], "no route"),
    "two names, the first is known": ([(TYPE_HEADER, b"Sample"), (TYPE_HEADER, b"Other")], "decoded"),
    "two names, the second is known": ([(TYPE_HEADER, b"Other"), (TYPE_HEADER, b"Sample")], "no route"),
    "not UTF-8": ([(TYPE_HEADER, b"\xff\xfe\x00")], "no route"),
    "64 KiB": ([(TYPE_HEADER, b"S" * 65536)], "no route"),
    "unknown": ([(TYPE_HEADER, b"Withdrawn")], "no route"),
    "space at the end": ([(TYPE_HEADER, b"Sample ")], "no route"),
    "null byte at the end": ([(TYPE_HEADER, b"Sample\x00")], "no route"),
    "path": ([(TYPE_HEADER, b"../../etc/passwd")], "no route"),
    "module path": ([(TYPE_HEADER, b"os.system")], "no route"),
    "format string": ([(TYPE_HEADER, b"%s{0.__class__}${jndi:x}")], "no route"),
    "a thousand headers": ([*[("h", b"x")] * 1000, (TYPE_HEADER, b"Sample")], "decoded"),
}

VERSION_HEADERS: dict[str, tuple[bytes | None, Ending]] = {
    "one": (b"1", "decoded"),
    "leading zeros": (b"001", "decoded"),
    "newer": (b"2", "refused"),
    "far newer": (b"999999999", "refused"),
    "too many digits": (b"9" * 10_000, "refused"),
    "zero": (b"0", "refused"),
    "negative": (b"-1", "refused"),
    "null": (None, "refused"),
    "empty": (b"", "refused"),
    "text": (b"one", "refused"),
    "float": (b"1.0", "refused"),
    "space": (b" 1", "refused"),
    "underscore": (b"1_0", "refused"),
    "other digits": ("\u0661".encode(), "refused"),
    "not UTF-8": (b"\xff", "refused"),
}

KEYS: dict[str, bytes | None] = {
    "null": None,
    "empty": b"",
    "100 KiB": b"k" * 102_400,
    "not UTF-8": b"\xff\xfe",
    "reserved": b"\xff\xffkes.offset",
    "null bytes": b"\x00\x00",
}
"""Each comes with a good value and type: a handler that keeps state by key gets into trouble, the decoder does not."""


@functools.cache
def values() -> dict[str, tuple[bytes | None, Ending]]:
    """The values. A function, because some are large."""
    return {
        "null": (None, "refused"),
        "empty": (b"", "refused"),
        "null byte": (b"\x00", "refused"),
        "truncated": (GOOD_VALUE[:-1], "refused"),
        "truncated escape": (b'{"account":"\\u00', "refused"),
        "text after the value": (GOOD_VALUE + b"x", "refused"),
        "two values": (GOOD_VALUE + GOOD_VALUE, "refused"),
        "spaces around": (b" \n" + GOOD_VALUE + b"\t ", "decoded"),
        "JSON null": (b"null", "refused"),
        "number": (b"5", "refused"),
        "text": (b'"Sample"', "refused"),
        "array": (b"[]", "refused"),
        "empty object": (b"{}", "refused"),
        "missing field": (b'{"cents":1}', "refused"),
        "unknown field": (b'{"account":"a","surprise":[{"x":{}}]}', "decoded"),
        "dunder fields": (b'{"account":"a","__class__":"os.system","__reduce__":[]}', "decoded"),
        "wrong type": (b'{"account":1}', "refused"),
        "text for a number": (b'{"account":"a","cents":"1"}', "refused"),
        "float for an integer": (b'{"account":"a","cents":1.5}', "refused"),
        "null for a number": (b'{"account":"a","cents":null}', "refused"),
        "arrays nested 10,000 deep": (b"[" * 10_000 + b"]" * 10_000, "refused"),
        "objects nested 10,000 deep": (b'{"account":' * 10_000 + b"1" + b"}" * 10_000, "refused"),
        "unknown field nested 10,000 deep": (
            b'{"account":"a","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
            "refused",
        ),
        "opened 1,000,000 times, never closed": (b"[" * 1_000_000, "refused"),
        "1e308": (b'{"account":"a","rate":1e308}', "decoded"),
        "1e309": (b'{"account":"a","rate":1e309}', "refused"),
        "1e308 for an integer": (b'{"account":"a","cents":1e308}', "refused"),
        "exponent of 100 digits": (b'{"account":"a","rate":1e' + b"9" * 100 + b"}", "refused"),
        "NaN": (b'{"account":"a","rate":NaN}', "refused"),
        "Infinity": (b'{"account":"a","rate":-Infinity}', "refused"),
        "2**64": (b'{"account":"a","cents":18446744073709551616}', "decoded"),
        "integer of 5,000 digits": (b'{"account":"a","cents":' + b"7" * 5_000 + b"}", "refused"),
        "duplicate keys": (b'{"account":"a","cents":1,"cents":2}', "decoded"),
        "lone surrogate, escaped": (b'{"account":"\\ud800"}', "refused"),
        "lone surrogate, raw": (b'{"account":"\xed\xa0\x80"}', "refused"),
        "surrogates in wrong order": (b'{"account":"\\udc00\\ud800"}', "refused"),
        "byte order mark": (b"\xef\xbb\xbf" + GOOD_VALUE, "refused"),
        "UTF-16": (GOOD_VALUE.decode().encode("utf-16"), "refused"),
        "Latin-1": ('{"account":"Zürich"}'.encode("latin-1"), "refused"),
        "overlong UTF-8": (b'{"account":"\xc0\xaf"}', "refused"),
        "control character": (b'{"account":"\x01"}', "refused"),
        "escaped null byte": (b'{"account":"\\u0000"}', "decoded"),
        "trailing comma": (b'{"account":"a",}', "refused"),
        "pickle": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "refused"),
        "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "refused"),
        "msgpack": (msgspec.msgpack.encode(Sample("a")), "refused"),
        "8 MiB of text": (b'{"account":"' + b"x" * (8 << 20) + b'"}', "decoded"),
        "8 MiB of rubbish": (b"\xa5" * (8 << 20), "refused"),
        "8 MiB of spaces": (b" " * (8 << 20), "refused"),
    }


class BadRecord(NamedTuple):
    """One case as the engine meets it."""

    name: str
    key: bytes | None
    value: bytes | None
    headers: Headers | None
    ending: Ending

    def incoming(self, topic: str = "events", partition: int = 0, offset: int = 0) -> IncomingRecord:
        return IncomingRecord(topic, partition, offset, self.key, self.value, self.headers, 0)


TWICE: list[tuple[str, Headers, Ending]] = [
    ("type header: empty, then known", [(TYPE_HEADER, b""), *GOOD_HEADERS], "no route"),
    ("type header: null, then known", [(TYPE_HEADER, None), *GOOD_HEADERS], "no route"),
    ("version header: bad, then good", [*GOOD_HEADERS, (VERSION_HEADER, b"2"), (VERSION_HEADER, b"1")], "refused"),
    ("version header: good, then bad", [*GOOD_HEADERS, (VERSION_HEADER, b"1"), (VERSION_HEADER, b"2")], "decoded"),
]


def records() -> Iterator[BadRecord]:
    """All cases, one thing wrong in each."""
    for name, (headers, ending) in TYPE_HEADERS.items():
        yield BadRecord(f"type header: {name}", GOOD_KEY, GOOD_VALUE, headers, ending)
    for name, (version, ending) in VERSION_HEADERS.items():
        headers = [*GOOD_HEADERS, (VERSION_HEADER, version)]
        yield BadRecord(f"version header: {name}", GOOD_KEY, GOOD_VALUE, headers, ending)
    for name, key in KEYS.items():
        yield BadRecord(f"key: {name}", key, GOOD_VALUE, GOOD_HEADERS, "decoded")
    for name, (value, ending) in values().items():
        yield BadRecord(f"value: {name}", GOOD_KEY, value, GOOD_HEADERS, ending)


FAILING_KEYS = ("key: null", "key: reserved")
"""Keys that a store refuses; the record itself can be read."""


def small_records() -> list[BadRecord]:
    """Those that a topic takes with default settings, and those with a header twice, of which the first one counts."""
    twice = [BadRecord(name, GOOD_KEY, GOOD_VALUE, headers, ending) for name, headers, ending in TWICE]
    return twice + [case for case in records() if len(case.value or b"") < 900_000]


@event_type("Seen")
class Seen(msgspec.Struct, frozen=True):
    """``size``: of the account of a ``Sample``, the how manieth it is."""

    size: int
    count: int


def counting(config: EventSourceConfig, output: str, policy: Retry) -> EventSource[Table[bytes, int]]:
    """A source of ``Sample``: keeps the count, also by key (a null key is the store's affair), sends ``Seen``."""
    source = EventSource(config, Table.factory(key=bytes, value=int))

    @source.register_event_type(Sample, on_error=policy)
    def count(ctx: EventContext[Table[bytes, int]], event: Sample) -> None:
        assert ctx.input is not None
        number = ctx.store.get(b"all", 0) + 1
        ctx.store.put(b"all", number)
        key: Any = ctx.input.key
        ctx.store.put(key, number)
        ctx.forward(output, Seen(len(event.account), number), key=b"seen")

    return source
