"""Batch handlers (``register_event_type(T, batch=True)``): events that follow each other, handled by one call.

A batch is a run of records of one type in one slice of the hot path. It is admitted as a whole, or undone as a whole; a
failure is never the batch's but an event's: after a failure the events up to the batch's end are handed in one by one,
and a batch of one is an event like any other. The same holds for a record that the broker refuses: its ``origin`` is
that of a batch, so no event is blamed, and the partition starts again with these events one by one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeVar

from streams.core.origin import INTERJECTION, Origin, batch_origin
from streams.core.router import Route, Router
from streams.core.timers import Timer
from streams.errors import RegistrationError
from streams.metrics import BatchFailed
from streams.model.tracing import EventSpan, Tracer, carried
from streams.records import IncomingRecord
from streams.runtime.partition.context_fields import OWN_NAME
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import RestartNeeded, describe, trace_of
from streams.runtime.partition.host import Host
from streams.runtime.partition.state import Partition
from streams.runtime.partition.timekeeping import WindowFailed
from streams.runtime.partition.unit import Unit

_log = logging.getLogger(__name__)

StoreT = TypeVar("StoreT")


class BatchContext(EventContext[StoreT]):
    """The events of a batch, with their partition's store and their outputs. Valid while the handler runs, not longer.

    ``records`` are the input records, one for each event and in the same order; for a timer's event it is one that was
    made for it (offset -1, the timer's key and time). ``input`` is ``None``, and ``offset`` is refused: a batch has
    many. All other methods are those of ``EventContext``; they take effect for all events together.
    """

    records: Sequence[IncomingRecord] = ()
    _batch: Origin = INTERJECTION

    def _gather(self, records: Sequence[IncomingRecord], timer: Timer | None = None) -> None:
        """Take the events' records."""
        self.records = records
        last = records[-1].offset
        if timer is not None:
            self._batch = timer.origin
            self._begin_timer(timer)
        else:
            # One event alone has its own origin: if the broker refuses a record of it, its policy decides. A list has
            # the origin of a batch: no event is blamed before all were handled one by one.
            self._batch = last if len(records) == 1 else batch_origin(last)

    @property
    def _origin(self) -> Origin:
        """The origin of the events' outputs and changes."""
        return self._batch

    @property
    def offset(self) -> int:
        """Refused (``AttributeError``): each of ``records`` has its own."""
        raise AttributeError("a batch has no offset of its own: see ctx.records, one for each event")

    @property
    def where(self) -> str:
        """The name in error messages."""
        first, last = self.records[0].offset, self.records[-1].offset
        return f"{self.topic_partition}@{first}" + (f" to {last}" if last > first else "")

    @property
    def is_interjection(self) -> bool:
        """Check whether the event is a timer's."""
        return self.timer is not None

    @property
    def _records(self) -> Sequence[IncomingRecord]:
        return self.records

    def _own_name(self, number: int) -> str:
        origin = self._origin if self.timer is not None else self.records[-1].offset
        return f"{OWN_NAME}{self._named(origin)}/{number}"


class BatchKind:
    """The kind of batch handlers; see ``handler_kind.HandlerKind``."""

    name = "batch"
    option = "batch=True"
    instead = "for calls that take many items at a time there is AsyncBatcher"
    keep = None

    def __reduce__(self) -> str:
        """Travel to other processes by name."""
        return "BATCH"

    def argument(self, partition: Partition, host: Host, record: IncomingRecord, event: Any) -> Any:
        """Make a batch of one."""
        return [event]

    def context(
        self,
        partition: Partition,
        host: Host,
        records: Sequence[IncomingRecord],
        attempt: int = 1,
        timer: Timer | None = None,
        origin: Origin | None = None,
    ) -> BatchContext[Any]:
        """Make the context of these events."""
        where = partition.reading if timer is None else partition.topic_partition
        ctx: BatchContext[Any] = BatchContext(
            partition.store, where, None, [], [], host.message_limit, attempt, partition.timers
        )
        ctx._host = host
        ctx._gather(records, timer)
        if origin is not None:
            ctx._batch = origin
        return ctx

    def run(
        self, partition: Partition, host: Host, route: Route, records: list[IncomingRecord], start: int, stop: int
    ) -> tuple[int, BaseException | None]:
        """Handle and admit the records from ``start`` on that belong into one batch; if it fails, the first of them.
        Returns as ``HandlerKind.run``."""
        # The batch that ended there has failed: one at a time shows which of its events is to blame.
        if records[start].offset < partition.failures.single_until:
            stop = start + 1
        events = _decoded(route, host.router, records, start, stop)
        if not events:
            return start, None
        found, covered = records[start : start + len(events)], len(events)
        once = None if route.once is None else route.once.of_batch(partition, host, route, found, events)
        if once is not None:
            found, events, covered = once.records, once.events, once.covered
            if not events:  # duplicates, or an event that ``Execution`` handles
                return start + covered, None
        batch = tuple(found)  # a handler cannot change the worker's list
        ctx = self.context(partition, host, batch)
        if once is not None:
            once.note(ctx)
        span = None if host.router.tracer is None else _span_of(host.router.tracer, batch)
        ctx._trace = span
        unit = Unit(partition, ctx._outputs, ctx._journal)
        unit.begin()
        error: Exception | None
        try:
            with nullcontext() if span is None else span.active():
                unit.observe(ctx)
                answer = route.handler(ctx, events)
        except BaseException as raised:
            error = unit.fail(ctx, raised)
        else:
            if inspect.iscoroutine(answer):  # a plain function around an async one: nothing of it has run
                answer.close()
                ctx._error = RegistrationError(f"the handler of {route.name} has batch=True, and is asynchronous")
            error = unit.complete(ctx, answer, records[start + covered - 1].offset + 1, covered)
        if span is not None:
            if error is not None:
                span.failed(error, 1)  # also if its events complete later, one by one
            span.end()
        if error is None:
            unit.end()
            unit.admit(host.pool)
            route.handled += len(batch)
            if once is not None:
                once.count()
            return start + covered, None
        if len(batch) == 1 or isinstance(error, WindowFailed):  # no event's failure, so none is to be found
            return start, error
        split_batch(partition, host, batch[-1].offset, error)
        # Undone: the first event goes on alone. A store that cannot undo has to be restored before that.
        if partition.is_journalled:
            return self.run(partition, host, route, records, start, start + 1)
        return start, RestartNeeded(batch[0].offset, 0, error)


BATCH: Final = BatchKind()


def split_batch(partition: Partition, host: Host, last: int, error: Exception) -> None:
    """Have the events up to this offset handled one by one: the batch that ends there has failed and is undone."""
    partition.failures.split_batch(last, error)
    host.measure(BatchFailed(partition.partition, last, describe(error)))
    _log.warning(
        "the batch of %s that ended at offset %d failed: %s; its events are handled one by one",
        partition.reading,
        last,
        describe(error),
        exc_info=trace_of(error),
    )


def _span_of(tracer: Tracer, batch: Sequence[IncomingRecord]) -> EventSpan | None:
    """Begin the span of a batch: in the trace of its first record that has one, with links to the others."""
    traces = [(record, parent) for record in batch if (parent := carried(record.headers))]
    if not traces:
        return None
    record, parent = traces[0]
    return tracer.process(record, parent, [other for _, other in traces[1:]], len(batch))


def _decoded(route: Route, router: Router, records: list[IncomingRecord], start: int, stop: int) -> list[Any]:
    """Decode the events from ``start`` on, up to the first that is not of this route or cannot be read."""
    decode, headers = route.bare_decode, records[start].headers
    events: list[Any] = []
    for record in records[start:stop]:
        value = record.value
        if value is None or (record.headers is not headers and router.current(record.headers) is not route):
            break
        try:
            events.append(decode(value))
        except Exception:
            break  # decoded again by Execution.one, which reports the error
    return events
