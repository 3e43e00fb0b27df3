"""The stage of ``AsyncJobScheduler``: one job per event, one at a time per key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import stamina

from streams.job_settings import SchedulerConfig
from streams.runtime.event_context import EventContext
from streams.runtime.failures import cancelled_inside
from streams.runtime.job_runner import Job, JobRunner
from streams.runtime.line import Entry, Finish
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
    then: JobDefinition | None = None

    def open(self, host: Host) -> JobStage:
        """For one run."""
        return JobStage(self, host)


class JobStage:
    """One running scheduler."""

    def __init__(self, definition: JobDefinition, host: Host) -> None:
        self._definition = definition
        self._host = host
        self._runner = JobRunner(definition.name, definition.config)
        self._once = _once(definition, host)
        self._retries = _retries(definition.config)

    def begin(self, entry: Entry) -> bool:
        """See ``stages.Stage``."""
        if entry.work is None:
            entry.settle(_nothing)
            return True
        key, item = entry.work
        if not self._runner.has_room(entry, key):
            return False
        self._add(entry, key, item)
        return True

    def statistics(self) -> StageStatistics:
        """What is under way."""
        return self._runner.statistics()

    def close(self) -> None:
        """Cancel what runs."""
        self._runner.close()

    async def complete(self, ctx: EventContext[Any], item: Any) -> Any:
        """A job, and what comes after it, for a handler that has its turn. Returns the finalizer's answer."""
        definition = self._definition
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            result, error, _ = await self._outcome(item)
            if not future.done():
                future.set_result((result, error))

        alone = object()  # these have no order among each other
        job = Job(alone, alone, run)
        self._runner.add(job)
        try:
            result, error = await future
        finally:
            self._runner.cancel(job)
        if error is not None and definition.on_failure is None:
            raise error
        if error is None and definition.then is not None:
            return await self._following(definition.then).complete(ctx, result)
        if error is None:
            answer = _finish(definition.finalizer, item, result)(ctx)
        else:
            answer = _finish(definition.on_failure, item, error)(ctx)
        return await answer if isinstance(answer, Awaitable) else answer

    def _add(self, entry: Entry, key: Hashable, item: Any) -> None:
        definition = self._definition

        async def run() -> None:
            entry.begun = True
            result, error, attempts = await self._outcome(item)
            if error is None and definition.then is not None:
                self._following(definition.then)._add(entry, key, result)
            elif error is None:
                entry.settle(_finish(definition.finalizer, item, result))
            elif definition.on_failure is not None:
                entry.settle(_finish(definition.on_failure, item, error))
            else:
                entry.fail(error, attempts)

        job = Job(entry.lane, key, run)
        entry.cancel = lambda: self._runner.cancel(job)
        self._runner.add(job)

    def _following(self, definition: JobDefinition) -> JobStage:
        stage = self._host.stages.get(definition)
        assert isinstance(stage, JobStage)
        return stage

    async def _outcome(self, item: Any) -> tuple[Any, Exception | None, int]:
        """(result, error, attempts made)"""
        made = 0

        async def attempt() -> Any:
            nonlocal made
            made += 1
            return await self._once(item)

        try:
            return await (attempt() if self._retries is None else self._retries(attempt)), None, made
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None, cancelled_inside(cancelled), made
        except Exception as error:
            return None, error, made


def _nothing(_: EventContext[Any]) -> None:
    """Nothing to do."""


def _finish(function: Callable[..., Any] | None, item: Any, outcome: Any) -> Finish:
    if function is None:
        return _nothing
    return lambda ctx: function(ctx, item, outcome)


def _once(definition: JobDefinition, host: Host) -> Callable[[Any], Awaitable[Any]]:
    """One attempt of a job, with its timeout."""
    seconds, run = definition.config.timeout_seconds, _runner(definition, host)

    async def limited(item: Any) -> Any:
        async with asyncio.timeout(seconds):
            return await run(item)

    return run if seconds is None else limited


def _retries(config: SchedulerConfig) -> Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]] | None:
    """What calls an attempt as often as it takes."""
    retry = config.retry
    if retry is None or retry.attempts == 1:
        return None
    return stamina.AsyncRetryingCaller(
        attempts=retry.attempts,
        timeout=retry.timeout_seconds,
        wait_initial=retry.wait_initial_seconds,
        wait_max=retry.wait_max_seconds,
        wait_jitter=retry.wait_jitter_seconds,
    ).on(retry.on)


def _runner(definition: JobDefinition, host: Host) -> Callable[[Any], Awaitable[Any]]:
    job = definition.job
    if definition.kind == "async":
        return job
    if definition.kind == "thread":
        return lambda item: host.handler_threads.run(job, item)
    return lambda item: host.in_process(job, item)
