"""Batch handlers (``register_event_type(T, batch=True)``): events that follow each other, handled by one call.

A batch is a run of records of one type in one slice of the hot path. It is admitted as a whole, or undone as a whole;
what fails is never the batch but an event: after a failure the events up to the batch's end are handed in one by one,
and a batch of one is an event like any other. The same holds for a record that the broker refuses: its ``origin`` tells
that it came from a batch, so nobody is blamed, and the partition starts again with these events one by one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from streams.core.router import Route, type_and_version
from streams.core.timers import Timer
from streams.errors import RegistrationError
from streams.outcomes import ExecutionState
from streams.records import Change, IncomingRecord, Output
from streams.runtime.event_context import OWN_NAME, EventContext
from streams.runtime.failures import Answered, RestartNeeded, cancelled_inside, check_changes

if TYPE_CHECKING:
    from streams.runtime.partition_worker import PartitionWorker

StoreT = TypeVar("StoreT")

TOGETHER: Final = 1 << 62
"""From here on an origin stands for a batch of several events: this and the offset of the last one. Offsets are
smaller."""
NEVER_TOGETHER: Final = TOGETHER
"""An ``alone_below`` that no offset reaches."""


class BatchContext(EventContext[StoreT]):
    """The events of a batch, their partition's store, and what they send. Valid while the handler runs, not longer.

    ``records`` are the input records, one for each event and in the same order; for a timer's event it is one that was
    made for it (offset -1, the timer's key and time). ``input`` is ``None``, and ``offset`` is refused: a batch has
    many. All other methods are those of ``EventContext``; what they do takes effect for all events together.
    """

    records: Sequence[IncomingRecord] = ()
    _origin: int = -1

    def gather(self, records: Sequence[IncomingRecord], timer: Timer | None = None) -> None:
        """For the toolkit itself: these are the events' records."""
        self.records = records
        last = records[-1].offset
        if timer is not None:
            self._origin = timer.origin
            self.begin_timer(timer)
        else:
            self._origin = last if len(records) == 1 else TOGETHER + last

    @property
    def origin(self) -> int:
        """For the toolkit itself: what stands for the events where their effects are traced back."""
        return self._origin

    @property
    def offset(self) -> int:
        """Refused (``AttributeError``): each of ``records`` has its own."""
        raise AttributeError("a batch has no offset of its own: see ctx.records, one for each event")

    @property
    def where(self) -> str:
        """As error messages name it."""
        first, last = self.records[0].offset, self.records[-1].offset
        return f"{self.topic_partition}@{first}" + (f" to {last}" if last > first else "")

    @property
    def is_interjection(self) -> bool:
        """Whether the event is a timer's."""
        return self.timer is not None

    def _own_name(self, number: int) -> str:
        origin = self.origin if self.timer is not None else self.records[-1].offset
        return f"{OWN_NAME}{origin}/{number}"


def run_batch(
    worker: PartitionWorker, records: list[IncomingRecord], start: int, stop: int
) -> tuple[int, BaseException | None]:
    """Handle and admit those records from ``start`` to ``stop`` that belong into one batch; if it fails, the first of
    them. Returns the position behind and ``None``; or ``start``, when there is no batch (no batch handler, not
    readable, another version), or with the reason why the first event failed."""
    engine, attempts = worker.engine, worker.attempts
    route = _route(records[start], engine.router.routes)
    if route is None or attempts.known_failures:
        return start, None
    if records[start].offset < attempts.alone_below:
        stop = start + 1
    events = _decoded(route, records, start, stop)
    if not events:
        return start, None
    batch = tuple(records[start : start + len(events)])  # a handler cannot change what is its own
    journal: list[Change] = []
    outputs: list[Output] = []
    ctx: BatchContext[Any] = BatchContext(
        worker.store, worker.topic_partition, None, outputs, journal, engine.message_limit, 1, worker.timers
    )
    ctx.gather(batch)
    if worker.is_journalled:
        worker.store.begin(journal)
    try:
        answer = route.handler(ctx, events)
        if answer is not None and answer is not ExecutionState.COMPLETE:
            raise _answered(answer, ctx, route)
        check_changes(journal, ctx.origin, engine.message_limit)
    except (Exception, asyncio.CancelledError) as raised:
        ctx.close()
        worker.undo(journal)
        error = raised if isinstance(raised, Exception) else cancelled_inside(raised)
        if len(batch) == 1:
            return start, error
        attempts.apart(batch[-1].offset, error)
        if worker.is_journalled:
            return run_batch(worker, records, start, start + 1)
        return start, RestartNeeded(batch[0].offset, 0, error)
    ctx.close()
    if worker.is_journalled:
        worker.store.end()
    if ctx.timer_changes:
        journal += worker.timers.admitted(ctx.timer_changes, ctx.origin)
    worker.watermark = batch[-1].offset + 1
    engine.pool.admit(worker.partition, worker.watermark, outputs, journal, events=len(batch))
    return start + len(batch), None


def _route(record: IncomingRecord, routes: dict[bytes, Route]) -> Route | None:
    """Who handles it, if that is a batch handler and the record has the current version."""
    name, version = type_and_version(record.headers)
    route = routes.get(name or b"")
    return route if route is not None and route.is_batch and version == route.wire_version else None


def _decoded(route: Route, records: list[IncomingRecord], start: int, stop: int) -> list[Any]:
    """The events from ``start`` on, up to the first that is not of this route or cannot be read."""
    decode, headers, routes = route.bare_decode, records[start].headers, {route.name.encode(): route}
    events: list[Any] = []
    for record in records[start:stop]:
        value = record.value
        if value is None or (record.headers is not headers and _route(record, routes) is None):
            break
        try:
            events.append(decode(value))
        except Exception:
            break  # met again by Attempts.one, which knows what to do
    return events


def _answered(answer: object, ctx: BatchContext[Any], route: Route) -> Answered:
    if inspect.iscoroutine(answer):  # a plain function around an async one
        answer.close()
        return Answered(answer, RegistrationError(f"the handler of {route.name} has batch=True, and is asynchronous"))
    return Answered(answer, ctx.error)
