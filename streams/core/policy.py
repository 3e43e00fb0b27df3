"""The error policy as one pure function, for events, timers, interjections, refused records and views.

The order of the questions is the point. First whether another attempt could end otherwise, then whether the handler
itself demands a stop (no policy overrides that), then the response of the policy, as far as the failed work allows it.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from streams.errors import DecodeError, HandlerBlocked, RecordRefused, TimeJump
from streams.outcomes import ErrorResponse, ExecutionState, Retry


class Answered(Exception):
    """A handler answered ``FAIL`` or ``FATAL`` (or nothing that is an answer) instead of raising."""

    def __init__(self, answer: object, error: BaseException | None) -> None:
        super().__init__(text_of(error) if error is not None else f"the handler answered {answer!r}")
        self.answer = answer
        self.__cause__ = error


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, also where that raises: an exception without a text must not get past its policy."""
    try:
        return str(error)
    except Exception as reason:
        return f"(no text: its __str__ raised {type(reason).__name__})"


class WorkKind(enum.Enum):
    """The kinds of work that can fail."""

    EVENT = "event"
    """An input record or the event of a timer: attempted again, dead-lettered, parked, skipped."""
    INTERJECTION = "interjection"
    """No record: there is nothing to dead-letter, and the next attempt is the next run."""
    RUN = "run"
    """The run of a schedule by cron: attempted again, as the next one may be a day away. No record, no key."""
    VIEW = "view"
    """A record for the receiver of a view, which has neither a dead-letter topic nor a process of its own."""


class Decision(enum.Enum):
    """The next step for a failed unit of work. The values are those of ``ErrorResponse``, as in measurements."""

    RETRY = "retry"
    DEAD_LETTER = ErrorResponse.DEAD_LETTER.value
    SKIP = ErrorResponse.CONTINUE.value
    PARK = ErrorResponse.PARK.value
    STOP = ErrorResponse.FAIL_CONSUMER.value
    EXIT = ErrorResponse.FATALLY_EXIT.value


class Failure(NamedTuple):
    """A unit of work that failed: so many attempts were made, the last one ended with ``error``, ``elapsed_seconds``
    after the first one began. ``is_final``: no further one is possible."""

    attempts: int
    error: BaseException
    work: WorkKind = WorkKind.EVENT
    is_final: bool = False
    elapsed_seconds: float = 0.0


FINAL: Final = (DecodeError, RecordRefused, TimeJump, HandlerBlocked)
"""Errors that the same bytes will always give, or that were given often enough."""

_BY_RESPONSE: Final[dict[ErrorResponse, Decision]] = {response: Decision(response.value) for response in ErrorResponse}


def demands_stop(error: BaseException) -> bool:
    """Check for an answer that stops the source whatever the policy is: ``FATAL``, or what is no answer at all."""
    return isinstance(error, Answered) and error.answer is not ExecutionState.FAIL


def apply_error_policy(failure: Failure, policy: Retry) -> Decision:
    """Decide what becomes of failed work. The wait before a retry is ``Retry.pause_seconds``."""
    error, work = failure.error, failure.work
    must_stop = demands_stop(error)
    is_final = failure.is_final or must_stop or isinstance(error, FINAL) or not isinstance(error, Exception)
    if not is_final and work is not WorkKind.INTERJECTION:  # the next run of an interjection is its next attempt
        reason = error.__cause__ if isinstance(error, Answered) and error.__cause__ is not None else error
        if policy.allows(failure.attempts, reason, failure.elapsed_seconds):
            return Decision.RETRY
    decision = Decision.STOP if must_stop else _BY_RESPONSE[policy.then]
    if work in (WorkKind.INTERJECTION, WorkKind.RUN) and decision in (Decision.DEAD_LETTER, Decision.PARK):
        return Decision.SKIP  # it has no record that a letter could carry, and no key
    if work is WorkKind.VIEW and decision is not Decision.SKIP:
        return Decision.STOP  # a view has no dead letters, and the process is not its own
    return decision
