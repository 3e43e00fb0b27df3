"""The stage of ``register_event_type(T, concurrency=...)``: the handler runs ahead, up to ``await ctx.turn()``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streams.errors import StoreError
from streams.job_settings import SchedulerConfig
from streams.outcomes import ErrorPolicy, ExecutionState
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.event_context import EventContext
from streams.runtime.failures import FINAL, Answered, backoff, cancelled_inside, is_fatal
from streams.runtime.job_runner import Job, JobRunner
from streams.runtime.line import Entry
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.host import Host


class AheadContext(EventContext[Any]):
    """The context of a handler that runs ahead: without a store until its turn."""

    __slots__ = ("_reached", "_store", "_turn")

    def __init__(
        self, where: TopicPartition, record: IncomingRecord, limit: int, attempt: int, reached: Callable[[], None]
    ) -> None:
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reached = reached
        super().__init__(None, where, record, [], [], limit, attempt)

    @property
    def store(self) -> Any:
        """The partition's store; from the event's turn on."""
        if not self._turn.done():
            raise StoreError(
                f"{self.topic_partition}@{self.offset}: the store was used ahead of the event's turn; "
                "await ctx.turn() first"
            )
        return self._store

    @store.setter
    def store(self, store: Any) -> None:
        self._store = store

    async def turn(self) -> None:
        """See ``EventContext.turn``."""
        self._reached()
        await asyncio.shield(self._turn)

    def arrive(self) -> None:
        """The turn has come."""
        self._turn.set_result(None)


@dataclass(frozen=True, eq=False, kw_only=True)
class HandlerStageDefinition:
    """A concurrent handler. The key of an event is its record's; events without key have no order among each other."""

    name: str
    handler: Callable[[EventContext[Any], Any], Any]
    policy: ErrorPolicy
    config: SchedulerConfig

    def open(self, host: Host) -> HandlerStage:
        """For one run."""
        return HandlerStage(self, host)


def key_of(record: IncomingRecord, event: Any) -> Hashable:
    """The key of an event's work."""
    return record.key if record.key is not None else object()


class HandlerStage:
    """One running concurrent handler."""

    def __init__(self, definition: HandlerStageDefinition, host: Host) -> None:
        self._definition = definition
        self._host = host
        self._runner = JobRunner(definition.name, definition.config)

    def begin(self, entry: Entry) -> bool:
        """See ``stages.Stage``."""
        if not self._runner.has_room(entry, entry.work):
            return False
        job = Job(entry.lane, entry.work, lambda: self._run(entry, job))
        entry.cancel = lambda: self._runner.cancel(job)
        self._runner.add(job)
        return True

    def statistics(self) -> StageStatistics:
        """What is under way."""
        return self._runner.statistics()

    def close(self) -> None:
        """Cancel what runs."""
        self._runner.close()

    async def _run(self, entry: Entry, job: Job) -> None:
        entry.begun = True
        policy, rng = self._definition.policy, self._host.rng
        attempt = 1
        while (error := await self._try(entry, job, attempt)) is not None:
            if attempt > policy.retries or isinstance(error, FINAL) or is_fatal(error):
                entry.fail(error, attempt)
                return
            await asyncio.sleep(backoff(policy, attempt, rng))
            attempt += 1

    async def _try(self, entry: Entry, job: Job, attempt: int) -> Exception | None:
        """Run the handler once. Returns its error if there is one ahead of the turn; what comes later is the event's
        outcome at its turn."""
        definition, record = self._definition, entry.record
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def finish(ctx: EventContext[Any]) -> Any:
            if not isinstance(ctx, AheadContext):  # a further attempt, all of it in the event's turn
                return await definition.handler(ctx, entry.event)
            ctx.arrive()
            return await outcome

        def reached() -> None:
            if not entry.is_settled:
                entry.settle(finish, ctx, attempt - 1)
                self._runner.over(job)  # waiting for the turn takes no slot, or nobody might have one left

        where = TopicPartition(self._host.config.topic, record.partition)
        ctx = AheadContext(where, record, self._host.message_limit, attempt, reached)
        ctx.host = self._host
        error: Exception | None = None
        answer: Any = None
        try:
            answer = await definition.handler(ctx, entry.event)
            if answer is not None and answer is not ExecutionState.COMPLETE:
                error = Answered(answer, ctx.error)
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                outcome.cancel()
                raise
            error = cancelled_inside(cancelled)
        except Exception as raised:
            error = raised
        if not entry.is_settled:
            if error is None:
                outcome.set_result(None)
                entry.settle(finish, ctx, attempt - 1)
            return error
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)
            outcome.exception()  # it may be that nobody asks
        return None
