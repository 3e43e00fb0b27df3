"""The turns of a partition's line: what its first events do when everything before them is complete.

What needs no patience runs back to back: plain handlers as a slice, finalizers, and concurrent handlers, which pass the
turn on to each other. Everything else (failures, retries, what is awaited) goes through ``Attempts``, an event at a
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final

from streams.outcomes import ExecutionState
from streams.records import Change, Output
from streams.runtime.event_context import EventContext
from streams.runtime.failures import Answered, cancelled_inside, check_changes
from streams.runtime.line import Entry, Line
from streams.runtime.slices import LONGEST_SLICE_SECONDS

if TYPE_CHECKING:
    from streams.runtime.partition_worker import PartitionWorker

MOST_AT_ONCE: Final = 64
"""Turns between two looks at the loop, at most."""


class Turns:
    """One partition's. On its task; but a concurrent handler passes its turn on in its own."""

    def __init__(self, worker: PartitionWorker, line: Line) -> None:
        self._worker = worker
        self._line = line
        self._handled = 0  # events that had their turn, and the inbox does not know of yet
        self._passing: asyncio.Future[BaseException | None] | None = None  # while concurrent handlers pass turns on
        self._left = 0  # turns until they stop doing so
        self._roused = 0  # handlers that were told to be there for theirs
        self._most_roused = MOST_AT_ONCE
        self._task: asyncio.Task[Any] | None = None  # of the handler that has the turn

    def is_of(self, task: asyncio.Task[Any]) -> bool:
        """Whether a handler has the turn that runs in this task."""
        return task is self._task

    async def take(self) -> None:
        """The first one's turn, and that of those behind it for as long as they need no patience. The first one is
        settled. Raises as ``PartitionWorker.run``."""
        worker, line = self._worker, self._line
        first, pool = line.first, worker.engine.pool
        if pool.is_full:
            await pool.wait_room()
            return  # anything may have happened meanwhile
        if first.is_plain:
            records = [entry.record for entry in line.plain(worker.slices.size)]
            done = await worker.back_to_back(records, 0)
            line.leave(done)
            self._handled += done
        elif first.error is not None or first.record.offset in worker.attempts.known_failures:
            await self._patiently(first)
        elif first.waiting is not None:
            await self._pass_on()
        else:
            await self._finalize()
        handled, self._handled = self._handled, 0
        if handled and not worker.is_closing:
            worker.inbox.handled(handled)

    def _goes_on(self, left: int) -> bool:
        """Whether the first one may have its turn without a look at anything else."""
        worker, line = self._worker, self._line
        if not left or not line.is_ready or worker.attempts.known_failures or worker.engine.pool.is_full:
            return False
        return line.first.finish is not None and worker.state.admits

    async def _patiently(
        self,
        entry: Entry,
        ctx: EventContext[Any] | None = None,
        begun: Awaitable[Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """One event, whatever it takes. An attempt may have been made: it has failed with ``error``; or it is under way
        with ``ctx`` and has given an answer that is to be awaited."""
        attempts, record, route = self._worker.attempts, entry.record, entry.route
        try:
            if entry.error is not None:
                await attempts.failed(record, route, entry.error, entry.attempts)
            else:
                assert entry.finish is not None
                assert route is not None
                made = entry.attempts if error is None else entry.attempts + 1
                await attempts.persist(
                    record, route, entry.finish, made, error, error is not None, context=ctx, begun=begun
                )
        finally:
            entry.drop()
        self._is_over()

    def _is_over(self) -> None:
        self._line.leave()
        self._handled += 1

    # -- finalizers ----------------------------------------------------------------------------------------------------

    async def _finalize(self) -> None:
        """What stages have left for the events' turns: as ``Slices`` does with plain handlers, with one journal and one
        list of outputs for all of them."""
        ctx, answer, error = self._finalizers()
        self._worker.engine.pool.pump()
        if answer is not None or error is not None:
            await self._patiently(self._line.first, ctx, answer, error)

    def _finalizers(self) -> tuple[EventContext[Any] | None, Awaitable[Any] | None, BaseException | None]:
        """Run and admit some. Returns why it ended: nothing special; or the first one in the line has given an answer
        that is to be awaited, with the context that it still holds; or it has failed with this error, and is undone."""
        worker, engine, line = self._worker, self._worker.engine, self._line
        store, journalled, timers, where = worker.store, worker.is_journalled, worker.timers, worker.topic_partition
        limit, left, until = engine.message_limit, MOST_AT_ONCE, engine.now() + LONGEST_SLICE_SECONDS
        outputs: list[Output] = []
        journal: list[Change] = []
        sent = written = watermark = 0  # so many of them are of events that are complete, which go up to there
        begun: EventContext[Any] | None = None
        if journalled:
            store.begin(journal)
        try:
            while True:
                entry = line.first
                assert entry.finish is not None
                record = entry.record
                ctx: EventContext[Any] = EventContext(
                    store, where, record, outputs, journal, limit, entry.attempts + 1, timers, written, host=engine
                )
                try:
                    answer = entry.finish(ctx)
                    if answer is not None and answer is not ExecutionState.COMPLETE:
                        if isinstance(answer, Awaitable):
                            begun = ctx
                            return ctx, answer, None
                        raise Answered(answer, ctx.error)
                    check_changes(journal[written:], record.offset, limit)
                except (Exception, asyncio.CancelledError) as error:
                    ctx.close()
                    return None, None, error if isinstance(error, Exception) else cancelled_inside(error)
                ctx.close()
                if ctx.timer_changes:
                    journal += timers.admitted(ctx.timer_changes, record.offset)
                sent, written, watermark = len(outputs), len(journal), record.offset + 1
                entry.drop()
                self._is_over()
                left -= 1
                if not self._goes_on(left) or line.first.waiting is not None or engine.now() > until:
                    return None, None, None
        finally:
            done, changes = outputs[:sent], journal[:written]
            if begun is not None:  # it keeps the lists, and the store
                del outputs[:sent], journal[:written]
                begun._first = 0
            elif journalled:
                store.end()
                if len(journal) > written:
                    store.undo(journal[written:])
            if left < MOST_AT_ONCE and worker.state.admits:
                worker.watermark = watermark
                engine.pool.admit(worker.partition, worker.watermark, done, changes, events=MOST_AT_ONCE - left)

    # -- concurrent handlers -------------------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Handlers that run already, and wait for their turn. The first one goes on; when it has ended its own task
        gives the turn to the next. Those behind it are roused at the same time, so that as many as do not wait in their
        turn have it in one trip through the loop."""
        line = self._line
        passing = self._passing = asyncio.get_running_loop().create_future()
        behind = line.waiting(self._most_roused - 1)
        self._left, self._roused = MOST_AT_ONCE, len(behind)
        self._most_roused = min(2 * self._most_roused, MOST_AT_ONCE)
        try:
            self._give_turn()
            for waiting in behind:
                waiting.rouse()
            error = await passing
        finally:
            self._passing = self._task = None
        self._worker.engine.pool.pump()
        if error is not None:
            await self._patiently(line.first, error=error)

    def _give_turn(self) -> None:
        """To the first one; to the next as well if that one had ended already, and so on."""
        worker = self._worker
        while True:
            waiting = self._line.first.waiting
            assert waiting is not None
            ctx = waiting.context
            if waiting.is_asleep and 0 < MOST_AT_ONCE - self._left <= self._roused:
                self._most_roused = 1  # in vain: one before it waits in its turn
            ctx.store, ctx.timers = worker.store, worker.timers
            worker.attempts.begin(ctx)
            self._task = ctx.task
            if not waiting.arrive(self._handler_ended) or not self._had_turn(waiting.error):
                return

    def _handler_ended(self, error: BaseException | None) -> None:
        """Called by the task of the handler that has the turn."""
        passing = self._passing
        if passing is None or passing.done():
            return  # given up meanwhile
        try:
            if self._had_turn(error):
                self._give_turn()
        except BaseException as failed:  # it is the partition's, and not this handler's
            passing.set_exception(failed)

    def _had_turn(self, error: BaseException | None) -> bool:
        """The first one's handler has ended. Returns whether the next has its turn now."""
        entry, passing = self._line.first, self._passing
        assert entry.waiting is not None
        assert passing is not None
        error = self._worker.attempts.end(entry.waiting.context, error)
        if error is None:
            entry.drop()
            self._is_over()
            self._left -= 1
            if self._goes_on(self._left) and self._line.first.waiting is not None:
                return True
        passing.set_result(error)
        return False
