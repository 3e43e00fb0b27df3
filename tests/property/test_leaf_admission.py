"""Sizes of what a transaction takes in, added up by compiled code and in plain Python."""

from __future__ import annotations

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
changes = st.builds(Change, st.one_of(st.binary(max_size=2), contents), contents)
outputs = st.builds(Output, st.just("t"), contents, contents, headers, st.just(0), st.just(0), st.just(0), st.just(0))


records: Any = st.builds(
    IncomingRecord,
    st.just("t"),
    st.just(0),
    st.just(0),
    contents,
    contents,
    st.one_of(headers, st.just((("h", b"v"),))),
)


@given(st.lists(records, max_size=6))
def test_records_are_added_up_alike(made: list[IncomingRecord]) -> None:
    assert outcome(admission.size_of_records, made) == outcome(PLAIN.size_of_records, made)


@pytest.mark.parametrize("lost", fields_of(IncomingRecord))
def test_records_that_have_lost_a_field_are_added_up_alike(lost: str) -> None:
    made = [IncomingRecord("t", 0, 0, b"k", b"v", None) for _ in range(2)]
    delattr(made[1], lost)
    assert outcome(admission.size_of_records, made) == outcome(PLAIN.size_of_records, made)


def of_changes(module: Any, made: list[Any]) -> Any:
    latest: dict[Any, Any] = {}
    return outcome(module.size_of_changes, made, latest), {key: id(change) for key, change in latest.items()}


@given(st.lists(changes, max_size=6))
def test_changes_are_added_up_alike(made: list[Change]) -> None:
    assert of_changes(admission, made) == of_changes(PLAIN, made)


@given(st.lists(outputs, max_size=6))
def test_outputs_are_added_up_alike(made: list[Output]) -> None:
    assert outcome(admission.size_of_outputs, made) == outcome(PLAIN.size_of_outputs, made)


@pytest.mark.parametrize("lost", fields_of(Change))
def test_changes_that_have_lost_a_field_are_added_up_alike(lost: str) -> None:
    made = [Change(b"k", b"v"), Change(b"l", b"w")]
    delattr(made[1], lost)
    assert of_changes(admission, made) == of_changes(PLAIN, made)


@pytest.mark.parametrize("lost", fields_of(Output))
def test_outputs_that_have_lost_a_field_are_added_up_alike(lost: str) -> None:
    made = [Output("t", b"v", b"k", None, 0, 0, 0, 0) for _ in range(2)]
    delattr(made[1], lost)
    assert outcome(admission.size_of_outputs, made) == outcome(PLAIN.size_of_outputs, made)


@pytest.mark.parametrize("foreign", [None, 7, object()], ids=["none", "number", "object"])
def test_what_is_no_record_is_refused(foreign: Any) -> None:
    for call in (
        lambda: admission.size_of_changes([foreign], {}),
        lambda: admission.size_of_outputs([foreign]),
        lambda: admission.size_of_records([foreign]),
    ):
        with pytest.raises((TypeError, AttributeError)):
            call()
