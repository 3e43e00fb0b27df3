"""The stage of ``AsyncJobScheduler``: one job per event, one at a time per key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from streams.job_settings import SchedulerConfig
from streams.metrics import JobEnded
from streams.runtime.calls import Calls
from streams.runtime.event_context import EventContext
from streams.runtime.job_runner import Job, JobRunner
from streams.runtime.line import Entry, Finish
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
        self._definition = definition
        self._host = host
        self._runner = JobRunner(definition.name, definition.config)
        config = definition.config
        self._calls = Calls(host, definition.kind, definition.job, config.timeout_seconds, config.retry)

    def begin(self, entry: Entry) -> bool:
        """See ``stages.Stage``."""
        if entry.work is None:
            entry.settle(_nothing)
            return True
        key, item = entry.work
        if not self._runner.has_room(entry, key):
            return False
        self.add(entry, key, item)
        return True

    def statistics(self) -> StageStatistics:
        """What is under way."""
        return self._runner.statistics()

    def close(self) -> list[asyncio.Task[None]]:
        """See ``stages.Stage``."""
        return self._runner.close()

    async def complete(self, ctx: EventContext[Any], item: Any) -> Any:
        """A job, and what comes after it, for a handler that has its turn. Returns the finalizer's answer."""
        definition = self._definition
        future: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()

        def end(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result((result, error))

        async def run() -> None:
            result, error, _ = await self._outcome(item, ctx.topic_partition.partition)
            end(result, error)

        alone = object()  # these have no order among each other
        job = Job(alone, alone, run, lambda error: end(None, error))
        self._runner.add(job)
        try:
            result, error = await future
        finally:
            self._runner.cancel(job)
        if error is None and definition.then is not None:
            return await self._following(definition.then).complete(ctx, result)
        if error is None:
            answer = _finish(definition.finalizer, item, result)(ctx)
        elif definition.on_failure is not None and isinstance(error, Exception):
            answer = _finish(definition.on_failure, item, error)(ctx)
        else:
            raise error
        return await answer if isinstance(answer, Awaitable) else answer

    async def in_turn(self, ctx: EventContext[Any], planned: tuple[Hashable, Any] | None) -> Any:
        """All that an event's plan asks for, finalizer included, when the event has its turn already."""
        return None if planned is None else await self.complete(ctx, planned[1])

    def add(self, entry: Entry, key: Hashable, item: Any) -> None:
        """See ``stages.Follower``."""
        definition = self._definition

        async def run() -> None:
            entry.begun = True
            result, error, attempts = await self._outcome(item, entry.record.partition)
            if entry.is_settled:  # dropped, and the job would not hear of it
                return
            if error is None and definition.then is not None:
                self._following(definition.then).add(entry, key, result)
                return
            if error is None:
                entry.settle(_finish(definition.finalizer, item, result))
                return
            self._runner.over(job, holds_key=True)  # none of its key begins before its failure was dealt with
            if definition.on_failure is not None and isinstance(error, Exception):
                entry.settle(_finish(definition.on_failure, item, error))
            else:
                entry.fail(error, attempts)

        def lost(error: BaseException) -> None:
            if not entry.is_settled:
                self._runner.over(job, holds_key=True)
                entry.fail(error, 1)

        job = Job(entry.lane, key, run, lost)
        entry.cancel = lambda: self._runner.cancel(job)
        self._runner.add(job)

    def _following(self, definition: StageDefinition) -> Follower:
        return cast(Follower, self._host.stages.get(definition))

    async def _outcome(self, item: Any, partition: int) -> tuple[Any, BaseException | None, int]:
        """(result, error, attempts made)"""
        host = self._host
        if host.config.metrics_handler is None:
            return await self._calls.outcome(item)
        began, attempts, outcome = host.now(), 1, "cancelled"
        try:
            result, error, attempts = await self._calls.outcome(item)
            outcome = "done" if error is None else "failed"
            return result, error, attempts
        finally:
            host.measure(JobEnded(self._definition.name, partition, host.now() - began, attempts, outcome))


def _nothing(_: EventContext[Any]) -> None:
    """Nothing to do."""


def _finish(function: Callable[..., Any] | None, item: Any, outcome: Any) -> Finish:
    if function is None:
        return _nothing
    return lambda ctx: function(ctx, item, outcome)
