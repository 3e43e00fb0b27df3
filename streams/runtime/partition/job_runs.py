"""The durable jobs of one partition at work: begun when they are due, ended as events between two turns.

A job begins once the transaction of its start is committed. Its end is the event of a timer that removes the job's
record: so a job whose result is not in the changelog is still there, and runs again, under its id. A process that has
found a job, and not been handed it, notes that before it runs it: a job that ends its process costs one attempt each
time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

import anyio
import msgspec

from streams.core.jobs import JobEnd, JobRecord
from streams.core.parking import NEVER_MS, Queued
from streams.core.policy import Decision, Failure
from streams.core.router import Route, Router
from streams.errors import DecodeError, JobCancelled, JobFailed, StreamsError
from streams.metrics import DurableJobEnded, EventFailed
from streams.outcomes import ErrorPolicy, unparked
from streams.records import Change
from streams.runtime.partition.execution import Execution
from streams.runtime.partition.failures import describe
from streams.runtime.partition.host import Host
from streams.runtime.partition.judging import judged
from streams.runtime.partition.starting_jobs import DurableJobs
from streams.runtime.partition.state import Partition
from streams.runtime.partition.timers import as_record
from streams.runtime.signal import Signal

_log = logging.getLogger(__name__)

SHORT_SECONDS: Final = 5.0
"""A shorter pause between two attempts is kept in memory only: a new owner tries the job at once."""
LONGEST_MOVE_SECONDS: Final = 5.0
"""Running jobs have so many seconds when their partition moves, at most."""
_GONE: Final = "the process that ran it has ended"


class JobRun:
    """One run of a job, its optional second argument: ``id`` of the job, the same in each attempt and of no other job;
    ``attempt``: from 1, and ``started``: when this one began."""

    __slots__ = ("attempt", "id", "progressed", "started")

    def __init__(self, job_id: str, attempt: int, started: datetime) -> None:
        self.id = job_id
        self.attempt = attempt
        self.started = started
        self.progressed: tuple[float, float, str] | None = None

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Note how far it is, for people who look at the running jobs. It is kept in memory only."""
        self.progressed = done, total, text


class Outcome(NamedTuple):
    """The end of a run: its result, also ``encoded``, or its error."""

    result: Any
    encoded: bytes | None
    error: BaseException | None


class RunningWork(Protocol):
    """The work of a run that is under way."""

    def cancel(self) -> None: ...


class JobIntake(Protocol):
    """A stage that runs durable jobs (``async_work.durable_jobs``)."""

    def run_job(
        self, record: JobRecord, partition: int, run: JobRun, item: Any, ended: Callable[[Outcome], None]
    ) -> RunningWork: ...


class _Run:
    """A job that runs, or has ended and not had its turn."""

    __slots__ = ("number", "outcome", "run", "work")

    def __init__(self, number: int, run: JobRun) -> None:
        self.number = number
        self.run = run
        self.work: RunningWork
        self.outcome: Outcome | None = None


class JobRuns:
    """The jobs of one partition that run. On its task, but for the ends of runs and of transactions, which the loop
    reports. ``wake`` is called when the partition has something to do."""

    def __init__(self, partition: Partition, host: Host, execution: Execution, wake: Callable[[], None]) -> None:
        self._partition = partition
        self._host = host
        self._execution = execution
        self._wake = wake
        self._runs: dict[str, _Run] = {}
        self._found: set[str] = set()
        self._unknown: set[str] = set()
        self._routes: dict[tuple[str, bool], Route] = {}  # of the ends of jobs, by name and whether they succeeded
        self._is_closing = False
        self.are_handed_over = False
        """Their donor has ended all that ran."""
        self._changed = Signal()

    def start(self) -> None:
        """Begin with the jobs that are there."""
        # Behind a release marker nothing was running, so none of them can have ended its process.
        self._found = set() if self.are_handed_over else set(self._partition.timers.jobs.by_name)

    def is_running(self, name: str) -> bool:
        """Check for a job that runs, or whose end has not had its turn."""
        return name in self._runs

    def is_known(self, record: JobRecord) -> bool:
        """Check that the source has the definition of a job."""
        return _definition_in(self._host.router, record.state.jobs) is not None

    @property
    def running(self) -> Mapping[str, JobRun]:
        """Return the runs that are under way, by the names of the jobs' records."""
        return {name: run.run for name, run in self._runs.items() if run.outcome is None}

    async def attempt(self, due: JobRecord) -> None:
        """Begin a job that is due, or take the turn of one that has ended. Raises as ``PartitionWorker.run``."""
        timers, name, state = self._partition.timers, due.name, due.state
        definition, run = _definition_in(self._host.router, state.jobs), self._runs.get(name)
        if state.cancelled and (definition is None or definition.on_failure is None):
            # There is no function to hear of it. A policy would park the job again, or stop the source at each start.
            await self._execution.change({name: None})
            self._measure(due, "cancelled")
        elif definition is None:
            self._without_definition(due)
        elif state.cancelled:
            await self._end(due, definition, Outcome(None, None, JobCancelled("an operator has cancelled the job")))
        elif run is not None and run.outcome is not None:
            del self._runs[name]
            self._changed.notify()
            # A result is for the start that it was run for: the name may have been set again meanwhile.
            if run.number == state.number:
                await self._has_ended(due, definition, run.outcome)
        elif run is not None or self._is_closing or name in timers.jobs.unsettled or not timers.jobs.is_first(due):
            timers.set_aside(name)  # what it waits for calls it back
        elif name in self._found and state.noted != self._host.writer:
            if state.noted:
                await self._failed(due, definition, JobFailed(_GONE))
            else:
                await self._execution.change({name: due.changed(due.due_ms, noted=self._host.writer)})
        elif state.attempts >= _most_attempts(definition):
            await self._end(due, definition, Outcome(None, None, JobFailed(state.error)))
        else:
            await self._begin(due, definition)

    def settled(self, committed: Mapping[bytes, Change]) -> None:
        """Let go on what the committed changes of a transaction are about."""
        timers = self._partition.timers
        changed, behind = timers.settle_jobs(committed)
        for name in changed:
            record, run = timers.jobs.by_name.get(name), self._runs.get(name)
            # Cancelled, or set again under its name: not before that is committed.
            if run is not None and (record is None or record.state.number != run.number or record.state.cancelled):
                self._cancel(name)
            if record is None:
                self._found.discard(name)
        for name in (*changed, *behind):
            timers.call_back(name)
        self._wake()

    def figures(self) -> dict[str, Any]:
        """Return its part of the partition's statistics."""
        timers = self._partition.timers
        jobs, parked, since_ms = timers.jobs.figures()
        counts = {"jobs": jobs, "jobs_parked": parked, "jobs_running": len(self.running)}
        return counts | {"jobs_since_ms": since_ms, "jobs_full": timers.jobs_full}

    async def drain(self, *, is_move: bool) -> None:
        """Begin no job any more, and give those that run the time of a drain, while events go on; then cancel them."""
        self._is_closing = True
        seconds = self._host.config.timeouts.drain_timeout_seconds
        if is_move:
            seconds = min(seconds, LONGEST_MOVE_SECONDS)
        with anyio.move_on_after(seconds):
            while self._runs and self._partition.state.admits:
                await self._changed.wait()
        if self._runs:
            _log.warning(
                "%s: %d job(s) that still run are cancelled; the next owner runs them again, under the same ids",
                self._partition.topic_partition,
                len(self._runs),
            )
        self.drop()

    def drop(self) -> None:
        """Cancel all runs: the partition is given up, and nothing that they answer is used."""
        self._is_closing = True
        for name in list(self._runs):
            self._cancel(name)

    # -- one job -------------------------------------------------------------------------------------------------------

    async def _begin(self, due: JobRecord, definition: DurableJobs) -> None:
        name, state = due.name, due.state
        try:
            item = definition.codecs[0].decode(state.item)
        except StreamsError as error:  # its class is another one by now
            await self._end(due, definition, Outcome(None, None, error))
            return
        self._found.discard(name)
        now = datetime.fromtimestamp(self._host.wall_ms() / 1000, UTC)
        job_run = JobRun(state.id, state.attempts + 1, now)
        run = self._runs[name] = _Run(state.number, job_run)

        def ended(outcome: Outcome) -> None:
            if self._runs.get(name) is not run:  # it is not wanted any more
                return
            run.outcome = outcome
            record = timers.jobs.by_name.get(name)
            # Else an event has cancelled it, or set it again, and is not committed yet: ``settled`` lets the run go.
            if record is not None and record.state.number == run.number:
                # Due whatever the clock says: it may have been set back since the job began.
                timers.set_job(msgspec.structs.replace(record, due_ms=0))
                self._wake()

        timers = self._partition.timers
        timers.set_aside(name)
        stage: JobIntake = self._host.stages.get(definition)  # type: ignore[assignment]
        run.work = stage.run_job(due, self._partition.partition, job_run, item, ended)

    async def _has_ended(self, due: JobRecord, definition: DurableJobs, outcome: Outcome) -> None:
        if outcome.error is not None:
            await self._failed(due, definition, outcome.error)
        else:
            await self._end(due, definition, outcome)

    async def _failed(self, due: JobRecord, definition: DurableJobs, error: BaseException) -> None:
        """Have a job tried again after a failed attempt, or end it."""
        host, state, retry = self._host, due.state, definition.config.retry
        attempts, now_ms = state.attempts + 1, host.wall_ms()
        elapsed = (now_ms - state.since_ms) / 1000
        if retry is None or not isinstance(error, Exception) or not retry.allows(attempts, error, elapsed):
            failed = due.changed(due.due_ms, attempts=attempts)
            await self._end(failed, definition, Outcome(None, None, error))
            return
        seconds = retry.pause_seconds(attempts, host.rng)
        text = "the %s of %s: attempt %d of %d failed (%s); the next one in %.2f s"
        where = self._partition.topic_partition
        _log.warning(text, due.title, where, attempts, retry.attempts, describe(error)[:300], seconds)
        due_ms = now_ms + round(1000 * seconds)
        record = due.changed(due_ms, attempts=attempts, error=describe(error), noted="")
        if seconds < SHORT_SECONDS:
            self._partition.timers.set_job(record)
        else:
            await self._execution.change({due.name: record})

    async def _end(self, due: JobRecord, definition: DurableJobs, outcome: Outcome) -> None:
        """Give the end of a job to the function that takes it, as an event of the partition."""
        error, partition, execution = outcome.error, self._partition, self._execution
        self._runs.pop(due.name, None)
        end = JobEnd.of_record(due, outcome.encoded, "" if error is None else describe(error))
        has_function = error is None or (definition.on_failure is not None and isinstance(error, Exception))
        queue = None if due.key is None else partition.parked.get(due.key)
        if queue is not None and has_function:
            await execution.change(execution.parked_events.end_behind(queue, end))
            self._measure(due, "queued")
            return
        record = as_record(end, partition.topic_partition)
        route = self._route_of(definition, error)
        measured = "done" if error is None else "cancelled" if isinstance(error, JobCancelled) else "failed"
        with execution.traced(record):
            if has_function:
                try:
                    event = _Ended(definition.codecs[0].decode(end.value), outcome.result, error)
                except DecodeError as unreadable:
                    await execution.failed(record, None, unreadable, 1, end)
                else:
                    await execution.retrying(record, route, execution.in_turn(route, event, record), timer=end)
            elif await self._parked(due, route, error, end):
                measured = "parked"
            else:
                assert error is not None
                without_key = route.with_policy(unparked(route.policy))
                await execution.failed(record, without_key, error, due.state.attempts, end)
        self._measure(due, measured)

    def _route_of(self, definition: DurableJobs, error: BaseException | None) -> Route:
        # Kept: making one looks at its functions, which is a tenth of the price of a job that does nothing.
        place = definition.name, error is None
        if place not in self._routes:
            self._routes[place] = route_of(definition, self._host.config.error_policy, error)
        return self._routes[place]

    async def _parked(self, due: JobRecord, route: Route, error: BaseException | None, end: JobEnd) -> bool:
        """Keep a job without ``on_failure``, if its policy is to park it: the events of its key go on meanwhile.
        ``False``: the policy is another one."""
        attempts, partition = due.state.attempts, self._partition
        if not isinstance(error, Exception):  # SystemExit ends the source, whatever the policy is
            return False
        failure = Failure(attempts, error, is_final=True)
        record = as_record(end, partition.topic_partition)
        if judged(failure, route.policy, record, route.name, "job").decision is not Decision.PARK:
            return False
        self._host.measure(EventFailed(partition.partition, -1, describe(error), Decision.PARK.value))
        _log.warning(
            "the %s of %s failed after %d attempt(s): %s; it waits for an operator (kes jobs retry, cancel), "
            "or until ctx.start_job sets its name again",
            end.title, partition.topic_partition, attempts, describe(error),
        )  # fmt: skip
        await self._execution.change({due.name: due.changed(NEVER_MS, parked=True, error=describe(error), noted="")})
        return True

    def _without_definition(self, due: JobRecord) -> None:
        """Leave a job whose definition is gone from the code, or has a second one of its name."""
        self._partition.timers.set_aside(due.name)
        if due.state.jobs not in self._unknown:
            self._unknown.add(due.state.jobs)
            _log.warning(
                "%s has jobs of %r, which this source does not define (once): they wait until it does, or until they "
                "are cancelled (kes jobs cancel)",
                self._partition.topic_partition,
                due.state.jobs,
            )

    def _cancel(self, name: str) -> None:
        run = self._runs.pop(name)  # first: what ends now is not wanted any more
        self._changed.notify()
        if run.outcome is None:
            run.work.cancel()

    def _measure(self, due: JobRecord, outcome: str) -> None:
        self._host.measure(DurableJobEnded(due.state.jobs, self._partition.partition, outcome))


class _Ended(NamedTuple):
    """The event of a job's end."""

    item: Any
    result: Any
    error: BaseException | None


def route_of(definition: DurableJobs, otherwise: ErrorPolicy, error: BaseException | None) -> Route:
    """Return the route of an end of these jobs, which have failed with ``error`` or not; ``otherwise``: the policy of
    jobs that have none."""

    def ended(ctx: Any, event: _Ended) -> Any:
        if event.error is not None:
            return None if definition.on_failure is None else definition.on_failure(ctx, event.item, event.error)
        return None if definition.finalizer is None else definition.finalizer(ctx, event.item, event.result)

    policy = otherwise if definition.on_error is None else definition.on_error
    route = Route(f"the end of {definition.name}", None, ended, blocking=False, policy=policy)
    taken_by = definition.finalizer if error is None else definition.on_failure
    return route.named(definition.job if taken_by is None else taken_by)


def read_queued(
    router: Router, policy: ErrorPolicy, queued: Queued, end: JobEnd
) -> tuple[Route | None, Any, DecodeError | None]:
    """Read the end of a job that has waited in the queue of its key, as ``Execution.read`` does with a record."""
    definition = _definition_in(router, queued.topic)
    if definition is None:
        return None, None, DecodeError(f"{end.title}: this source defines no jobs {queued.topic!r} (any more)")
    items, results = definition.codecs
    try:
        if end.result is not None:
            event = _Ended(items.decode(end.value), results.decode(end.result), None)
        else:
            event = _Ended(items.decode(end.value), None, JobFailed(end.failure))
    except DecodeError as error:
        return None, None, DecodeError(f"{end.title}: {error}")
    return route_of(definition, policy, event.error), event, None


def _definition_in(router: Router, jobs: str) -> DurableJobs | None:
    """Return the definition of jobs; ``None``: the source has none, or two, of this name."""
    return (router.jobs or {}).get(jobs)


def _most_attempts(definition: DurableJobs) -> int:
    return 1 if definition.config.retry is None else definition.config.retry.attempts
