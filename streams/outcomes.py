"""Answers of a handler, and policies for failed records."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from streams.errors import ConfigError


class ExecutionState(enum.Enum):
    """The answer of a handler. Returning ``None`` means ``COMPLETE``."""

    COMPLETE = "complete"
    """The event is done: its outputs and changes go into the next transaction."""
    FAIL = "fail"
    """The event failed: it is undone, and its error policy decides."""
    FATAL = "fatal"
    """The event is undone and the event source stops, whatever the error policy is."""


class ErrorResponse(enum.Enum):
    """Response to a failed event once its retries are used up."""

    DEAD_LETTER = "dead_letter"
    """Write the record to the dead-letter topic, in the same transaction as the offset, and go on."""
    CONTINUE = "continue"
    """Skip the record (logged, counted), and go on."""
    FAIL_CONSUMER = "fail_consumer"
    """Leave the group in good order and stop; ``run()`` raises the error. The record is not passed."""
    FATALLY_EXIT = "fatally_exit"
    """End the process at once with exit code 70 (``EX_SOFTWARE``). The record is not passed."""


class ErrorPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policy for an event that failed: first retries, then ``then``.

    ``retries``: further attempts after the first. ``backoff_seconds``: wait before the first retry; doubled for each
    further one up to ``max_backoff_seconds``, with up to a quarter of it added or taken off at random. While an event
    waits for its retry its partition waits with it (order is kept), other partitions go on. ``then``: the last word.
    Decode errors are never retried: the bytes do not change.
    """

    retries: int = 0
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 10.0
    then: ErrorResponse = ErrorResponse.FAIL_CONSUMER

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"ErrorPolicy.retries is {self.retries}; it must be 0 or more")
        if not 0 <= self.backoff_seconds <= self.max_backoff_seconds:
            raise ConfigError(
                f"ErrorPolicy.backoff_seconds is {self.backoff_seconds}; it must be between 0 and "
                f"max_backoff_seconds ({self.max_backoff_seconds})"
            )


STOP: Final = ErrorPolicy()
"""No retry; leave the group and stop. This is the default, so that nothing is skipped unless a policy says so."""
SKIP: Final = ErrorPolicy(then=ErrorResponse.CONTINUE)
"""No retry; skip the record."""
DEAD_LETTER: Final = ErrorPolicy(then=ErrorResponse.DEAD_LETTER)
"""No retry; write the record to the dead-letter topic."""
