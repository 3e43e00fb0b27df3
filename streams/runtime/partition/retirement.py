"""Retire the events of a partition's reorder buffer in order: each has its turn when all before it are complete.

Turns without an await run back to back: plain handlers as a slice, finalizers, and concurrent handlers, which pass the
turn on to each other. Failures, retries and awaitables go through ``Execution``, an event at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, Final

from streams.core.router import Route
from streams.outcomes import ExecutionState
from streams.records import IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.execution import Begun, Execution
from streams.runtime.partition.host import Host
from streams.runtime.partition.hot_path import LONGEST_SLICE_SECONDS, HotPath
from streams.runtime.partition.parked_events import NoRoom
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from streams.runtime.partition.single_events import SingleEvents
from streams.runtime.partition.state import Partition
from streams.runtime.partition.unit import Unit

RunSlice = Callable[[list[IncomingRecord], int], Awaitable[int]]

MOST_AT_ONCE: Final = 64
"""Turns that are taken before the loop runs other tasks, at most."""


class Retirement:
    """The turns of one partition. On its task; but a concurrent handler passes its turn on in its own."""

    def __init__(
        self,
        partition: Partition,
        host: Host,
        execution: Execution,
        buffer: ReorderBuffer,
        hot_path: HotPath,
        run_slice: RunSlice,
        singles: SingleEvents,
    ) -> None:
        self._partition = partition
        self._host = host
        self._execution = execution
        self._buffer = buffer
        self._hot_path = hot_path
        self._run_slice = run_slice
        self._singles = singles
        self._passing: asyncio.Future[BaseException | None] | None = None  # while concurrent handlers pass turns on
        self._left = 0  # turns until they stop doing so
        self._roused = 0  # handlers that were roused to be there for theirs
        self._most_roused = MOST_AT_ONCE
        self._task: asyncio.Task[Any] | None = None  # of the handler that has the turn
        self._unit: tuple[Unit, EventContext[Any]] | None = None  # of the handler that has the turn

    def is_of(self, task: asyncio.Task[Any]) -> bool:
        """Check for the task of the handler that has the turn."""
        return task is self._task

    async def retire(self) -> None:
        """Take the turn of the first entry, which is settled, and of those behind it that need no await. Raises as
        ``PartitionWorker.run``."""
        buffer, pool = self._buffer, self._host.pool
        first = buffer.first
        if pool.is_full:
            await pool.wait_room()
            return  # the partition may have been given up meanwhile
        if first.is_plain:
            records = [entry.record for entry in buffer.plain(self._hot_path.size)]
            self._leave(await self._run_slice(records, 0))
        elif first.is_given_up or first.record.key in self._partition.timers.parked.keys or self._is_duplicate(first):
            first.drop()  # its work may have ended: a finalizer now would pass the events of its key
            self._leave(await self._singles.one(first.record, None))
        elif first.error is not None or self._partition.failures.of_event(first.record.offset) is not None:
            # A failure that is known from an earlier worker goes this way, too: its attempts count.
            await self._retrying(first)
        elif first.waiting is not None:
            await self._pass_on()
        elif first.trace is not None:  # its turn has a span of its own, so it shares no unit
            await self._retrying(first)
        else:
            await self._finalize()

    def _goes_on(self, left: int) -> bool:
        """Check that the first entry may have its turn without a look at anything else."""
        partition, buffer = self._partition, self._buffer
        if not left or not buffer.is_ready or partition.failures.events or self._host.pool.is_full:
            return False
        first, parked = buffer.entries[0], partition.timers.parked.keys
        if first.finish is None or first.record.key in parked or self._is_duplicate(first):
            return False
        return partition.state.admits

    def _is_duplicate(self, entry: Entry) -> bool:
        """Check for an event whose id was handled since its work began (``Execution`` passes it), or has no room."""
        digest, seen = entry.digest, self._partition.seen
        return digest is not None and (seen.is_full or seen.find(digest) is not None)

    def _note(self, entry: Entry, ctx: EventContext[Any]) -> None:
        """Note the id of an event at its turn: it is recorded if the event completes."""
        route = entry.route
        if route is not None and route.once is not None:
            self._execution.once.is_known(entry.record, route, entry.digest)
            self._execution.once.note(ctx, entry.record)
            if entry.digest is None:
                route.once.unfiltered(self._partition, self._host, route, 1)

    def _leave(self, count: int) -> None:
        """Remove so many entries, which had their turn. None: the first one finds no room in its key's queue, and the
        partition is closing. Nothing behind it may be admitted then: the next owner handles all of them."""
        if count:
            self._buffer.leave(count)
        else:
            self._buffer.drop()

    async def _retrying(
        self,
        entry: Entry,
        error: BaseException | None = None,
        begun: Begun | None = None,
    ) -> None:
        """Execute one event to its end. An attempt may have been made, which failed with ``error``, or is ``begun``."""
        record, done = entry.record, 1
        try:
            try:
                with nullcontext() if entry.trace is None else self._execution.within(entry.trace):
                    await self._execute(entry, error, begun)
            except NoRoom as full:
                done = await self._singles.one(record, None, full)
            if record.key in self._partition.parked:
                self._buffer.give_up(record.key)
        finally:
            entry.drop()
        self._leave(done)

    async def _execute(self, entry: Entry, error: BaseException | None, begun: Begun | None) -> None:
        execution, record, route = self._execution, entry.record, entry.route
        if entry.error is not None:
            await execution.failed(record, route, entry.error, entry.attempts)
        else:
            assert entry.finish is not None
            assert route is not None
            if error is None and begun is None and route.once is not None:
                execution.once.is_known(record, route, entry.digest)
            made = entry.attempts if error is None else entry.attempts + 1
            await execution.retrying(
                record, route, entry.finish, made, error, store_dirty=error is not None, begun=begun
            )

    # -- finalizers ----------------------------------------------------------------------------------------------------

    async def _finalize(self) -> None:
        """Run finalizers that stages have left for the events' turns: many in one unit, as ``HotPath`` does."""
        begun, error = self._finalizers()
        if begun is not None or error is not None:
            await self._retrying(self._buffer.first, error, begun)

    def _finalizers(self) -> tuple[Begun | None, Exception | None]:
        """Run and admit some. Returns how the first one that is left stands: it has answered with an awaitable, or has
        failed and is undone; else there is no need to await anything."""
        partition, host, buffer = self._partition, self._host, self._buffer
        store, timers, where = partition.store, partition.timers, partition.reading
        limit, left, until = host.message_limit, MOST_AT_ONCE, host.now() + LONGEST_SLICE_SECONDS
        entries = buffer.entries
        unit = done = Unit(partition, [], [])
        is_open = True
        route, since = entries[0].route, left  # since then the entries are of this route
        outputs, journal = unit.outputs, unit.journal
        unit.begin()
        try:
            entry = entries[0]
            while True:
                assert entry.finish is not None
                record, first = entry.record, unit.begin_next()
                ctx: EventContext[Any] = EventContext(
                    store, where, record, outputs, journal, limit, entry.attempts + 1, timers, first, _host=host
                )
                self._note(entry, ctx)
                try:
                    unit.observe(ctx)
                    answer = entry.finish(ctx)
                except BaseException as error:
                    is_open = False
                    return None, unit.fail(ctx, error)
                if answer is not None and answer is not ExecutionState.COMPLETE and isinstance(answer, Awaitable):
                    # Those before it are complete, and are admitted now: they do not wait for its await.
                    is_open, done = False, unit.split(ctx)
                    return Begun(unit, ctx, answer), None
                failed = unit.complete(ctx, answer, record.offset + 1)
                if failed is not None:
                    is_open = False
                    return None, failed
                entry.drop()
                entries.popleft()
                left -= 1
                if not self._goes_on(left):
                    return None, None
                entry = entries[0]
                if entry.waiting is not None or entry.trace is not None or host.now() > until:
                    return None, None
                if entry.route is not route:
                    _count(route, since - left)
                    route, since = entry.route, left
        finally:
            _count(route, since - left)
            if is_open:
                unit.end()
            done.admit(host.pool)  # in any case: the events before one that failed, or waits, are complete

    # -- concurrent handlers -------------------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Pass turns on among handlers that run already, and wait for them. The first one goes on; when it has ended
        its own task gives the turn to the next. Those behind it are roused at the same time, so that all that do not
        wait in their turn have it in one trip through the loop."""
        buffer = self._buffer
        passing = self._passing = asyncio.get_running_loop().create_future()
        behind = buffer.waiting(self._most_roused - 1)
        self._left, self._roused = MOST_AT_ONCE, len(behind)
        self._most_roused = min(2 * self._most_roused, MOST_AT_ONCE)  # more each time, until one was roused in vain
        try:
            self._give_turn()
            for waiting in behind:
                waiting.rouse()
            error = await passing
        finally:
            self._passing = self._task = None
        if error is not None:
            buffer.first.withdraw()  # a task of it may still wait, and hold what the next attempt needs (a lock)
            await self._retrying(buffer.first, error)

    def _give_turn(self) -> None:
        """Give the turn to the first handler; to the next as well if that one had ended already, and so on."""
        partition = self._partition
        while True:
            waiting = self._buffer.entries[0].waiting
            assert waiting is not None
            ctx = waiting.context
            if waiting.is_asleep and 0 < MOST_AT_ONCE - self._left <= self._roused:
                self._most_roused = 1  # it was roused in vain, and sleeps again: one before it waits within its turn
            ctx.store, ctx._timers, ctx._has_turn = partition.store, partition.timers, True
            unit = Unit(partition, ctx._outputs, ctx._journal)
            unit.begin()
            self._unit = unit, ctx
            self._task = ctx._task
            self._note(self._buffer.entries[0], ctx)
            try:
                unit.observe(ctx)
            except BaseException as error:
                self._had_turn(error)  # as if the handler had raised it at once
                return
            if not waiting.arrive(self._handler_ended) or not self._had_turn(waiting.error):
                return

    def _handler_ended(self, error: BaseException | None) -> None:
        """End a turn. Called by the task of the handler that has it."""
        passing = self._passing
        if passing is None or passing.done():
            return  # given up meanwhile
        try:
            if self._had_turn(error):
                self._give_turn()
        except BaseException as failed:  # an error of the partition: this handler's task must not swallow it
            passing.set_exception(failed)

    def _had_turn(self, error: BaseException | None) -> bool:
        """Retire the first entry, whose handler has ended. Returns whether the next has its turn now."""
        buffer, passing = self._buffer, self._passing
        entry = buffer.entries[0]
        assert passing is not None
        assert self._unit is not None
        unit, ctx = self._unit
        if error is None:
            error = unit.complete(ctx, None, entry.record.offset + 1)
        else:
            error = unit.fail(ctx, error)
        if error is None:
            unit.end()
            unit.admit(self._host.pool)  # before the next one has its turn: admission is in the partition's order
            if entry.route is not None:
                entry.route.handled += 1
            entry.drop()
            buffer.entries.popleft()
            self._left -= 1
            if self._goes_on(self._left) and buffer.entries[0].waiting is not None:
                return True
        passing.set_result(error)
        return False


def _count(route: Route | None, events: int) -> None:
    if route is not None:
        route.handled += events
