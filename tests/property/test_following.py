"""What a muted source knows of the one that it follows, against the whole history (``core/following.py``)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.following import Followed, News, TimerMark
from streams.errors import OffsetError

POSITIONS = st.fixed_dictionaries({"own": st.integers(0, 5)}, optional={"more": st.integers(0, 5)})
MARKS = st.builds(TimerMark, st.integers(0, 3), st.integers(0, 3))
TIMERS = st.dictionaries(st.sampled_from("abc"), st.none() | MARKS, max_size=3)
BATCHES = st.lists(st.tuples(st.none() | POSITIONS, TIMERS), max_size=8)


@given(BATCHES, st.integers(0, 8), POSITIONS)
def test_the_cap_is_the_last_position_once_all_is_read(
    batches: list[tuple[dict[str, int] | None, dict[str, TimerMark | None]]], whole_from: int, own: dict[str, int]
) -> None:
    followed, last, pending = Followed(own), dict[str, int](), dict[str, TimerMark]()
    for number, (positions, timers) in enumerate(batches):
        is_whole = number >= whole_from
        goes_back = number > whole_from and positions and any(at < last.get(name, 0) for name, at in positions.items())
        last = last if positions is None else positions
        is_beyond = number == whole_from and any(last[name] < at for name, at in own.items() if name in last)
        if goes_back or is_beyond:
            with pytest.raises(OffsetError, match="went back"):
                followed.learn(News(positions, timers, is_whole))
            return
        followed.learn(News(positions, timers, is_whole))
        for name, mark in timers.items():
            pending.pop(name, None)
            pending |= {} if mark is None else {name: mark}
        for topic in ("own", "more"):
            assert followed.cap(topic) == (last.get(topic, 0) if is_whole else 0)
        for name in "abc":
            known = pending.get(name)
            for due_ms in range(4):
                for by in range(4):
                    same = known is not None and (known.due_ms == due_ms or known.by == by != 0)
                    assert followed.has(name, TimerMark(due_ms, by)) == same
