"""The runs of a visit in one partition, as a value."""

from __future__ import annotations

import msgspec
import pytest

from streams.core.known_failures import KnownFailures
from streams.core.origin import is_timer, is_visit, timer_origin, window_origin
from streams.core.policy import Failure
from streams.core.router import Route, Router
from streams.core.timers import Timer
from streams.core.visits import (
    FORMAT,
    MOST_FINISHED,
    MOST_WAITING,
    NEVER_MS,
    FinishedRun,
    VisitedKey,
    VisitRequest,
    VisitState,
    encode_request,
    joined_runs,
    request_headers,
    runs_of,
    state_of,
)
from streams.errors import RegistrationError
from streams.outcomes import STOP
from streams.records import TYPE_HEADER, IncomingRecord
from streams.runtime.changelog import decode_timer, encode_timer, timer_key
from streams.statistics import VisitRunStatistics, VisitStatistics


def start(state: VisitState, *runs: str) -> VisitState:
    for run in runs:
        state = state.requested(VisitRequest("v", run))
    return state


def cancel(state: VisitState, run: str = "") -> VisitState:
    return state.requested(VisitRequest("v", run, "cancel"))


def over(state: VisitState) -> list[tuple[str, int, bool]]:
    return [(one.run, one.keys, one.cancelled) for one in state.finished]


def test_a_run_goes_over_keys_and_ends_and_is_not_begun_again() -> None:
    state = start(VisitState(), "a").visited(b"k1").visited(b"k2")
    assert (state.run, state.after, state.keys) == ("a", b"k2", 2)
    assert start(state, "a") is state
    ended = state.ended()
    assert ended == VisitState(finished=(FinishedRun("a", 2),))
    assert start(ended, "a") is ended


def test_the_next_run_waits_for_the_end_of_the_one_under_way() -> None:
    state = start(VisitState(), "a", "b", "c", "b").visited(b"k")
    assert (state.run, state.waiting) == ("a", ("b", "c"))
    following = state.ended()
    assert (following.run, following.after, following.keys, following.waiting) == ("b", None, 0, ("c",))
    assert following.ended().ended().run == ""


def test_what_is_cancelled_is_over_and_does_not_begin() -> None:
    state = start(VisitState(), "a", "b", "c", "d").visited(b"k")
    assert over(cancel(state, "c")) == [("c", 0, True)]
    assert cancel(state, "c").waiting == ("b", "d")
    assert (cancel(state, "a").run, over(cancel(state, "a"))) == ("b", [("a", 1, True)])
    nothing = cancel(state)
    assert (nothing.run, nothing.waiting) == ("", ())
    assert over(nothing) == [("b", 0, True), ("c", 0, True), ("d", 0, True), ("a", 1, True)]
    assert start(nothing, "a", "b") is nothing
    before = cancel(VisitState(), "a")
    assert start(before, "a") is before, "the request to cancel came first"
    assert cancel(before, "a") is before
    assert cancel(VisitState()) == VisitState()


def test_what_is_remembered_is_bounded() -> None:
    state = start(VisitState(), *(f"r{number}" for number in range(MOST_WAITING + 2)))
    assert len(state.waiting) == MOST_WAITING
    assert over(state) == [(f"r{MOST_WAITING + 1}", 0, True)], "one too many is over at once"
    for _ in range(MOST_FINISHED + 5):
        state = start(state.ended(), *(() if state.waiting else ("again",)))
    assert len(state.finished) <= MOST_FINISHED


def test_it_is_kept_as_a_timer_that_is_never_due() -> None:
    state = start(VisitState(), "a").visited(b"\xff\x00k")
    timer = state.as_timer("v")
    record = IncomingRecord("c", 0, 1, timer_key(timer.name), encode_timer(timer), None)
    name, read = decode_timer(record)
    assert (name, read) == ("@visit/v", timer)
    assert (timer.due_ms, timer.due.year, timer.following) == (NEVER_MS, 9999, None)
    assert state_of(read) == state
    assert (timer.title, timer.facts) == ("timer '@visit/v'", {"timer": "@visit/v", "due_ms": str(NEVER_MS)})
    assert state_of(None) == VisitState()


@pytest.mark.parametrize("value", [b"", b"[]", b'{"run":7}', b'{"v":%d}' % (FORMAT + 1)])
def test_a_state_of_a_newer_release_is_left_alone(value: bytes) -> None:
    assert state_of(Timer("@visit/v", NEVER_MS, "kes.visit", value)) is None


def test_the_event_of_a_key() -> None:
    state = start(VisitState(), "a")
    visited = VisitedKey.of("v", state, b"k1", 7)
    assert state_of(visited.following) == state.visited(b"k1")
    assert (visited.visit, visited.facts, visited.due_ms) == ("v", {"visit": "v", "run": "a"}, 7)
    assert visited.title == "the visit 'v' (run 'a') of the key b'k1'"
    assert msgspec.json.decode(visited.value, type=VisitRequest) == VisitRequest("v", "a", "again")
    others = [
        VisitedKey.of("v", state, b"k2", 7),
        VisitedKey.of("w", state, b"k1", 7),
        VisitedKey.of("v", start(VisitState(), "b"), b"k1", 7),
    ]
    assert len({one.origin for one in (visited, *others)}) == 4
    assert VisitedKey.of("v", state, b"k1", 8).origin == visited.origin, "the same after a restart"
    assert all(is_visit(one.origin) and is_timer(one.origin) for one in others)
    assert not any(is_visit(timer_origin(due, "name")) for due in range(100))
    windows = {window_origin("w", key, start, start + 1) for key in (b"a", b"b") for start in range(50)}
    assert (len(windows), all(map(is_visit, windows))) == (100, True)


def test_the_failure_of_a_key_is_known_after_a_restart() -> None:
    visited, timer = VisitedKey.of("v", start(VisitState(), "a"), b"k", 0), Timer("t", 5, "x", b"")
    known = KnownFailures({one.origin: Failure(1, ValueError()) for one in (visited, timer)})
    known.expect(0, [])
    assert known.meet(timer.origin) is None
    assert known.meet(visited.origin) is not None


def test_visits_are_registered_once_before_the_start() -> None:
    router, route = Router(), Route("visit v", None, print, blocking=False, policy=STOP)
    router.add_visit("v", route, "orders")
    assert router.visits == {"v": (route, "orders")}
    with pytest.raises(RegistrationError, match="there is a visit 'v' already"):
        router.add_visit("v", route, None)
    router.freeze()
    with pytest.raises(RegistrationError, match="the visit 'w' comes too late"):
        router.add_visit("w", route, None)


def test_a_request_as_a_record() -> None:
    assert request_headers() == [(TYPE_HEADER, b"kes.visit")]
    assert msgspec.json.decode(encode_request(VisitRequest("v", "a"))) == {"visit": "v", "run": "a", "action": "start"}


def test_runs_over_partitions_and_members() -> None:
    here = runs_of(
        [
            VisitStatistics("v", "b", 5, ("c",), {"a": 7}, {}),
            VisitStatistics("v", "", 0, (), {"a": 3, "b": 4}, {"c": 0}),
            VisitStatistics("w", "b", 1, (), {}, {}),
        ]
    )
    assert [(one.visit, one.run) for one in here][-2:] == [("v", "b"), ("w", "b")], "those under way are the last"
    assert {(one.visit, one.run): one for one in here} == {
        ("v", "a"): VisitRunStatistics("v", "a", ended=2, keys=10),
        ("v", "b"): VisitRunStatistics("v", "b", running=1, ended=1, keys=9),
        ("v", "c"): VisitRunStatistics("v", "c", waiting=1, cancelled=1),
        ("w", "b"): VisitRunStatistics("w", "b", running=1, keys=1),
    }
    twice = joined_runs([*here, *here])
    assert twice[0] == VisitRunStatistics("v", "a", ended=4, keys=20)
