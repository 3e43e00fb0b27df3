"""One event with patience: reading it, its attempts, its policy, and its way into a transaction."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import anyio

from streams.core.router import Route
from streams.core.timers import Timer
from streams.core.transaction import Waiter
from streams.errors import DecodeError, EventFailure, NotOwned, RecordRefused
from streams.events import parse_version
from streams.metrics import BatchFailed, EventFailed
from streams.outcomes import ErrorPolicy, ErrorResponse, ExecutionState
from streams.records import TYPE_HEADER, VERSION_HEADER, Change, IncomingRecord, Output
from streams.runtime.batch_handlers import TOGETHER, BatchContext
from streams.runtime.dead_letters import dead_letter
from streams.runtime.event_context import EventContext
from streams.runtime.failures import (
    Answered,
    RestartNeeded,
    backoff,
    cancelled_inside,
    check_changes,
    describe,
    describe_type,
    is_fatal,
    is_last,
)
from streams.runtime.interjections import Interjection

if TYPE_CHECKING:
    from streams.runtime.partition_worker import PartitionWorker

_log = logging.getLogger(__name__)

WAYS_ON: Final = (
    ". To go on, repair the event class and deploy it, or set decode_policy=DEAD_LETTER or decode_policy=SKIP"
)
"""For a record that nobody can read: a restart alone does not help."""

Handle = Callable[[EventContext[Any]], Any]
"""What an event, or an interjection, does with its context. May be asynchronous."""


class Attempts:
    """The patient way through one partition's events, beside the worker's hot path. On its task."""

    def __init__(self, worker: PartitionWorker) -> None:
        self._worker = worker
        self._engine = worker.engine
        self.known_failures: dict[int, tuple[int, BaseException]] = {}
        """Offset -> attempts and the last error: met before a restart, not to be tried again."""
        self.known_timers: dict[int, tuple[int, BaseException]] = {}
        """The same of timers, by their origin."""
        self.met_failures: dict[int, tuple[int, BaseException]] = {}
        """Known ones that were met, for the next restart; offsets, and origins of timers."""
        self.alone_below = 0
        """Batch handlers get the events below this offset one by one: a batch of them has failed."""
        self._apart: dict[int, tuple[int, BaseException]] = {}
        """The same for the next worker of this partition, by the batch's origin."""

    def expect(self, known: dict[int, tuple[int, BaseException]], offset: int) -> None:
        """Work begins at this offset; these are known to fail."""
        self.known_failures = {origin: failure for origin, failure in known.items() if offset <= origin < TOGETHER}
        self._apart = {origin: failure for origin, failure in known.items() if origin >= TOGETHER}
        self.alone_below = max(self._apart, default=TOGETHER - 1) - TOGETHER + 1
        timers = {origin: failure for origin, failure in known.items() if origin < -1}
        there = {timer.origin for timer in self._worker.timers} if timers else ()
        self.known_timers = {origin: failure for origin, failure in timers.items() if origin in there}

    def known(self) -> dict[int, tuple[int, BaseException]]:
        """What is known to fail, for the next worker of this partition."""
        return self.met_failures | self.known_failures | self.known_timers | self._apart

    def apart(self, last: int, error: BaseException) -> None:
        """A batch that ended at this offset has failed and is undone: its events are handled one by one."""
        self.alone_below = max(self.alone_below, last + 1)
        self._apart = {TOGETHER + self.alone_below - 1: (0, error)}
        self._engine.measure(BatchFailed(self._worker.partition, last, describe(error)))
        _log.warning(
            "the batch of %s that ended at offset %d failed: %s; its events are handled one by one",
            self._worker.topic_partition,
            last,
            describe(error),
            exc_info=error,
        )

    def read(self, record: IncomingRecord, where: str = "") -> tuple[Route | None, Any, DecodeError | None]:
        """(route, event, None), or the reason why there is none; ``where``: what it calls the record. The event is what
        the route's handler takes: for a batch handler a list of one."""
        router = self._engine.router
        name = record.header(TYPE_HEADER)
        route = router.routes.get(name) if name is not None else None
        if route is None:
            route = router.default
            if route is None:
                advice = "register a handler for it, or a default handler"
                return None, None, DecodeError(f"{where or record.where}: {describe_type(record)}; {advice}")
        versions = [content for header, content in record.headers or () if header == VERSION_HEADER]
        try:
            event = route.decode(record.value, parse_version(versions[0]) if versions else 1)
        except DecodeError as error:
            return route, None, DecodeError(f"{where or record.where}: {error}")
        return route, [event] if route.is_batch else event, None

    async def one(self, record: IncomingRecord, failure: BaseException | None) -> None:
        """Handle one record whatever it takes: decode errors, retries, policies. ``failure``: the first attempt's, if
        made."""
        if isinstance(failure, RestartNeeded):
            raise failure
        route, event, unreadable = self.read(record)
        if unreadable is not None:
            self.is_known(record.offset)
            await self.last_word(record, None, self._engine.config.decode_policy, unreadable, 1)
            return
        assert route is not None
        handler = route.handler
        attempts = 0 if failure is None else 1
        await self.persist(record, route, lambda ctx: handler(ctx, event), attempts, failure, failure is not None)

    async def persist(
        self,
        record: IncomingRecord,
        route: Route,
        handle: Handle,
        attempts: int,
        error: BaseException | None,
        soiled: bool = False,
        context: EventContext[Any] | None = None,
        timer: Timer | None = None,
        begun: Awaitable[Any] | None = None,
    ) -> None:
        """Attempt it until it completes, or its policy has the last word. ``attempts`` were made, the last one failed
        with ``error``; ``soiled``: the store has seen an attempt that failed. ``context`` is for the next attempt,
        which may be under way: it has answered ``begun``, which is to be awaited. ``timer``: the record is that timer's
        event."""
        origin = record.offset if timer is None else timer.origin
        known = self.is_known(origin)
        if known is not None and error is None:
            attempts, error = known
        while True:
            if error is not None:
                if soiled and not self._worker.is_journalled:
                    raise RestartNeeded(origin, attempts, error)
                if is_last(route.policy, attempts, error):
                    await self.last_word(record, route, route.policy, error, attempts, timer)
                    return
                await anyio.sleep(backoff(route.policy, attempts, self._engine.rng))
                if not self._worker.state.admits:
                    return  # given up meanwhile
            attempts += 1
            ctx, context = context or self._context(record, route, attempts, timer), None
            watermark = record.offset + 1 if timer is None else self._worker.watermark
            answer, begun = begun, None
            error = await self.run(ctx, handle, watermark, blocking=route.is_blocking, begun=answer)
            if error is None:
                return
            soiled = True

    async def failed(self, record: IncomingRecord, route: Route | None, error: BaseException, attempts: int) -> None:
        """Its work has failed for good, ahead of its turn; the store knows nothing of it."""
        if not isinstance(error, Exception):
            raise error  # what ends a process, and not an event
        self.is_known(record.offset)
        policy = self._engine.config.error_policy if route is None else route.policy
        await self.last_word(record, route, policy, error, attempts)

    def context(self, record: IncomingRecord | None, attempt: int = 1, timer: Timer | None = None) -> EventContext[Any]:
        """A fresh one."""
        worker, limit = self._worker, self._engine.message_limit
        ctx: EventContext[Any] = EventContext(
            worker.store, worker.topic_partition, record, [], [], limit, attempt, worker.timers
        )
        ctx.host = self._engine
        if timer is not None:
            ctx.begin_timer(timer)
        return ctx

    def _context(
        self, record: IncomingRecord, route: Route, attempt: int, timer: Timer | None = None
    ) -> EventContext[Any]:
        """What the route's handler takes; ``record`` stands for the timer's event if there is one."""
        if not route.is_batch:
            return self.context(None if timer is not None else record, attempt, timer)
        worker, limit = self._worker, self._engine.message_limit
        ctx: BatchContext[Any] = BatchContext(
            worker.store, worker.topic_partition, None, [], [], limit, attempt, worker.timers
        )
        ctx.host = self._engine
        ctx.gather((record,), timer)
        return ctx

    async def run(
        self,
        ctx: EventContext[Any],
        handle: Handle,
        watermark: int,
        interjection: Interjection | None = None,
        *,
        blocking: bool = False,
        begun: Awaitable[Any] | None = None,
    ) -> BaseException | None:
        """Run it once; admits the event if it completes, undoes it if it fails. ``begun``: what it has answered
        already."""
        worker, engine = self._worker, self._engine
        journal, outputs = ctx._journal, ctx._outputs
        if begun is None:
            self.begin(ctx)
        try:
            answer: Any
            if begun is not None:
                answer = begun
            elif blocking:
                answer = await engine.handler_threads.call(worker.partition, handle, ctx)
            else:
                answer = handle(ctx)
            if isinstance(answer, Awaitable):
                answer = await answer
            if interjection is not None and not isinstance(answer, ExecutionState):
                interjection.result = answer
            elif answer is not None and answer is not ExecutionState.COMPLETE:
                raise Answered(answer, ctx.error)
            check_changes(journal, ctx.origin, engine.message_limit)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and anyio.current_effective_deadline() == -math.inf:
                raise  # we are cancelled ourselves; otherwise the handler awaited what somebody else had cancelled
            ctx.close()
            worker.undo(journal)
            return error if isinstance(error, Exception) else cancelled_inside(error)
        ctx.close()
        if worker.is_journalled and worker.store is not None:
            worker.store.end()
        waiter = None if interjection is None else interjection.waiter
        if interjection is not None and not outputs and not journal and not ctx.timer_changes:
            if waiter is not None:
                engine.looked(worker, waiter)
        else:
            await self._admit(watermark, ctx.origin, outputs, journal, waiter, ctx.timer_changes)
        return None

    # -- without waiting -----------------------------------------------------------------------------------------------

    def begin(self, ctx: EventContext[Any]) -> None:
        """The store is in this event from now on, until ``end`` or ``run``."""
        if self._worker.is_journalled:
            self._worker.store.begin(ctx._journal)

    def end(self, ctx: EventContext[Any], error: BaseException | None) -> BaseException | None:
        """An event's handler has ended: admits the event, or undoes it. Returns the error, if any. Raises one that ends
        a process, and not an event."""
        worker = self._worker
        if error is None:
            try:
                check_changes(ctx._journal, ctx.offset, self._engine.message_limit)
            except RecordRefused as refused:
                error = refused
        ctx.close()
        if error is not None:
            worker.undo(ctx._journal)
            if not isinstance(error, Exception):
                raise error
            return error
        if worker.is_journalled and worker.store is not None:
            worker.store.end()
        if worker.state.admits:
            offset = ctx.offset
            self._admit_now(offset + 1, offset, ctx._outputs, ctx._journal, None, ctx.timer_changes)
        return None

    def _admit_now(
        self,
        watermark: int,
        origin: int,
        outputs: list[Output],
        journal: list[Change],
        waiter: Waiter | None,
        timers: dict[str, Timer | None] | None,
    ) -> None:
        worker = self._worker
        worker.watermark = watermark
        if timers:
            journal += worker.timers.admitted(timers, origin)
        self._engine.pool.admit(worker.partition, watermark, outputs, journal, waiter)

    # -- what becomes of it --------------------------------------------------------------------------------------------

    def given_up(self) -> NotOwned:
        """Why somebody waits in vain."""
        return NotOwned(
            f"{self._worker.topic_partition} was given up before the interjection was committed; nothing of it is, so "
            "whoever has the partition then may be asked again"
        )

    async def _admit(
        self,
        watermark: int,
        origin: int,
        outputs: list[Output],
        journal: list[Change],
        waiter: Waiter | None = None,
        timers: dict[str, Timer | None] | None = None,
    ) -> None:
        """Admit a completed event, when there is room; unless the partition is not ours any more by then. (A
        cancelled task still runs on once when what it waited for had happened already: the state decides, not the
        cancellation.)"""
        pool, worker = self._engine.pool, self._worker
        while pool.is_full and worker.state.admits:
            await pool.wait_room()
        if worker.state.admits:
            self._admit_now(watermark, origin, outputs, journal, waiter, timers)
            pool.pump()
        elif waiter is not None:
            waiter(self.given_up())

    def is_known(self, origin: int) -> tuple[int, BaseException] | None:
        """(attempts, the last error) of an event, or a timer, that is known to fail; now it is met."""
        known = (self.known_failures if origin >= 0 else self.known_timers).pop(origin, None)
        if known is not None:
            self.met_failures[origin] = known
        return known

    async def last_word(
        self,
        record: IncomingRecord,
        route: Route | None,
        policy: ErrorPolicy,
        error: BaseException,
        attempts: int,
        timer: Timer | None = None,
    ) -> None:
        """The retries are used up: do what the policy says."""
        engine = self._engine
        origin, watermark, name = record.offset, record.offset + 1, record.where
        removed: dict[str, Timer | None] = {}
        if timer is not None:
            origin, watermark = timer.origin, self._worker.watermark
            removed[timer.name] = None
            name = f"timer {timer.name!r} of {self._worker.topic_partition}"
        response = ErrorResponse.FAIL_CONSUMER if is_fatal(error) else policy.then
        engine.measure(EventFailed(self._worker.partition, record.offset, describe(error), response.value))
        if route is None:  # its error begins with the place
            text = f"{describe(error)}; the record cannot be read"
        else:
            text = f"{name} ({route.name}) failed after {attempts} attempt(s): {describe(error)}"
        if response is ErrorResponse.FATALLY_EXIT:
            engine.exit_now(f"{text}; fatally_exit")
        if response is ErrorResponse.FAIL_CONSUMER:
            ways_on = WAYS_ON if route is None else ""
            raise EventFailure(f"{text}; the source stops, and the next start meets it again{ways_on}") from error
        _log.log(logging.WARNING, "%s; %s", text, response.value, exc_info=error if route is not None else None)
        outputs: list[Output] = []
        if response is ErrorResponse.DEAD_LETTER:
            letter = dead_letter(engine.config.dead_letters, record, error, attempts, engine.wall_ms(), timer)
            outputs.append(letter.within(engine.message_limit))
        await self._admit(watermark, origin, outputs, [], timers=removed)
