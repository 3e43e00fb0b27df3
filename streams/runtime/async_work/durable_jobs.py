"""Durable jobs of an ``AsyncJobScheduler``: one attempt each, with the slots of those that run ahead of their turn."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from streams.codecs import codec_for
from streams.core.jobs import LONGEST_BYTES, JobRecord
from streams.errors import ConfigError, RecordRefused, RegistrationError
from streams.protocols import Codec
from streams.records import TopicPartition
from streams.runtime.async_work.invoke import Calls
from streams.runtime.async_work.invoke import Outcome as Ended
from streams.runtime.async_work.job_runner import Job, JobRunner
from streams.runtime.partition.host import Host
from streams.runtime.partition.job_runs import JobRun, Outcome
from streams.runtime.partition.reorder_buffer import AsideEntry, ReorderBuffer
from streams.runtime.partition.starting_jobs import DurableJobs
from streams.runtime.partition.timers import as_record
from streams.sak.users_code import location_of, parameter_types, result_type


class Definition(DurableJobs, Protocol):
    """The definition of the jobs (``job_stage.JobDefinition``)."""

    @property
    def kind(self) -> str: ...
    @property
    def then(self) -> object: ...
    @property
    def takes_run(self) -> bool: ...


class Attempts(Protocol):
    """The stage of the jobs (``job_stage.JobStage``)."""

    @property
    def definition(self) -> Definition: ...
    @property
    def runner(self) -> JobRunner: ...
    @property
    def topic(self) -> str: ...

    def once(self, argument: Any, partition: int, where: Callable[[], str]) -> Awaitable[Ended]: ...


def takes_run(job: Callable[..., Any]) -> bool:
    """Check for a job that takes a ``JobRun`` as its second argument."""
    try:
        parameters = list(inspect.signature(job).parameters.values())
    except (TypeError, ValueError):  # written in C
        return False
    second = parameters[1] if len(parameters) > 1 else None
    if second is None or second.kind not in (second.POSITIONAL_ONLY, second.POSITIONAL_OR_KEYWORD):
        return False
    return second.default is second.empty or parameter_types(job)[1:2] == [JobRun]


def codecs_of(definition: Definition) -> tuple[Codec[Any], Codec[Any]]:
    """Return the codecs of a job's item and result, by its annotations. Raises ``RegistrationError``."""
    job = definition.job
    what = f"the jobs {definition.name}{location_of(job)} cannot be durable"
    if definition.then is not None:
        raise RegistrationError(f"{what}: they have `then`; start the next job in their finalizer instead")
    item: Any
    result: Any
    item, result = next(iter(parameter_types(job)), None), result_type(job)
    for part, found in (("item (its first argument)", item), ("result", result)):
        if found is None:
            raise RegistrationError(f"{what}: the function has no annotation for the {part}, which is kept encoded")
    try:
        return codec_for(item), codec_for(result)
    except ConfigError as error:
        raise RegistrationError(f"{what}: {error}") from error


class DurableWork(Job):
    """One run of a durable job."""

    __slots__ = ("_ended", "_item", "_partition", "_run", "_stage", "_title")

    def __init__(
        self,
        stage: Attempts,
        record: JobRecord,
        partition: int,
        run: JobRun,
        item: Any,
        ended: Callable[[Outcome], None],
    ) -> None:
        where = TopicPartition(stage.topic, partition)
        # A lane of its own. By their order, or their id: of those that were cancelled one may still be at its end.
        entry = AsideEntry(("durable", partition), as_record(record, where), None, None, ReorderBuffer(lambda: None))
        key = record.state.order if record.state.order is not None else record.state.id
        super().__init__(stage.runner, entry, key)
        self._stage = stage
        self._partition = partition
        self._run = run
        self._item = item
        self._ended: Callable[[Outcome], None] | None = ended
        self._title = f"the {record.title} of {where}"

    async def run(self) -> None:
        stage = self._stage
        argument = (self._item, self._run) if stage.definition.takes_run else self._item
        result, error, _ = await stage.once(argument, self._partition, lambda: self._title)
        encoded: bytes | None = None
        if error is None:
            try:
                encoded = stage.definition.codecs[1].encode(result)
                if len(encoded) > LONGEST_BYTES:
                    size = len(encoded)
                    raise RecordRefused(f"the result of {self._title} has {size} bytes; at most {LONGEST_BYTES}")
            except Exception as refused:
                error = refused
        self._end(Outcome(result, encoded, error))

    def _end(self, outcome: Outcome) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(outcome)

    def lost(self, error: BaseException) -> None:
        self._end(Outcome(None, None, error))

    def cancel(self) -> None:
        """Cancel it: its end is not awaited any more. What cannot be stopped keeps its slot until it ends."""
        self._ended = None
        self.runner.cancel(self)


def single_calls(host: Host, definition: Definition) -> Calls:
    """Return the calls of a job's function that make one attempt each: further ones are up to the partition."""
    function = definition.job
    if definition.takes_run:
        function = functools.partial(_with_run, definition.job)
    return Calls(host, definition.kind, function, definition.config.timeout_seconds, None)


def _with_run(job: Callable[..., Any], argument: tuple[Any, JobRun]) -> Any:
    return job(*argument)
