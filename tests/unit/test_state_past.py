"""The state as it was, beside a compaction as Kafka's: exact, or refused with places that are exact."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import typer

from streams.cli.state_past import Past, place_of
from streams.errors import OffsetError
from streams.model.places import shown_place
from streams.records import IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord

BEGAN_MS = 1_763_640_000_000
KEYS = [b"a", b"b", b"c", b"d", b"e", b"f"]
State = dict[bytes, bytes]


def position(offset: int, at: int, time_ms: int) -> IncomingRecord:
    value = msgspec.json.encode(OffsetRecord(at, "m", 0, 0))
    return IncomingRecord("log", 0, offset, OFFSET_KEY, value, None, time_ms)


def a_changelog(rng: random.Random) -> list[IncomingRecord]:
    """Transactions of a few changes; some leave the position as it is, and a reset sets it back."""
    log: list[IncomingRecord] = []
    at, time_ms = 0, BEGAN_MS
    for _ in range(rng.randint(1, 20)):
        time_ms += rng.randint(0, 3)
        for _ in range(rng.randint(0, 3)):
            value = None if rng.random() < 0.25 else b"%d" % len(log)
            log.append(IncomingRecord("log", 0, len(log), rng.choice(KEYS), value, None, time_ms))
        at = rng.randint(0, at) if rng.random() < 0.05 else at + rng.randint(0, 2)
        log.append(position(len(log), at, time_ms))
    return log


def compacted(log: list[IncomingRecord], rng: random.Random) -> list[IncomingRecord]:
    """Clean the log up to somewhere, some times: the last record of each key stays, and deletions go in the end."""
    for _ in range(rng.randint(0, 3)):
        end = rng.randint(0, len(log))
        last = {record.key: record.offset for record in log[:end]}
        without_deletions = rng.random() < 0.5
        log = [
            record
            for at, record in enumerate(log)
            if at >= end or (last[record.key] == record.offset and not (without_deletions and record.value is None))
        ]
    return log


def state_of(records: list[IncomingRecord]) -> State:
    found: State = {}
    for record in records:
        if record.key == OFFSET_KEY:
            continue
        found.pop(record.key or b"", None)
        if record.value is not None:
            found[record.key or b""] = record.value
    return found


def as_of(log: list[IncomingRecord], whole: int, text: str, about: Callable[[bytes], bool] = lambda key: True) -> State:
    """Return the state at a place as the command reads it. Raises ``OffsetError``."""
    past = Past(0, place_of(text, "input"), about)
    past.receive(log)
    there = {record.offset for record in log}
    past.check("log[0]", lambda start, end: not there.issuperset(range(start, min(end, whole))))
    return state_of([record for record in log if record.offset < past.cut])


def at_time(log: list[IncomingRecord], time_ms: int) -> State:
    """Return the state of all transactions before the first one of a later time."""
    ends = [record for record in log if record.key == OFFSET_KEY]
    below = list(itertools.takewhile(lambda record: record.timestamp_ms <= time_ms, ends))
    return state_of(log[: below[-1].offset + 1]) if below else {}


def at_of(record: IncomingRecord) -> int:
    return msgspec.json.decode(record.value or b"", type=OffsetRecord).offset


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_what_compaction_leaves_is_exact_or_refused(first: int) -> None:
    for seed in range(first, first + 100):
        check_places(seed)


def check_places(seed: int) -> None:
    rng = random.Random(seed)
    log = a_changelog(rng)
    left = compacted(log, rng)
    answers = 0
    for at in range(40):
        below = [record.offset for record in log if record.key == OFFSET_KEY and at_of(record) <= at]
        try:
            found = as_of(left, len(log), f"0@{at}")
        except OffsetError:
            continue
        answers += 1
        assert found == state_of(log[: below[-1] + 1]), f"0@{at}, seed {seed}"
    for time_ms in range(BEGAN_MS - 1, BEGAN_MS + 30):
        try:
            found = as_of(left, len(log), shown_place(time_ms))
        except OffsetError:
            continue
        answers += 1
        assert found == at_time(log, time_ms), f"{time_ms}, seed {seed}"
    assert answers, f"seed {seed}: the state of now is always known"


def test_of_a_single_key_more_is_known_and_that_is_exact() -> None:
    for seed in range(100):
        check_keys(seed)


def check_keys(seed: int) -> None:
    rng = random.Random(seed)
    log = a_changelog(rng)
    left = compacted(log, rng)
    for key in KEYS:
        for time_ms in range(BEGAN_MS, BEGAN_MS + 30, 3):
            try:
                found = as_of(left, len(log), shown_place(time_ms), key.__eq__)
            except OffsetError:
                continue
            assert found.get(key) == at_time(log, time_ms).get(key), f"{key!r} at {time_ms}, seed {seed}"


def row(offset: int, key: bytes, time_ms: int = 0) -> IncomingRecord:
    return IncomingRecord("log", 0, offset, key, b"%d" % offset, None, BEGAN_MS + time_ms)


LOG = [row(0, b"a"), position(1, 3, BEGAN_MS), row(2, b"b"), row(3, b"a"), position(4, 5, BEGAN_MS + 10)]


@pytest.mark.parametrize(
    ("log", "place", "said"),
    [
        (LOG, "0@4", r"no transaction is known to have ended at 0@4; the nearest exact places are 0@3 and 0@5"),
        (LOG, "0@2", r"the nearest exact places are 0@3"),
        (LOG, "0@9", r"the nearest exact places are 0@5"),
        ([LOG[1], *LOG[2:]], "0@3", r"records below 0@3, and 2 keys .* such as b'a'; the nearest exact place is 0@5"),
        ([LOG[1], LOG[4]], "0@3", r"compaction has taken records around 0@3; the nearest exact places are 0@3 and 0@5"),
    ],
)
def test_a_refusal_names_the_nearest_exact_places(log: list[IncomingRecord], place: str, said: str) -> None:
    with pytest.raises(OffsetError, match=said):
        as_of(log, 5, place)


@pytest.mark.parametrize("text", ["latest", "more:0@1", "soon", "2025-11-20T12:00"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        place_of(text, "input")


def test_before_the_first_transaction_the_state_is_empty() -> None:
    found: Any = as_of(LOG, 5, shown_place(BEGAN_MS - 1))
    assert found == {}
