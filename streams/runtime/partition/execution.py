"""The execution of one event that needs an await, a retry or its error policy: read, attempt, decide, admit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import anyio
import msgspec

from streams.core.origin import INTERJECTION
from streams.core.parking import Queue
from streams.core.policy import Decision, Failure, WorkKind
from streams.core.router import Route
from streams.core.timers import Timer
from streams.core.transaction import Waiter
from streams.core.visits import VisitRequest
from streams.errors import DecodeError, EventFailure, HandlerBlocked, NotOwned
from streams.metrics import HandlerTimed
from streams.model.tracing import Carrier, EventSpan, carried, stamped, with_context
from streams.outcomes import ErrorPolicy, ExecutionState, Retry
from streams.records import IncomingRecord, TypedRecord
from streams.runtime.partition.dead_letters import DeadLetter, dead_letter
from streams.runtime.partition.decoding import decode_policy, read_event
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import RestartNeeded, describe, event_failed, of_policy, trace_of
from streams.runtime.partition.handler_kind import HandlerKind
from streams.runtime.partition.host import Host
from streams.runtime.partition.interjections import Interjection
from streams.runtime.partition.judging import judged, kind_of, type_name, work_of
from streams.runtime.partition.once import OnceTurns
from streams.runtime.partition.parked_events import ParkedEvents
from streams.runtime.partition.state import Partition
from streams.runtime.partition.stopping import advice
from streams.runtime.partition.timekeeping import WindowFailed
from streams.runtime.partition.unit import Unit

_log = logging.getLogger(__name__)

Handle = Callable[[EventContext[Any]], Any]
"""The function of an event, or of an interjection, on its context. May be asynchronous."""


class Begun(NamedTuple):
    """An attempt that is under way: the handler has answered with an awaitable, and its unit has the store open."""

    unit: Unit
    ctx: EventContext[Any]
    answer: Awaitable[Any]


class Execution:
    """The events of one partition that need an await, a retry or their error policy. On the partition's task."""

    def __init__(self, partition: Partition, host: Host) -> None:
        self._partition = partition
        self._host = host
        self.parked_events = ParkedEvents(partition, host)
        self.once = OnceTurns(partition, host, self)
        self.span: EventSpan | None = None  # of the event that is handled, if it is traced
        self.seconds = 0.0  # which the handler took in the last attempt that completed; 0: not known

    def traced(self, record: IncomingRecord) -> AbstractContextManager[None]:
        """Open a block in which this record's event is handled, within its span if it is to be traced."""
        tracer = self._host.router.tracer
        parent = () if tracer is None else carried(record.headers)
        return nullcontext() if tracer is None or not parent else self.within(tracer.process(record, parent))

    @contextmanager
    def within(self, span: EventSpan) -> Iterator[None]:
        """Make this the span of the block's event; it ends with the block."""
        self.span = span
        try:
            with span.active():
                yield
        finally:
            self.span = None
            span.end()

    def read(self, record: IncomingRecord, where: str = "") -> tuple[Route | None, Any, DecodeError | None]:
        """Decode a record: return (route, event, None), or the reason why there is none; ``where``: its name in errors.
        The event is what the route's handler takes: for a batch handler a list of one. Raises a rule's exit."""
        if isinstance(record, TypedRecord) and record.ending is not None:
            of_policy(record.ending, where or record.where, "type rule")  # which raises it
        router = self._host.router
        route, event, unreadable = read_event(router.routes, router.default, record, where)
        if isinstance(event, VisitRequest) and event.action == "again" and route is not None:
            visited, _ = router.visits.get(event.visit, (route, None))
            route = route.with_policy(visited.policy).named(visited.handler)  # it fails as in a run
        if unreadable is not None or route is None or route.kind is None:
            return route, event, unreadable
        try:
            return route, route.kind.argument(self._partition, self._host, record, event), None
        except DecodeError as error:
            return route, None, DecodeError(f"{where or record.where}: {error}")

    def in_turn(self, route: Route, event: Any, record: IncomingRecord) -> Handle:
        """Return the handler of an event, all of which runs in the turn, also a job that could run ahead."""
        handler, ahead = route.handler, route.ahead
        job = None if ahead is None else getattr(self._host.stages.get(ahead.stage), "in_turn", None)
        if ahead is None or job is None:  # of a concurrent handler, too: it is the turn already
            return lambda ctx: handler(ctx, event)
        return lambda ctx: job(ctx, ahead.plan(record, event))

    async def one(self, record: IncomingRecord, failure: BaseException | None) -> None:
        """Handle one record to its end: decode errors, retries, policies. ``failure``: of the first attempt, if it
        was made."""
        if isinstance(failure, RestartNeeded):
            raise failure
        queue = self._partition.queue_of(record)
        is_row = record.topic in self._partition.joined.tables
        if queue is not None and not is_row:  # undecoded: its class may be the one that is broken
            await self._queue(queue, record, None)
            return
        route, event, unreadable = self.read(record)
        if unreadable is not None:
            await self.failed(record, None, unreadable, 1)
            return
        assert route is not None
        if queue is not None and route.kind.keep is None:  # the row changes at once, and its update handler waits
            await self._queue(queue, record, route)
            return
        if route.once is not None and await self.once.settles(record, route, event):
            return
        if route.ahead is not None:  # its work was given up, or there was no room to park its key
            await self._queue_alone(record, route)
            return
        handler, failed = route.handler, failure is not None
        await self.retrying(record, route, lambda ctx: handler(ctx, event), int(failed), failure, store_dirty=failed)

    async def retrying(
        self,
        record: IncomingRecord,
        route: Route,
        handle: Handle,
        attempts: int = 0,
        error: BaseException | None = None,
        *,
        store_dirty: bool = False,
        timer: Timer | None = None,
        begun: Begun | None = None,
    ) -> None:
        """Attempt an event until it completes or its error policy ends it. ``attempts`` were made, the last one failed
        with ``error``; ``store_dirty``: the store has seen an attempt that failed. ``timer``: the record is that
        timer's event. ``begun``: the next attempt is under way."""
        origin = record.offset if timer is None else timer.origin
        began = self._host.now() if route.is_timed else 0.0
        known = self._partition.failures.meet(origin)
        if known is not None and isinstance(known.error, HandlerBlocked) and route.is_blocking:
            known = None  # the handler runs on a thread by now, and blocks no loop any more
        if known is not None and error is None:  # attempts of an earlier worker count: a restart gives no further ones
            attempts, error = known.attempts, known.error
        while True:
            if isinstance(error, WindowFailed):
                if not await self.window_failed(error):
                    return  # given up meanwhile
                attempts, error = attempts - 1, None  # that attempt ended in front of the event's own handler
                began = began if attempts else self._host.now()
            if error is not None:
                # The store has traces of the attempt that cannot be undone: only the changelog has the state before it.
                if store_dirty and not self._partition.is_journalled:
                    raise RestartNeeded(origin, attempts, error)
                failure = Failure(attempts, error, work_of(timer), elapsed_seconds=self._host.now() - began)
                decision, policy, failure = judged(failure, route.policy, record, route.name, kind_of(timer))
                if self.span is not None and decision is Decision.RETRY:
                    self.span.failed(error, attempts)
                if decision is Decision.RETRY and policy.waits == "key" and failure.work is not WorkKind.RUN:
                    pause = policy.pause_seconds(attempts, self._host.rng)
                    await self._carry_out(Decision.PARK, failure, policy, record, route, timer, pause)
                    return
                if decision is not Decision.RETRY:
                    await self._carry_out(decision, failure, policy, record, route, timer)
                    return
                await anyio.sleep(policy.pause_seconds(attempts, self._host.rng))
                if not self._partition.state.admits:
                    return  # given up meanwhile
            attempts += 1
            ctx = self.context_of(record, route, attempts, timer) if begun is None else begun.ctx
            self.once.note(ctx, record)
            error = await self.run(ctx, handle, self._watermark(record, timer), blocking=route.is_blocking, begun=begun)
            begun = None
            if error is None:
                if timer is None and route.is_sample() and self.seconds:
                    self._host.measure(HandlerTimed(route.name, self.seconds))
                return
            store_dirty = True

    async def window_failed(self, failed: WindowFailed) -> bool:
        """Apply the policy of a window that could not be reported in front of an event, or in an interjection; that is
        undone, and to be attempted again. ``False``: the partition was given up meanwhile. Raises ``EventFailure``."""
        host, partition, window = self._host, self._partition, failed.window
        policy_of = host.config.error_policy if failed.policy is None else failed.policy
        failure, record = partition.timekeeper.tried(failed), window.record(partition)
        decision, policy, failure = judged(failure, policy_of, record, window.name, window.kind)
        if decision is Decision.RETRY:
            await anyio.sleep(policy.pause_seconds(failure.attempts, host.rng))
            return partition.state.admits
        if decision is Decision.PARK:  # by the source's policy: a window is no event of a queue
            decision = Decision.STOP
        route = Route("on_close", None, failed.function, blocking=False, policy=policy)
        self._announce(decision, failure, record, route, window)
        letter = self.letter(failure, record, route, window) if decision is Decision.DEAD_LETTER else None

        def instead(ctx: EventContext[Any]) -> None:
            if letter is not None:
                ctx._outputs.append(msgspec.structs.replace(letter, origin=ctx._origin))

        # For the next attempt at the event: at the window's place in the order this comes instead of its report.
        partition.timekeeper.decide(failed, instead)
        return True

    async def failed(
        self,
        record: IncomingRecord,
        route: Route | None,
        error: BaseException,
        attempts: int,
        timer: Timer | None = None,
    ) -> None:
        """End an event without a further attempt: its work ahead of its turn has failed for good, or (no ``route``) its
        record cannot be read. The store knows nothing of it."""
        error = of_policy(error, record.where)
        self._partition.failures.meet(record.offset if timer is None else timer.origin)
        policy_of = self.decode_policy(record) if route is None else route.policy
        name = type_name(record) if route is None else route.name
        # The stage has made the attempts that hold up the partition; those that hold up the key are to be made.
        failure = Failure(attempts, error, is_final=route is None)
        decision, policy, failure = judged(failure, policy_of, record, name, kind_of(timer), was_ahead=True)
        pause = None
        if decision is Decision.RETRY:
            decision, pause = Decision.PARK, policy.pause_seconds(attempts, self._host.rng)
        await self._carry_out(decision, failure, policy, record, route, timer, pause)

    def context(self, record: IncomingRecord | None, attempt: int = 1, timer: Timer | None = None) -> EventContext[Any]:
        """Make the context of one attempt; without a record that of an interjection, or of this timer."""
        partition, limit = self._partition, self._host.message_limit
        where = partition.topic_partition if record is None else partition.reading
        ctx: EventContext[Any] = EventContext(partition.store, where, record, [], [], limit, attempt, partition.timers)
        ctx._host = self._host
        if timer is not None:
            ctx._begin_timer(timer)
        ctx._trace = self.span
        return ctx

    def context_of(
        self, record: IncomingRecord, route: Route | None, attempt: int, timer: Timer | None = None
    ) -> EventContext[Any]:
        """Make the context that the route's handler takes; ``record`` is the timer's event if there is one."""
        kind: HandlerKind | None = None if route is None else route.kind
        if kind is None:
            return self.context(None if timer is not None else record, attempt, timer)
        ctx: EventContext[Any] = kind.context(self._partition, self._host, (record,), attempt, timer)
        ctx._trace = self.span
        return ctx

    async def run(
        self,
        ctx: EventContext[Any],
        handle: Handle,
        watermark: int,
        interjection: Interjection | None = None,
        *,
        blocking: bool = False,
        begun: Begun | None = None,
    ) -> Exception | None:
        """Make one attempt, and admit the event if it completes. Returns why it failed; then it is undone. ``begun``:
        the attempt is under way."""
        partition, host, began = self._partition, self._host, self._host.now()
        unit = self._unit(ctx) if begun is None else begun.unit
        if begun is None:
            unit.begin()
        try:
            answer: Any
            if begun is None:
                unit.observe(ctx)
            if begun is not None:
                answer = begun.answer
            elif blocking:
                if self.span is not None:
                    handle = with_context(handle)
                answer = await host.handler_threads.call(partition.partition, handle, ctx)
            else:
                answer = handle(ctx)
            if isinstance(answer, Awaitable):
                answer = await answer
        except BaseException as error:
            if isinstance(error, GeneratorExit) and asyncio._get_running_loop() is None:
                raise  # the loop is gone
            if isinstance(error, asyncio.CancelledError) and host.cancellation.is_real:
                raise  # the partition's task is cancelled, and not something that the handler awaited
            return unit.fail(ctx, error)
        if answer is not None and not isinstance(answer, ExecutionState):
            if interjection is not None:
                interjection.result, answer = answer, None
            elif work_of(ctx.timer) is WorkKind.RUN:
                answer = None
        self.seconds = host.now() - began if begun is None else 0.0
        failed = unit.complete(ctx, answer, watermark)
        if failed is not None:
            return failed
        unit.end()
        if partition.timekeeper.instead:
            partition.timekeeper.completed(ctx)
        waiter = None if interjection is None else interjection.waiter
        # An interjection that has changed nothing commits nothing, so no commit fences its answer: an evicted member
        # could answer from an old state. It needs another proof that the state was current.
        if interjection is None or not unit.is_empty:
            await self._admit(unit, waiter)
        elif waiter is not None:
            host.prove_read(partition, waiter, interjection.proof)
        return None

    def given_up(self) -> NotOwned:
        """Make the error for an interjection whose partition was given up."""
        return NotOwned(
            f"{self._partition.topic_partition} was given up before the interjection was committed; nothing of it is, "
            "so the partition's next owner may see the event again"
        )

    def _unit(self, ctx: EventContext[Any]) -> Unit:
        return Unit(self._partition, ctx._outputs, ctx._journal)

    async def _admit(self, unit: Unit, waiter: Waiter | None = None) -> None:
        """Admit a completed event when there is room."""
        pool, partition = self._host.pool, self._partition
        # A cancelled task still runs on once when its awaited condition was true already. So the partition's state
        # decides whether the event is admitted, and not the cancellation.
        while pool.is_full and partition.state.admits:
            await pool.wait_room()
        if not unit.admit(pool, waiter) and waiter is not None:
            waiter(self.given_up())

    async def _carry_out(
        self,
        decision: Decision,
        failure: Failure,
        policy: Retry,
        record: IncomingRecord,
        route: Route | None,
        timer: Timer | None = None,
        pause_seconds: float | None = None,
    ) -> None:
        """Carry out the error policy's decision on an event that is not attempted again, or later from its key's queue,
        after a pause (``None``: by the pace of queues)."""
        parked: dict[str, Timer | None] | None = None
        if decision is Decision.PARK:  # first: it may find no room, and then this is called again
            handler = "" if route is None else route.handler_name
            parked = self.parked_events.begun(failure, record, timer, policy, handler, pause_seconds)
        if self.span is not None:
            self.span.failed(failure.error, failure.attempts, decision.value)
            record = _stamped(record, self.span.carrier)
        self._announce(decision, failure, record, route, timer)
        # An update changes its row whatever its handler has done.
        ctx = self.context_of(record, route, 1 if route is None else failure.attempts, timer)
        ctx._trace = None  # the letter has its headers by now, and was made to fit: it may not grow any more
        if parked is not None:
            ctx._timer_changes = parked  # a timer stays set until it has its turn
        if decision is Decision.DEAD_LETTER:
            # In the event's own transaction: the letter is there if, and only if, the offset has passed the event.
            ctx._outputs.append(self.letter(failure, record, route, timer))
        await self.complete(ctx, self._watermark(record, timer))

    async def complete(self, ctx: EventContext[Any], watermark: int) -> None:
        """Admit an event whose handler is not called (again)."""
        unit = self._unit(ctx)
        failed = unit.complete(ctx, None, watermark)
        assert failed is None  # it has changed nothing
        await self._admit(unit)

    # -- parked keys ---------------------------------------------------------------------------------------------------

    async def _queue(self, queue: Queue, record: IncomingRecord, route: Route | None) -> None:
        """Have an event wait behind those of its key; with the ``route`` of a row's update, which changes the row.
        Raises ``NoRoom``."""
        changes = self.parked_events.behind(queue, record)  # in one unit with the position: never below it and nowhere
        ctx = self.context_of(record, route, 1)
        ctx._timer_changes = changes
        await self.complete(ctx, record.offset + 1)

    async def _queue_alone(self, record: IncomingRecord, route: Route) -> None:
        """Make an event the first in a queue of its key, which is open, rather than do its work in the turn. Raises
        ``NoRoom``."""
        known = self._partition.failures.meet(record.offset)
        if known is not None:
            await self.failed(record, route, known.error, known.attempts)
            return
        ctx = self.context(record)
        ctx._timer_changes = self.parked_events.alone(record)
        await self.complete(ctx, record.offset + 1)

    async def change(
        self, changes: dict[str, Timer | None], waiter: Waiter | None = None, *, set_aside: str = ""
    ) -> None:
        """Admit changes of queues that no event makes. ``set_aside``: the timer that does not fire until it is called
        back."""
        pool, partition = self._host.pool, self._partition
        while pool.is_full and partition.state.admits:
            await pool.wait_room()
        if partition.state.admits:
            admitted = partition.timers.admitted(changes, INTERJECTION)
            if set_aside:
                partition.timers.set_aside(set_aside)
            pool.admit(partition.partition, partition.watermark, [], admitted, waiter, events=0)

    def _announce(
        self, decision: Decision, failure: Failure, record: IncomingRecord, route: Route | None, timer: Timer | None
    ) -> None:
        """Measure and log a failure for good. Raises ``EventFailure`` to stop the source, or ends the process."""
        partition, host = self._partition, self._host
        attempts, error = failure.attempts, failure.error
        name = record.where if timer is None else f"{timer.title} of {partition.topic_partition}"
        host.measure(event_failed(record, error, decision.value, host.router.routes, route))
        if route is None:  # its error begins with the place
            text = f"{describe(error)}; the record cannot be read"
        else:
            text = f"{name} ({route.name}) failed after {attempts} attempt(s): {describe(error)}"
        traced = None if route is None else trace_of(error)
        if decision is Decision.EXIT:
            _log.error("%s", text, exc_info=traced)
            host.exit_now(f"{text}; {decision.value}")
        if decision is Decision.STOP:
            text += advice(partition, record, route, error, timer)
            raise EventFailure(text) from error
        _log.log(logging.WARNING, "%s; %s", text, decision.value, exc_info=traced)

    def letter(self, failure: Failure, record: IncomingRecord, route: Route | None, timer: Timer | None) -> DeadLetter:
        """Make the dead letter of an event that has failed for good."""
        host, handler = self._host, "" if route is None else route.handler_name
        topic, now, instance = host.config.dead_letters, host.wall_ms(), host.config.instance_id
        letter = dead_letter(topic, record, failure.error, failure.attempts, now, timer, handler, instance)
        return letter.within(host.message_limit)

    def decode_policy(self, record: IncomingRecord) -> ErrorPolicy:
        """Return the policy of a record that cannot be read."""
        spec, host = self._partition.specs.get(record.topic), self._host
        return decode_policy(spec, host.router.routes, record, host.config.decode_policy)

    def _watermark(self, record: IncomingRecord, timer: Timer | None) -> int:
        """Return the watermark behind the event of a record, or of a timer, which moves none."""
        return record.offset + 1 if timer is None else self._partition.watermark


def _stamped(record: IncomingRecord, carrier: Carrier) -> IncomingRecord:
    """Return a record whose letter carries the trace."""
    came = record.as_received
    stamp = msgspec.structs.replace(came, headers=stamped(came.headers, carrier))
    return stamp if came is record else msgspec.structs.replace(record, original=stamp)
