"""Traces: the headers that carry one (W3C Trace Context), and the interface to what records spans
(``observability.OpenTelemetryTraces``).

Only events whose ``traceparent`` is sampled are traced. Each has one span, from the first attempt (or the beginning of
its work ahead of its turn) to its end; what it sends carries that span's context.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar

from streams.records import Headers, IncomingRecord, ReceivedHeaders

A = TypeVar("A")
T = TypeVar("T")

TRACE_PARENT: Final = "traceparent"
TRACE_STATE: Final = "tracestate"

Carrier = tuple[tuple[str, str], ...]
"""The headers of one trace, as text: ``traceparent``, and ``tracestate`` if there is one. Empty: no trace."""

_SAMPLED: Final = re.compile(
    rb"(?:00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]"
    rb"|(?!00|ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf](?:-[ -~]*)?)"
)
_LONGEST_STATE: Final = 512
"""Bytes of ``tracestate`` that have to be carried on; longer ones are left out."""


class EventSpan(Protocol):
    """A span that is under way. On the loop."""

    @property
    def carrier(self) -> Carrier:
        """The headers of what is sent under this span."""
        ...

    def enter(self) -> None:
        """Make it the current span of the present ``contextvars`` context, to the context's end."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """Make it the current span for a block."""
        ...

    def child(self, name: str, links: Sequence[EventSpan] = ()) -> EventSpan:
        """Begin a span for a part of its work."""
        ...

    def failed(self, error: BaseException, attempts: int, response: str = "") -> None:
        """Note a failed attempt. With a ``response``, the error policy's, the event has failed for good."""
        ...

    def end(self) -> None:
        """End it. A further call does nothing."""
        ...


class Tracer(Protocol):
    """Begins spans. ``current`` may be called by any thread, the others on the loop."""

    def process(
        self, record: IncomingRecord, parent: Carrier, links: Sequence[Carrier] = (), count: int = 1
    ) -> EventSpan:
        """Begin the span of an event, or of a batch of ``count`` that begins with this record."""
        ...

    def interject(self, name: str, topic: str, partition: int, parent: Carrier) -> EventSpan:
        """Begin the span of an interjection."""
        ...

    def current(self) -> Carrier:
        """Return the headers of the caller's current span; empty without one."""
        ...


def carried(headers: ReceivedHeaders | None) -> Carrier:
    """Return the sampled trace that these headers carry. Empty when there is none, when it is not sampled, and for
    garbage (a ``traceparent`` that is none, or two of them)."""
    parents = [value for name, value in headers or () if name == TRACE_PARENT]
    if len(parents) != 1 or parents[0] is None or not _SAMPLED.fullmatch(parents[0]):
        return ()
    found = ((TRACE_PARENT, parents[0].decode()),)
    state = b",".join(value for name, value in headers or () if name == TRACE_STATE and value)
    if state and len(state) <= _LONGEST_STATE and state.isascii():
        return *found, (TRACE_STATE, state.decode())
    return found


def stamped(headers: Iterable[tuple[str, bytes | None]] | None, carrier: Carrier) -> Headers:
    """Return these headers with this trace in place of any other: a handler may have copied those of its input."""
    given = list(headers or ())
    try:
        own = [header for header in given if header[0] not in (TRACE_PARENT, TRACE_STATE)]
    except (TypeError, IndexError):  # no headers: the client refuses them, and names the fault
        return given
    return [*((name, text.encode()) for name, text in carrier), *own]


def with_context(function: Callable[[A], T]) -> Callable[[A], T]:
    """Make a function for another thread, in which the caller's current span is current."""
    context = contextvars.copy_context()
    return lambda argument: context.run(function, argument)


async def under_span(span: EventSpan, outcome: Awaitable[tuple[Any, BaseException | None, int]]) -> Any:
    """Await the outcome (result, error, attempts) of a call under this span, and end it."""
    try:
        with span.active():
            result, error, attempts = await outcome
        if error is not None:
            span.failed(error, attempts, "failed")
        return result, error, attempts
    finally:
        span.end()
