"""Compiled leaves do what their source does in plain Python, with whatever they are handed: also with objects that have
lost a field, which must be an ``AttributeError`` and never a crash."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streams.kafka.wire.placement import Placement
from streams.kafka.writing import row_encoder
from streams.kafka.writing.record_batch import EncodedRecords, encode_headers
from streams.kafka.writing.rows import Rows, TopicRows
from streams.records import Change, Output
from streams.sak.compiling import fields_of
from tests.property.leaves_kit import needs_compiled, outcome, plain

pytestmark = needs_compiled

NOW = 1_700_000_000_000


PLAIN_ENCODER = plain(row_encoder)


def contents(found: Any) -> Any:
    """All there is in it, also in objects without ``==``."""
    if isinstance(found, dict):
        return {key: contents(value) for key, value in found.items()}
    if isinstance(found, Rows | TopicRows | Placement):
        return {name: contents(getattr(found, name, "not set")) for name in fields_of(type(found))}
    return found


sizes = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 8180, 8191, 8192, 20_000]))
usual = st.builds(lambda size: b"x" * size, sizes)
WIDE = memoryview(b"view" * 4).cast("I")
"""It cannot be hashed, so hypothesis does not choose it."""
weird = st.sampled_from([None, "text", bytearray(b"array"), memoryview(b"view"), 7, (), [b"list"]])
headers = st.one_of(
    st.none(),
    st.lists(st.tuples(st.text(max_size=3), st.one_of(st.none(), st.binary(max_size=3))), max_size=2),
    st.sampled_from([7, ["no pair"], [("name", 7)]]),
)
times = st.sampled_from([0, NOW, NOW - 1, NOW + 8_000, NOW + 9_000, -1, 1 << 70, 1.5, None, "then", True])
partitions = st.sampled_from([-1, -1, 0, 1, 2, 9, -2, None, "two", 1 << 70, 1.0])


def lossy(made: st.SearchStrategy[Any], cls: type) -> st.SearchStrategy[Any]:
    """Objects of which some have lost a field."""

    def lose(one: Any, field: str | None) -> Any:
        if field is not None:
            delattr(one, field)
        return one

    return st.builds(lose, made, st.one_of(st.none(), st.none(), st.none(), st.sampled_from(fields_of(cls))))


outputs = st.builds(
    Output,
    topic=st.sampled_from(["t", "t", "t", "u", "unknown", None, 7]),
    value=st.one_of(usual, usual, usual, weird),
    key=st.one_of(usual, usual, usual, weird),
    headers=headers,
    partition=partitions,
    timestamp_ms=times,
    origin_partition=st.just(0),
    origin=st.just(0),
)
changes = st.builds(
    Change,
    key=st.one_of(usual, usual, usual, weird),
    value=st.one_of(usual, usual, usual, weird),
    type=st.sampled_from(["", "", "", "kind", None, 7]),
)


def rows(stamp: int | None) -> Rows:
    made = Rows()
    if stamp is not None:
        made.add(stamp, b"first", b"of all", b"\0", 100_000)
    return made


def topics(stamp: int | None, limit: int) -> dict[str, TopicRows]:
    made = {name: TopicRows(Placement(name, 3, limit)) for name in ("t", "u")}
    for topic in made.values():
        topic.rows = {partition: rows(stamp) for partition in (0, 1, 2)}
    return made


def encoded_headers(given: Any) -> bytes:
    return encode_headers(given) if given else b"\0"


stamps = st.sampled_from([NOW, NOW - 10, NOW + 10, None])
limits = st.sampled_from([100, 3_000, 100_000])


@given(st.lists(lossy(outputs, Output), max_size=12), st.integers(-3, 13), stamps, limits)
@example([Output("t", b"v", b"k", None, -1, 0, 0, 0)] * 20, 0, NOW, 100_000)
def test_outputs_become_the_same_rows(sent: list[Output], start: int, stamp: int | None, limit: int) -> None:
    ours, theirs = topics(stamp, limit), topics(stamp, limit)
    found = outcome(row_encoder.add_outputs, ours, encoded_headers, sent, start, NOW, 900_000)
    assert found == outcome(PLAIN_ENCODER.add_outputs, theirs, encoded_headers, sent, start, NOW, 900_000)
    assert contents(ours) == contents(theirs)


@given(st.lists(lossy(changes, Change), max_size=12), st.integers(-3, 13), stamps, limits)
@example([Change(b"k", b"v")] * 20, 0, NOW, 100_000)
def test_changes_become_the_same_rows(made: list[Change], start: int, stamp: int | None, limit: int) -> None:
    ours, theirs = rows(stamp), rows(stamp)
    found = outcome(row_encoder.add_changes, ours, made, start, NOW, limit)
    assert found == outcome(PLAIN_ENCODER.add_changes, theirs, made, start, NOW, limit)
    assert contents(ours) == contents(theirs)


@pytest.mark.parametrize("field", sorted({*fields_of(Rows)} - {"full"}))
def test_rows_that_have_lost_a_field_end_the_hot_path(field: str) -> None:
    """In plain Python some are not missed: those that are set before they are read. (``full`` is not read here.)"""
    known = topics(NOW, 100_000)
    delattr(known["t"].rows[1], field)
    sent = [Output("t", b"v", b"k", None, partition, 0, 0, 0) for partition in (0, 1)]
    assert row_encoder.add_outputs(known, encoded_headers, sent, 0, NOW, 900_000) == 1
    with pytest.raises(AttributeError, match=field):
        row_encoder.add_changes(known["t"].rows[1], [Change(b"k", b"v")], 0, NOW, 100_000)


@pytest.mark.parametrize("field", fields_of(TopicRows))
def test_topics_that_have_lost_a_field_end_the_hot_path(field: str) -> None:
    known = topics(NOW, 100_000)
    delattr(known["u"], field)
    sent = [Output(topic, b"v", b"k", None, 0, 0, 0, 0) for topic in ("t", "u")]
    assert row_encoder.add_outputs(known, encoded_headers, sent, 0, NOW, 900_000) == 1


@pytest.mark.parametrize(
    "foreign", [None, "text", object(), Change(b"k", b"v")], ids=["none", "text", "object", "change"]
)
def test_what_is_no_record_ends_the_hot_path(foreign: Any) -> None:
    sent = [Output("t", b"v", b"k", None, 0, 0, 0, 0), foreign]
    assert row_encoder.add_outputs(topics(NOW, 100_000), encoded_headers, sent, 0, NOW, 900_000) == 1


@pytest.mark.parametrize("encoder", [row_encoder, PLAIN_ENCODER], ids=["compiled", "plain"])
@pytest.mark.parametrize("buffer", [bytearray(b"b"), memoryview(b"b"), WIDE], ids=["array", "view", "wide"])
def test_a_buffer_is_no_usual_record(encoder: Any, buffer: Any) -> None:
    """Its length need not be that of its bytes, and they may change before the transaction is sent."""
    for key, value in ((buffer, b"v"), (b"k", buffer)):
        sent = [Output("t", content, name, None, 1, 0, 0, 0) for name, content in ((b"k", b"v"), (key, value))]
        assert encoder.add_outputs(topics(NOW, 100_000), encoded_headers, sent, 0, NOW, 900_000) == 1
        made = [Change(b"k", b"v"), Change(key, value)]
        assert encoder.add_changes(rows(NOW), made, 0, NOW, 100_000) == 1


@pytest.mark.parametrize("encoder", [row_encoder, PLAIN_ENCODER], ids=["compiled", "plain"])
@pytest.mark.parametrize(
    "partition, stamp", [(0, 0), (2, 5), (3, 0), (-2, 0), (True, 0), (0.0, 0), (0, -1), (0, 1 << 62)]
)
def test_the_first_record_of_a_partition_is_usual_if_it_can_be_sent(encoder: Any, partition: Any, stamp: int) -> None:
    known = {"t": TopicRows(Placement("t", 3, 1_000))}
    is_usual = (partition, stamp) in ((0, 0), (2, 5)) and type(partition) is int
    sent = [Output("t", b"v", b"k", None, partition, stamp, 0, 0)]
    assert encoder.add_outputs(known, encoded_headers, sent, 0, NOW, 900_000) == is_usual
    slowly = Rows()
    slowly.add(stamp or NOW, b"k", b"v", encoded_headers(None), 1_000)
    assert [found.batches() for found in known["t"].rows.values() if found.count] == [slowly.batches()] * is_usual


@pytest.mark.parametrize("headers", [bytearray(b"h"), None, "h"], ids=["array", "none", "text"])
def test_parts_that_are_no_bytes_end_the_hot_path(headers: Any) -> None:
    """They are joined by a function of the builder's, which copies bytes only."""
    sent = [Output("t", b"v", b"k", None, 1, 0, 0, 0)]
    assert row_encoder.add_outputs(topics(NOW, 100_000), lambda _: headers, sent, 0, NOW, 900_000) == 0


def test_a_replaced_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(row_encoder, "add_outputs", lambda *given: called.append(given) or given[3])
    EncodedRecords({"t": Placement("t", 3, 1_000)}, 1_000_000).add([Output("t", b"v", b"k", None, 0, 0, 0, 0)], 0, NOW)
    assert len(called) == 1
