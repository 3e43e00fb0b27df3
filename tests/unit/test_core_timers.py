"""The heap of timers against a plain dict, what a timer looks like in the changelog, and how it is read back."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import Timer
from streams.core.timers import Timers
from streams.errors import OffsetError
from streams.records import IncomingRecord
from streams.runtime.changelog import decode_timer, encode_timer, timer_key

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
STEPS = st.lists(st.tuples(st.sampled_from(["set", "set", "remove", "fire"]), NAMES, st.integers(0, 9)), max_size=300)


@given(st.dictionaries(NAMES, st.integers(0, 9)), STEPS)
def test_the_first_one_is_the_first_one(restored: dict[str, int], steps: list[tuple[str, str, int]]) -> None:
    """Whatever was restored, set, replaced and removed before; and what is outdated does not pile up."""
    timers, model = Timers(Timer(name, due_ms, "T", b"") for name, due_ms in restored.items()), dict(restored)
    for step, name, due_ms in steps:
        if step == "set":
            timers.apply({name: Timer(name, due_ms, "T", b"")})
            model[name] = due_ms
        elif step == "remove":
            timers.apply({name: None})
            model.pop(name, None)
        elif (first := timers.first()) is not None:
            timers.apply({first.name: None})
            assert (first.due_ms, first.name) == min((due, name) for name, due in model.items())
            del model[first.name]
        first = timers.first()
        expected = min(((due, name) for name, due in model.items()), default=None)
        assert (None if first is None else (first.due_ms, first.name)) == expected
        assert {timer.name: timer.due_ms for timer in timers} == model
        assert {name for name in "abcde" if name in timers} == set(model)
        assert len(timers) == len(model)
        assert len(timers._heap) <= 2 * len(model) + 65


def test_one_that_is_set_again_and_again_takes_no_more_room() -> None:
    timers = Timers()
    for due_ms in range(10_000):
        timers.apply({"idle": Timer("idle", due_ms, "T", b"")})
    assert len(timers._heap) < 100


GOLDEN = b'{"v":1,"due_ms":1767225600123,"type":"PaymentDue","version":2,"value":"eyJvcmRlciI6Im83In0=","key":"AP9v"}'
"""What is in changelogs of released versions: it has to be read for ever."""
TIMER = Timer("payment/o7", 1767225600123, "PaymentDue", b'{"order":"o7"}', 2, b"\x00\xffo")


def record(value: bytes | None, key: bytes = b"\xff\xffkes.timer.payment/o7") -> IncomingRecord:
    return IncomingRecord("g.in.changelog", 3, 17, key, value, None)


def test_the_format_is_what_it_was() -> None:
    assert timer_key(TIMER.name) == b"\xff\xffkes.timer.payment/o7"
    assert encode_timer(TIMER) == GOLDEN
    assert decode_timer(record(GOLDEN)) == (TIMER.name, TIMER)
    assert decode_timer(record(None)) == (TIMER.name, None)
    plain = json.loads(GOLDEN)
    assert base64.b64decode(plain["value"]) == TIMER.value
    newer = json.dumps(plain | {"zone": "UTC"}).encode()
    assert decode_timer(record(newer)) == (TIMER.name, TIMER), "a field more is passed over"
    assert TIMER.due == datetime(2026, 1, 1, 0, 0, 0, 123_000, tzinfo=UTC)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"nonsense", GOLDEN.replace(b'"v":1', b'"v":2'), GOLDEN.replace(b"eyJ", b"*"), GOLDEN]
)
def test_what_cannot_be_read_says_where(value: bytes) -> None:
    key = b"\xff\xffkes.timer." + (b"\xff" if value == GOLDEN else b"name")
    with pytest.raises(OffsetError, match=r"g\.in\.changelog\[3\]@17: the timer b'.*' cannot be read"):
        decode_timer(record(value, key))


@given(
    st.builds(
        Timer,
        NAMES | st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        st.integers(0, 2**48),
        st.text(st.characters(exclude_categories=["Cs"])),
        st.binary(),
        st.integers(1, 99),
        st.none() | st.binary(),
    )
)
def test_there_and_back(timer: Timer) -> None:
    found = decode_timer(record(encode_timer(timer), timer_key(timer.name)))
    assert found == (timer.name, timer)
