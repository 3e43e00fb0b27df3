"""The hot path: plain handlers of one partition, run back to back without an await, a slice at a time.

An event that needs more (async and blocking handlers, records that cannot be read, failures) ends the slice in front of
it, and goes through ``Execution``. Why the loop looks as it does:

* The whole slice has one journal and one list of outputs, and is admitted once. An event's part begins at a mark
  (``written``, ``sent``); an event that fails is undone from there, and the complete ones before it are admitted.
  Nothing else runs in between, so the result is the same as with events that are admitted one by one.
* Everything is a local name, and every call of Python per event is one that the user could notice if it were missing.
  Functions that are kept in attributes (``route.handler``) are local names too: called as attributes they cost 130
  instructions more on Python 3.11, which takes them for methods.
* Records mostly have the same headers as the one before (the same tuple: ``clients.received``), so the handler is
  looked up when these change.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Final

from streams.core.policy import Answered
from streams.core.router import type_and_version
from streams.outcomes import ExecutionState
from streams.records import TYPE_HEADER, Change, IncomingRecord, Output
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import RestartNeeded, cancelled_inside, change_too_large
from streams.runtime.partition.handler_kind import HandlerKind
from streams.runtime.partition.host import Host
from streams.runtime.partition.state import Partition

SLICE: Final = 128
"""Events handled between two looks at the loop, at most: the switch costs nothing then."""

LONGEST_SLICE_SECONDS: Final = 0.005
"""Slices of slow handlers get shorter until they take about so long: all other tasks, commits included, wait
meanwhile."""


class HotPath:
    """The hot path of one partition. On its task. ``size``: events in the next one, at most."""

    def __init__(self, partition: Partition, host: Host) -> None:
        self._partition = partition
        self._host = host
        self.size = SLICE // 8

    def run(self, records: list[IncomingRecord], start: int) -> tuple[int, BaseException | None]:
        """Handle and admit some of these records. Returns the position of the first that was not handled; and if that
        one ended the slice because its handler failed, why."""
        now = self._host.now
        began = now()
        stop = min(start + self.size, len(records))
        position, error = self._run(records, start, stop)
        while error is None and position < stop:  # at a record whose handler is not plain
            behind, error = self._run_kind(records, position, stop)
            if behind == position:
                break
            position, error = self._run(records, behind, stop)
        self._adapt(now() - began)
        return position, error

    def _run_kind(self, records: list[IncomingRecord], start: int, stop: int) -> tuple[int, BaseException | None]:
        """Handle some records by a handler of another kind that needs no await. Returns ``start`` if there is none."""
        partition, host = self._partition, self._host
        route = host.router.current(records[start].headers)
        if route is None or route.kind is None or partition.failures.events:
            return start, None
        kind: HandlerKind = route.kind
        return kind.run(partition, host, route, records, start, stop)

    def _adapt(self, seconds: float) -> None:
        if seconds > LONGEST_SLICE_SECONDS:
            self.size = max(1, self.size // 2)
        elif self.size < SLICE:
            self.size *= 2

    def _run(self, records: list[IncomingRecord], start: int, stop: int) -> tuple[int, BaseException | None]:
        partition, host = self._partition, self._host
        store, journalled, timers = partition.store, partition.is_journalled, partition.timers
        routes, limit, where = host.router.routes, host.message_limit, partition.topic_partition
        headers: Any = routes  # of the record before: at first something that no headers are
        route: Any = None  # of these headers
        decode = handler = route
        outputs: list[Output] = []
        journal: list[Change] = []
        sent = written = 0  # so many of them are of events that are complete
        position = start
        failure: BaseException | None = None
        if partition.failures.events:
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
                    break  # met again by Execution.one, which handles it
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
                        raise Answered(answer, ctx._error)
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
                if ctx._timer_changes:
                    journal += timers.admitted(ctx._timer_changes, offset)
                position, sent, written = position + 1, len(outputs), len(journal)  # at once, for interrupts' sake
        finally:
            if journalled:
                store.end()
                if len(journal) > written:
                    store.undo(journal[written:])
            if position > start:
                del outputs[sent:], journal[written:]
                partition.watermark = records[position - 1].offset + 1
                host.pool.admit(partition.partition, partition.watermark, outputs, journal, events=position - start)
        return position, failure
