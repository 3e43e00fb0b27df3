"""The stage of ``register_event_type(T, concurrency=...)``: the handler runs ahead, up to ``await ctx.turn()``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import msgspec

from streams.core.policy import Answered, Decision, Failure
from streams.errors import StoreError
from streams.outcomes import ErrorPolicy, ExecutionState
from streams.records import Change, IncomingRecord, TopicPartition
from streams.runtime.async_work.async_stage import described
from streams.runtime.async_work.job_runner import Job, JobRunner
from streams.runtime.partition.context_fields import ContextFields
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import cancelled_inside
from streams.runtime.partition.host import Host
from streams.runtime.partition.judging import judged
from streams.runtime.partition.reorder_buffer import Entry, WaitingContext
from streams.settings.jobs import SchedulerConfig
from streams.statistics import StageStatistics


class ConcurrentContext(WaitingContext):
    """The context of a handler that runs ahead: without a store until its turn."""

    _reached: Callable[[], None] = lambda: None
    _waiting: list[asyncio.Future[None]] = msgspec.field(default_factory=list)

    @property  # type: ignore[misc]  # in front of a field
    def store(self) -> Any:
        """The partition's store; from the event's turn on."""
        self._needs_turn("the store was used")
        return _held.__get__(self)

    @store.setter
    def store(self, store: Any) -> None:
        _held.__set__(self, store)

    def record_change(self, *changes: Change) -> None:
        """See ``EventContext.record_change``; from the event's turn on."""
        self._needs_turn("record_change was called")
        super().record_change(*changes)

    async def turn(self) -> None:
        if self._closed:
            self._needs_turn("turn was awaited")
        self._reached()
        while not self._has_turn:  # it may be roused ahead of its turn: then it waits again
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)  # each call has one of its own: a cancelled one does not cancel the others
            await waiting

    def _arrive(self) -> None:
        """Let the handler go on: its turn has come."""
        self._has_turn = True
        self._rouse()

    @property
    def _is_asleep(self) -> bool:
        """Check for a call of ``turn`` that waits and has not been roused."""
        return bool(self._waiting)

    def _rouse(self) -> None:
        """Wake the waiting calls of ``turn``: each looks whether the turn has come."""
        roused, self._waiting = self._waiting, []
        for waiting in roused:
            if not waiting.done():
                waiting.set_result(None)

    def _needs_turn(self, what: str) -> None:
        if self._closed:
            raise StoreError(f"{self.topic_partition}@{self.offset}: {what} after the event had ended or was given up")
        if not self._has_turn:
            raise StoreError(
                f"{self.topic_partition}@{self.offset}: {what} ahead of the event's turn; await ctx.turn() first"
            )


_held: Any = ContextFields.__dict__["store"]
"""The field that the property is in front of."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ConcurrentStageDefinition:
    """A concurrent handler. The key of an event is its record's; events without key have no order among each other."""

    name: str
    handler: Callable[[EventContext[Any], Any], Any]
    policy: ErrorPolicy
    config: SchedulerConfig

    @property
    def described(self) -> tuple[str, ...]:
        return ("handler", *described(self.handler))

    def open(self, host: Host) -> ConcurrentStage:
        return ConcurrentStage(self, host)


def key_of(record: IncomingRecord, event: Any) -> Hashable:
    """Return the key of an event's work."""
    # Without a key: an object that equals no other, so nothing waits behind it.
    return record.key if record.key is not None else object()


class ConcurrentStage:
    """One running concurrent handler."""

    def __init__(self, definition: ConcurrentStageDefinition, host: Host) -> None:
        self.definition = definition
        self.host = host
        self.runner = JobRunner(definition.name, definition.config)
        self._where: dict[int, TopicPartition] = {}

    def begin(self, entry: Entry) -> bool:
        if not self.runner.has_room(entry, entry.plan):
            return False
        run = entry.work = _Run(self, entry)
        self.runner.add(run)
        return True

    def where(self, topic: str, partition: int) -> TopicPartition:
        found = self._where.get(partition)
        if found is None or found.topic != topic:
            found = self._where[partition] = TopicPartition(topic, partition)
        return found

    def statistics(self) -> StageStatistics:
        return self.runner.statistics()

    def close(self) -> list[asyncio.Task[None]]:
        return self.runner.close()


class _Run(Job):
    """One event's handler, with as many attempts as it takes to get to its turn. A later failure is the event's at its
    turn, where a further attempt is made, as for any handler."""

    __slots__ = ("_attempt", "_ctx", "_entry", "_has_ended", "_on_end", "_stage", "error")

    def __init__(self, stage: ConcurrentStage, entry: Entry) -> None:
        super().__init__(stage.runner, entry, entry.plan)
        self._stage = stage
        self._entry = entry
        self._ctx: ConcurrentContext | None = None
        self._attempt = entry.attempts + 1
        self._has_ended = False
        self._on_end: Callable[[BaseException | None], None] | None = None
        self.error: BaseException | None = None

    # -- ahead of the turn ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        entry, policy, host = self._entry, self._stage.definition.policy, self._stage.host
        began = host.now()
        entry.begun = True
        while True:
            error = await self._try()
            # Settled: it has come to its turn, or was dropped. A failure is for the turn then, as that of any handler.
            if entry.is_settled or error is None:
                self._end(error)
                return
            failure = Failure(self._attempt, error, elapsed_seconds=host.now() - began)
            judgement = judged(failure, policy, entry.record, self._stage.definition.name)
            if judgement.policy.waits == "key" or judgement.decision is not Decision.RETRY:
                # The key stays held: no later event of the key may run before this failure has met its policy.
                self.runner.over(self, holds_key=True)
                entry.fail(error, self._attempt)
                return
            await asyncio.sleep(judgement.policy.pause_seconds(self._attempt, host.rng))
            self._attempt += 1

    def lost(self, error: BaseException) -> None:
        self._end(error)

    def withdraw(self) -> None:
        if self._ctx is not None:
            self._ctx._closed = True  # before the cancellation arrives: what the handler does until then has no effect
        if self.holds_key or not self._has_ended:
            self.runner.cancel(self)

    def reached(self) -> None:
        """Note that the handler waits for its turn."""
        entry = self._entry
        if not entry.is_settled:
            entry.settle(self._again, None if self._ctx is None else self, self._attempt - 1)
            # A waiting handler keeps no permit. One before it, whose turn it waits for, may need it: a deadlock.
            self.runner.over(self)

    async def _try(self) -> BaseException | None:
        """Run the handler once. Returns its error."""
        host, entry = self._stage.host, self._entry
        ctx = self._ctx = ConcurrentContext(
            None,
            self._stage.where(entry.record.topic, entry.record.partition),
            entry.record,
            [],
            [],
            host.message_limit,
            self._attempt,
            _host=host,
            _task=asyncio.current_task(),
            _reached=self.reached,
            _trace=entry.trace,
        )
        try:
            answer = await self._stage.definition.handler(ctx, entry.event)
        except asyncio.CancelledError as cancelled:
            # This task is cancelled, or else something that the handler awaited: that is an error like any other.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            error: BaseException = cancelled_inside(cancelled)
        except GeneratorExit:
            raise  # the loop is gone
        except BaseException as raised:  # of any type: it belongs to the event
            error = raised
        else:
            if answer is None or answer is ExecutionState.COMPLETE:
                return None
            error = Answered(answer, ctx._error)
        if not entry.is_settled:
            ctx._closed = True  # a task that it left behind has no part in the next attempt
        return error

    def _end(self, error: BaseException | None) -> None:
        """Note the end of the handler, before its turn or after."""
        if self._has_ended:
            return
        self._has_ended, self.error = True, error
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(error)
        else:
            self.reached()

    # -- its turn ------------------------------------------------------------------------------------------------------

    @property
    def context(self) -> ConcurrentContext:
        assert self._ctx is not None
        return self._ctx

    def arrive(self, ended: Callable[[BaseException | None], None]) -> bool:
        if not self._has_ended:
            self._on_end = ended
            self.context._arrive()
        return self._has_ended

    @property
    def is_asleep(self) -> bool:
        return self.context._is_asleep

    def rouse(self) -> None:
        self.context._rouse()

    def _again(self, ctx: EventContext[Any]) -> Any:
        """Make a further attempt, all of it in the turn."""
        return self._stage.definition.handler(ctx, self._entry.event)
