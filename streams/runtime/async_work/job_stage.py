"""The stage of ``AsyncJobScheduler``: one job per event, one at a time per key."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

from streams.core.jobs import JobRecord
from streams.metrics import JobEnded
from streams.model.tracing import under_span
from streams.outcomes import ErrorPolicy
from streams.protocols import Codec
from streams.runtime.async_work.async_stage import (
    AsyncStage,
    Follower,
    StageDefinition,
    StageWork,
    described,
    where_of,
)
from streams.runtime.async_work.durable_jobs import DurableWork, codecs_of, single_calls
from streams.runtime.async_work.invoke import Calls
from streams.runtime.async_work.invoke import Outcome as Ended
from streams.runtime.async_work.job_runner import Job, JobRunner
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.host import Host
from streams.runtime.partition.job_runs import JobRun, Outcome
from streams.runtime.partition.reorder_buffer import Entry
from streams.settings.jobs import SchedulerConfig
from streams.statistics import StageStatistics


@dataclass(frozen=True, eq=False, kw_only=True)
class JobDefinition:
    """The definition of an ``AsyncJobScheduler``. ``kind``: ``async``, ``thread`` or ``process``. ``then``: takes the
    results of the jobs, instead of ``finalizer``."""

    name: str
    kind: str
    job: Callable[[Any], Any]
    finalizer: Callable[[EventContext[Any], Any, Any], Any] | None
    on_failure: Callable[[EventContext[Any], Any, Exception], Any] | None
    config: SchedulerConfig
    then: StageDefinition | None = None
    on_error: ErrorPolicy | None = None
    takes_run: bool = False

    @property
    def codecs(self) -> tuple[Codec[Any], Codec[Any]]:
        """Return those of durable jobs. Raises ``RegistrationError`` for jobs that cannot be durable."""
        return self._codecs

    @functools.cached_property
    def _codecs(self) -> tuple[Codec[Any], Codec[Any]]:
        return codecs_of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_codecs"}

    @property
    def described(self) -> tuple[str, ...]:
        functions = described(self.job, self.finalizer, self.on_failure)
        return (self.kind, *functions, *(() if self.then is None else self.then.described))

    def open(self, host: Host) -> JobStage:
        return JobStage(self, host)


Plan = tuple[Hashable, Any]
"""Key and item."""


class JobStage(AsyncStage[Plan, "_EventJob"]):
    """One running scheduler."""

    def __init__(self, definition: JobDefinition, host: Host) -> None:
        super().__init__(takes_failures=definition.on_failure is not None)
        self.definition = definition
        self.runner = JobRunner(definition.name, definition.config)
        self._host = host
        self.topic = host.config.topic
        config = definition.config
        self._single: Calls | None = None
        self._calls = Calls(host, definition.kind, definition.job, config.timeout_seconds, config.retry)

    def admits(self, entry: Entry, plan: Plan) -> bool:
        then = self.definition.then
        # Room in the next stage as well: what ends here is added there without a check.
        has_room = self.runner.has_room(entry, plan[0])
        return has_room and (then is None or self.following(then).has_room(entry, plan[0]))

    def start(self, entry: Entry, plan: Plan) -> _EventJob:
        job = entry.work = _EventJob(self, entry, *plan)
        self.runner.add(job)
        return job

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        return self.admits(entry, (key, None))

    def add(self, entry: Entry, key: Hashable, item: Any) -> None:
        self.start(entry, (key, item))

    def run_job(
        self, record: JobRecord, partition: int, run: JobRun, item: Any, ended: Callable[[Outcome], None]
    ) -> DurableWork:
        """Queue one attempt of a durable job. There is no check for room: those that wait are in the changelog."""
        work = DurableWork(self, record, partition, run, item, ended)
        self.runner.add(work)
        return work

    def statistics(self) -> StageStatistics:
        return self.runner.statistics()

    def close(self) -> list[asyncio.Task[None]]:
        return self.runner.close()

    def following(self, definition: StageDefinition) -> Follower:
        """Return the stage that goes on where this one ends."""
        return cast(Follower, self._host.stages.get(definition))

    def outcome(self, item: Any, partition: int, where: Callable[[], str]) -> Awaitable[Ended]:
        """Call a job's function; the result is (result, error, attempts made)."""
        if self._host.config.metrics_handler is None:  # here as well: a call for each job costs
            return self._calls.outcome(item, where)
        return self._measured(self._calls, item, partition, where)

    def once(self, argument: Any, partition: int, where: Callable[[], str]) -> Awaitable[Ended]:
        """Call a job's function once, with this argument."""
        if self._single is None:
            self._single = single_calls(self._host, self.definition)
        if self._host.config.metrics_handler is None:
            return self._single.outcome(argument, where)
        return self._measured(self._single, argument, partition, where)

    async def _measured(self, calls: Calls, item: Any, partition: int, where: Callable[[], str]) -> Ended:
        host = self._host
        began, attempts, outcome = host.now(), 1, "cancelled"
        try:
            result, error, attempts = await calls.outcome(item, where)
            outcome = "done" if error is None else "failed"
            return result, error, attempts
        finally:
            host.measure(JobEnded(self.definition.name, partition, host.now() - began, attempts, outcome))


class _EventJob(Job, StageWork):
    """The job of an event."""

    __slots__ = ("_error", "_item", "_result", "_stage", "entry")

    entry: Entry

    def __init__(self, stage: JobStage, entry: Entry, key: Hashable, item: Any) -> None:
        super().__init__(stage.runner, entry, key, entry.record.offset)
        self._stage = stage
        self.entry = entry
        self._item = item
        self._error: Exception | None = None

    async def run(self) -> None:
        entry, stage = self.entry, self._stage
        entry.begun = True
        outcome = stage.outcome(self._item, entry.record.partition, self._where)
        if self.trace is not None:
            outcome = under_span(self.trace.child(f"job {stage.definition.name}"), outcome)
        self._result, error, attempts = await outcome
        if entry.is_settled:
            return  # dropped meanwhile
        then = stage.definition.then
        if error is not None:
            self._failed(error, attempts)
        elif then is None:
            entry.settle(self.finish)
            self.runner.over(self)
        else:
            # Before this job gives its key back, which is when its task ends: so items of a key keep their order.
            stage.following(then).add(entry, self.key, self._result)

    def _where(self) -> str:
        """Return the job's name, the record, and the key."""
        return f"the job {self._stage.definition.name} of {where_of(self.entry, self.key)}"

    def lost(self, error: BaseException) -> None:
        if not self.entry.is_settled:
            self._failed(error, 1)

    def _failed(self, error: BaseException, attempts: int) -> None:
        if isinstance(error, Exception):
            self._error = error
        self.runner.over(self, holds_key=True)  # no later job of the key begins before the failure has had its turn
        self._stage.end(self, error, attempts)

    def withdraw(self) -> None:
        if self.holds_key or not self.is_over:
            self.runner.cancel(self)

    def finish(self, ctx: EventContext[Any]) -> Any:
        definition, error = self._stage.definition, self._error
        if error is None:
            finalizer = definition.finalizer
            return None if finalizer is None else finalizer(ctx, self._item, self._result)
        assert definition.on_failure is not None
        return definition.on_failure(ctx, self._item, error)
