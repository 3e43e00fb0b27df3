"""The first events of parked keys, tried again between two turns: by time, by each new owner, by an operator.

A head runs as the event that it was. It leaves its queue in the transaction of its effects, so it is in the queue if,
and only if, they are not there. A process that tries a head which it has found, or which has failed before, notes that
first: an event that ends its process is not tried at once by one member after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from streams.core import parking
from streams.core.jobs import JobEnd
from streams.core.origin import INTERJECTION, Origin
from streams.core.parking import Queue
from streams.core.parking_rules import next_due_ms
from streams.core.policy import Decision, Failure
from streams.core.router import Route
from streams.core.timers import Timer
from streams.errors import EventFailure
from streams.metrics import HeadTried
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.execution import Execution, Handle
from streams.runtime.partition.failures import RestartNeeded, describe, event_failed, of_policy
from streams.runtime.partition.handler_kind import HandlerKind
from streams.runtime.partition.heads_ahead import HeadsAhead, resume
from streams.runtime.partition.host import Host
from streams.runtime.partition.job_runs import read_queued
from streams.runtime.partition.joining import update_again
from streams.runtime.partition.judging import judged, kind_of, type_name
from streams.runtime.partition.parking_acts import as_parked_record
from streams.runtime.partition.reorder_buffer import Entry, Finish, Waiting
from streams.runtime.partition.state import Partition
from streams.runtime.partition.timekeeping import WindowFailed
from streams.runtime.partition.timers import as_record

_log = logging.getLogger(__name__)


class HeadContext(EventContext[Any]):
    """The context of an event that was parked: that of its record, with an origin of its own."""

    _at: Origin = INTERJECTION

    @property
    def _origin(self) -> Origin:
        return self._at


class ParkedHeads:
    """The heads of one partition's queues. On its task. ``ahead``: those whose work runs ahead of their turn."""

    def __init__(self, partition: Partition, host: Host, execution: Execution, wake: Callable[[], None]) -> None:
        self._partition = partition
        self._host = host
        self._execution = execution
        self._wake = wake
        self._task: asyncio.Task[Any] | None = None  # of the handler that has the turn
        self.ahead = HeadsAhead(partition, host, wake)

    def is_of(self, task: asyncio.Task[Any]) -> bool:
        """Check for the task of a head that has the turn."""
        return task is self._task

    async def attempt(self, due: Timer) -> None:
        """Try the head of a queue that is due. Raises as ``PartitionWorker.run``."""
        partition, timers = self._partition, self._partition.timers
        queue = timers.parked.by_name[due.name]
        # Before its work, which may run ahead: an event that ends its process does so there, too.
        if queue.must_be_noted(self._host.writer):
            await self._note(queue)
            return
        if self.ahead.waits(queue):
            return
        head, timer = queue.head, None
        if head.is_timer:
            timer = timers.get(head.topic)
            if timer is None or timer.due_ms != head.timestamp_ms:  # an earlier event has cancelled or replaced it
                await self._execution.change(self._left(queue))
                return
            record = as_record(timer, partition.topic_partition)
        elif head.is_result:
            timer = JobEnd.of_queued(head)
            record = as_record(timer, partition.topic_partition)
        else:
            record = as_parked_record(head, partition.partition)
            spec = partition.specs.get(record.topic)
            if self._waits_for_schema(queue.name, None if spec is None else spec.types, record):
                return
            if spec is not None:
                [record] = spec.received([record])
        with self._execution.traced(record):
            await self._try(queue, record, timer)

    def _waits_for_schema(self, name: str, types: Any, record: IncomingRecord) -> bool:
        timers = self._partition.timers

        def known() -> None:
            timers.call_back(name)
            self._wake()

        if not self._host.schema_waits.waits((self._partition.partition, name), types, record, known):
            return False
        timers.set_aside(name)
        return True

    async def settle(self) -> bool:
        """Take the turn of a head whose work has ended. ``False``: there is none."""
        name = self.ahead.first_ended
        if name is not None:
            await self.attempt(self._partition.timers.parked.by_name[name].record)
        return name is not None

    def _left(self, queue: Queue) -> dict[str, Timer | None]:
        return queue.left(self._host.writer, self._host.wall_ms())

    async def _note(self, queue: Queue) -> None:
        """Note that this process is going to try the head. It is due again once that is committed."""
        timers, name = self._partition.timers, queue.name

        def committed(error: BaseException | None) -> None:
            if error is None:  # else the partition is not ours any more, or restarts
                timers.call_back(name)
                self._wake()

        # Set aside behind the change, which makes it due.
        await self._execution.change(queue.noted(self._host.writer), committed, set_aside=name)

    async def _try(self, queue: Queue, record: IncomingRecord, timer: Timer | None) -> None:
        partition, execution = self._partition, self._execution
        attempts, origin = queue.state.attempts + 1, queue.origin
        where = "" if timer is None else f"{timer.title} of {partition.topic_partition}"
        if isinstance(timer, JobEnd):
            config = self._host.config
            route, event, unreadable = read_queued(self._host.router, config.error_policy, queue.head, timer)
        else:
            route, event, unreadable = execution.read(record, where)
        known = partition.failures.meet(origin)
        error: BaseException | None = unreadable if known is None else known.error
        entry: Entry | None = None
        if error is None and timer is None and route is not None and route.once is not None:
            try:
                if execution.once.is_duplicate(record, route, event):
                    await self._pass(queue, record, route)
                    return
            except EventFailure:
                raise
            except BaseException as raised:
                error = of_policy(raised, record.where)
        if error is None and timer is None and route is not None and route.ahead is not None:
            entry = self.ahead.ended(queue, record, route, event)
            if entry is None:
                return  # its work is under way: the partition goes on
            error = entry.error
        else:
            self.ahead.withdraw(queue.name)  # of an attempt that could read the record
        try:
            if error is None:
                assert route is not None
                error = await self._turn(queue, record, timer, route, event, entry)
            if error is not None:
                await self._failed(queue, record, timer, None if unreadable is not None else route, error, attempts)
        finally:
            if entry is not None:
                entry.drop()

    async def _turn(
        self, queue: Queue, record: IncomingRecord, timer: Timer | None, route: Route, event: Any, entry: Entry | None
    ) -> BaseException | None:
        """Run the handler of a head, or what is left of it behind its work ahead. Returns why it failed; ``None``: it
        is complete, or the partition was given up."""
        partition, execution, attempts = self._partition, self._execution, queue.state.attempts + 1
        if queue.head.is_update:
            handler: Finish | None = update_again(route, record, queue.head.old, partition)
        else:
            handler = execution.in_turn(route, event, record) if entry is None else entry.finish
        waiting = None if entry is None else entry.waiting
        while True:
            if waiting is None:
                assert handler is not None
                ctx, function = self._context(queue, record, timer, route, attempts), handler
            else:
                ctx, function = self._resumed(queue, waiting), resume(waiting)
            execution.once.note(ctx, record)
            error = await execution.run(ctx, _named(function), partition.watermark, blocking=route.is_blocking)
            self._task = waiting = None
            if error is None:
                self._host.measure(HeadTried(partition.partition, "completed"))
                if timer is None:
                    route.handled += 1
            elif isinstance(error, WindowFailed):
                if await execution.window_failed(error):
                    continue
                error = None
            elif not partition.is_journalled:  # only the changelog has the state before the attempt
                raise RestartNeeded(queue.origin, attempts, error)
            return error

    async def _pass(self, queue: Queue, record: IncomingRecord, route: Route) -> None:
        """Let a head go that is a duplicate of an event which was handled while it waited."""
        partition, host = self._partition, self._host
        self.ahead.withdraw(queue.name)
        host.measure(HeadTried(partition.partition, "duplicate"))
        route.once.passed(partition, host, route, [record])
        await self._execution.complete(self._context(queue, record, None, None, 1), partition.watermark)

    def _context(
        self, queue: Queue, record: IncomingRecord, timer: Timer | None, route: Route | None, attempts: int
    ) -> EventContext[Any]:
        """Make the context of an attempt, with the changes that let the head go."""
        partition, host = self._partition, self._host
        where = TopicPartition(record.topic, record.partition)  # the input that has its turn may be another one
        kind: HandlerKind | None = None if route is None else route.kind
        ctx: EventContext[Any]
        if kind is None or queue.head.is_update:  # the row of an update is changed already
            given = None if timer is not None else record
            head = HeadContext(partition.store, where, given, [], [], host.message_limit, attempts, partition.timers)
            head._host, head._at = host, queue.origin
            if timer is not None:
                head._begin_timer(timer)
            if isinstance(timer, JobEnd):  # its record has gone, and its name may be another job's by now
                head._timer_changes = None
            ctx = head
        else:
            ctx = kind.context(partition, host, (record,), attempts, timer, queue.origin)
            ctx.topic_partition = where
        # Among the changes of its own unit: the head is gone if, and only if, its effects are there.
        ctx._trace, ctx._timer_changes = self._execution.span, (ctx._timer_changes or {}) | self._left(queue)
        return ctx

    def _resumed(self, queue: Queue, waiting: Waiting) -> EventContext[Any]:
        """Give the context of a handler that waits for its turn what it has from its turn on."""
        partition, ctx = self._partition, waiting.context
        ctx.store, ctx._timers, ctx._has_turn, ctx._at = partition.store, partition.timers, True, queue.origin
        ctx._timer_changes = (ctx._timer_changes or {}) | self._left(queue)
        self._task = ctx._task
        return ctx

    async def _failed(
        self,
        queue: Queue,
        record: IncomingRecord,
        timer: Timer | None,
        route: Route | None,
        error: BaseException,
        attempts: int,
    ) -> None:
        """Carry out the policy of a head that has failed."""
        partition, host, execution = self._partition, self._host, self._execution
        now_ms, state, config = host.wall_ms(), queue.state, host.config.parking
        policy_of = execution.decode_policy(record) if route is None else route.policy
        name = type_name(record) if route is None else route.name
        elapsed = (now_ms - (state.first_ms or now_ms)) / 1000
        failure = Failure(attempts, error, is_final=route is None, elapsed_seconds=elapsed)
        decision, policy, failure = judged(failure, policy_of, record, name, kind_of(timer))
        self._announce(queue, record, timer, route, failure, decision)
        if decision in (Decision.RETRY, Decision.PARK):
            if decision is Decision.RETRY:
                due_ms = now_ms + round(1000 * policy.pause_seconds(attempts, host.rng))
            else:
                due_ms = next_due_ms(failure.error, attempts, policy, config, now_ms, host.rng)
            handler = "" if route is None else route.handler_name
            partition.traces.note(queue.name, error)
            await execution.change(queue.failed(host.writer, attempts, due_ms, describe(error), handler, now_ms))
            return
        ctx = self._context(queue, record, timer, route, attempts)
        ctx._trace = None  # as in ``Execution``: the letter was made to fit
        if decision is Decision.DEAD_LETTER:
            letter = execution.letter(failure, record, route, timer)
            ctx._outputs.append(msgspec.structs.replace(letter, origin=ctx._origin))
        await execution.complete(ctx, partition.watermark)

    def _announce(
        self,
        queue: Queue,
        record: IncomingRecord,
        timer: Timer | None,
        route: Route | None,
        failure: Failure,
        decision: Decision,
    ) -> None:
        """Measure and log a failure of a head. Raises ``EventFailure`` to stop the source, or ends the process."""
        partition, host = self._partition, self._host
        outcome = decision.value if decision is not Decision.RETRY else Decision.PARK.value
        host.measure(HeadTried(partition.partition, outcome))
        host.measure(event_failed(record, failure.error, outcome, host.router.routes, route))
        name = record.where if timer is None else f"{timer.title} of {partition.topic_partition}"
        text = (
            f"{name} ({'the record cannot be read' if route is None else route.name}), the first of {len(queue)} "
            f"event(s) of a parked key, failed in attempt {failure.attempts}: {describe(failure.error)}"
        )
        if decision is Decision.EXIT:
            host.exit_now(f"{text}; {decision.value}")
        if decision is Decision.STOP:
            raise EventFailure(
                f"{text}; the source stops, and the next start tries it again. To go on, repair the handler and deploy "
                "it; or stop all members and let this event go: kes parked skip-head MODULE:SOURCE "
                f"--queue {queue.name.removeprefix(parking.PREFIX)}"
            ) from failure.error
        _log.warning("%s; %s", text, outcome)


def _named(handler: Handle) -> Handle:
    """Return a head's handler that gives what is sent the head's origin: ``forward`` takes that of the record."""

    def handle(ctx: EventContext[Any]) -> Any:
        answer = handler(ctx)
        return ended(ctx, answer) if isinstance(answer, Awaitable) else named(ctx, answer)

    async def ended(ctx: EventContext[Any], answer: Awaitable[Any]) -> Any:
        return named(ctx, await answer)

    def named(ctx: EventContext[Any], answer: Any) -> Any:
        for output in ctx._outputs:
            output.origin = ctx._origin
        return answer

    return handle
