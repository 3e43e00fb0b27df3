"""The unit of work: events of one partition that run under one journal and enter a transaction together.

``begin``, then for each event a context over the unit's lists, ``observe``, and ``complete`` or ``fail``, then ``end``
and ``admit``.
Most units are one event, a batch or an interjection; finalizers share one, so that their admission is paid once. Plain
handlers have a copy of this, inlined (``hot_path``); ``tests/property/test_unit.py`` holds the two together.
"""

from __future__ import annotations

from typing import Any

from streams.core.policy import Answered
from streams.core.transaction import Waiter
from streams.model.tracing import stamped
from streams.outcomes import ExecutionState
from streams.records import Change, Output
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import change_too_large, of_policy
from streams.runtime.partition.host import Admission
from streams.runtime.partition.starting_jobs import beyond_bounds
from streams.runtime.partition.state import Partition


class Unit:
    """One unit of one partition. ``outputs`` and ``journal``: of all its events; the contexts of its events write to
    them."""

    __slots__ = ("_events", "_partition", "_sent", "_watermark", "_written", "journal", "outputs")

    def __init__(self, partition: Partition, outputs: list[Output], journal: list[Change]) -> None:
        self._partition = partition
        self.outputs = outputs
        self.journal = journal
        self._sent = self._written = 0  # the part of the last event begins there
        self._events = self._watermark = 0  # of the complete ones

    def begin(self) -> None:
        """Open the store for the first event: writes from now on are in the journal."""
        partition = self._partition
        if partition.is_journalled:
            partition.store.begin(self.journal)

    def observe(self, ctx: EventContext[Any]) -> None:
        """Show the event to a store that observes them, before its handler runs. What that raises is the event's
        failure."""
        before_event = self._partition.before_event
        if before_event is not None and ctx._is_observed:
            before_event(ctx)

    def begin_next(self) -> int:
        """Begin a further event. Returns where its part of the journal begins."""
        self._sent, self._written = len(self.outputs), len(self.journal)
        return self._written

    def complete(self, ctx: EventContext[Any], answer: object, watermark: int, events: int = 1) -> Exception | None:
        """Look at a handler's answer and changes, and close its context. Returns why it failed after all; then the unit
        has ended."""
        if answer is not None and answer is not ExecutionState.COMPLETE:
            return self.fail(ctx, Answered(answer, ctx._error))
        if ctx._timer_changes and (full := beyond_bounds(ctx)) is not None:
            return self.fail(ctx, full)
        journal = self.journal
        changes = journal[self._written :]
        if changes:
            origin, limit = ctx._origin, ctx._limit
            for change in changes:
                change.origin = origin
                if change.value is not None and len(change.value) > limit:
                    return self.fail(ctx, change_too_large(change, limit))
        # Nothing fails from here on: ``fail`` could not take the timers back, and the row is no change of the store.
        ctx._closed = True
        if ctx._trace is not None:
            carrier, outputs = ctx._trace.carrier, self.outputs
            for number in range(self._sent, len(outputs)):
                outputs[number].headers = stamped(outputs[number].headers, carrier)
        if ctx._timer_changes:
            journal += self._partition.timers.admitted(ctx._timer_changes, ctx._origin)
        if ctx._row is not None:
            journal.append(ctx._row.admitted(ctx._origin))
        self._events += events
        self._watermark = watermark
        return None

    def fail(self, ctx: EventContext[Any], error: BaseException) -> Exception:
        """Close the context of an event that failed, and end the unit: nothing of the event is left. Returns the error,
        raises one that ends the process."""
        ctx._closed = True
        self.end()
        self._undo(self.journal[self._written :])
        if ctx._row is not None:  # rows are beside the store, so its journal has no change of theirs
            ctx._row.undo()
        del self.outputs[self._sent :], self.journal[self._written :]
        return of_policy(error, ctx._event)

    def end(self) -> None:
        """Close the store behind events that are complete; once."""
        partition = self._partition
        store = partition.store
        if partition.is_journalled and store is not None:  # None: the partition was lost while the event ran
            store.end()

    def _undo(self, changes: list[Change]) -> None:
        partition = self._partition
        if changes and partition.is_journalled and partition.store is not None:
            partition.store.undo(changes)

    def split(self, ctx: EventContext[Any]) -> Unit:
        """Return the complete events as a unit that has ended. This one goes on with the last event, that of ``ctx``,
        for which the store stays open."""
        sent, written = self._sent, self._written
        done = Unit(self._partition, self.outputs[:sent], self.journal[:written])
        done._events, done._watermark = self._events, self._watermark
        del self.outputs[:sent], self.journal[:written]
        ctx._first = self._sent = self._written = self._events = 0
        return done

    @property
    def is_empty(self) -> bool:
        """Check for events that left nothing: no output, no change, no timer."""
        return not self.outputs and not self.journal

    def admit(self, admission: Admission, waiter: Waiter | None = None) -> bool:
        """Hand over the complete events to the open transaction. ``False``: the partition was given up meanwhile."""
        partition = self._partition
        # The state of this moment: the partition may have been given up during any await since the event began.
        if not partition.state.admits:
            return False
        events = self._events
        if events:
            watermark = partition.watermark = self._watermark
            admission.admit(partition.partition, watermark, self.outputs, self.journal, waiter, events)
        return True
