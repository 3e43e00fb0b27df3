"""The part of the event source under test that has durable jobs: what it starts, what its receiver sees of the calls,
and what must be true of both."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from streams.core.jobs import PREFIX, JobRecord, JobState
from streams.events import event_type
from streams.outcomes import DEAD_LETTER, Retry
from streams.records import IncomingRecord
from streams.runtime.changelog import decode_timer, timer_key
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.job_runs import JobRun
from streams.settings.jobs import SchedulerConfig
from streams.source.event_source import EventSource
from streams.source.jobs import AsyncJobScheduler
from streams.testing.simulation.broker import LogEntry
from streams.testing.simulation.process import FOREVER
from streams.testing.simulation.virtual_time import elapse

ENDS, ENDS_KEY = "ends", "_ends"
JOBS = timer_key(PREFIX)
SECONDS = (0.0, 0.001, 0.1, 0.5, 2.0)
TIMEOUT = 1.0
ATTEMPTS = 2
MOST_DEATHS = 3 * ATTEMPTS
"""Processes that the jobs of one world end: more than one job may."""


@event_type("Told")
class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the partition does with a job, in its order: ``value`` counts. ``what``: ``begun``, ``ended``,
    ``failed``, or ``gone`` for a cancel, which has found the job (``found``) or not."""

    value: int
    what: str
    token: str = ""
    name: str = ""
    lane: str = ""
    id: str = ""
    found: bool = False


class Work(msgspec.Struct, frozen=True):
    """The item: ``token`` of its start; ``lane``: its order, if any; ``fails``: so many attempts; ``deadly``: it ends
    its process instead; ``chained``: its end starts the next one."""

    token: str
    lane: str
    partition: int
    fails: int = 0
    deadly: bool = False
    chained: bool = False


class Receiver:
    """The service that the jobs of one world call. ``ids``: by token. ``running``: (process, whether it can be
    stopped) of each run that is under way, by id."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.ids: dict[str, set[str]] = {}
        self.running: dict[str, list[tuple[Any, bool]]] = {}
        self.deaths = Counter[str]()
        self._records: dict[int, JobRecord | None] = {}

    def called(self, process: Any, work: Work, run: JobRun, *, stoppable: bool) -> None:
        """A call has come."""
        self.ids.setdefault(self._place(work.partition, work.token), set()).add(run.id)
        others = self.running.setdefault(run.id, [])
        if stoppable and any(other is process or self._is_member(other) for other, can_stop in others if can_stop):
            self._say(f"two runs of {run.id} at {[other.name for other, _ in others]} and {process.name}")
        others.append((process, stoppable))
        mine, is_last = self._committed(work.partition, run.id)
        if mine is None:
            self._say(f"{run.id} is called before its start is committed")
        elif is_last and self._is_member(process):  # else another owner has gone on
            early = mine.due_ms / 1000 - self._world.loop.time()
            if early > 0.001:
                self._say(f"{run.id} is called {early:.3f} s too early")
            if mine.state.attempts >= run.attempt:
                self._say(f"{run.id} has failed {mine.state.attempts} times, and this is its attempt {run.attempt}")

    def left(self, process: Any, run: JobRun, *, stoppable: bool) -> None:
        """A call has its answer, or nobody waits for it any more."""
        self.running[run.id].remove((process, stoppable))

    def ends(self, process: Any, run: JobRun) -> bool:
        """Check whether a deadly job ends its process, and end it."""
        world = self._world
        if self.deaths.total() >= MOST_DEATHS or process.dead:
            return False
        self.deaths[run.id] += 1
        if self.deaths[run.id] > ATTEMPTS + 1:
            self._say(f"{run.id} ends a process for the {self.deaths[run.id]}th time")
        world.act(f"crash {process.name}")  # also when all else is calm
        world.rolling.append(world.loop.create_task(self._restart(process.name)))
        return True

    async def _restart(self, name: str) -> None:
        await asyncio.wait([self._world.members[name].task])
        self._world.act(f"start {name}")

    def judge(self, partition: int, told: Iterable[Told]) -> None:
        """Compare what a partition has told with a list."""
        live: dict[str, Told] = {}
        for one in told:
            named = [token for token, other in live.items() if other.name == one.name]
            match one.what:
                case "begun":
                    for token in named:
                        del live[token]
                    live[one.token] = one
                case "gone":
                    if one.found is not bool(named):
                        self._say(f"{partition}: a cancel of {one.name} says {one.found}, and there are {named}")
                    for token in named:
                        del live[token]
                case _:
                    if one.token not in live:
                        self._say(f"{partition}: {one.token} has ended, and is not there")
                        continue
                    lane = live[one.token].lane
                    before = next(token for token, other in live.items() if other.lane == lane)
                    if lane and before != one.token:
                        self._say(f"{partition}: {one.token} has ended before {before}")
                    del live[one.token]
                    # Owners that die may use up the attempts of a job that has never had a slot.
                    called = self.ids.get(self._place(partition, one.token))
                    if called != {one.id} and (called or one.what == "ended"):
                        self._say(f"{partition}: {one.token} is {one.id}, and was called as {called}")
        if live:
            self._say(f"{partition}: these have no end: {[*live]}")
        every = [id for token, ids in self.ids.items() for id in ids]
        if len(every) != len(set(every)):
            self._say(f"two jobs have one id: {self.ids}")

    @staticmethod
    def _place(partition: int, token: str) -> str:
        return f"{token} of {partition}"

    def _committed(self, partition: int, job_id: str) -> tuple[JobRecord | None, bool]:
        """The last record of a job whose commit is decided, and whether it is the last one of its name. Its marker may
        be on its way."""
        mine, last = None, dict[bytes, JobRecord | None]()
        for entry in self._world.broker.log("sim.in.changelog", partition).entries:
            is_decided = not entry.marker and (entry.txn is None or entry.txn.outcome)
            if is_decided and entry.key is not None and entry.key.startswith(JOBS):
                last[entry.key] = record = self._read(entry)
                mine = record if record is not None and record.state.id == job_id else mine
        return mine, mine is not None and last[timer_key(mine.name)] is mine

    def _read(self, entry: LogEntry) -> JobRecord | None:
        if entry.number not in self._records:
            name, timer = decode_timer(IncomingRecord("", 0, 0, entry.key, entry.value, None))
            state = None if timer is None else msgspec.json.decode(timer.value, type=JobState)
            read = None if timer is None or state is None else JobRecord.of(name, timer.due_ms, state, timer.key)
            self._records[entry.number] = read
        return self._records[entry.number]

    def _is_member(self, process: Any) -> bool:
        member = self._world.members.get(process.name)
        return member is not None and member.process is process and self._world.watch.is_current(member)

    def _say(self, text: str) -> None:
        if text not in self._world.differences:
            self._world.differences.append(text)


def limits(rng: random.Random) -> SchedulerConfig:
    """Draw the settings of jobs."""
    pause = rng.choice((0.05, 6.0))  # of which the latter is one that a new owner keeps
    retry = Retry(attempts=ATTEMPTS, backoff_seconds=pause, max_backoff_seconds=pause, jitter=0)
    most = rng.choice((4, 1_000))
    return SchedulerConfig(concurrency=rng.choice((1, 3)), timeout_seconds=TIMEOUT, retry=retry, max_jobs=most)


def register(source: EventSource[Any], process: Any, kinds: Mapping[str, Any], add: Callable[..., None]) -> None:
    """Register handlers of events that start jobs, or cancel them. ``add`` is what each does besides."""
    rng, world = process.rng, process.world

    def tell(ctx: EventContext[Any], what: str, **more: Any) -> None:
        number = ctx.store.get(ENDS_KEY, 0) + 1
        ctx.store.write(ctx, ENDS_KEY, number)
        ctx.forward(ENDS, Told(number, what, **more), key=str(ctx.topic_partition.partition))

    async def deliver(work: Work, run: JobRun) -> str:
        world.receiver.called(process, work, run, stoppable=True)
        try:
            if work.deadly and world.receiver.ends(process, run):
                await elapse(FOREVER)
            await elapse(rng.choice(SECONDS))
        finally:
            world.receiver.left(process, run, stoppable=True)
        if run.attempt <= work.fails:
            raise ConnectionError("no answer")
        return work.token

    def crunch(work: Work, run: JobRun) -> str:
        world.receiver.called(process, work, run, stoppable=False)
        try:
            process.pause(rng.choice(SECONDS))
        finally:
            world.receiver.left(process, run, stoppable=False)
        return work.token

    def done(ctx: EventContext[Any], work: Work, token: str) -> None:
        assert ctx.job is not None
        tell(ctx, "ended", token=work.token, id=ctx.job.id)
        if token != work.token:
            world.differences.append(f"the job {work.token} ends with the result of {token}")
        queue = None if ctx._timers is None else ctx._timers.parked.keys.get(work.lane.encode())
        if queue is not None and queue.head.headers != (("kes-job-id", ctx.job.id.encode()),):
            world.differences.append(f"the job {work.token} ends in front of {queue.head}")
        if work.chained:
            start(ctx, tasks, Work(f"{work.token}+", work.lane, work.partition))

    def failed(ctx: EventContext[Any], work: Work, error: Exception) -> None:
        assert ctx.job is not None
        tell(ctx, "failed", token=work.token, id=ctx.job.id)

    def start(ctx: EventContext[Any], jobs: Any, work: Work, **more: Any) -> None:
        lane: dict[str, Any] = {} if work.lane else {"order": None}
        name = ctx.start_job(jobs, work, **more, **lane)
        tell(ctx, "begun", token=work.token, name=name, lane=work.lane)

    config = limits(rng)
    tasks: Any = AsyncJobScheduler(source, deliver, done, on_failure=failed, config=config, name="tasks")
    threads: Any = AsyncJobScheduler(source, crunch, done, on_failure=failed, config=config, name="threads")

    def work_of(ctx: EventContext[Any], **more: Any) -> Work:
        return Work(str(ctx.offset), more.pop("lane", ""), ctx.topic_partition.partition, **more)

    def hire(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        start(ctx, tasks, work_of(ctx, lane=event.key, fails=event.amount, chained=event.amount == 1))

    def hire_named(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        work = work_of(ctx, fails=event.amount // 2)
        # Without a key: behind a parked one an end that waits is no job any more, and its name is free.
        start(ctx, tasks, work, name=event.key, delay=event.amount, key=None)

    def hire_thread(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        start(ctx, threads, work_of(ctx))

    def hire_death(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        start(ctx, tasks, work_of(ctx, deadly=True))

    def hire_fails(ctx: EventContext[Any], event: Any) -> None:
        hire(ctx, event)
        raise RuntimeError("never")

    def fire(ctx: EventContext[Any], event: Any) -> None:
        add(ctx, event)
        tell(ctx, "gone", name=event.key, found=ctx.cancel_job(event.key))

    handlers = {"Hire": hire, "HireNamed": hire_named, "HireThread": hire_thread, "HireDeath": hire_death, "Fire": fire}
    for kind, handler in handlers.items():
        source.register_event_type(kinds[kind], handler)
    source.register_event_type(kinds["HireFails"], hire_fails, on_error=DEAD_LETTER)
