"""One partition, one task, one writer of its store.

The hot path is ``_slice``: plain handlers, run back to back without an await, a slice at a time. Everything that
needs patience (async and blocking handlers, failures, interjections) goes through ``Attempts``, an event at a time.
Both end in ``pool.admit``, in the order of the partition, so what is admitted is always a completed prefix. Events
whose work runs ahead of their turn, and those behind them, are in the ``Line`` until then.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from streams.core.partition import PartitionState
from streams.errors import DecodeError
from streams.metrics import EventFailed
from streams.outcomes import ErrorResponse, ExecutionState
from streams.protocols import JournalledStore
from streams.records import TYPE_HEADER, VERSION_HEADER, Change, IncomingRecord, Output, TopicPartition
from streams.runtime.attempts import Attempts
from streams.runtime.changelog import OffsetRecord
from streams.runtime.copies import StateCopy
from streams.runtime.event_context import EventContext
from streams.runtime.failures import (
    Answered,
    EventFailure,
    RestartNeeded,
    cancelled_inside,
    change_too_large,
    describe,
    is_fatal,
    reason_of,
)
from streams.runtime.inbox import Inbox
from streams.runtime.interjections import Interjection, Timetable
from streams.runtime.line import Entry, Line
from streams.runtime.signal import Signal

if TYPE_CHECKING:
    from streams.runtime.host import Host

_log = logging.getLogger(__name__)

SLICE: Final = 128
"""Events handled between two looks at the loop, at most: the switch costs nothing then."""

LONGEST_SLICE_SECONDS: Final = 0.005
"""Slices of slow handlers get shorter until they take about so long: everybody else, commits included, waits
meanwhile."""

YIELD_EVERY: Final = 32
"""Events that enter the line between two looks at the loop: 20 to 50 us each."""


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
        self._wake = Signal()  # something came, or a turn has come
        self.inbox = Inbox(engine.config, engine.input, partition, self._wake)
        self.started_at: int | None = None  # where it began without any committed offset
        self.replaced_by: PartitionWorker | None = None  # after a restart
        self.scope = anyio.CancelScope()
        self.finished = anyio.Event()  # the task has ended
        self.gone = anyio.Event()  # the partition is released or void
        self.is_journalled = False
        self.attempts = Attempts(self)
        self._line = Line()
        self._next: Entry | None = None  # would be the line's last one, but finds no room
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
        self.inbox.drop(self.attempts.given_up())

    def undo(self, journal: list[Change]) -> None:
        """Take an event's changes back."""
        store = self.store
        if self.is_journalled and store is not None:  # None: voided while the event ran, and dropped as a whole
            store.end()
            store.undo(journal)

    @property
    def events_ahead(self) -> int:
        """Events in the line."""
        return len(self._line)

    # -- the task ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle what comes until the intake is closed, then what has begun. Raises ``RestartNeeded``, and
        ``EventFailure`` to stop the source."""
        self._timetable.start(self.engine.now())
        try:
            while not self._closing:
                interjected = await self._between()
                if self._line.is_ready:
                    await self._turn()
                elif self.inbox:
                    await self.handle(self.inbox.take())
                elif not interjected:
                    await self._wait()
            self._line.cut()
            await self.settle_line()
        finally:
            self.drop_line()

    async def handle(self, records: list[IncomingRecord]) -> None:
        """Handle what the inbox gave, in order, or as much of it as there is before the intake is closed; the last of
        it may be left in the line. Raises as ``run``."""
        pool, now = self.engine.pool, self.engine.now
        position = 0
        while position < len(records) and not self._closing:
            if self._line or self._next is not None:
                position += await self._in_line(records[position])
            elif pool.is_full:
                await pool.wait_room()
                continue  # anything may have happened meanwhile
            else:
                start, began = position, now()
                position, failure = self._slice(records, start, min(start + self._slice_size, len(records)))
                self._adapt(now() - began)
                pool.pump()
                ahead = failure is None and position < len(records) and self._goes_ahead(records[position])
                if ahead:
                    self.inbox.handled(records[start:position])
                    position += await self._in_line(records[position])
                else:
                    if failure is not None or position == start:
                        await self.attempts.one(records[position], failure)
                        position += 1
                    else:
                        await anyio.lowlevel.checkpoint()
                    if not self._closing:
                        self.inbox.handled(records[start:position])
            if not self._closing:
                await self._between()

    async def settle_line(self) -> None:
        """Take the turns of all that is in the line."""
        while self._line:
            if self._line.is_ready:
                await self._turn()
            else:
                await self._wake.wait()

    def drop_line(self) -> None:
        """Forget what is in the line; what runs for it is cancelled."""
        self._next = None
        self._line.drop()

    async def _wait(self) -> None:
        await self._wake.wait(self._timetable.seconds_to_next(self.engine.now()))

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
        if self.attempts.known_failures:
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
                        self.undo(journal)
                        soiled = RestartNeeded(record.offset, 0, Answered(answer, None))
                        return position, None if journalled else soiled
                    raise Answered(answer, ctx.error)
                for change in journal:
                    if change.value is not None and len(change.value) > limit:
                        raise change_too_large(change, limit)
            except (Exception, asyncio.CancelledError) as error:
                ctx.close()
                self.undo(journal)
                return position, error if isinstance(error, Exception) else cancelled_inside(error)
            ctx._closed = True
            if journalled:
                store.end()
            offset = record.offset
            self.watermark = offset + 1
            admit(partition, offset + 1, offset, outputs, journal)
        return stop, None

    # -- work ahead of its turn ----------------------------------------------------------------------------------------

    def _goes_ahead(self, record: IncomingRecord) -> bool:
        router = self.engine.router
        name = record.header(TYPE_HEADER)
        route = router.routes.get(name, router.default) if name is not None else router.default
        return route is not None and route.ahead is not None

    async def _in_line(self, record: IncomingRecord) -> int:
        """One step while work runs ahead: a turn that has come, or this record's way into the line (1), or a wait."""
        if self._line.is_ready:
            await self._turn()
            return 0
        if not self._enter(record):
            await self._wait()
            return 0
        if len(self._line) % YIELD_EVERY == 0:
            await anyio.lowlevel.checkpoint()
        return 1

    def _enter(self, record: IncomingRecord) -> bool:
        """Let its work begin ahead, or have it wait behind those in front. ``False``: there is no room for its work."""
        entry = self._next or self._entry(record)
        self._next = None
        if not entry.is_settled:
            assert entry.route is not None
            if not self.engine.stages.get(entry.route.ahead.stage).begin(entry):
                self._next = entry
                return False
        self._line.append(entry)
        return True

    def _entry(self, record: IncomingRecord) -> Entry:
        if not self._goes_ahead(record):
            entry = Entry(self.epoch, record, None, None, self._wake.notify)
            entry.settle(None)
            return entry
        route, event, unreadable = self.attempts.read(record)
        entry = Entry(self.epoch, record, route, event, self._wake.notify)
        if unreadable is not None:
            entry.settle(None)
            return entry
        assert route is not None
        try:
            entry.work = route.ahead.plan(record, event)
        except Exception as error:
            entry.fail(error, 1)
        return entry

    async def _turn(self) -> None:
        """The first one in the line: everything before it is complete."""
        entry = self._line.take()
        attempts, record = self.attempts, entry.record
        try:
            if entry.route is None or entry.finish is None:
                if entry.error is None:
                    await attempts.one(record, None)
                else:
                    await attempts.failed(record, entry.route, entry.error, entry.attempts)
            else:
                if entry.context is not None:
                    entry.context.store = self.store
                await attempts.persist(record, entry.route, entry.finish, entry.attempts, None, context=entry.context)
        finally:
            entry.drop()
        if not self._closing:
            self.inbox.handled([record])

    # -- interjections -------------------------------------------------------------------------------------------------

    async def _between(self) -> bool:
        """What has its place between two events: one that is due, one that was asked for. No more: events have their
        turn, too."""
        due = self._timetable.due(self.engine.now())
        if due is not None:
            await self._interjection(due)
        asked = self.inbox.take_interjection()
        if asked is not None:
            await self._interjection(asked)
        return due is not None or asked is not None

    async def _interjection(self, interjection: Interjection) -> None:
        engine = self.engine
        try:
            ctx = self.attempts.context(None)
            error = await self.attempts.run(ctx, interjection.route.handler, self.watermark, interjection)
        except BaseException:  # cancelled: whoever waits for it must hear of it
            interjection.done(self.attempts.given_up())
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
