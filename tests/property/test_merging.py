"""Which input comes next: the rules one by one, and inputs that come, go silent and end at any time."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.merging import InputHead, InputKind, Take, Wait, next_input, run_length
from streams.core.origin import INTERJECTION, in_input, timer_origin
from streams.core.runs import merge, name_input
from streams.records import Change, IncomingRecord, Output

LOOP, TABLE, EVENTS = InputKind.LOOP, InputKind.UNREAD_TABLE, InputKind.EVENTS
PATIENCE = 0.5
NOW = 100.0


def here(next_ms: int, kind: InputKind = EVENTS) -> InputHead:
    return InputHead(kind, next_ms)


def at_end(kind: InputKind = EVENTS) -> InputHead:
    return InputHead(kind, None)


def missing(seconds: float, kind: InputKind = EVENTS) -> InputHead:
    """It has had nothing for so long."""
    return InputHead(kind, None, NOW - seconds)


@pytest.mark.parametrize(
    ("inputs", "answer"),
    [
        ([], Wait(None, ())),
        ([at_end()], Wait(None, ())),
        ([here(7)], Take(0, None)),
        ([here(7), here(5), here(9)], Take(1, 6)),  # before the first one's, which wins ties
        ([here(7), here(7), here(9)], Take(0, 7)),
        ([here(7), at_end()], Take(0, None)),
        ([here(7), missing(0.2)], Wait(NOW + 0.3, (1,))),
        ([here(7), missing(0.2), missing(0.3)], Wait(NOW + 0.2, (1, 2))),
        ([here(7), missing(0.5)], Take(0, None)),
        ([here(7), here(1, LOOP), missing(0.2)], Take(1, None)),
        ([here(7), here(1, LOOP), here(9, TABLE)], Take(2, None)),  # nor does one of the loop
        ([here(7), missing(0.2, LOOP)], Wait(NOW + 0.3, (1,))),
        ([here(7), missing(0.2, LOOP), here(9, TABLE)], Take(2, None)),
        ([here(7), here(1, LOOP), missing(9.0, TABLE)], Wait(None, (2,))),
        ([here(7), at_end(LOOP), here(9, TABLE), here(1, TABLE)], Take(2, None)),
        ([here(7), missing(9.0, TABLE)], Wait(None, (1,))),  # no event meets half a table, however long it takes
        ([here(7), missing(0.2), missing(9.0, TABLE)], Wait(None, (2,))),
    ],
)
def test_each_rule(inputs: list[InputHead], answer: Take | Wait) -> None:
    assert next_input(inputs, NOW, PATIENCE) == answer


def test_an_input_at_its_end_after_a_restart_holds_up_no_other() -> None:
    """quixstreams #1116: topics aligned by time stood still for good when one of them was at its end after a restart.
    Here an end that is known is no reason to wait, and one that is not is waited for once."""
    backlog, silent = here(7), InputHead(EVENTS, None, NOW)
    assert next_input([backlog, at_end()], NOW, PATIENCE) == Take(0, None)
    assert next_input([backlog, silent], NOW, PATIENCE) == Wait(NOW + PATIENCE, (1,))
    for later in (0.0, 1.0, 3600.0):  # nothing is ever heard of it
        assert next_input([backlog, silent], NOW + PATIENCE + later, PATIENCE) == Take(0, None)


heads = st.builds(
    lambda kind, next_ms, since: InputHead(
        kind, next_ms, None if next_ms is not None or since is None else NOW - since
    ),
    st.sampled_from(InputKind),
    st.none() | st.integers(0, 5),
    st.none() | st.floats(0, 1),
)


@given(st.lists(heads, max_size=5))
def test_it_waits_for_a_reason_only_and_takes_nothing_before_its_turn(inputs: list[InputHead]) -> None:
    answer = next_input(inputs, NOW, PATIENCE)
    awaited = {place for place, head in enumerate(inputs) if head.missing_since and head.missing_since + PATIENCE > NOW}
    by_kind: dict[InputKind, list[int]] = {kind: [] for kind in InputKind}
    for place, head in enumerate(inputs):
        by_kind[head.kind].append(place)
    with_records = [place for place, head in enumerate(inputs) if head.next_ms is not None]
    loops = [place for place in with_records if place in by_kind[LOOP]]
    tables = [place for place in with_records if place in by_kind[TABLE]]
    if isinstance(answer, Wait):
        assert not tables
        assert not loops or by_kind[TABLE]
        assert set(answer.missing) <= awaited | set(by_kind[TABLE])
        assert answer.missing or not with_records, "it never stands still without a name"
        assert answer.until is None or NOW < answer.until <= NOW + PATIENCE
        assert answer.until is not None or not with_records or (by_kind[TABLE] and not tables)
        return
    assert answer.input_number in with_records
    if by_kind[TABLE]:
        assert answer == Take(tables[0], None)
    elif loops:
        assert answer == Take(loops[0], None)
    else:
        assert not awaited
        order = sorted((inputs[place].next_ms or 0, place) for place in with_records)
        assert answer.input_number == order[0][1]
        limits = [(next_ms, place) for next_ms, place in order[1:]]
        if answer.until_ms is None:
            assert not limits
        else:  # the last record that it may take is before all others, and one later would not be
            assert all((answer.until_ms, answer.input_number) < limit for limit in limits)
            assert any((answer.until_ms + 1, answer.input_number) > limit for limit in limits)


def records(times: list[int]) -> list[IncomingRecord]:
    return [IncomingRecord("t", 0, offset, None, None, None, time) for offset, time in enumerate(times)]


@given(st.lists(st.integers(0, 9), min_size=1), st.none() | st.integers(0, 9), st.data())
def test_a_run_ends_in_front_of_the_first_younger_record(times: list[int], until_ms: int | None, data: Any) -> None:
    start = data.draw(st.integers(0, len(times) - 1))
    stop = data.draw(st.integers(start + 1, len(times)))
    length = run_length(records(times), start, stop, until_ms)
    assert 1 <= length <= stop - start
    if until_ms is None:
        assert length == stop - start
    else:
        assert all(time <= until_ms for time in times[start + 1 : start + length])
        assert start + length == stop or times[start + length] > until_ms


class Simulated:
    """One input in virtual time: ``deliveries`` (when, times of records; none: its end is reported), in order."""

    def __init__(self, kind: InputKind, deliveries: list[tuple[float, list[int]]]) -> None:
        self.kind, self.deliveries = kind, deque(deliveries)
        self.queue: deque[int] = deque()
        self.missing_since: float | None = 0.0
        self.waited = 0.0

    def deliver(self, now: float) -> None:
        while self.deliveries and self.deliveries[0][0] <= now:
            _, times = self.deliveries.popleft()
            self.queue += times
            self.missing_since, self.waited = None, 0.0

    @property
    def head(self) -> InputHead:
        return InputHead(self.kind, self.queue[0] if self.queue else None, self.missing_since)


deliveries = st.lists(st.tuples(st.floats(0.0, 2.0), st.lists(st.integers(0, 20), max_size=4)), max_size=5).map(
    lambda found: sorted(found, key=lambda delivery: delivery[0])
)


@given(st.lists(st.tuples(st.sampled_from([LOOP, EVENTS, EVENTS]), deliveries), min_size=1, max_size=4))
def test_everything_is_handled_in_order_and_none_is_waited_for_twice(
    plan: list[tuple[InputKind, list[tuple[float, list[int]]]]],
) -> None:
    inputs = [Simulated(*each) for each in plan]
    last = max((when for _, found in plan for when, _ in found), default=0.0)
    now, handled, taken, ended = 0.0, [list[int]() for _ in inputs], 0, 0.0
    while True:
        for each in inputs:
            each.deliver(now)
        answer = next_input([each.head for each in inputs], now, PATIENCE)
        if isinstance(answer, Take):
            each, taken, ended = inputs[answer.input_number], taken + 1, now
            run = run_length(records([*each.queue]), 0, len(each.queue), answer.until_ms)
            handled[answer.input_number] += [each.queue.popleft() for _ in range(run)]
            if not each.queue:  # and whether there is more is not known before it is heard of
                each.missing_since, each.waited = now, 0.0
            continue
        moments = [each.deliveries[0][0] for each in inputs if each.deliveries]
        moments += [] if answer.until is None else [answer.until]
        if not moments:
            break
        for place in answer.missing:
            inputs[place].waited += min(moments) - now
            assert inputs[place].waited <= PATIENCE + 1e-9, "it was waited for before, and not heard of since"
        now = max(now, min(moments))
    assert ended <= last + PATIENCE * (taken + 1), "an input that runs empty is waited for once"
    assert handled == [[time for _, times in found for time in times] for _, found in plan]


@given(st.lists(st.lists(st.integers(0, 20)).map(sorted), min_size=1, max_size=4))
def test_what_is_all_here_comes_by_time_and_then_by_declaration(times: list[list[int]]) -> None:
    queues = [deque(found) for found in times]
    order: list[tuple[int, int]] = []
    while any(queues):
        found = [here(queue[0]) if queue else at_end() for queue in queues]
        answer = next_input(found, NOW, PATIENCE)
        assert isinstance(answer, Take)
        queue = queues[answer.input_number]
        run = run_length(records([*queue]), 0, len(queue), answer.until_ms)
        order += [(queue.popleft(), answer.input_number) for _ in range(run)]
    assert len(order) == sum(map(len, times))
    assert all(one <= other for one, other in pairwise(order))


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=2, max_size=4), st.integers(1, 20), st.data()
)
def test_merged_runs_are_those_that_would_be_taken_one_by_one(times: list[list[int]], most: int, data: Any) -> None:
    """Up to the end of what one input has here; times need not ascend."""
    batches = [records(found) for found in times]
    starts = [data.draw(st.integers(0, len(batch) - 1)) for batch in batches]
    places = [2 * number for number in range(len(batches))]
    merged, runs = merge(places, batches, starts, most)
    at, number = list(starts), 0
    while number < most and all(start < len(batch) for start, batch in zip(at, batches, strict=True)):
        answer = next_input([here(batch[start].timestamp_ms) for start, batch in zip(at, batches, strict=True)], 0, 0)
        assert isinstance(answer, Take)
        batch, start = batches[answer.input_number], at[answer.input_number]
        stop = start + min(run_length(batch, start, len(batch), answer.until_ms), most - number)
        place, end, first, behind = runs.pop(0)
        assert merged[number:end] == batch[start:stop]
        assert (place, first, behind) == (2 * answer.input_number, start, stop)
        at[answer.input_number], number = stop, end
    assert (len(merged), runs) == (number, [])


@pytest.mark.parametrize("place", [0, 1, 3])
def test_effects_of_events_name_their_input_and_others_name_none(place: int) -> None:
    origins = [5, INTERJECTION, 7, timer_origin(1, "t"), 8]
    outputs = [Output("out", b"v", None, None, -1, 0, 0, origin) for origin in origins]
    changes = [Change(b"k", b"v", origin=origin) for origin in origins]
    name_input(place, outputs, 1, 5, changes, 0, 4)
    named = [in_input(place, origin) for origin in origins]
    assert [one.origin for one in outputs] == [5, *named[1:]]
    assert [one.origin for one in changes] == [*named[:4], 8]
