"""The task of one partition: events, interjections and timers in the partition's order, one writer of its store.

Plain handlers run on the hot path, a slice at a time without an await. Async and blocking handlers, failures and
interjections go through ``Execution``, one at a time. Both end in ``pool.admit``, in the order of the partition, so the
admitted events are always a completed prefix. Events whose work runs ahead of their turn, and those behind them, are in
the reorder buffer until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import anyio
import msgspec

from streams.core.origin import INTERJECTION, input_and_offset
from streams.core.partition import PartitionState
from streams.core.policy import Decision
from streams.core.position import Position, offsets_of
from streams.errors import EventFailure
from streams.metrics import EventFailed
from streams.model.topics import specs_of
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.changelog import further_positions
from streams.runtime.partition.batch_handlers import split_batch
from streams.runtime.partition.delivery import DeliveredRecords
from streams.runtime.partition.due_timers import DueTimers
from streams.runtime.partition.execution import Execution
from streams.runtime.partition.failures import RestartNeeded, describe, reason_of, trace_of
from streams.runtime.partition.host import Host
from streams.runtime.partition.hot_path import LONGEST_SLICE_SECONDS, HotPath
from streams.runtime.partition.inbox import Inbox
from streams.runtime.partition.interjections import Interjection, StoreRead, Timetable
from streams.runtime.partition.issue import Issuer
from streams.runtime.partition.job_runs import JobRuns
from streams.runtime.partition.judging import of_interjection
from streams.runtime.partition.merged_inputs import MergedInputs
from streams.runtime.partition.parked_heads import ParkedHeads
from streams.runtime.partition.reorder_buffer import Entry, ReorderBuffer
from streams.runtime.partition.retirement import Retirement
from streams.runtime.partition.single_events import SingleEvents
from streams.runtime.partition.state import Partition
from streams.runtime.partition.timekeeping import Timekeeper, WindowFailed
from streams.runtime.partition.timers import PartitionTimers
from streams.runtime.partition.visiting import Visiting
from streams.runtime.signal import Signal
from streams.statistics import PartitionStatistics, VisitStatistics

_log = logging.getLogger(__name__)

YIELD_EVERY: Final = 32
"""Steps in the reorder buffer before the loop runs other tasks, at most. One takes 20 to 100 us, besides handlers."""


class PartitionWorker(Partition):
    """One partition with the task that works on it: its inbox, its interjections and the ways of its events."""

    kinds = Inbox, PartitionTimers, DeliveredRecords

    def __init__(self, engine: Host, partition: int, epoch: int) -> None:
        inbox, timers, delivery = self.kinds
        super().__init__(TopicPartition(engine.config.topic, partition), epoch, timers(engine))
        self.engine = engine
        self._wake = Signal()  # input, an interjection or a turn has come
        self.inbox = self._reads_from = inbox(engine.config, engine.input, partition, self._wake)
        self.inputs: MergedInputs | None = None  # with one topic there is nothing to be merged
        if engine.further_inputs:
            others = [(spec, inbox(engine.config, port, partition, self._wake)) for spec, port in engine.further_inputs]
            self.inputs = MergedInputs(self, self.inbox, others, engine.config.alignment_seconds)
            self.timers.timeless = frozenset(spec.topic for spec, _ in engine.further_inputs if not spec.moves_time)
        own, self.forms = engine.router.types, engine.router.forms
        self.specs = specs_of(engine.config.topic, own, [spec for spec, _ in engine.further_inputs])
        self.timekeeper = Timekeeper(self, engine)
        self.started_at: dict[str, int] = {}  # topic -> where it began without any committed offset
        self.replaced_by: PartitionWorker | None = None  # after a restart
        self.is_restart = False  # it is the one after a restart
        self.scope = anyio.CancelScope()
        self.finished = anyio.Event()  # the task has ended
        self.gone = anyio.Event()  # the partition is released or void
        self.hot_path = HotPath(self, engine)
        self.delivery = delivery(self, engine, self.inbox, self.hot_path, self._wake)
        self._execution = Execution(self, engine)
        self._heads = ParkedHeads(self, engine, self._execution, self._wake.notify)
        self.jobs = JobRuns(self, engine, self._execution, self._wake.notify)
        self._due_timers = DueTimers(self, engine, self._execution, self._heads, self.jobs)
        self._singles = SingleEvents(self, engine, self._execution, self._between, self._wait)
        self._visiting = Visiting(self, engine, self._execution)
        self._buffer = ReorderBuffer(self._wake.notify)
        self._issuer = Issuer(self, engine, self._execution, self._buffer)
        ways = self.hot_path, self.run_slice, self._singles
        self._retirement = Retirement(self, engine, self._execution, self._buffer, *ways)
        self._timetable = Timetable(engine.schedules, engine.rng)
        self._steps, self._breathed_at = 0, 0.0
        self._task: asyncio.Task[Any] | None = None  # a wait for a turn of this partition in it would never end

    # -- called by the engine ------------------------------------------------------------------------------------------

    def drop_store(self) -> None:
        """Let the store go, if it is still here; what was committed of it is written on another thread."""
        store, kept = self.take_store(), self.take_kept()
        self.joined.revoked()
        self.timekeeper.settle(is_end=True)
        if kept is not None:
            kept.close()
        if store is not None:
            self.engine.revoke_store(store, self.partition)

    def end_events(self) -> None:
        """Begin no event, and drop queued records. Interjections still have their turns, behind what has begun."""
        self.is_closing = True
        for inbox in self.inboxes:
            inbox.drop()

    def close_intake(self) -> None:
        """Handle nothing after the running event. Only interjections outlive a restart."""
        self.end_events()
        if self.state is not PartitionState.RESTARTING:
            self.inbox.refuse(self._execution.given_up())

    def split_batch(self, last: int, error: Exception) -> None:
        """Have the events up to this offset handled one by one: the broker refuses a record of their batch."""
        input_number, offset = input_and_offset(last)
        self.failures.input_number = input_number  # this worker is of no further use: it is replaced
        if self.inputs is not None:
            self.reading = self.inputs.all[input_number].where
        split_batch(self, self.engine, offset, error)

    @property
    def takes_interjections(self) -> bool:
        """Check that an interjection requested now has its turn here: the partition works, or will after a restart."""
        restarting = self.state is PartitionState.RESTORING and self.is_restart
        return restarting or self.state in (PartitionState.ACTIVE, PartitionState.RESTARTING)

    def is_run_by(self, task: asyncio.Task[Any] | None) -> bool:
        """Check whether this task has the partition's turn now, so that it must not wait for another one."""
        return task is not None and (task is self._task or self._retirement.is_of(task) or self._heads.is_of(task))

    @property
    def inboxes(self) -> list[Inbox]:
        """Return the queues of its inputs, that of the source's own topic first."""
        return [self.inbox] if self.inputs is None else [one.inbox for one in self.inputs.all]

    @property
    def input_number(self) -> int:
        """Return the number of the input whose event has its turn."""
        return 0 if self.inputs is None else self.inputs.current.input_number

    @property
    def position(self) -> Position:
        """Return the position up to which everything is admitted."""
        return self.watermark if self.inputs is None else self.inputs.position

    def moved_to(self, offset: int) -> tuple[int, tuple[int, ...]]:
        """See ``MergedInputs.moved_to``."""
        assert self.inputs is not None  # the pool of a source with one topic does not call it
        return self.inputs.moved_to(offset)

    def start_at(self, position: Position) -> None:
        """Begin work at this position, up to which the store is complete."""
        super().start_at(position)
        if self.inputs is not None:
            self.inputs.start_at(offsets_of(position), self.engine.now())

    def further_fields(self, position: Position) -> tuple[str, str, msgspec.Raw | msgspec.UnsetType]:
        """Return the fields of its offset record at this position, from ``source_id`` on."""
        if self.inputs is None:
            return super().further_fields(position)
        positions = self.inputs.positions(self.input_ids, offsets_of(position))
        return self.ids.source, self.ids.changelog, further_positions(self.offset_record, self.partition, positions)

    @property
    def events_ahead(self) -> int:
        """Events in the reorder buffer."""
        return len(self._buffer)

    @property
    def line(self) -> tuple[Entry | None, int]:
        """Return the first event in the reorder buffer if it has begun and is not ready for its turn (``None``: it is),
        and how many handlers behind it are, and wait."""
        entries = self._buffer.entries
        if not entries or entries[0].is_settled or not entries[0].begun:
            return None, 0
        return entries[0], sum(entry.waiting is not None and entry.waiting.is_asleep for entry in entries)

    @property
    def _fires_timers(self) -> bool:
        """Check that no joined table is being read up to its end: no event of a timer or a visit meets half of one."""
        return self.inputs is None or not self.joined.goals

    def statistics(self, ends: Sequence[int] = ()) -> PartitionStatistics:
        """Return its figures; ``ends``: of its inputs, as far as they are known (-1: not)."""
        return PartitionStatistics(
            self.partition,
            self.state.value,
            offsets_of(self.position)[0],
            sum(inbox.records for inbox in self.inboxes),
            sum(inbox.size for inbox in self.inboxes),
            any(inbox.paused for inbox in self.inboxes),
            self.events_ahead,
            len(self.timers),
            self.timers.next_due_ms if len(self.timers) else None,
            ends[0] if ends else -1,
            () if self.inputs is None else self.inputs.statistics(self.engine.now(), ends),
            self.visits(),
            dict(self.timekeeper.totals),
            *self.timers.parked.figures(self._singles.full),
            **(self.jobs.figures() | self.seen.figures()),
        )

    def visits(self) -> tuple[VisitStatistics, ...]:
        """Return how far the runs of visits are."""
        return self._visiting.statistics()

    # -- the task ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle input until the intake is closed, then what has begun. Raises ``RestartNeeded``, ``EventFailure``."""
        self._timetable.start(self.engine.now())
        self._task = asyncio.current_task()
        interjected = has_looked = False
        try:
            await self._due_timers.start()
            while True:
                if not has_looked:
                    interjected = not self.is_closing and await self._between()
                has_looked = False
                if self.is_closing:  # it may have been closed during the await, and its inboxes are empty then
                    break
                if self._buffer.is_ready:
                    await self._turn()
                elif self.inputs is not None and await self._run_merged(self.inputs):
                    pass  # and look at what is between two events
                elif records := self._next_records():
                    interjected, has_looked = await self.handle(records), True
                elif not interjected:
                    await self._wait()
            # Nothing new begins. Work that has begun may have effects outside, so its events still have their turns.
            self._buffer.cut()
            self._heads.ahead.cut()
            await self.settle_line()
            while self.state is PartitionState.ACTIVE:  # functions of on_will_revoke are at work: their interjections
                if not await self._between():
                    await self._wake.wait()
        finally:
            self._task = None
            self.drop_line()  # also if cancelled: no job may run on without its partition

    def _next_records(self) -> list[IncomingRecord]:
        inputs = self.inputs
        if inputs is None or self.timers.jobs_full:
            return self.inbox.take() if self.inbox and not self.timers.jobs_full else []
        now = self.engine.now()
        if changes := inputs.tables_read(now):
            self.engine.pool.admit(self.partition, self.watermark, [], changes, events=0)
        records = inputs.take(now, only_current=bool(self._buffer) or self._issuer.is_blocked)
        self._reads_from = inputs.current.inbox
        return records

    async def handle(self, records: list[IncomingRecord]) -> bool:
        """Handle what the inbox gave, in order, or as much of it as there is before the intake is closed; the last of
        it may be left in the reorder buffer. Returns the answer of ``_between`` behind it. Raises as ``run``."""
        pool = self.engine.pool
        position, interjected = 0, False
        while position < len(records) and not self.is_closing:
            if self.timers.jobs_full and not self._buffer.is_ready:  # ends of jobs, timers and heads go on
                await (asyncio.sleep(0) if interjected else self._wait())
            # Behind work that runs ahead all events wait: admitted before it they would leave a gap in front of them.
            elif self._buffer or self._issuer.is_blocked or self._issuer.goes_ahead(records[position]):
                position = await self._step_ahead(records, position)
            elif pool.is_full:
                await pool.wait_room()
                continue  # the intake may be closed meanwhile
            else:
                start = position
                position = await self.run_slice(records, start)
                if not self.is_closing:  # a closed intake has dropped its records, and given back their room
                    self._reads_from.handled(position - start)
            if not self.is_closing:  # interjections and timers do not wait for the end of a batch
                interjected = await self._between()
        return interjected

    async def settle_line(self) -> None:
        """Take the turns of all that has begun ahead of them, for as long as that may be committed."""
        while (self._buffer or self._heads.ahead) and self.state.admits:
            if self._buffer.is_ready:
                await self._turn()
            elif not await self._heads.settle():
                await self._wake.wait()

    def drop_line(self) -> None:
        """Forget what is in the reorder buffer; what runs for it is cancelled."""
        self._issuer.drop()
        self._buffer.drop()
        self._heads.ahead.drop()
        self.jobs.drop()

    async def run_slice(self, records: list[IncomingRecord], start: int) -> int:
        """Handle some of these records, one at least unless it is closing. Returns the position of the next."""
        position, failure = self.hot_path.run(records, start)
        if failure is not None or position == start:
            return position + await self._singles.one(records[position], failure)
        if self.inputs is None:
            await asyncio.sleep(0)
        else:  # runs of one input, in front of the next of another one, are short
            await self._breathe(position - start)
        return position

    async def _run_merged(self, inputs: MergedInputs) -> bool:
        """Handle the next plain events of several inputs in one slice. ``False``: none; what is next: ``handle``."""
        if self._buffer or self._issuer.is_blocked or self.engine.pool.is_full or self.timers.jobs_full:
            return False
        records, runs = inputs.next_runs(self.engine.now(), self.hot_path.merged_size)
        if not records:
            return False
        position, failure = self.hot_path.run(records, 0, inputs, runs)
        steps = position + (failure is not None)
        if not steps:
            return False
        # Before the failed event goes on alone: its input has its turn then, with its policies and known failures.
        inputs.take_runs(runs, steps, self.engine.now())
        if failure is not None:
            await self._singles.one(records[position], failure)
        await self._breathe(steps)
        return True

    async def _breathe(self, steps: int = 1) -> None:
        """Let other tasks run after steps that may not have awaited anything."""
        self._steps += steps
        if self._steps >= YIELD_EVERY or self.engine.now() - self._breathed_at > LONGEST_SLICE_SECONDS:
            await asyncio.sleep(0)
            self._steps, self._breathed_at = 0, self.engine.now()

    async def _wait(self) -> None:
        if self.inputs is None and self._timetable.is_empty and not self.timers and not self.timekeeper.has_news:
            if self.engine.router.runs_ahead:
                await self._wake.wait()
            elif (failed := await self.delivery.wait()) is not None:
                await self._singles.one(*failed)
                if not self.is_closing:
                    self.inbox.handled(1)
            return
        now = self.engine.now()
        times = [self._timetable.seconds_to_next(now)]
        if self._fires_timers:
            times.append(self._due_timers.seconds_to_next())
        # While an event waits for room nothing is taken, and this may be over.
        if self.inputs is not None and self.inputs.wait_until is not None and not self._singles.full:
            times.append(max(0.0, self.inputs.wait_until - now))
        times.append(self.timekeeper.settle())
        await self._wake.wait(min((time for time in times if time is not None), default=None))

    # -- work ahead of its turn ----------------------------------------------------------------------------------------

    async def _step_ahead(self, records: list[IncomingRecord], start: int) -> int:
        """One step while work runs ahead: turns that have come, or the way of some of these records into the buffer, or
        a wait. Returns the position of the next record."""
        if self._buffer.is_ready:
            await self._turn()
            return start
        entered = self._issuer.issue(records, start)
        if entered:
            await self._breathe(entered)
        else:
            await self._wait()
        return start + entered

    async def _turn(self) -> None:
        before = len(self._buffer)
        await self._retirement.retire()
        handled = before - len(self._buffer)
        if handled and not self.is_closing:
            self._reads_from.handled(handled)
        await self._breathe(max(1, handled))

    # -- interjections -------------------------------------------------------------------------------------------------

    async def _between(self) -> bool:
        """Run work between two events: a scheduled run that is due, a requested one, a few timers, keys of a visit."""
        if self.timekeeper.has_news:
            self.timekeeper.settle()
        swept = not self.is_closing and self._execution.once.sweep()
        if not swept and self._timetable.is_empty and not self.inbox.has_interjection and not self.timers:
            return False
        due = None if self.is_closing else self._timetable.due(self.engine.now())
        if due is not None:
            await self._interjection(due)
        requested = self.inbox.take_interjection()
        if requested is not None:
            await self._interjection(requested)
            self._heads.ahead.withdraw_gone()
        fired = not self.is_closing and self._fires_timers and await self._due_timers.run_due()
        visited = not self.is_closing and self._fires_timers and await self._visiting.step(self.inputs)
        if due is None and requested is None and not fired and not visited and not swept:
            return False
        await self._breathe()
        return True

    async def _interjection(self, interjection: Interjection) -> None:
        tracer = self.engine.router.tracer
        if tracer is None or not interjection.trace:
            await self._interject(interjection)
            return
        name, (topic, partition) = interjection.route.name, self.topic_partition
        with self._execution.within(tracer.interject(name, topic, partition, interjection.trace)):
            await self._interject(interjection)

    async def _interject(self, interjection: Interjection) -> None:
        engine = self.engine
        if isinstance(interjection, StoreRead):
            interjection.read()
            return
        try:
            route = interjection.route
            while True:
                error = await self._execution.run(
                    self._execution.context(None),
                    route.handler,
                    self.watermark,
                    interjection,
                    blocking=route.is_blocking,
                )
                if not isinstance(error, WindowFailed):
                    break
                if not await self._execution.window_failed(error):
                    interjection.done(self._execution.given_up())
                    return
        except BaseException:  # cancelled: its waiter must get an outcome
            if self.state is PartitionState.RESTARTING and interjection.waiter is not None:
                self.inbox.put_back(interjection)  # it has its turn after the restart
            else:
                interjection.done(self._execution.given_up())
            raise
        if error is None:
            return
        if interjection.waiter is not None:
            interjection.done(reason_of(error))
        else:
            decision, why = of_interjection(error, route.policy, route.name)
            engine.measure(EventFailed(self.partition, -1, describe(why), decision.value))
            text = f"the interjection {interjection.route.name} of {self.topic_partition} failed: {describe(why)}"
            if decision is Decision.EXIT:
                engine.exit_now(f"{text}; {decision.value}")
            if decision is Decision.STOP:
                raise EventFailure(f"{text}; the source stops") from why
            _log.warning("%s; it runs again when it is due", text, exc_info=trace_of(why))
        if not self.is_journalled:  # its changes cannot be undone: the changelog has the state before them
            raise RestartNeeded(INTERJECTION, 0, error)
