"""The hot path: plain handlers of one partition, run back to back without an await, a slice at a time.

What needs patience (async and blocking handlers, records that cannot be read, failures) ends the slice in front of it,
and goes through ``Attempts``.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Final

from streams.errors import DecodeError
from streams.outcomes import ExecutionState
from streams.records import TYPE_HEADER, VERSION_HEADER, Change, IncomingRecord, Output
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
        partition, store, tp, timers = worker.partition, worker.store, worker.topic_partition, worker.timers
        routes, limit, admit = engine.router.routes, engine.message_limit, engine.pool.admit
        journalled = worker.is_journalled
        if worker.attempts.known_failures:
            return start, None
        for position in range(start, stop):
            record = records[position]
            name = version = None
            for header, content in record.headers or ():
                if header == TYPE_HEADER and name is None:
                    name = content or b""  # the first one counts, as for Attempts.read; null and empty name nothing
                elif header == VERSION_HEADER and version is None:
                    version = content or b""
            route = routes.get(name) if name is not None else None
            if route is None or not route.plain or version != route.wire_version:
                return position, None
            journal: list[Change] = []
            outputs: list[Output] = []
            try:
                event = route.decode(record.value, route.version)
            except DecodeError:
                return position, None  # met again by one(), which knows what to do
            ctx = EventContext(store, tp, record, outputs, journal, limit, 1, timers)
            if journalled:
                store.begin(journal)
            try:
                answer = route.handler(ctx, event)
                if answer is not None and answer is not ExecutionState.COMPLETE:
                    if inspect.iscoroutine(answer):  # a plain function around an async one: seen once, then known
                        answer.close()
                        route.plain = False
                        ctx.close()
                        worker.undo(journal)
                        soiled = RestartNeeded(record.offset, 0, Answered(answer, None))
                        return position, None if journalled else soiled
                    raise Answered(answer, ctx.error)
                for change in journal:
                    if change.value is not None and len(change.value) > limit:
                        raise change_too_large(change, limit)
            except (Exception, asyncio.CancelledError) as error:
                ctx.close()
                worker.undo(journal)
                return position, error if isinstance(error, Exception) else cancelled_inside(error)
            ctx._closed = True
            if journalled:
                store.end()
            if ctx.timer_changes:
                journal += timers.admitted(ctx.timer_changes)
            offset = record.offset
            worker.watermark = offset + 1
            admit(partition, offset + 1, offset, outputs, journal)
        return stop, None
