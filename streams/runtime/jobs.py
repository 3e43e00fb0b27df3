"""The stage of ``AsyncJobScheduler``: one job per event, one at a time per key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from streams.job_settings import SchedulerConfig
from streams.metrics import JobEnded
from streams.runtime.calls import Calls, Outcome
from streams.runtime.event_context import EventContext
from streams.runtime.job_runner import Job, JobRunner
from streams.runtime.line import Entry
from streams.runtime.stages import Follower, StageDefinition, described
from streams.statistics import StageStatistics

if TYPE_CHECKING:
    from streams.runtime.host import Host


@dataclass(frozen=True, eq=False, kw_only=True)
class JobDefinition:
    """What ``AsyncJobScheduler`` knows. ``kind``: ``async``, ``thread`` or ``process``. ``then``: takes the results of
    the jobs, instead of ``finalizer``."""

    name: str
    kind: str
    job: Callable[[Any], Any]
    finalizer: Callable[[EventContext[Any], Any, Any], Any] | None
    on_failure: Callable[[EventContext[Any], Any, Exception], Any] | None
    config: SchedulerConfig
    then: StageDefinition | None = None

    @property
    def described(self) -> tuple[str, ...]:
        """See ``stages.StageDefinition``."""
        functions = described(self.job, self.finalizer, self.on_failure)
        return (self.kind, *functions, *(() if self.then is None else self.then.described))

    def open(self, host: Host) -> JobStage:
        """For one run."""
        return JobStage(self, host)


class JobStage:
    """One running scheduler."""

    def __init__(self, definition: JobDefinition, host: Host) -> None:
        self.definition = definition
        self.runner = JobRunner(definition.name, definition.config)
        self._host = host
        config = definition.config
        self._calls = Calls(host, definition.kind, definition.job, config.timeout_seconds, config.retry)

    def begin(self, entry: Entry) -> bool:
        """See ``stages.Stage``."""
        if entry.plan is None:
            entry.settle(_nothing)
            return True
        key, item = entry.plan
        if not self.has_room(entry, key):
            return False
        job = entry.work = _EventJob(self, entry, key, item)
        self.runner.add(job)
        return True

    def statistics(self) -> StageStatistics:
        """What is under way."""
        return self.runner.statistics()

    def close(self) -> list[asyncio.Task[None]]:
        """See ``stages.Stage``."""
        return self.runner.close()

    async def complete(self, ctx: EventContext[Any], item: Any) -> Any:
        """A job, and what comes after it, for a handler that has its turn. Returns the finalizer's answer."""
        definition = self.definition
        job = _TurnJob(self, item, ctx.topic_partition.partition)
        self.runner.add(job)
        try:
            result, error = await job.outcome
        finally:
            self.runner.cancel(job)
        if error is None and definition.then is not None:
            return await self.following(definition.then).complete(ctx, result)
        if error is None:
            answer = None if definition.finalizer is None else definition.finalizer(ctx, item, result)
        elif definition.on_failure is not None and isinstance(error, Exception):
            answer = definition.on_failure(ctx, item, error)
        else:
            raise error
        return await answer if isinstance(answer, Awaitable) else answer

    async def in_turn(self, ctx: EventContext[Any], planned: tuple[Hashable, Any] | None) -> Any:
        """All that an event's plan asks for, finalizer included, when the event has its turn already."""
        return None if planned is None else await self.complete(ctx, planned[1])

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        """See ``stages.Follower``."""
        then = self.definition.then
        return self.runner.has_room(entry, key) and (then is None or self.following(then).has_room(entry, key))

    def add(self, entry: Entry, key: Hashable, item: Any) -> None:
        """See ``stages.Follower``."""
        job = entry.work = _EventJob(self, entry, key, item)
        self.runner.add(job)

    def following(self, definition: StageDefinition) -> Follower:
        """The stage that goes on where this one ends."""
        return cast(Follower, self._host.stages.get(definition))

    def outcome(self, item: Any, partition: int) -> Awaitable[Outcome]:
        """(result, error, attempts made) of a job."""
        if self._host.config.metrics_handler is None:
            return self._calls.outcome(item)
        return self._measured(item, partition)

    async def _measured(self, item: Any, partition: int) -> Outcome:
        host = self._host
        began, attempts, outcome = host.now(), 1, "cancelled"
        try:
            result, error, attempts = await self._calls.outcome(item)
            outcome = "done" if error is None else "failed"
            return result, error, attempts
        finally:
            host.measure(JobEnded(self.definition.name, partition, host.now() - began, attempts, outcome))


class _EventJob(Job):
    """The job of an event in the line; then what the event does at its turn."""

    __slots__ = ("_entry", "_item", "_key", "_outcome", "_stage")

    def __init__(self, stage: JobStage, entry: Entry, key: Hashable, item: Any) -> None:
        super().__init__(stage.runner, entry.lane, key, entry.record.offset)
        self._key = key  # whatever it waits for here
        self._stage = stage
        self._entry = entry
        self._item = item
        self._outcome: Any = None  # the result, or the error that on_failure gets

    async def run(self) -> None:
        """See ``job_runner.Job``."""
        entry, definition = self._entry, self._stage.definition
        entry.begun = True
        result, error, attempts = await self._stage.outcome(self._item, entry.record.partition)
        if entry.is_settled:  # dropped, and the job would not hear of it
            return
        if error is None and definition.then is not None:
            self._stage.following(definition.then).add(entry, self._key, result)
        elif error is None:
            self._outcome = result
            entry.settle(_nothing if definition.finalizer is None else self._finalize)
            self.runner.over(self)
        else:
            self.runner.over(self, holds_key=True)  # none of its key begins before its failure was dealt with
            if definition.on_failure is not None and isinstance(error, Exception):
                self._outcome = error
                entry.settle(self._on_failure)
            else:
                entry.fail(error, attempts)

    def lost(self, error: BaseException) -> None:
        """See ``job_runner.Job``."""
        if not self._entry.is_settled:
            self.runner.over(self, holds_key=True)
            self._entry.fail(error, 1)

    def withdraw(self) -> None:
        """See ``line.Work``."""
        if self.holds_key or not self.is_over:
            self.runner.cancel(self)

    def _finalize(self, ctx: EventContext[Any]) -> Any:
        finalizer = self._stage.definition.finalizer
        assert finalizer is not None
        return finalizer(ctx, self._item, self._outcome)

    def _on_failure(self, ctx: EventContext[Any]) -> Any:
        on_failure = self._stage.definition.on_failure
        assert on_failure is not None
        return on_failure(ctx, self._item, self._outcome)


class _TurnJob(Job):
    """A job of a handler that has its turn. These have no order among each other."""

    __slots__ = ("_item", "_partition", "_stage", "outcome")

    def __init__(self, stage: JobStage, item: Any, partition: int) -> None:
        alone = object()
        super().__init__(stage.runner, alone, alone)
        self._stage = stage
        self._item = item
        self._partition = partition
        self.outcome: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """See ``job_runner.Job``."""
        result, error, _ = await self._stage.outcome(self._item, self._partition)
        self._end(result, error)

    def lost(self, error: BaseException) -> None:
        """See ``job_runner.Job``."""
        self._end(None, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result((result, error))


def _nothing(_: EventContext[Any]) -> None:
    """Nothing to do."""
