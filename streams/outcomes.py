"""Answers of a handler, and what follows when work has failed: retries, a last word, functions that choose them."""

from __future__ import annotations

import enum
import inspect
import random
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from streams.errors import ConfigError
from streams.records import IncomingRecord
from streams.sak.backoff import backoff_seconds
from streams.sak.numbers import is_number, is_whole

_A_DAY: Final = 86_400
"""In seconds."""


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
    PARK = "park"
    """Keep the record, and later ones of its key, in a queue of the key, and go on with all others. The queue is tried
    again, in order, by time and by each new owner of the partition."""
    FAIL_CONSUMER = "fail_consumer"
    """Leave the group in good order and stop; ``run()`` raises the error. The record is not passed."""
    FATALLY_EXIT = "fatally_exit"
    """End the process at once with exit code 70 (``EX_SOFTWARE``). The record is not passed."""


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of work that failed, the waits between them, and the last word after the last one.

    ``attempts``: in all, the first one included. ``backoff_seconds``: the wait before the second; multiplied by
    ``backoff_factor`` for each further one, up to ``max_backoff_seconds``, with up to the share ``jitter`` of it added
    or taken off at random. ``timeout_seconds``: what fails so long after the first attempt began is not tried again
    (``None``: no such bound). ``on``: the errors that are worth another attempt. ``then``: the last word about an
    event; a job or a call has none, because its event has one.

    ``waits``: what waits between two attempts at an event. ``"partition"``: its partition waits with it (order is
    kept), other partitions go on. ``"key"``: the event's key is parked after the first failure, further attempts are
    made from its queue, over restarts and moves, and the others of the partition go on. A job keeps its slot and its
    key. Records that cannot be read, or that a broker refused, are not tried again: the bytes do not change.
    """

    attempts: int = 3
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 10.0
    backoff_factor: float = 2.0
    jitter: float = 0.25
    timeout_seconds: float | None = None
    on: tuple[type[Exception], ...] = (Exception,)
    then: ErrorResponse = ErrorResponse.FAIL_CONSUMER
    waits: Literal["partition", "key"] = "partition"

    def __post_init__(self) -> None:
        if not is_whole(self.attempts) or self.attempts < 1:
            raise ConfigError(f"Retry.attempts is {self.attempts!r}; it must be a whole number, 1 or more")
        for name, least, most in (
            ("max_backoff_seconds", 0, _A_DAY),
            ("backoff_seconds", 0, self.max_backoff_seconds),
            ("backoff_factor", 1, 1000),
            ("jitter", 0, 1),
        ):
            value = getattr(self, name)
            if not is_number(value) or not least <= value <= most:
                limit = f"max_backoff_seconds ({most})" if name == "backoff_seconds" else most
                raise ConfigError(f"Retry.{name} is {value!r}; it must be between {least} and {limit}")
        seconds: object = self.timeout_seconds  # whatever it is
        if seconds is not None and not (is_number(seconds) and seconds > 0):
            raise ConfigError(f"Retry.timeout_seconds is {seconds!r}; it must be more than 0, or None")
        kinds: object = self.on
        if not isinstance(kinds, tuple):
            raise ConfigError(f"Retry.on is {kinds!r}; it must be a tuple of classes of exceptions")
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise ConfigError(f"Retry.on has {kind!r}; it takes classes of exceptions (no BaseException)")
        then: object = self.then
        if not isinstance(then, ErrorResponse):
            raise ConfigError(f"Retry.then is {then!r}; use one of {', '.join(map(str, ErrorResponse))}")
        waits: object = self.waits
        if waits not in ("partition", "key"):
            raise ConfigError(f"Retry.waits is {waits!r}; use 'partition' or 'key'")

    @property
    def parks(self) -> bool:
        """Check for a policy that parks keys."""
        return self.then is ErrorResponse.PARK or self.waits == "key"

    @property
    def unparked(self) -> Retry:
        """Return the policy for work without a key's order: a letter instead of a parked key, and waits that hold up
        the partition."""
        then = ErrorResponse.DEAD_LETTER if self.then is ErrorResponse.PARK else self.then
        return msgspec.structs.replace(self, then=then, waits="partition") if self.parks else self

    def allows(self, attempts: int, error: BaseException, elapsed_seconds: float = 0.0) -> bool:
        """Check for a further attempt after so many, the last of which ended with ``error``, so long after the first
        one began."""
        in_time = self.timeout_seconds is None or elapsed_seconds < self.timeout_seconds
        return attempts < self.attempts and in_time and isinstance(error, self.on)

    def pause_seconds(self, attempts: int, rng: random.Random | None = None) -> float:
        """Return the wait after so many failed attempts, in seconds. ``rng`` replaces the module ``random``."""
        return backoff_seconds(
            attempts, self.backoff_seconds, self.max_backoff_seconds, self.backoff_factor, jitter=self.jitter, rng=rng
        )


STOP: Final = Retry(attempts=1)
"""No retry; leave the group and stop. This is the default, so that nothing is skipped unless a policy says so."""
SKIP: Final = Retry(attempts=1, then=ErrorResponse.CONTINUE)
"""No retry; skip the record."""
DEAD_LETTER: Final = Retry(attempts=1, then=ErrorResponse.DEAD_LETTER)
"""No retry; write the record to the dead-letter topic."""
PARK: Final = Retry(attempts=1, then=ErrorResponse.PARK)
"""No retry at once; keep the record, and later ones of its key, in a queue of the key, and go on with all others."""


WorkOrigin: TypeAlias = Literal["event", "timer", "visit", "window", "job", "interjection"]
"""Kinds of work that can fail."""


class Failed(NamedTuple):
    """Work that failed, as a policy function gets it.

    ``record``: that of the event; of a timer, a visit, a window or the end of a job one in its shape; ``None`` of an
    interjection. ``type``: the name of the event type, as far as it is known, else empty; of other work the name of
    its handler. ``error``: a ``DecodeError`` if the record cannot be read. ``attempts``: made so far, those before a
    restart included. ``elapsed_seconds``: since the first of them began, as far as this member knows. ``origin``: the
    kind of work.
    """

    record: IncomingRecord | None
    type: str
    error: BaseException
    attempts: int
    elapsed_seconds: float
    origin: WorkOrigin


class PolicyFunction(Protocol):
    """An error policy that is a plain function of the failure. It is called after each failed attempt."""

    def __call__(self, failed: Failed, /) -> ErrorResponse | Retry: ...


ErrorPolicy: TypeAlias = Retry | PolicyFunction
"""An error policy: a value, or a function that gives one."""

POLICIES: Final = "STOP, SKIP, DEAD_LETTER, PARK, Retry(...), or a plain function of one argument, a Failed"
"""The error policies, for messages."""


def is_policy(value: object) -> bool:
    """Check for an error policy. Functions are plain: a policy cannot wait for anything."""
    if isinstance(value, Retry):
        return True
    if not callable(value) or isinstance(value, type):
        return False
    call = getattr(value, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    for function in (value, call):
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            return False
    try:
        inspect.signature(value, follow_wrapped=False).bind(None)
    except TypeError:
        return False
    except Exception:  # some functions written in C have no signature
        return True
    return True


def policy_name(policy: object) -> str:
    """Return ``module.function`` of a policy function; of a value its text. It is the same in each process."""
    if isinstance(policy, Retry):
        return str(policy)
    if isinstance(policy, Adapted):
        return policy_name(policy.function)
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def function_names(*policies: ErrorPolicy | None) -> tuple[str, ...]:
    """Return the names of the policy functions among these, each once."""
    return tuple(dict.fromkeys(policy_name(policy) for policy in policies if not isinstance(policy, Retry | None)))


def answered(answer: object) -> Retry:
    """Return the answer of a policy function as a policy. Raises ``TypeError`` if it is none."""
    if isinstance(answer, ErrorResponse):
        return Retry(attempts=1, then=answer)
    if isinstance(answer, Retry):
        return answer
    if inspect.iscoroutine(answer):
        answer.close()  # or a warning would follow: it was never awaited
    raise TypeError(f"it returned {answer!r}; an error policy returns an ErrorResponse or a Retry")


class Adapted:
    """A policy function whose answers are changed before they hold. ``change`` is a function of a module, so that the
    policy can travel to another process."""

    def __init__(self, function: PolicyFunction, change: Callable[[Retry], Retry]) -> None:
        self.function = function
        self.change = change

    def __call__(self, failed: Failed, /) -> Retry:
        return self.change(answered(self.function(failed)))


def adapted(policy: ErrorPolicy, change: Callable[[Retry], Retry]) -> ErrorPolicy:
    """Return a policy that is changed so, now or at each answer."""
    return change(policy) if isinstance(policy, Retry) else Adapted(policy, change)


def unparked(policy: ErrorPolicy) -> ErrorPolicy:
    """Return the policy for work without a key's order: see ``Retry.unparked``."""
    return adapted(policy, _unparked)


def parks(policy: ErrorPolicy | None) -> bool:
    """Check for a policy that is known to park keys; of a function nothing is known."""
    return isinstance(policy, Retry) and policy.parks


def _unparked(policy: Retry) -> Retry:
    return policy.unparked
