from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import DecodeError
from streams.events import event_type, event_type_of, parse_version, upcaster


@event_type("Counted", version=5)
class Counted(msgspec.Struct):
    steps: list[int]
    count: int = 0


def _register(step: int) -> None:
    @upcaster(Counted, from_version=step)
    def upcast(old: dict[str, Any]) -> dict[str, Any]:
        old["steps"].append(step)
        return old


for _step in range(1, 5):
    _register(_step)


@given(st.integers(-3, 10), st.integers())
def test_every_older_version_takes_each_later_step_once_in_order(version: int, count: int) -> None:
    kind = event_type_of(Counted)
    value = msgspec.json.encode({"steps": [], "count": count})
    try:
        decoded = kind.decode(value, version)
    except DecodeError:
        assert not 1 <= version <= 5
    else:
        assert decoded == Counted(list(range(version, 5)), count)


@given(st.none() | st.binary(max_size=40), st.integers())
def test_rubbish_is_a_decode_error_and_nothing_else(value: bytes | None, version: int) -> None:
    kind = event_type_of(Counted)
    for tried in (version, version % 7):
        try:
            assert isinstance(kind.decode(value, tried), Counted)
        except DecodeError:
            continue


@given(st.none() | st.binary(max_size=12) | st.integers(-5, 10**12).map(lambda number: b"%d" % number))
def test_version_headers(header: bytes | None) -> None:
    try:
        version = parse_version(header)
    except DecodeError:
        return
    assert header is not None
    assert 1 <= version == int(header) < 10**9
