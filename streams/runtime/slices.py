"""The hot path: plain handlers of one partition, run back to back without an await, a slice at a time.

What needs patience (async and blocking handlers, records that cannot be read, failures) ends the slice in front of it,
and goes through ``Attempts``. Why the loop looks as it does:

* The whole slice has one journal and one list of outputs, and is admitted once. What an event adds is its own from a
  mark on (``written``, ``sent``); an event that fails is undone from there, and what is complete before it is admitted.
  Nothing else runs in between, so nobody sees the difference to events that are admitted one by one.
* Everything is a local name, and every call of Python per event is one that the user could notice if it were missing.
  Functions that are kept in attributes (``route.handler``) are local names too: called as attributes they cost 130
  instructions more on Python 3.11, which takes them for methods.
* Records mostly have the same headers as the one before (the same tuple: ``clients.received``), so who handles them is
  looked up when these change.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final

from streams.core.router import type_and_version
from streams.outcomes import ExecutionState
from streams.records import TYPE_HEADER, Change, IncomingRecord, Output
from streams.runtime.batch_handlers import run_batch
from streams.runtime.event_context import EventContext
from streams.runtime.failures import Answered, RestartNeeded, cancelled_inside, change_too_large

if TYPE_CHECKING:
    from streams.runtime.partition_worker import PartitionWorker

SLICE: Final = 128
"""Events handled between two looks at the loop, at most: the switch costs nothing then."""

LONGEST_SLICE_SECONDS: Final = 0.005
"""Slices of slow handlers get shorter until they take about so long: everybody else, commits included, waits
meanwhile."""


class Slices:
    """One partition's. On its task. ``size``: events in the next one, at most."""

    def __init__(self, worker: PartitionWorker) -> None:
        self._worker = worker
        self.size = SLICE // 8

    def run(self, records: list[IncomingRecord], start: int) -> tuple[int, BaseException | None]:
        """Handle and admit some of these records. Returns the position of the first that was not handled; and if that
        one ended the slice because its handler failed, why."""
        now = self._worker.engine.now
        began = now()
        stop = min(start + self.size, len(records))
        position, error = self._run(records, start, stop)
        while error is None and position < stop:  # at what is not plain: perhaps it is for a batch handler
            behind, error = run_batch(self._worker, records, position, stop)
            if behind == position:
                break
            position, error = self._run(records, behind, stop)
        self._adapt(now() - began)
        return position, error

    def _adapt(self, seconds: float) -> None:
        if seconds > LONGEST_SLICE_SECONDS:
            self.size = max(1, self.size // 2)
        elif self.size < SLICE:
            self.size *= 2

    def _run(self, records: list[IncomingRecord], start: int, stop: int) -> tuple[int, BaseException | None]:
        worker, engine = self._worker, self._worker.engine
        store, journalled, timers, where = worker.store, worker.is_journalled, worker.timers, worker.topic_partition
        routes, limit = engine.router.routes, engine.message_limit
        headers: Any = routes  # of the record before: at first something that no headers are
        route: Any = None  # of these headers
        decode = handler = route
        outputs: list[Output] = []
        journal: list[Change] = []
        sent = written = 0  # so many of them are of events that are complete
        position = start
        failure: BaseException | None = None
        if worker.attempts.known_failures:
            return start, None
        if journalled:
            store.begin(journal)
        try:
            while position < stop:
                record = records[position]
                if record.headers is not headers:  # else it is like the one before
                    headers = record.headers
                    if headers is not None and len(headers) == 1 and headers[0][0] == TYPE_HEADER:  # nearly always
                        name, version = headers[0][1], None
                    else:
                        name, version = type_and_version(headers)
                    route = routes.get(name or b"")
                    if route is None or not route.plain or version != route.wire_version:
                        break
                    decode, handler = route.bare_decode, route.handler
                value = record.value
                if value is None:
                    break
                try:
                    event = decode(value)
                except Exception:
                    break  # met again by Attempts.one, which knows what to do
                offset = record.offset
                ctx = EventContext(store, where, record, outputs, journal, limit, 1, timers, written)
                try:
                    answer = handler(ctx, event)
                    if answer is not None and answer is not ExecutionState.COMPLETE:
                        if inspect.iscoroutine(answer):  # a plain function around an async one: seen once, then known
                            answer.close()
                            route.plain = False
                            failure = None if journalled else RestartNeeded(offset, 0, Answered(answer, None))
                            break
                        raise Answered(answer, ctx.error)
                    own = written
                    while own < len(journal):  # half the price of journal[written:]
                        change = journal[own]
                        change.origin = offset
                        if change.value is not None and len(change.value) > limit:
                            raise change_too_large(change, limit)
                        own += 1
                except (Exception, asyncio.CancelledError) as error:
                    failure = error if isinstance(error, Exception) else cancelled_inside(error)
                    break
                finally:
                    ctx._closed = True
                if ctx.timer_changes:
                    journal += timers.admitted(ctx.timer_changes, offset)
                position, sent, written = position + 1, len(outputs), len(journal)  # at once, for interrupts' sake
        finally:
            if journalled:
                store.end()
                if len(journal) > written:
                    store.undo(journal[written:])
            if position > start:
                del outputs[sent:], journal[written:]
                worker.watermark = records[position - 1].offset + 1
                engine.pool.admit(worker.partition, worker.watermark, outputs, journal, events=position - start)
        return position, failure
