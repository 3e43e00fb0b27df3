"""Records of a journal: marks, the order of a log, and what it says of an append."""

from __future__ import annotations

import pytest

from streams.core.journal import (
    CHECKPOINT_TYPE,
    TERM_TYPE,
    CheckpointRecord,
    EntryMark,
    LogOrder,
    Payload,
    SettledAppend,
    TermRecord,
    checkpoint_of,
    control,
    kept_from,
    mark_of,
    output_of,
    outputs_of,
    plain_value,
    settled,
    term_of,
)
from streams.errors import DecodeError, JournalError
from streams.kafka.wire.placement import Placement
from streams.kafka.writing.record_batch import EncodedRecords
from streams.kafka.writing.row_encoder import add_outputs
from streams.records import Headers, IncomingRecord


def record(offset: int, payload: Payload, mark: EntryMark) -> IncomingRecord:
    output = output_of("ledger", payload, mark)
    return IncomingRecord("ledger", 0, offset, output.key, output.value, output.headers)


def entry(offset: int, term: int, number: int) -> IncomingRecord:
    return record(offset, Payload([("__grt__", b"bytes")], b"x"), EntryMark(term, number))


def began(offset: int, previous: int) -> IncomingRecord:
    return record(offset, control(TERM_TYPE, TermRecord("me", 1)), EntryMark(offset, 0, previous))


def raw(key: bytes | None, value: bytes | None = b"x", headers: Headers | None = None) -> IncomingRecord:
    return IncomingRecord("ledger", 0, 7, key, value, headers)


def test_a_log_in_order_is_taken_from_its_start_and_from_anywhere() -> None:
    log = [began(0, -1), entry(2, 0, 1), entry(3, 0, 2), began(9, 0), began(11, 9), entry(12, 11, 1)]
    order = LogOrder(is_start=True)
    assert [order.see(each) for each in log] == [
        (0, 0, -1),
        (0, 1, -1),
        (0, 2, -1),
        (9, 0, 0),
        (11, 0, 9),
        (11, 1, -1),
    ]
    for start in range(len(log)):
        order = LogOrder()
        assert [order.see(each).term for each in log[start:]] == [mark_of(each).term for each in log[start:]]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([began(0, -1), entry(1, 0, 2)], "number 2 of term 0, after number 0 at offset 0: entries are missing"),
        ([began(0, -1), entry(1, 0, 1), entry(2, 0, 1)], "number 1 of term 0, after number 1"),
        ([began(0, -1), began(3, 0), entry(4, 0, 1)], "@4 is of term 0, and term 3 has begun before it"),
        ([began(0, -1), began(5, 3)], "begins a term after term 3, and the log has term 0 before it"),
        ([began(0, -1), entry(4, 0, 1), entry(2, 0, 2)], "@2 comes after offset 4: the topic was recreated"),
        ([entry(3, 3, 1)], "is of term 3, and term -1 has begun"),
        ([began(4, 4)], "begins a term after term 4"),
    ],
    ids=["missing", "doubled", "older", "term", "recreated", "itself", "after-itself"],
)
def test_a_log_out_of_order_is_an_error_with_numbers(log: list[IncomingRecord], message: str) -> None:
    order = LogOrder()
    for each in log[:-1]:
        order.see(each)
    with pytest.raises(JournalError, match=message):
        order.see(log[-1])


def test_a_start_that_is_cut_off_is_an_error() -> None:
    for first in (entry(4, 0, 1), began(4, 0)):
        with pytest.raises(JournalError, match="is the first entry, and none that begins the first term"):
            LogOrder(is_start=True).see(first)


def test_a_foreign_record_is_an_error_with_its_offset() -> None:
    with pytest.raises(JournalError, match=r"ledger\[0\]@7 is no entry of a journal"):
        mark_of(raw(None))
    with pytest.raises(JournalError, match="is no entry of a journal"):
        mark_of(raw(b"5:3"))
    for content in (b"", b"1", b"x:1", b"term:x", b"-1:3", b"1:-3", b"5:0"):
        with pytest.raises(JournalError, match="is no mark of an entry"):
            mark_of(raw(b"grj:" + content))
    with pytest.raises(JournalError, match="no mark"):  # begins a term by its mark, and not by its type
        mark_of(raw(b"grj:term:3", headers=[("__grt__", b"bytes")]))


def test_an_entry_that_is_like_the_one_before_is_still_looked_at() -> None:
    """The next entry of the same term and type takes a short way, which anything else does not."""
    shared: Headers = [("__grt__", b"bytes")]
    log = [record(at, Payload(shared, b"x"), EntryMark(0, at)) for at in range(1, 4)]
    order = LogOrder()
    assert [order.see(each) for each in log] == [(0, 1, -1), (0, 2, -1), (0, 3, -1)]
    for key in (b"grj:0:5", b"grj:0:3", b"grj:1:4", b"grj:0:04x", b"0:4", None):
        with pytest.raises(JournalError):
            order.see(IncomingRecord("ledger", 0, 9, key, b"x", shared))
    with pytest.raises(JournalError, match="the topic was recreated"):
        order.see(IncomingRecord("ledger", 0, 3, b"grj:0:4", b"x", shared))
    with pytest.raises(JournalError, match="no mark"):
        order.see(IncomingRecord("ledger", 0, 9, b"grj:0:4", b"x", [("__grt__", b"__term__")]))
    assert order.see(record(9, Payload([], b"x"), EntryMark(0, 4))) == (0, 4, -1)
    assert order.see(began(12, 0)) == (12, 0, 0)
    assert order.see(record(13, Payload(shared, b"x"), EntryMark(12, 1))) == (12, 1, -1)


def test_entries_are_encoded_on_the_hot_path() -> None:
    """Those behind the first one: one that leaves it costs six times as much."""
    shared: Headers = [("__grt__", b"bytes")]
    outputs = outputs_of("ledger", [Payload(shared, b"x" * 100)] * 300, 7, 1, [-1] * 300)
    encoded = EncodedRecords({"ledger": Placement("ledger", 1, 1_000_000)}, 1_000_000)
    assert encoded.add(outputs, 0, 0) == len(outputs)
    again = add_outputs(encoded._topics, lambda headers: b"", outputs, 0, 0, 900_000)
    assert again == len(outputs)


def test_control_entries_that_cannot_be_read_are_errors() -> None:
    for value in (None, b"", b"{}", b'{"covers": "x"}'):
        with pytest.raises(JournalError, match="the checkpoint cannot be read"):
            checkpoint_of(raw(None, value))
        with pytest.raises(JournalError, match="the beginning of a term cannot be read"):
            term_of(raw(None, value))
    with pytest.raises(JournalError, match="covers what is before 8, which is behind it"):
        checkpoint_of(raw(None, b'{"covers": 8}'))
    covered = record(7, control(CHECKPOINT_TYPE, CheckpointRecord(7, "x")), EntryMark(0, 1))
    assert checkpoint_of(covered) == CheckpointRecord(7, "x")


def test_the_log_says_what_became_of_an_append() -> None:
    ours = [entry(5, 0, 3), entry(6, 0, 4)]
    assert settled([], 0, 3, 2) == SettledAppend((), -1)
    assert settled([entry(4, 0, 2), *ours, entry(7, 0, 5)], 0, 3, 2) == SettledAppend((5, 6), -1)
    assert settled([*ours, began(9, 0), entry(10, 9, 3)], 0, 3, 2) == SettledAppend((5, 6), 9)
    assert settled([began(9, 0), began(12, 9)], 0, 3, 2) == SettledAppend((), 9)
    with pytest.raises(JournalError, match=r"of 2 entries of term 0 from number 3 on, the log has \[3\]"):
        settled(ours[:1], 0, 3, 2)
    with pytest.raises(JournalError, match="is of term 0, and term 4 has begun before it"):
        settled([began(4, 0), *ours], 0, 3, 2)


def test_a_log_is_never_cut_beyond_the_checkpoints_that_are_kept() -> None:
    assert kept_from([], 1) == -1
    assert kept_from([5, 9], 3) == -1
    assert kept_from([5, 9], 2) == 5
    assert kept_from([5, 9], 1) == 9
    assert kept_from([5, 20, 9], 2) == 9  # a fuzzy one may cover less than the one before it
    assert kept_from([5], 0) == -1


def test_an_entry_has_a_value() -> None:
    assert plain_value(raw(None)) == b"x"
    with pytest.raises(DecodeError, match=r"ledger\[0\]@7: the value is null"):
        plain_value(raw(None, None))
