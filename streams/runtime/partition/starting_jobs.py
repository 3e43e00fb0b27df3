"""Start and cancel durable jobs from a handler: as changes of its event, like timers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol

from msgspec import UNSET, UnsetType

from streams.core.jobs import LONGEST_BYTES, PREFIX, JobAction, JobRecord, JobState, SeenJob
from streams.errors import EncodeError, JobsFull, RecordRefused, RegistrationError, StoreError
from streams.outcomes import ErrorPolicy
from streams.protocols import Codec
from streams.runtime.partition.context_fields import ContextFields, check_name, outlived
from streams.sak.numbers import is_number
from streams.settings.jobs import SchedulerConfig

LONGEST_DELAY: Final = 100 * 366 * 86_400
"""Seconds between the start of a job and its first run, at most."""


class DurableJobs(Protocol):
    """The definition of an ``AsyncJobScheduler``, as far as durable jobs need it
    (``async_work.job_stage.JobDefinition``)."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> SchedulerConfig: ...
    @property
    def job(self) -> Callable[..., Any]: ...
    @property
    def finalizer(self) -> Callable[..., Any] | None: ...
    @property
    def on_failure(self) -> Callable[..., Any] | None: ...
    @property
    def on_error(self) -> ErrorPolicy | None: ...
    @property
    def codecs(self) -> tuple[Codec[Any], Codec[Any]]:
        """Return those of items and results. Raises ``RegistrationError`` for jobs that cannot be durable."""
        ...


class Startable(Protocol):
    """An ``AsyncJobScheduler``."""

    @property
    def _definition(self) -> DurableJobs: ...


def start(
    ctx: ContextFields,
    jobs: Startable,
    item: object,
    name: str | None,
    own_name: Callable[[int], str],
    delay: timedelta | float,
    key: str | bytes | UnsetType | None,
    order: str | bytes | UnsetType | None,
) -> str:
    """See ``EventContext.start_job``."""
    definition, timers = _definition_of(ctx, jobs), ctx._timers
    encoded = definition.codecs[0].encode(item)
    if len(encoded) > LONGEST_BYTES:
        raise RecordRefused(f"the item of a job {definition.name} has {len(encoded)} bytes; at most {LONGEST_BYTES}")
    changes = ctx._changes
    if name is None:
        number = len(changes)
        name = own_name(number)
        # The event may have had its turn before, for the same time (a timer's): what it started then may still be here.
        while PREFIX + name in changes or (timers is not None and PREFIX + name in timers.jobs.by_name):
            number += 1
            name = own_name(number)
    else:
        check_name("job", name)
    if (full := _full(ctx, definition, PREFIX + name)) is not None:
        raise full
    known = ctx.input or ctx.timer
    result_key = (None if known is None else known.key) if key is UNSET else _as_bytes("key", key)
    ordered_by = result_key if order is UNSET else _as_bytes("order", order)
    now_ms = ctx._now_ms
    due_ms = now_ms + round(1000 * _seconds(delay))
    state = JobState(definition.name, encoded, now_ms, order=ordered_by)
    trace = () if ctx._trace is None else ctx._trace.carrier
    changes[PREFIX + name] = JobRecord.of(PREFIX + name, due_ms, state, result_key, trace)
    return name


def cancel(ctx: ContextFields, name: str) -> bool:
    """See ``EventContext.cancel_job``."""
    if ctx._closed:
        raise outlived("cancel_job", ctx)
    if ctx._timers is None:
        raise StoreError(f"{ctx.where}: cancel_job was called ahead of the event's turn; await ctx.turn() first")
    changes, full = ctx._changes, f"{PREFIX}{name}"
    there = changes[full] is not None if full in changes else full in ctx._timers.jobs.by_name
    if there:
        changes[full] = None
    return there


def act(ctx: ContextFields, action: JobAction, seen: SeenJob) -> bool:
    """Carry out an operator's act, in an interjection. ``False``: the job is over, or another one by now."""
    timers = ctx._timers
    assert timers is not None  # an interjection has its turn
    record = timers.jobs.acted(seen, action, timers.now_ms())
    if record is not None:
        ctx._changes[record.name] = record
    return record is not None


def _definition_of(ctx: ContextFields, jobs: Startable) -> DurableJobs:
    if ctx._closed:
        raise outlived("start_job", ctx)
    definition: DurableJobs | None = getattr(jobs, "_definition", None)
    if definition is None or not hasattr(definition, "on_error"):
        raise RegistrationError(f"start_job was given {jobs!r}; it takes an AsyncJobScheduler")
    known = (ctx._host.router if ctx._timers is None else ctx._timers.router).jobs
    if known is not None and known.get(definition.name) is not definition:
        why = (
            "another one of this source has its name, too: give each a name="
            if definition.name in known
            else ("it belongs to another event source")
        )
        raise RegistrationError(f"the jobs {definition.name!r} cannot be started here: {why}")
    return definition


def beyond_bounds(ctx: ContextFields) -> JobsFull | None:
    """Check the jobs of an event in its turn for a bound that they do not fit: those that it has started ahead of its
    turn could not be counted then."""
    timers = ctx._timers
    if timers is None or not timers.router.jobs:
        return None
    started = {change.state.jobs for change in ctx._changes.values() if isinstance(change, JobRecord)}
    found = (timers.router.jobs.get(jobs) for jobs in started)
    return next((full for one in found if one is not None and (full := _full(ctx, one)) is not None), None)


def _full(ctx: ContextFields, definition: DurableJobs, starting: str = "") -> JobsFull | None:
    config, timers = definition.config, ctx._timers
    if config.when_full == "wait" or timers is None:
        return None
    there = bool(starting) + timers.jobs.counts.get(definition.name, 0)
    if there + len(ctx._changes) <= config.max_jobs:
        return None  # whatever they are: looked through at each start, 6,000 jobs of one event took 20 s
    # What this event replaces, cancels or ends makes room: a finalizer that starts the next job has ended one.
    for name in {*ctx._changes, starting}:
        known, change = timers.jobs.by_name.get(name), ctx._changes.get(name)
        there -= known is not None and known.state.jobs == definition.name
        there += name != starting and isinstance(change, JobRecord) and change.state.jobs == definition.name
    if there <= config.max_jobs:
        return None
    return JobsFull(
        f"{ctx.where}: the partition has {config.max_jobs} jobs {definition.name!r} that are not over "
        "(SchedulerConfig.max_jobs)"
    )


def _as_bytes(what: str, given: object) -> bytes | None:
    if isinstance(given, str):
        return given.encode()
    if given is None or isinstance(given, bytes):
        return given
    raise EncodeError(f"the {what} of a job is a {type(given).__name__}; use str, bytes or None")


def _seconds(delay: object) -> float:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if not is_number(seconds) or not 0 <= seconds <= LONGEST_DELAY:
        raise StoreError(f"a job was started with the delay {delay!r}; give a timedelta or seconds, 0 or more")
    return float(seconds)
