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


@given(STEPS)
def test_the_first_one_is_the_first_one(steps: list[tuple[str, str, int]]) -> None:
    """Whatever was set, replaced and removed before; and what is outdated does not pile up."""
    timers, model = Timers(), dict[str, int]()
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
        assert len(timers) == len(model)
        assert len(timers._heap) <= 2 * len(model) + 65


def test_one_that_is_set_again_and_again_takes_no_more_room() -> None:
    timers = Timers()
    for due_ms in range(10_000):
        timers.apply({"idle": Timer("idle", due_ms, "T", b"")})
    assert len(timers._heap) < 100


def test_restored_ones_are_in_order() -> None:
    timers = Timers(Timer(str(number), (number * 7919) % 1000, "T", b"") for number in range(1000))
    order = []
    while (first := timers.first()) is not None:
        order.append(first.due_ms)
        timers.apply({first.name: None})
    assert order == list(range(1000))


def test_an_origin_is_that_of_a_time() -> None:
    one = Timer("a", 5, "Ring", b"{}")
    assert one.origin == Timer("a", 5, "Other", b"").origin < -1
    assert one.origin != Timer("a", 6, "Ring", b"{}").origin
    assert one.origin != Timer("b", 5, "Ring", b"{}").origin


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


def test_a_field_more_is_passed_over() -> None:
    newer = json.loads(GOLDEN) | {"zone": "UTC"}
    assert decode_timer(record(json.dumps(newer).encode())) == (TIMER.name, TIMER)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"nonsense", GOLDEN.replace(b'"v":1', b'"v":2'), GOLDEN.replace(b"eyJ", b"*")]
)
def test_what_cannot_be_read_says_where(value: bytes) -> None:
    with pytest.raises(OffsetError, match=r"g\.in\.changelog\[3\]@17: the timer cannot be read"):
        decode_timer(record(value))


def test_a_name_that_is_no_text() -> None:
    with pytest.raises(OffsetError, match="timer cannot be read"):
        decode_timer(record(GOLDEN, b"\xff\xffkes.timer.\xff"))


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


def test_a_timer_is_known_by_name_and_due_in_utc() -> None:
    timers = Timers([Timer("a", 1_500, "T", b"")])
    assert "a" in timers
    assert "b" not in timers
    assert timers.first() == Timer("a", 1_500, "T", b"")
    assert next(iter(timers)).due == datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
