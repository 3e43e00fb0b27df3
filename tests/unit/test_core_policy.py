"""The error policy, the origin of effects and the failures that outlive a restart, row by row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from streams.core import origin
from streams.core.known_failures import ALWAYS, KnownFailures
from streams.core.origin import INTERJECTION, batch_end, batch_origin, timer_origin
from streams.core.policy import Answered, Decision, Failure, WorkKind, apply_error_policy, text_of
from streams.core.position import behind, offsets_of, position_of
from streams.core.timers import Timer
from streams.errors import DecodeError, RecordRefused
from streams.outcomes import ErrorResponse, ExecutionState, Retry

R, D = ErrorResponse, Decision
ERROR = ValueError("no")
RETRIED = [ERROR, Answered(ExecutionState.FAIL, ERROR)]
DEMANDS_STOP = [Answered(ExecutionState.FATAL, None), Answered("an answer", None)]
NEVER_RETRIED = [DecodeError("bytes"), RecordRefused("too large"), KeyboardInterrupt()]


@pytest.mark.parametrize(
    ("work", "response", "decision"),
    [
        (WorkKind.EVENT, R.DEAD_LETTER, D.DEAD_LETTER),
        (WorkKind.EVENT, R.CONTINUE, D.SKIP),
        (WorkKind.EVENT, R.FAIL_CONSUMER, D.STOP),
        (WorkKind.EVENT, R.FATALLY_EXIT, D.EXIT),
        (WorkKind.INTERJECTION, R.DEAD_LETTER, D.SKIP),
        (WorkKind.INTERJECTION, R.CONTINUE, D.SKIP),
        (WorkKind.INTERJECTION, R.FAIL_CONSUMER, D.STOP),
        (WorkKind.INTERJECTION, R.FATALLY_EXIT, D.EXIT),
        (WorkKind.RUN, R.DEAD_LETTER, D.SKIP),
        (WorkKind.RUN, R.PARK, D.SKIP),
        (WorkKind.RUN, R.FAIL_CONSUMER, D.STOP),
        (WorkKind.VIEW, R.DEAD_LETTER, D.STOP),
        (WorkKind.VIEW, R.CONTINUE, D.SKIP),
        (WorkKind.VIEW, R.FAIL_CONSUMER, D.STOP),
        (WorkKind.VIEW, R.FATALLY_EXIT, D.STOP),
    ],
)
def test_the_response_of_a_policy_by_kind_of_work(work: WorkKind, response: ErrorResponse, decision: Decision) -> None:
    policy = Retry(attempts=3, then=response)
    for error in RETRIED:
        assert apply_error_policy(Failure(3, error, work), policy) is decision
        assert apply_error_policy(Failure(1, error, work, is_final=True), policy) is decision
    for error in NEVER_RETRIED:
        assert apply_error_policy(Failure(1, error, work), policy) is decision


@pytest.mark.parametrize(("work", "response", "error"), list(itertools.product(WorkKind, R, RETRIED)))
def test_attempts_up_to_their_number(work: WorkKind, response: ErrorResponse, error: Exception) -> None:
    policy = Retry(attempts=3, then=response)
    decisions = [apply_error_policy(Failure(attempts, error, work), policy) for attempts in (1, 2, 3)]
    retried = work is not WorkKind.INTERJECTION
    assert [decision is D.RETRY for decision in decisions] == [retried, retried, False]


@pytest.mark.parametrize(("work", "response", "error"), list(itertools.product(WorkKind, R, DEMANDS_STOP)))
def test_a_handler_that_demands_a_stop_gets_it(work: WorkKind, response: ErrorResponse, error: Exception) -> None:
    """Whatever the policy says, and at once."""
    assert apply_error_policy(Failure(1, error, work), Retry(attempts=6, then=response)) is D.STOP


@pytest.mark.parametrize(("work", "wrap"), [(WorkKind.EVENT, False), (WorkKind.EVENT, True), (WorkKind.VIEW, False)])
def test_only_some_errors_are_tried_again_and_only_for_some_time(work: WorkKind, wrap: bool) -> None:
    """The reason counts where a handler answers ``FAIL`` because of it."""
    policy = Retry(attempts=9, timeout_seconds=5.0, on=(OSError,), then=R.CONTINUE)

    def decided(error: Exception, seconds: float) -> Decision:
        raised = Answered(ExecutionState.FAIL, error) if wrap else error
        return apply_error_policy(Failure(1, raised, work, elapsed_seconds=seconds), policy)

    assert decided(TimeoutError(), 4.9) is D.RETRY
    assert decided(TimeoutError(), 5.0) is D.SKIP
    assert decided(ValueError(), 0.0) is D.SKIP
    assert apply_error_policy(Failure(1, Answered(ExecutionState.FAIL, None), work), policy) is D.SKIP, "no reason"


def test_the_waits_of_a_retry() -> None:
    retry = Retry(attempts=9, backoff_seconds=1.0, max_backoff_seconds=20.0, backoff_factor=3.0, jitter=0.0)
    assert [retry.pause_seconds(attempts) for attempts in range(1, 6)] == [1.0, 3.0, 9.0, 20.0, 20.0]
    waits = [Retry(backoff_seconds=1.0, jitter=0.5).pause_seconds(1, random.Random(seed)) for seed in range(100)]
    assert 0.5 <= min(waits) < 0.6
    assert 1.4 < max(waits) <= 1.5


def test_decisions_are_measured_as_responses() -> None:
    assert {decision.value for decision in D} - {"retry"} == {response.value for response in R}


def test_an_answer_is_described_by_its_reason() -> None:
    assert str(Answered(ExecutionState.FAIL, ERROR)) == "no"
    assert "FATAL" in str(Answered(ExecutionState.FATAL, None))

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert text_of(Silent()) == "(no text: its __str__ raised RuntimeError)"


def predicates(number: int) -> list[bool]:
    return [made(number) for made in (origin.is_event, origin.is_interjection, origin.is_timer, origin.is_batch)]


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (0, 0, "the event t[3]@0"),
        (2**52 - 1, 0, f"the event t[3]@{2**52 - 1}"),
        (origin.in_input(1, 77), 0, "the event t[3]@77"),
        (INTERJECTION, 1, "an interjection, a timer, a job, a visit, or a parked event, of t[3]"),
        (timer_origin(5, "name"), 2, "an interjection, a timer, a job, a visit, or a parked event, of t[3]"),
        (batch_origin(0), 3, "the batch of events of t[3] that ends at offset 0"),
        (batch_origin(77), 3, "the batch of events of t[3] that ends at offset 77"),
        (origin.in_input(2, batch_origin(77)), 3, "the batch of events of t[3] that ends at offset 77"),
    ],
)
def test_an_origin_is_of_exactly_one_kind(number: int, kind: int, text: str) -> None:
    assert predicates(number) == [place == kind for place in range(4)]
    assert origin.describe(number, "t[3]") == text


def test_a_position_behind_an_event_stands_still_in_the_other_inputs() -> None:
    assert behind(9, 4) == 5
    assert behind((9, 20), 4) == (5, 20)
    assert behind((9, 20), origin.in_input(1, 17)) == (9, 18)
    assert position_of([3]) == 3
    assert offsets_of(position_of([3, 4])) == (3, 4)


def test_a_timer_set_anew_has_another_origin() -> None:
    timer = Timer("name", 5, "T", b"")
    assert timer.origin == timer_origin(5, "name") == Timer("name", 5, "U", b"x").origin
    assert len({timer_origin(due, name) for due in (5, 6) for name in ("name", "other")}) == 4
    assert batch_end(batch_origin(7)) == 7


def failures(*origins: int) -> dict[int, Failure]:
    return {number: Failure(place + 1, ERROR) for place, number in enumerate(origins)}


def test_known_failures_are_met_once_and_carried_over() -> None:
    due = timer_origin(5, "set")
    known = KnownFailures(failures(4, 9, due))
    known.expect(4, iter([due]))
    assert (known.meet(4), known.meet(4), known.meet(5), known.meet(due)) == (
        Failure(1, ERROR),
        None,
        None,
        Failure(3, ERROR),
    )
    assert list(known.events) == [9]
    known.add(12, Failure(1, ERROR))
    assert known.carried_over().keys() == {4, 9, 12, due}
    known = KnownFailures(failures(3, 4, timer_origin(5, "fired")))
    known.expect(4, ())
    assert known.carried_over() == {4: Failure(2, ERROR)}, "what is behind the start is forgotten"


def test_origins_of_timers_are_not_asked_for_without_need() -> None:
    def hashed() -> Iterator[int]:
        raise AssertionError("a hash for each timer")
        yield 0

    KnownFailures(failures(4, batch_origin(9))).expect(0, hashed())


def test_a_batch_that_failed_stays_split_over_restarts() -> None:
    known = KnownFailures()
    assert known.single_until == 0
    known.split_batch(7, ERROR)
    known.split_batch(5, ERROR)
    assert known.single_until == 8
    again = KnownFailures(known.carried_over())
    again.expect(0, ())
    assert again.single_until == 8
    assert not again.events, "no event is to blame"
    assert not origin.is_event(ALWAYS), "above all offsets"


def test_an_event_that_waits_for_room_meets_its_failure_in_the_next_attempt() -> None:
    known, failure = KnownFailures(), Failure(2, RuntimeError("no"))
    known.input_number = 1
    known.expect_again(7, failure)
    known.input_number = 0
    assert known.meet(7) is None
    known.input_number = 1
    assert known.of_event(7) is failure
    assert known.meet(7) is failure
    assert known.meet(7) is None
    assert failure in known.carried_over().values()
