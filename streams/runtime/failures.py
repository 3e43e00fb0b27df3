"""How an event can fail, and what is said about it."""

from __future__ import annotations

import random

from streams.errors import DecodeError, RecordError, RecordRefused
from streams.outcomes import ErrorPolicy, ExecutionState
from streams.records import TYPE_HEADER, Change, IncomingRecord
from streams.sak.backoff import backoff_seconds


class RestartNeeded(Exception):
    """The store cannot be undone: restore the partition from its changelog, then go on with this event."""

    def __init__(self, offset: int, attempts: int, error: BaseException) -> None:
        super().__init__(text_of(error))
        self.offset = offset
        self.attempts = attempts
        self.error = error


class TakenBack(Exception):
    """What was admitted is undone, because another event of the partition was refused (``__cause__``): it may be done
    again after the restart."""


class Answered(Exception):
    """A handler answered ``FAIL`` or ``FATAL`` instead of raising."""

    def __init__(self, answer: object, error: BaseException | None) -> None:
        super().__init__(text_of(error) if error is not None else f"the handler answered {answer!r}")
        self.answer = answer
        self.__cause__ = error


def cancelled_inside(error: BaseException) -> RuntimeError:
    """A ``CancelledError`` that is not ours, as an error like any other: passed on it would end the partition's task
    without a word."""
    wrapped = RuntimeError(
        "the handler met a cancellation that is not its own: it awaited something that was cancelled"
    )
    wrapped.__cause__ = error
    return wrapped


FINAL = (DecodeError, RecordRefused)
"""Errors that the same bytes will always give."""


def backoff(policy: ErrorPolicy, attempts: int, rng: random.Random) -> float:
    """Seconds to wait after so many failed attempts: doubled each time, capped, a quarter to either side at random."""
    return backoff_seconds(attempts, policy.backoff_seconds, policy.max_backoff_seconds, rng=rng)


def is_fatal(error: BaseException) -> bool:
    """Whether the handler asked for the source to stop."""
    return isinstance(error, Answered) and error.answer is not ExecutionState.FAIL


def is_last(policy: ErrorPolicy, attempts: int, error: BaseException) -> bool:
    """Whether an event that has failed so often is not tried again."""
    return attempts > policy.retries or isinstance(error, FINAL) or is_fatal(error) or not isinstance(error, Exception)


def reason_of(error: BaseException) -> BaseException:
    """What the handler gave as its reason, if it answered instead of raising; else the error itself."""
    return error.__cause__ if isinstance(error, Answered) and error.__cause__ is not None else error


def describe(error: BaseException) -> str:
    """The error in one line."""
    error = reason_of(error)
    return str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {text_of(error)}"


def describe_type(record: IncomingRecord) -> str:
    """What is wrong with the type of a record that nobody handles."""
    raw = record.header(TYPE_HEADER)
    if raw is None:
        return f"the record has no type header ({TYPE_HEADER})"
    return f"nobody handles the event type {raw[:64].decode(errors='replace')!r}"


def check_changes(changes: list[Change], origin: int, limit: int) -> None:
    """They are the event's ``origin``. Raises ``RecordRefused`` for one that no producer would take."""
    for change in changes:
        change.origin = origin
        if change.value is not None and len(change.value) > limit:
            raise change_too_large(change, limit)


def change_too_large(change: Change, limit: int) -> RecordRefused:
    """The error for a change that no producer would take."""
    return RecordRefused(
        f"the store's value for key {change.key[:64]!r} has {len(change.value or b'')} bytes, more than "
        "message.max.bytes of "
        f"the producer ({limit}): raise it in client_settings (and max.message.bytes of the changelog), or "
        "store less per key"
    )


def text_of(error: BaseException) -> str:
    """``str(error)``, also where that raises: an exception without words must not get past its policy."""
    try:
        return str(error)
    except Exception as reason:
        return f"(no text: its __str__ raised {type(reason).__name__})"
