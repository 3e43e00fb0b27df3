"""Sizes of what a transaction takes in, added up by compiled code and in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core import admission
from streams.records import Change, IncomingRecord, Output
from streams.sak.compiling import fields_of
from tests.property.leaves_kit import needs_compiled, outcome, plain

pytestmark = needs_compiled
PLAIN = plain(admission)

contents: Any = st.one_of(st.binary(max_size=3), st.none(), st.sampled_from(["text", 7, (), b""]))
headers: Any = st.sampled_from([None, [], [("h", b"v")], [("h", None)], 7, ["no pair"]])
received = st.one_of(headers, st.just((("h", b"v"),)))
zero = st.just(0)


def of_changes(module: Any, made: list[Any]) -> Any:
    latest: dict[Any, Any] = {}
    return outcome(module.size_of_changes, made, latest), {key: id(change) for key, change in latest.items()}


SIZES: dict[type, Callable[[Any, list[Any]], Any]] = {
    IncomingRecord: lambda module, made: outcome(module.size_of_records, made),
    Change: of_changes,
    Output: lambda module, made: outcome(module.size_of_outputs, made),
}
MADE: dict[type, st.SearchStrategy[Any]] = {
    IncomingRecord: st.builds(IncomingRecord, st.just("t"), zero, zero, contents, contents, received),
    Change: st.builds(Change, st.one_of(st.binary(max_size=2), contents), contents),
    Output: st.builds(Output, st.just("t"), contents, contents, headers, zero, zero, zero, zero),
}
GOOD: dict[type, Callable[[], Any]] = {
    IncomingRecord: lambda: IncomingRecord("t", 0, 0, b"k", b"v", None),
    Change: lambda: Change(b"k", b"v"),
    Output: lambda: Output("t", b"v", b"k", None, 0, 0, 0, 0),
}


@pytest.mark.parametrize("kind", SIZES)
@given(st.data())
def test_all_are_added_up_alike(kind: type, data: st.DataObject) -> None:
    made = data.draw(st.lists(MADE[kind], max_size=6))
    assert SIZES[kind](admission, made) == SIZES[kind](PLAIN, made)


@pytest.mark.parametrize(("kind", "lost"), [(kind, field) for kind in SIZES for field in fields_of(kind)])
def test_those_that_have_lost_a_field_are_added_up_alike(kind: type, lost: str) -> None:
    made = [GOOD[kind](), GOOD[kind]()]
    delattr(made[1], lost)
    assert SIZES[kind](admission, made) == SIZES[kind](PLAIN, made)


@pytest.mark.parametrize("foreign", [None, 7, object()], ids=["none", "number", "object"])
def test_what_is_no_record_is_refused(foreign: Any) -> None:
    for call in (
        lambda: admission.size_of_changes([foreign], {}),
        lambda: admission.size_of_outputs([foreign]),
        lambda: admission.size_of_records([foreign]),
    ):
        with pytest.raises((TypeError, AttributeError)):
            call()
