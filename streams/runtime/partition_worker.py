"""One partition, one task, one writer of its store.

The hot path is ``Slices``: plain handlers, run back to back without an await, a slice at a time. Everything that needs
patience (async and blocking handlers, failures, interjections) goes through ``Attempts``, an event at a time.
Both end in ``pool.admit``, in the order of the partition, so what is admitted is always a completed prefix. Events
whose work runs ahead of their turn, and those behind them, are in the ``Line`` until then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import anyio

from streams.core.partition import PartitionState
from streams.errors import EventFailure
from streams.metrics import EventFailed
from streams.outcomes import ErrorResponse
from streams.protocols import JournalledStore
from streams.records import Change, IncomingRecord, TopicPartition
from streams.runtime.attempts import Attempts
from streams.runtime.changelog import OffsetRecord, TopicIds
from streams.runtime.copies import StateCopy
from streams.runtime.entrance import Entrance
from streams.runtime.failures import (
    RestartNeeded,
    describe,
    is_fatal,
    reason_of,
)
from streams.runtime.inbox import Inbox
from streams.runtime.interjections import Interjection, Timetable
from streams.runtime.line import Line
from streams.runtime.signal import Signal
from streams.runtime.slices import LONGEST_SLICE_SECONDS, Slices
from streams.runtime.timers import PartitionTimers
from streams.runtime.turns import Turns

if TYPE_CHECKING:
    from streams.runtime.host import Host

_log = logging.getLogger(__name__)

YIELD_EVERY: Final = 32
"""Steps in the line between two looks at the loop, at most: 20 to 100 us each, besides the handlers."""


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
        self.ids = TopicIds()  # of the topics that its state belongs to, as they were checked
        self.watermark = -1
        self._wake = Signal()  # something came, or a turn has come
        self.inbox = Inbox(engine.config, engine.input, partition, self._wake)
        self.started_at: int | None = None  # where it began without any committed offset
        self.replaced_by: PartitionWorker | None = None  # after a restart
        self.is_restart = False  # it is the one after a restart
        self.scope = anyio.CancelScope()
        self.finished = anyio.Event()  # the task has ended
        self.gone = anyio.Event()  # the partition is released or void
        self.is_journalled = False
        self.timers = PartitionTimers(self)
        self.attempts = Attempts(self)
        self.slices = Slices(self)
        self._line = Line(self._wake.notify)
        self._entrance = Entrance(self, self._line)
        self._turns = Turns(self, self._line)
        self._timetable = Timetable(engine.schedules, engine.rng)
        self._closing = False
        self._steps, self._breathed_at = 0, 0.0
        self._task: asyncio.Task[Any] | None = None  # whoever waits for a turn of ours in it never ends

    # -- called by the engine ------------------------------------------------------------------------------------------

    def adopt(self, copy: StateCopy) -> None:
        """Work on the state of this copy from now on."""
        self.store = copy.store
        self.offset_record = copy.offset_record
        self.timers.restore(copy.timers.values())
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
        committed). Only interjections outlive a restart."""
        self._closing = True
        self.inbox.drop()
        if self.state is not PartitionState.RESTARTING:
            self.inbox.refuse(self.attempts.given_up())

    def undo(self, journal: list[Change]) -> None:
        """Take an event's changes back."""
        store = self.store
        if self.is_journalled and store is not None:  # None: voided while the event ran, and dropped as a whole
            store.end()
            store.undo(journal)

    @property
    def takes_interjections(self) -> bool:
        """Whether what is asked for now will have its turn here: it works, or will again after a restart."""
        restarting = self.state is PartitionState.RESTORING and self.is_restart
        return restarting or self.state in (PartitionState.ACTIVE, PartitionState.RESTARTING)

    def is_run_by(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this task has the partition's turn now, so that it must not wait for another one."""
        return task is not None and (task is self._task or self._turns.is_of(task))

    @property
    def is_closing(self) -> bool:
        """Whether nothing new is handled any more."""
        return self._closing

    @property
    def events_ahead(self) -> int:
        """Events in the line."""
        return len(self._line)

    # -- the task ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle what comes until the intake is closed, then what has begun. Raises ``RestartNeeded``, and
        ``EventFailure`` to stop the source."""
        self._timetable.start(self.engine.now())
        self._task = asyncio.current_task()
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
            self._task = None
            self.drop_line()

    async def handle(self, records: list[IncomingRecord]) -> None:
        """Handle what the inbox gave, in order, or as much of it as there is before the intake is closed; the last of
        it may be left in the line. Raises as ``run``."""
        pool = self.engine.pool
        position = 0
        while position < len(records) and not self._closing:
            if self._line or self._entrance.is_blocked or self._entrance.goes_ahead(records[position]):
                position = await self._in_line(records, position)
            elif pool.is_full:
                await pool.wait_room()
                continue  # anything may have happened meanwhile
            else:
                start = position
                position = await self.back_to_back(records, start)
                if not self._closing:
                    self.inbox.handled(position - start)
            if not self._closing:
                await self._between()

    async def settle_line(self) -> None:
        """Take the turns of all that is in the line, for as long as that may be committed."""
        while self._line and self.state.admits:
            if self._line.is_ready:
                await self._turn()
            else:
                await self._wake.wait()

    def drop_line(self) -> None:
        """Forget what is in the line; what runs for it is cancelled."""
        self._entrance.drop()
        self._line.drop()

    async def back_to_back(self, records: list[IncomingRecord], start: int) -> int:
        """Handle some of these records, one at least. Returns the position of the next."""
        position, failure = self.slices.run(records, start)
        self.engine.pool.pump()
        if failure is not None or position == start:
            await self.attempts.one(records[position], failure)
            return position + 1
        await asyncio.sleep(0)
        return position

    async def _breathe(self, steps: int = 1) -> None:
        """Called after steps that may have waited for nothing: the others have their turn, too."""
        self._steps += steps
        if self._steps >= YIELD_EVERY or self.engine.now() - self._breathed_at > LONGEST_SLICE_SECONDS:
            await asyncio.sleep(0)
            self._steps, self._breathed_at = 0, self.engine.now()

    async def _wait(self) -> None:
        times = self._timetable.seconds_to_next(self.engine.now()), self.timers.seconds_to_next()
        await self._wake.wait(min((time for time in times if time is not None), default=None))

    # -- work ahead of its turn ----------------------------------------------------------------------------------------

    async def _in_line(self, records: list[IncomingRecord], start: int) -> int:
        """One step while work runs ahead: turns that have come, or the way of some of these records into the line, or a
        wait. Returns the position of the next record."""
        if self._line.is_ready:
            await self._turn()
            return start
        entered = self._entrance.enter(records, start)
        if entered:
            await self._breathe(entered)
        else:
            await self._wait()
        return start + entered

    async def _turn(self) -> None:
        before = len(self._line)
        await self._turns.take()
        await self._breathe(max(1, before - len(self._line)))

    # -- interjections -------------------------------------------------------------------------------------------------

    async def _between(self) -> bool:
        """What has its place between two events: a scheduled run that is due, one that was asked for, and a few timers.
        No more: events have their turn, too."""
        if self._timetable.is_empty and not self.inbox.is_asked and not self.timers:
            return False
        due = self._timetable.due(self.engine.now())
        if due is not None:
            await self._interjection(due)
        asked = self.inbox.take_interjection()
        if asked is not None:
            await self._interjection(asked)
        fired = not self._closing and await self.timers.run_due()
        if due is None and asked is None and not fired:
            return False
        await self._breathe()
        return True

    async def _interjection(self, interjection: Interjection) -> None:
        engine = self.engine
        try:
            ctx, route = self.attempts.context(None), interjection.route
            error = await self.attempts.run(
                ctx, route.handler, self.watermark, interjection, blocking=route.is_blocking
            )
        except BaseException:  # cancelled: whoever waits for it must hear of it
            if self.state is PartitionState.RESTARTING and interjection.waiter is not None:
                self.inbox.put_back(interjection)  # for no fault of its own
            else:
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
