"""One partition, one task, one writer of its store.

The hot path is ``_slice``: plain handlers, run back to back without an await, a slice at a time. Everything that
needs patience (async and blocking handlers, failures, interjections) goes through ``_one`` and its neighbours, an
event at a time. Both end in ``pool.admit``, in the order of the partition, so what is admitted is always a completed
prefix.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from streams.core.partition import PartitionState
from streams.core.router import Route
from streams.core.transaction import Waiter
from streams.errors import DecodeError, NotOwned
from streams.events import parse_version
from streams.metrics import EventFailed
from streams.outcomes import ErrorPolicy, ErrorResponse, ExecutionState
from streams.protocols import JournalledStore
from streams.records import TYPE_HEADER, VERSION_HEADER, Change, IncomingRecord, Output, TopicPartition
from streams.runtime.changelog import OffsetRecord
from streams.runtime.copies import StateCopy
from streams.runtime.dead_letters import dead_letter
from streams.runtime.event_context import EventContext
from streams.runtime.failures import (
    FINAL,
    Answered,
    EventFailure,
    RestartNeeded,
    backoff,
    cancelled_inside,
    change_too_large,
    describe,
    describe_type,
    is_fatal,
    reason_of,
)
from streams.runtime.inbox import Inbox
from streams.runtime.interjections import Interjection, Timetable

if TYPE_CHECKING:
    from streams.runtime.host import Host

_log = logging.getLogger(__name__)

SLICE: Final = 128
"""Events handled between two looks at the loop, at most: the switch costs nothing then."""

LONGEST_SLICE_SECONDS: Final = 0.005
"""Slices of slow handlers get shorter until they take about so long: everybody else, commits included, waits
meanwhile."""


class PartitionWorker:
    """Everything this member keeps for one partition. ``watermark`` is the first offset that is not handled yet."""

    def __init__(self, engine: Host, partition: int, epoch: int) -> None:
        self.engine = engine
        self.partition = partition
        self.epoch = epoch
        self.state = PartitionState.RESTORING
        self.topic_partition = TopicPartition(engine.config.topic, partition)
        self.store: Any = None  # until it is adopted
        self.offset_record: OffsetRecord | None = None
        self.watermark = -1
        self.inbox = Inbox(engine.config, engine.input, partition)
        self.started_at: int | None = None  # where it began without any committed offset
        self.replaced_by: PartitionWorker | None = None  # after a restart
        self.known_failures: dict[int, tuple[int, BaseException]] = {}
        self.met_failures: dict[int, tuple[int, BaseException]] = {}  # known ones that were met, for the next restart
        self.dead_lettered: set[int] = set()
        self.scope = anyio.CancelScope()
        self.finished = anyio.Event()  # the task has ended
        self.gone = anyio.Event()  # the partition is released or void
        self.is_journalled = False
        self._timetable = Timetable(engine.schedules, engine.rng)
        self._closing = False
        self._slice_size = SLICE // 8

    # -- called by the engine ------------------------------------------------------------------------------------------

    def adopt(self, copy: StateCopy) -> None:
        """Work on the state of this copy from now on."""
        self.store = copy.store
        self.offset_record = copy.offset_record
        self.is_journalled = isinstance(self.store, JournalledStore)

    def take_store(self) -> Any:
        """The store, for somebody else."""
        store, self.store = self.store, None
        return store

    def drop_store(self) -> None:
        """Let the store go, if it is still here."""
        store = self.take_store()
        if store is not None:
            self.engine.revoke_store(store, self.partition)

    def close_intake(self) -> None:
        """Nothing more is handled after the event that is running now; what is queued is dropped (it is not
        committed)."""
        self._closing = True
        self.inbox.drop(self._given_up())

    # -- the task ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle what comes until the intake is closed. Raises ``RestartNeeded``, and ``EventFailure`` to stop the
        source."""
        self._timetable.start(self.engine.now())
        while not self._closing:
            due = self._timetable.due(self.engine.now())
            if due is not None:
                await self._interjection(due)
            elif not self.inbox:
                await self.inbox.wait(self._timetable.seconds_to_next(self.engine.now()))
            else:
                item = self.inbox.take()
                if isinstance(item, Interjection):
                    await self._interjection(item)
                else:
                    await self.handle(item)

    async def handle(self, records: list[IncomingRecord]) -> None:
        """Handle what the inbox gave, in order, or as much of it as there is before the intake is closed. Raises as
        ``run``."""
        pool, now = self.engine.pool, self.engine.now
        position = 0
        while position < len(records) and not self._closing:
            if pool.is_full:
                await pool.wait_room()
                continue  # anything may have happened meanwhile
            start, began = position, now()
            position, failure = self._slice(records, start, min(start + self._slice_size, len(records)))
            self._adapt(now() - began)
            pool.pump()
            if failure is not None or position == start:
                await self._one(records[position], failure)
                position += 1
            else:
                await anyio.lowlevel.checkpoint()
            if not self._closing:
                self.inbox.handled(records[start:position])
            due = self._timetable.due(now())
            if due is not None and not self._closing:
                await self._interjection(due)

    def _adapt(self, slice_seconds: float) -> None:
        if slice_seconds > LONGEST_SLICE_SECONDS:
            self._slice_size = max(1, self._slice_size // 2)
        elif self._slice_size < SLICE:
            self._slice_size *= 2

    def _slice(self, records: list[IncomingRecord], start: int, stop: int) -> tuple[int, BaseException | None]:
        """Run plain handlers back to back. Returns the position of the first record that needs patience, and why if it
        is because its handler failed."""
        engine, partition, store, tp = self.engine, self.partition, self.store, self.topic_partition
        routes, limit, admit = engine.router.routes, engine.message_limit, engine.pool.admit
        journalled = self.is_journalled
        if self.known_failures:
            return start, None
        for position in range(start, stop):
            record = records[position]
            name = version = None
            for header, content in record.headers or ():
                if header == TYPE_HEADER and name is None:
                    name = content or b""  # the first one counts, as for _read; null and empty name nothing
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
                return position, None  # met again by _one, which knows what to do
            ctx = EventContext(store, tp, record, outputs, journal, limit)
            if journalled:
                store.begin(journal)
            try:
                answer = route.handler(ctx, event)
                if answer is not None and answer is not ExecutionState.COMPLETE:
                    if inspect.iscoroutine(answer):  # a plain function around an async one: seen once, then known
                        answer.close()
                        route.plain = False
                        ctx.close()
                        self._undo(journal)
                        soiled = RestartNeeded(record.offset, 0, Answered(answer, None))
                        return position, None if journalled else soiled
                    raise Answered(answer, ctx.error)
                for change in journal:
                    if change.value is not None and len(change.value) > limit:
                        raise change_too_large(change, limit)
            except (Exception, asyncio.CancelledError) as error:
                ctx.close()
                self._undo(journal)
                return position, error if isinstance(error, Exception) else cancelled_inside(error)
            ctx._closed = True
            if journalled:
                store.end()
            offset = record.offset
            self.watermark = offset + 1
            admit(partition, offset + 1, offset, outputs, journal)
        return stop, None

    # -- one event, with patience --------------------------------------------------------------------------------------

    async def _one(self, record: IncomingRecord, failure: BaseException | None) -> None:
        """Handle one record whatever it takes: decode errors, retries, policies. ``failure``: the first attempt's, if
        made."""
        if isinstance(failure, RestartNeeded):
            raise failure
        known = self.known_failures.pop(record.offset, None)
        if known is not None:
            self.met_failures[record.offset] = known
        attempts, error = known or (0 if failure is None else 1, failure)
        route, event, unreadable = self._read(record)
        if unreadable is not None:
            await self._last_word(record, None, self.engine.config.decode_policy, unreadable, 1)
            return
        assert route is not None
        soiled = failure is not None  # the store has seen an attempt that failed
        while True:
            if error is not None:
                if soiled and not self.is_journalled:
                    raise RestartNeeded(record.offset, attempts, error)
                if attempts > route.policy.retries or isinstance(error, FINAL) or is_fatal(error):
                    await self._last_word(record, route, route.policy, error, attempts)
                    return
                await anyio.sleep(backoff(route.policy, attempts, self.engine.rng))
            attempts += 1
            error = await self._attempt(route, event, record, attempts)
            if error is None:
                return
            soiled = True

    def _read(self, record: IncomingRecord) -> tuple[Route | None, Any, DecodeError | None]:
        """(route, event, None), or the reason why there is none."""
        router = self.engine.router
        name = record.header(TYPE_HEADER)
        route = router.routes.get(name) if name is not None else None
        if route is None:
            route = router.default
            if route is None:
                advice = "register a handler for it, or a default handler, or set decode_policy"
                return None, None, DecodeError(f"{record.where}: {describe_type(record)}; {advice}")
        versions = [content for header, content in record.headers or () if header == VERSION_HEADER]
        try:
            return route, route.decode(record.value, parse_version(versions[0]) if versions else 1), None
        except DecodeError as error:
            return route, None, DecodeError(f"{record.where}: {error}")

    async def _attempt(self, route: Route, event: Any, record: IncomingRecord, attempt: int) -> BaseException | None:
        """Run the handler once; admits the event if it completes, undoes it if it fails."""
        return await self._run(route, record, attempt, lambda ctx: route.handler(ctx, event), record.offset + 1, None)

    async def _run(
        self,
        route: Route,
        record: IncomingRecord | None,
        attempt: int,
        handle: Callable[[EventContext[Any]], Any],
        watermark: int,
        waiter: Waiter | None,
    ) -> BaseException | None:
        journal: list[Change] = []
        outputs: list[Output] = []
        limit = self.engine.message_limit
        ctx = EventContext(self.store, self.topic_partition, record, outputs, journal, limit, attempt)
        if self.is_journalled:
            self.store.begin(journal)
        try:
            answer: Any
            if route.is_blocking:
                answer = await self.engine.handler_threads.call(self.partition, handle, ctx)
            else:
                answer = handle(ctx)
                if isinstance(answer, Awaitable):
                    answer = await answer
            if answer is not None and answer is not ExecutionState.COMPLETE:
                raise Answered(answer, ctx.error)
            for change in journal:
                if change.value is not None and len(change.value) > limit:
                    raise change_too_large(change, limit)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and anyio.current_effective_deadline() == -math.inf:
                raise  # we are cancelled ourselves; otherwise the handler awaited what somebody else had cancelled
            ctx.close()
            self._undo(journal)
            return error if isinstance(error, Exception) else cancelled_inside(error)
        ctx.close()
        if self.is_journalled and self.store is not None:
            self.store.end()
        if record is None and not outputs and not journal:
            self._nothing_to_commit(waiter)
        else:
            await self._admit(watermark, ctx.offset, outputs, journal, waiter)
        return None

    async def _admit(
        self, watermark: int, origin: int, outputs: list[Output], journal: list[Change], waiter: Waiter | None = None
    ) -> None:
        """Admit a completed event, when there is room; unless the partition is not ours any more by then. (A
        cancelled task still runs on once when what it waited for had happened already: the state decides, not the
        cancellation.)"""
        pool = self.engine.pool
        while pool.is_full and self.state.admits:
            await pool.wait_room()
        if self.state.admits:
            self.watermark = watermark
            pool.admit(self.partition, watermark, origin, outputs, journal, waiter)
            pool.pump()
        elif waiter is not None:
            waiter(self._given_up())

    def _given_up(self) -> NotOwned:
        return NotOwned(f"{self.topic_partition} was given up before the interjection was committed")

    def _nothing_to_commit(self, waiter: Waiter | None) -> None:
        """An interjection that changed nothing is committed when everything before it is."""
        if waiter is not None:
            last = self.engine.pool.last_with(self.partition)
            if last is None:
                waiter(None)
            else:
                last.waiters.append((self.partition, waiter))

    def _undo(self, journal: list[Change]) -> None:
        store = self.store
        if self.is_journalled and store is not None:  # None: voided while the event ran, and dropped as a whole
            store.end()
            store.undo(journal)

    async def _last_word(
        self,
        record: IncomingRecord,
        route: Route | None,
        policy: ErrorPolicy,
        error: BaseException,
        attempts: int,
    ) -> None:
        """The retries are used up: do what the policy says."""
        engine = self.engine
        response = ErrorResponse.FAIL_CONSUMER if is_fatal(error) else policy.then
        what = route.name if route is not None else "a record that cannot be read"
        engine.measure(EventFailed(self.partition, record.offset, describe(error), response.value))
        text = f"{record.where} ({what}) failed after {attempts} attempt(s): {describe(error)}"
        if response is ErrorResponse.FATALLY_EXIT:
            engine.exit_now(f"{text}; fatally_exit")
        if response is ErrorResponse.FAIL_CONSUMER:
            raise EventFailure(
                f"{text}; the source stops, and the record will be met again at the next start"
            ) from error
        _log.log(logging.WARNING, "%s; %s", text, response.value, exc_info=error if route is not None else None)
        outputs: list[Output] = []
        if response is ErrorResponse.DEAD_LETTER:
            letter = dead_letter(engine.config.dead_letters, record, error, attempts, engine.wall_ms())
            if len(letter.value or b"") > engine.message_limit:
                raise EventFailure(f"{text}; its dead letter is refused too, so the source stops") from error
            if engine.pool.last_with(self.partition) is None:
                self.dead_lettered.clear()  # those are committed
            self.dead_lettered.add(record.offset)
            outputs.append(letter)
        await self._admit(record.offset + 1, record.offset, outputs, [])

    # -- interjections -------------------------------------------------------------------------------------------------

    async def _interjection(self, interjection: Interjection) -> None:
        engine = self.engine
        try:
            error = await self._run(
                interjection.route, None, 1, interjection.route.handler, self.watermark, interjection.waiter
            )
        except BaseException:  # cancelled: whoever waits for it must hear of it
            interjection.done(self._given_up())
            raise
        if error is None:
            return
        if interjection.waiter is not None:
            interjection.done(reason_of(error))
        else:
            policy = interjection.route.policy
            engine.measure(EventFailed(self.partition, -1, describe(error), policy.then.value))
            text = f"the interjection {interjection.route.name} of {self.topic_partition} failed: {describe(error)}"
            if policy.then is ErrorResponse.FATALLY_EXIT:
                engine.exit_now(f"{text}; fatally_exit")
            if policy.then is ErrorResponse.FAIL_CONSUMER or is_fatal(error):
                raise EventFailure(f"{text}; the source stops") from error
            _log.warning("%s; it runs again when it is due", text, exc_info=error)
        if not self.is_journalled:
            raise RestartNeeded(-1, 0, error)
