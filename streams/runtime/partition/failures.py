"""The failures of an event, and their descriptions."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import anyio

from streams.core.origin import Origin
from streams.core.parking import LONGEST_ERROR, Queue
from streams.core.policy import FINAL, Answered, Failure, text_of
from streams.core.router import Route
from streams.errors import RecordError, RecordRefused, StateUnreadable
from streams.logs import Trace, exception_info, is_ours
from streams.metrics import EventFailed
from streams.records import TYPE_HEADER, Change, IncomingRecord, TypedRecord

_log = logging.getLogger(__name__)

LONGEST_TRACE: Final = 2_000
"""Characters of the stack trace that a dead letter carries, at most: the last ones, which are nearest to the error."""
MOST_TRACES: Final = 100
"""Stack traces of parked events that a partition keeps in memory, at most."""


class RestartNeeded(Exception):
    """The store cannot be undone: restore the partition from its changelog, then go on with this event."""

    def __init__(self, origin: Origin, attempts: int, error: BaseException) -> None:
        super().__init__(text_of(error))
        self.origin = origin
        self.failure = Failure(attempts, error)


class TakenBack(Exception):
    """Admitted effects are undone, because another event of the partition was refused (``__cause__``): the work may be
    done again after the restart."""


def cancelled_inside(error: BaseException) -> Exception:
    """Wrap a ``CancelledError`` that is not ours as an error like any other: passed on, it would end a task or a thread
    silently. An ``Exception`` is returned as it is."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(
        "the function met a cancellation that is not its own: it awaited something that was cancelled"
    )
    wrapped.__cause__ = error
    return wrapped


class Cancellation:
    """The cancellation of a run: by a scope, or of the task that it began in. The end of an event loop cancels all
    tasks, each for itself and not by their scopes; only that one shows that it was the run that was meant, and not
    something that a function of the user awaited."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._before = 0

    def begin(self) -> Cancellation:
        """Watch the current task from now on. Returns itself."""
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()
        return self

    @property
    def is_real(self) -> bool:
        """Check what a ``CancelledError`` in the current task is. ``False``: it is not ours."""
        task = self._task
        by_task = task is not None and task.cancelling() > self._before
        return by_task or anyio.current_effective_deadline() == -math.inf


async def no_foreign_cancellation(run: Callable[[], Awaitable[None]], cancellation: Cancellation) -> None:
    """Run what may call the user's functions. A ``CancelledError`` ends a whole group of tasks without a word: one that
    is not real becomes an error."""
    try:
        await run()
    except asyncio.CancelledError as error:
        if cancellation.is_real:
            raise
        raise cancelled_inside(error) from error


def of_policy(error: BaseException, where: str, what: str = "handler") -> Exception:
    """Return what the user's code (``what``) raised as an error for the event's policy. Raises what is no ``Exception``
    (``SystemExit``, ``KeyboardInterrupt``): it ends the process and no event, and only here the event is known."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError):
        return cancelled_inside(error)
    _log.critical(
        "%s: the %s raised %s: %s; that is no event's failure but the end of the process, and the next start "
        "meets the event again. (To stop the source on purpose a handler answers ExecutionState.FATAL)",
        where,
        what,
        type(error).__name__,
        text_of(error),
        exc_info=exception_info(error),
    )
    raise error


def reason_of(error: BaseException) -> BaseException:
    """Return the handler's reason, if it answered instead of raising; else the error itself."""
    return error.__cause__ if isinstance(error, Answered) and error.__cause__ is not None else error


def describe(error: BaseException) -> str:
    """Describe the error in one line."""
    error = reason_of(error)
    return str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {text_of(error)}"


def unreadable_state(error: BaseException) -> StateUnreadable | None:
    """Return the error of a value of the state that could not be read, if the failure comes from one."""
    found: BaseException | None = error
    for _ in range(10):  # a chain may be a circle
        if found is None or isinstance(found, StateUnreadable):
            return found
        found = found.__cause__ or found.__context__
    return None


def event_failed(
    record: IncomingRecord, error: BaseException, response: str, routes: Mapping[bytes, Route], route: Route | None
) -> EventFailed:
    """Measure an event that has failed for good, and count it by its type; without a ``route`` its record cannot be
    read."""
    unread = _unread(record, routes) if route is None else ""
    known = routes.get(record.header(TYPE_HEADER) or b"") if route is None else route
    if known is not None:
        known.failed[response] = known.failed.get(response, 0) + 1
    is_state = unreadable_state(error) is not None
    return EventFailed(record.partition, record.offset, describe(error), response, record.topic, unread, is_state)


def _unread(record: IncomingRecord, routes: Mapping[bytes, object]) -> str:
    if record.value is None:
        return "null"
    if isinstance(record, TypedRecord) and record.is_refused:
        return "refused"
    name = record.header(TYPE_HEADER)
    return "untyped" if name is None else "value" if name in routes else "unknown_type"


def trace_of(error: BaseException) -> Trace | None:
    """Return the ``exc_info`` of a log line about a failed event: from the user's code on; none where it had no part (a
    record that cannot be read, or is refused)."""
    return None if isinstance(error, FINAL) else exception_info(reason_of(error))


def describe_type(record: IncomingRecord) -> str:
    """Describe the type of a record without a handler."""
    raw = record.header(TYPE_HEADER)
    if raw is None:
        if isinstance(record, TypedRecord):
            return record.reason
        return f"the record has no type header ({TYPE_HEADER})"
    return f"no handler for the event type {raw[:64].decode(errors='replace')!r}"


def change_too_large(change: Change, limit: int) -> RecordRefused:
    """Make the error for a change that no producer would take."""
    return RecordRefused(
        f"the store's value for key {change.key[:64]!r} has {len(change.value or b'')} bytes, more than "
        "message.max.bytes of "
        f"the producer ({limit}): raise it in client_settings (and max.message.bytes of the changelog), or "
        "store less per key"
    )


def short_trace(error: BaseException) -> str:
    """Return the frames of the user's code that the error came through, without the toolkit's own; ``""`` if there are
    none. The last ``LONGEST_TRACE`` characters of it."""
    frames = ((frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not is_ours(frame))
    return "".join(traceback.StackSummary.extract(frames).format()).rstrip()[-LONGEST_TRACE:]


class LastTraces:
    """The stack traces of the last failures of parked events, by the names of their queues: as long as this process
    works on the partition, and of the ``MOST_TRACES`` queues that have failed last."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[str, str]] = {}

    def note(self, name: str, error: BaseException) -> None:
        """Keep the trace of an attempt at the first event of this queue."""
        self._by_name.pop(name, None)
        self._by_name[name] = describe(error)[:LONGEST_ERROR], short_trace(reason_of(error))
        if len(self._by_name) > MOST_TRACES:
            del self._by_name[next(iter(self._by_name))]

    def of(self, queue: Queue) -> str:
        """Return the trace of the failure that the queue's record names; ``""``: there is none here."""
        error, trace = self._by_name.get(queue.name, ("", ""))
        return trace if error == queue.state.error else ""
