"""Runs jobs as tasks of the loop, by the rules of ``core.keyed_jobs``."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from streams.core.keyed_jobs import KeyedJobs
from streams.job_settings import SchedulerConfig
from streams.runtime.failures import cancelled_inside
from streams.runtime.line import Entry
from streams.runtime.stages import Blocked
from streams.statistics import StageStatistics


class Job:
    """One job: ``run`` is called when its slot and its key are free. What it raises should be dealt with inside; what
    is not, and a cancellation that nobody here asked for, goes to ``lost``: whoever waits must hear of it."""

    __slots__ = ("holds_key", "is_over", "key", "lane", "lost", "run", "task")

    def __init__(
        self,
        lane: Hashable,
        key: Hashable,
        run: Callable[[], Coroutine[Any, Any, None]],
        lost: Callable[[BaseException], None],
    ) -> None:
        self.lane = lane
        self.key = key
        self.run = run
        self.lost = lost
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self.holds_key = False


class JobRunner:
    """The jobs of one stage. On the loop; nothing here blocks or waits."""

    def __init__(self, name: str, config: SchedulerConfig) -> None:
        self._name = name
        self._jobs: KeyedJobs[Job] = KeyedJobs(
            config.concurrency, config.worker_queue_depth, config.max_concurrent_keys
        )
        self._blocked = Blocked()
        self._running: dict[Job, asyncio.Task[None]] = {}
        self._context = contextvars.copy_context()  # or a job would inherit that of whichever ended before it

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        """Whether a job of this key may be added; if not, the entry is woken when there may be room."""
        if self._jobs.has_room(entry.lane, key):
            return True
        self._blocked.add(entry)
        return False

    def add(self, job: Job) -> None:
        """Queue it; it begins when slot and key are free, now if they are."""
        self._jobs.add(job.lane, job.key, job)
        self._pump()

    def over(self, job: Job, *, holds_key: bool = False) -> None:
        """It needs its slot no more, and its key neither unless it ``holds_key`` (said by itself, or when its task
        ends). A key that is held is given back by ``cancel``."""
        if job.is_over:
            return
        job.is_over, job.holds_key = True, holds_key
        self._jobs.left_slot()
        if not holds_key:
            self._jobs.left_key(job.lane, job.key)
        self._pump()
        self._blocked.wake()

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more, or holds its key. One that runs keeps its slot until it has ended."""
        if job.holds_key:
            job.holds_key = False
            self._jobs.left_key(job.lane, job.key)
            self._pump()
            self._blocked.wake()
        elif job.task is not None:
            job.task.cancel()
        elif self._jobs.withdraw(job.lane, job.key, job):
            self._blocked.wake()

    def statistics(self) -> StageStatistics:
        """What is under way."""
        return StageStatistics(self._name, self._jobs.running, self._jobs.waiting, self._jobs.keys)

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel what runs. Returns it."""
        for task in self._running.values():
            task.cancel()
        return list(self._running.values())

    def _pump(self) -> None:
        while (job := self._jobs.take()) is not None:
            self._begin(job)

    def _begin(self, job: Job) -> None:
        loop, context = asyncio.get_running_loop(), self._context.copy()
        task = job.task = loop.create_task(job.run(), name=f"kes-job-{self._name}", context=context)
        self._running[job] = task

        def ended(_: object) -> None:  # here, and not in the task: one that is cancelled at once never runs
            del self._running[job]
            if task.cancelled():
                job.lost(cancelled_inside(asyncio.CancelledError()))
            elif (error := task.exception()) is not None:
                job.lost(error)
            self.over(job)

        task.add_done_callback(ended)
