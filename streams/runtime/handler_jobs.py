"""The stage of ``register_event_type(T, concurrency=...)``: the handler runs ahead, up to ``await ctx.turn()``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from streams.errors import StoreError
from streams.job_settings import SchedulerConfig
from streams.outcomes import ErrorPolicy, ExecutionState
from streams.records import Change, IncomingRecord, TopicPartition
from streams.runtime.event_context import EventContext
from streams.runtime.failures import Answered, backoff, cancelled_inside, is_last
from streams.runtime.job_runner import Job, JobRunner
from streams.runtime.line import Entry
from streams.runtime.stages import described
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.host import Host


class AheadContext(EventContext[Any]):
    """The context of a handler that runs ahead: without a store until its turn."""

    task: asyncio.Task[Any] | None = None
    _reached: Callable[[], None] = lambda: None
    _has_turn: bool = False
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
        """See ``EventContext.turn``."""
        if self._closed:
            self._needs_turn("turn was awaited")
        self._reached()
        if not self._has_turn:  # each call has a future of its own: whoever is cancelled takes nobody along
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    def arrive(self) -> None:
        """The turn has come."""
        self._has_turn = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def _needs_turn(self, what: str) -> None:
        if self._closed:
            raise StoreError(f"{self.topic_partition}@{self.offset}: {what} after the event had ended or was given up")
        if not self._has_turn:
            raise StoreError(
                f"{self.topic_partition}@{self.offset}: {what} ahead of the event's turn; await ctx.turn() first"
            )


_held: Any = EventContext.__dict__["store"]
"""The field that the property is in front of."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HandlerStageDefinition:
    """A concurrent handler. The key of an event is its record's; events without key have no order among each other."""

    name: str
    handler: Callable[[EventContext[Any], Any], Any]
    policy: ErrorPolicy
    config: SchedulerConfig

    @property
    def described(self) -> tuple[str, ...]:
        """See ``stages.StageDefinition``."""
        return ("handler", *described(self.handler))

    def open(self, host: Host) -> HandlerStage:
        """For one run."""
        return HandlerStage(self, host)


def key_of(record: IncomingRecord, event: Any) -> Hashable:
    """The key of an event's work."""
    return record.key if record.key is not None else object()


class HandlerStage:
    """One running concurrent handler."""

    def __init__(self, definition: HandlerStageDefinition, host: Host) -> None:
        self.definition = definition
        self.host = host
        self.runner = JobRunner(definition.name, definition.config)

    def begin(self, entry: Entry) -> bool:
        """See ``stages.Stage``."""
        if not self.runner.has_room(entry, entry.work):
            return False
        run = _Run(self, entry)
        entry.cancel = run.cancel
        self.runner.add(run.job)
        return True

    def statistics(self) -> StageStatistics:
        """What is under way."""
        return self.runner.statistics()

    def close(self) -> list[asyncio.Task[None]]:
        """See ``stages.Stage``."""
        return self.runner.close()


class _Run:
    """One event's handler, with as many attempts as it takes to get to its turn. What comes later is the event's
    outcome at its turn, and a further attempt is made there, as for any handler."""

    def __init__(self, stage: HandlerStage, entry: Entry) -> None:
        self._stage = stage
        self._entry = entry
        self._ctx: AheadContext | None = None
        self._outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._attempt = 1
        self.job = Job(entry.lane, entry.work, self._run, self._end)

    def cancel(self) -> None:
        """The event is done with, or given up: what still runs for it touches nothing more."""
        if self._ctx is not None:
            self._ctx.close()
        self._stage.runner.cancel(self.job)

    async def _run(self) -> None:
        entry, policy, rng = self._entry, self._stage.definition.policy, self._stage.host.rng
        entry.begun = True
        while True:
            error = await self._try()
            if entry.is_settled or error is None:
                self._end(error)
                return
            if is_last(policy, self._attempt, error):
                self._stage.runner.over(self.job, holds_key=True)  # until its failure was dealt with
                entry.fail(error, self._attempt)
                return
            await asyncio.sleep(backoff(policy, self._attempt, rng))
            self._attempt += 1

    async def _try(self) -> BaseException | None:
        """Run the handler once. Returns its error."""
        host, entry = self._stage.host, self._entry
        where = TopicPartition(host.config.topic, entry.record.partition)
        ctx = self._ctx = AheadContext(
            None,
            where,
            entry.record,
            [],
            [],
            host.message_limit,
            self._attempt,
            host=host,
            task=asyncio.current_task(),
            _reached=self._reached,
        )
        try:
            answer = await self._stage.definition.handler(ctx, entry.event)
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            error: BaseException = cancelled_inside(cancelled)
        except GeneratorExit:
            raise  # the loop is gone
        except BaseException as raised:  # whatever it is, it belongs to the event
            error = raised
        else:
            if answer is None or answer is ExecutionState.COMPLETE:
                return None
            error = Answered(answer, ctx.error)
        if not entry.is_settled:
            ctx.close()  # what it may have left behind is not part of the next attempt
        return error

    def _reached(self) -> None:
        """The handler waits for its turn."""
        entry = self._entry
        if not entry.is_settled:
            entry.settle(self._finish, self._ctx, self._attempt - 1)
            self._stage.runner.over(self.job)  # that takes no slot, or nobody might have one left

    def _end(self, error: BaseException | None) -> None:
        """The handler has ended, before its turn or after."""
        if not self._outcome.done():
            if error is None:
                self._outcome.set_result(None)
            else:
                self._outcome.set_exception(error)
                self._outcome.exception()  # it may be that nobody asks
        self._reached()

    async def _finish(self, ctx: EventContext[Any]) -> Any:
        """The event's turn."""
        if ctx is not self._ctx or not isinstance(ctx, AheadContext):  # a further attempt, all of it in the turn
            return await self._stage.definition.handler(ctx, self._entry.event)
        ctx.arrive()
        return await self._outcome
