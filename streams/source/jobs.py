"""Jobs on outside services, many at once, inside an event source's order and transactions."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from streams.errors import PlanError, RegistrationError
from streams.outcomes import POLICIES, ErrorPolicy, ExecutionState, is_policy
from streams.records import IncomingRecord
from streams.runtime.async_work.durable_jobs import takes_run
from streams.runtime.async_work.invoke import check_ends, kind_of
from streams.runtime.async_work.job_stage import JobDefinition, JobStage
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.job_runs import JobRun
from streams.settings.jobs import COMPUTE, SchedulerConfig, check_settings
from streams.settings.once import Once
from streams.source.event_source import EventSource

if TYPE_CHECKING:
    from streams.source.async_batcher import AsyncBatcher

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
StoreT = TypeVar("StoreT")
E = TypeVar("E")
Answer = ExecutionState | None
Planner = Callable[[IncomingRecord, E], tuple[Hashable, ItemT] | None]
P = TypeVar("P", bound=Callable[..., Any])


class AsyncJobScheduler(Generic[StoreT, ItemT, ResultT]):
    """Runs a job for each event ahead of the event's turn, and a finalizer with its result at its turn.

    ``job(item)`` is ``async def`` (a task of the event loop), a plain function (on a thread of its own), or, with
    ``kind="process"``, a plain function that keeps a processor busy (in a process; function, item and result must be
    picklable). Jobs of one key and partition run one after the other, in the order of their events; others run side by
    side, within ``config``. A job has no store and no context. It runs **at least once**: again after a crash, a lost
    partition or an aborted attempt, so its effects outside must bear a repetition (an idempotency key, an upsert).

    ``finalizer(ctx, item, result)`` is a handler like any other: it runs in the order of the partition, has the store,
    forwards, and takes effect exactly once. ``on_failure(ctx, item, error)`` is called in its place when a job has
    failed for good; without it such an event goes to its error policy's last word (``Retry.then``: retries are
    the job's, ``config.retry``). ``then`` passes results on to another scheduler as its items, with the same key,
    instead of finalizing: stages with limits of their own, still in order per key.

    A full queue never blocks: an event for whose job there is no room stays where it is, and only its partition's
    reading waits with it. Until the first event in a partition's order is done, nothing behind it is committed; other
    partitions go on. When a partition is given up in good order, running jobs that are next in its order are waited for
    (``drain_timeout_seconds``). The rest is cancelled, and the next owner does it again.

    With ``ctx.start_job(scheduler, item)`` a handler starts a *durable* job instead, with what it knows from its state:
    it begins after the commit, survives everything, and holds up nothing. Item and result are kept encoded, by the
    annotations of ``job``, which may take a ``JobRun`` as its second argument. ``on_error`` (default:
    ``config.error_policy``) is the policy of the event at its end; with ``PARK``, and without ``on_failure``, a job
    that has failed for good waits until it is cancelled (``ctx.cancel_job``).

    Make it before the event source starts; it belongs to that source.
    """

    @overload
    def __init__(
        self,
        source: EventSource[StoreT],
        job: Callable[[ItemT], Awaitable[ResultT]] | Callable[[ItemT, JobRun], Awaitable[ResultT]],
        finalizer: Callable[[EventContext[StoreT], ItemT, ResultT], Answer | Awaitable[Answer]] | None = ...,
        *,
        config: SchedulerConfig = ...,
        kind: str | None = ...,
        on_failure: Callable[[EventContext[StoreT], ItemT, Exception], Answer | Awaitable[Answer]] | None = ...,
        then: AsyncJobScheduler[StoreT, ResultT, Any] | AsyncBatcher[StoreT, ResultT] | None = ...,
        name: str = ...,
        on_error: ErrorPolicy | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        source: EventSource[StoreT],
        job: Callable[[ItemT], ResultT] | Callable[[ItemT, JobRun], ResultT],
        finalizer: Callable[[EventContext[StoreT], ItemT, ResultT], Answer | Awaitable[Answer]] | None = ...,
        *,
        config: SchedulerConfig = ...,
        kind: str | None = ...,
        on_failure: Callable[[EventContext[StoreT], ItemT, Exception], Answer | Awaitable[Answer]] | None = ...,
        then: AsyncJobScheduler[StoreT, ResultT, Any] | AsyncBatcher[StoreT, ResultT] | None = ...,
        name: str = ...,
        on_error: ErrorPolicy | None = ...,
    ) -> None: ...

    def __init__(
        self,
        source: EventSource[StoreT],
        job: Callable[..., Any],
        finalizer: Callable[[EventContext[StoreT], ItemT, ResultT], Answer | Awaitable[Answer]] | None = None,
        *,
        config: SchedulerConfig = COMPUTE,
        kind: str | None = None,
        on_failure: Callable[[EventContext[StoreT], ItemT, Exception], Answer | Awaitable[Answer]] | None = None,
        then: AsyncJobScheduler[StoreT, ResultT, Any] | AsyncBatcher[StoreT, ResultT] | None = None,
        name: str = "",
        on_error: ErrorPolicy | None = None,
    ) -> None:
        self.name = name or getattr(job, "__qualname__", None) or repr(job)
        kind = kind_of(f"the jobs {self.name}", job, kind)
        check_settings(f"the jobs {self.name}", config, SchedulerConfig)
        check_ends(f"the jobs {self.name}", "ctx", "item", "result", finalizer=finalizer, on_failure=on_failure)
        with_run = takes_run(job)
        if kind == "process":
            _check_importable(self.name, job)
            if with_run:
                raise RegistrationError(f"the job {self.name} runs in a process, and takes no JobRun there")
        if on_error is not None and not is_policy(on_error):
            raise RegistrationError(
                f"the jobs {self.name}: on_error is {on_error!r}; it must be an error policy: {POLICIES}"
            )
        if source._declared.router.is_frozen:
            raise RegistrationError(f"the jobs {self.name} come too late: make them before the event source is started")
        if then is not None and finalizer is not None:
            raise RegistrationError(f"the jobs {self.name} have a finalizer and `then`: results go to one of them")
        if then is not None and then._source is not source:
            raise RegistrationError(f"the jobs {self.name} and {then.name} (`then`) are of two event sources")
        self._source: EventSource[StoreT] = source
        self._definition: JobDefinition = JobDefinition(
            name=self.name,
            kind=kind,
            job=job,
            finalizer=finalizer,
            on_failure=on_failure,
            config=config,
            then=None if then is None else then._definition,
            on_error=on_error,
            takes_run=with_run,
        )
        known = source._declared.router.jobs
        assert known is not None  # it is no replay
        known[self.name] = None if self.name in known else self._definition

    def register_event_type(
        self,
        event_class: type[E],
        planner: Planner[E, ItemT] | None = None,
        /,
        *,
        key: Callable[[E], Hashable] | None = None,
        on_error: ErrorPolicy | None = None,
        once: Once | None = None,
    ) -> Callable[[P], P]:
        """Schedule a job for each event of this class.

        The decorated (or given) function maps record and event to the job's ``(key, item)``, or to ``None`` if there is
        nothing to do (then the event completes in its turn, without the finalizer). Or ``key`` alone maps the event to
        the key, and the event itself is the item. A key is anything hashable that compares by value. The function runs
        ahead of the event's turn, once, so it has no store; an event for which it raises goes to the last word of
        ``on_error`` (default: ``config.error_policy``) at its turn. ``once``: as that of ``EventSource.on``; the job of
        a known duplicate does not begin. Raises ``RegistrationError``.
        """
        if self._definition.takes_run:
            raise RegistrationError(
                f"the job {self.name} takes a JobRun, which a job ahead of its event's turn has none of: start it with "
                "ctx.start_job"
            )
        return self._source._declared.handlers.register_planner(
            self._definition, self._definition.job, _checked, event_class, planner, key, on_error, once
        )

    def schedule(self, ctx: EventContext[StoreT], item: ItemT) -> Awaitable[Answer]:
        """Run one job and its finalizer as the rest of a handler that has its turn, while the partition waits.

        Deprecated, and gone in the next release: start a durable job (``ctx.start_job``), or await the call itself
        where this turn needs its answer. Raises the job's exception, unless ``on_failure`` takes it.
        """
        warnings.warn(
            "AsyncJobScheduler.schedule is deprecated: start a durable job (ctx.start_job), or await the call itself",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._in_turn(ctx, item)

    async def _in_turn(self, ctx: EventContext[StoreT], item: ItemT) -> Answer:
        stage = ctx._host.stages.get(self._definition)
        assert isinstance(stage, JobStage)
        answer: Answer = await stage.in_turn(ctx, (object(), item))  # a key of its own: it waits behind no other job
        return answer


def _checked(what: str, record: IncomingRecord, planned: Any) -> tuple[Hashable, Any] | None:
    if planned is None:
        return None
    if not isinstance(planned, tuple) or len(planned) != 2:
        raise PlanError(
            f"{record.where}: {what} answered {type(planned).__name__}; it has to answer a tuple (key, item), or None"
        )
    try:
        hash(planned[0])
    except Exception as error:
        raise PlanError(
            f"{record.where}: {what} answered a key that is a {type(planned[0]).__name__}, which cannot be hashed "
            f"({error}); use a str, bytes, int or a tuple of such"
        ) from error
    return planned


def _check_importable(name: str, job: Callable[..., Any]) -> None:
    found: Any = sys.modules.get(getattr(job, "__module__", ""))
    for part in getattr(job, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    # Found by its name in the other process: a lambda, or a function within one, would fail there with each job.
    if inspect.isroutine(job) and found is not job:
        raise RegistrationError(
            f"the job {name} cannot be found by its name in another process; it must be a function at the top of a "
            "module"
        )
