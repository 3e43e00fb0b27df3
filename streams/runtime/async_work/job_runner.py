"""Run jobs as tasks of the loop, in the order of ``core.keyed_queue``."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Final

from streams.core.keyed_queue import KeyedItem, KeyedQueue, PartitionLimits
from streams.core.token_bucket import TokenBucket
from streams.runtime.partition.failures import cancelled_inside
from streams.runtime.partition.reorder_buffer import Entry
from streams.settings.jobs import SchedulerConfig
from streams.statistics import StageStatistics

WAITING_PER_PERMIT: Final = 16
"""Jobs of a partition that may wait for a permit or their key, for each permit. Enough to find free keys for all
permits; more would only be objects that live long, which the garbage collector goes through again and again."""
LEAST_WAITING: Final = 1_000
"""Jobs of a partition that may wait, however few permits there are."""


class Job(KeyedItem, ABC):
    """One job. Slots and no closures: there may be thousands of them, all alive for a while."""

    __slots__ = ("holds_key", "is_over", "key", "lane", "runner", "task", "trace")

    def __init__(self, runner: JobRunner, entry: Entry, key: Hashable, position: int = 0) -> None:
        self.position = position
        self.runner = runner
        self.lane = entry.lane
        self.trace = entry.trace
        self.key = key
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self.holds_key = False

    @abstractmethod
    async def run(self) -> None:
        """Run the job, when its permit and its key are free. It should handle its errors inside; other errors, and a
        cancellation from outside, go to ``lost``: the waiting entry must get an outcome."""

    @abstractmethod
    def lost(self, error: BaseException) -> None:
        """Handle an end without an outcome."""

    def ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of its task. (A callback, and not the end of ``run``: one that is cancelled at once never
        runs.)"""
        del self.runner.tasks[task]
        if task.cancelled():
            self.lost(cancelled_inside(asyncio.CancelledError()))
        elif (error := task.exception()) is not None:
            self.lost(error)
        if not self.is_over:  # handed on to the next stage, or dropped meanwhile
            self.runner.over(self)


class JobRunner:
    """The jobs of one stage. On the loop; nothing here blocks or waits."""

    def __init__(self, name: str, config: SchedulerConfig) -> None:
        self._name = name
        self._task_name = f"kes-job-{name}"
        self._loop = asyncio.get_running_loop()
        limits = PartitionLimits(
            per_key=config.worker_queue_depth,
            keys=config.max_concurrent_keys,
            waiting=max(LEAST_WAITING, WAITING_PER_PERMIT * config.concurrency),
        )
        self._jobs: KeyedQueue[Job] = KeyedQueue(config.concurrency, limits)
        self._rate = None if config.rate_per_second is None else TokenBucket(config.rate_per_second, self._loop.time())
        self._pump_later: asyncio.TimerHandle | None = None
        self._refused: dict[Hashable, tuple[Entry, Hashable]] = {}  # by their lane, of which it is the next
        self.tasks: dict[asyncio.Task[None], None] = {}  # not a set: in the order in which they began
        self._context = contextvars.copy_context()  # or a job would inherit that of whichever ended before it

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        """Check whether a job of this key may be added; if not, the entry's buffer is woken when there is room."""
        if self._jobs.has_room(entry.lane, key):
            return True
        # One per lane: it is the next event of its partition, and nothing behind it is tried before it has room.
        self._refused[entry.lane] = entry, key
        return False

    def add(self, job: Job) -> None:
        """Queue a job; it begins when permit and key are free, now if they are."""
        self._jobs.add(job.lane, job.key, job)
        self._pump()

    def over(self, job: Job, *, holds_key: bool = False) -> None:
        """Give back a job's permit, and its key unless it ``holds_key`` (called by the job, or when its task ends). A
        key that is held is given back by ``cancel``."""
        if job.is_over:
            return
        job.is_over, job.holds_key = True, holds_key
        if holds_key:  # before ``end``, which would let the next job of the key begin
            self._jobs.hold(job)
        self._jobs.end((job,))
        if self._refused:
            self._wake_refused(job.lane)
        self._pump()

    def cancel(self, job: Job) -> None:
        """Cancel a job that is not wanted any more, or release its key. A running one keeps its permit until it has
        ended."""
        if job.holds_key:
            job.holds_key = False
            self._jobs.release(job)
            self._wake_refused(job.lane)
            self._pump()
        elif job.task is not None:
            job.task.cancel()
        elif self._jobs.withdraw(job):
            self._wake_refused(job.lane)

    def statistics(self) -> StageStatistics:
        return StageStatistics(self._name, self._jobs.running, self._jobs.waiting, self._jobs.keys)

    def close(self) -> list[asyncio.Task[None]]:
        if self._pump_later is not None:
            self._pump_later.cancel()
        for task in self.tasks:
            task.cancel()
        return list(self.tasks)

    def _pump(self) -> None:
        while (self._rate is None or self._may_begin(self._rate)) and (batch := self._jobs.take()) is not None:
            if self._rate is not None:
                self._rate.take()
            job = batch[0]
            context = self._context.copy()
            if job.trace is not None:
                context.run(job.trace.enter)
            task = job.task = self._loop.create_task(job.run(), name=self._task_name, context=context)
            self.tasks[task] = None
            task.add_done_callback(job.ended, context=self._context)
            if self._refused:
                self._wake_refused(job.lane)

    def _may_begin(self, rate: TokenBucket) -> bool:
        """Check for a token; without one the jobs that wait begin when there is one."""
        seconds = rate.seconds_to_token(self._loop.time())
        if seconds > 0 and self._pump_later is None:
            self._pump_later = self._loop.call_later(seconds, self._pump_again)
        return seconds <= 0

    def _pump_again(self) -> None:
        self._pump_later = None
        self._pump()

    def _wake_refused(self, lane: Hashable) -> None:
        """Wake the entry that was refused in this lane, if there is room for it now."""
        refused = self._refused.get(lane)
        if refused is not None and self._jobs.has_room(lane, refused[1]):
            del self._refused[lane]
            refused[0].buffer.wake()
