"""Runs jobs as tasks of the loop, by the rules of ``core.keyed_jobs``."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from streams.core.keyed_jobs import KeyedJobs
from streams.job_settings import SchedulerConfig
from streams.runtime.failures import cancelled_inside
from streams.runtime.line import Entry
from streams.statistics import StageStatistics

WAITING_PER_SLOT: Final = 16
LEAST_WAITING: Final = 1_000
"""Jobs of a partition that wait for a slot or their key, at most: so many per slot, and this at least. Enough to find
free keys for all slots among them; more would be nothing but objects that live long, which the garbage collector looks
at again and again."""


@dataclass(frozen=True)
class Overtaken:
    """Stands for a key that a failed job holds until its event's turn, where the jobs of earlier events are concerned:
    that turn waits for them, so they must not wait for it. They come later where a stage takes events from two ways,
    itself or behind another stage."""

    key: Hashable


class Job(ABC):
    """One job. Slots and no closures: there may be thousands of them, all alive for a while. ``place``: its event's in
    the lane."""

    __slots__ = ("holds_key", "is_over", "key", "lane", "place", "runner", "task")

    def __init__(self, runner: JobRunner, lane: Hashable, key: Hashable, place: int = 0) -> None:
        self.runner = runner
        self.lane = lane
        self.key = key
        self.place = place
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self.holds_key = False

    @abstractmethod
    async def run(self) -> None:
        """Called when its slot and its key are free. What it raises should be dealt with inside; what is not, and a
        cancellation that nobody here asked for, goes to ``lost``: whoever waits must hear of it."""

    @abstractmethod
    def lost(self, error: BaseException) -> None:
        """It ended without a word."""

    def ended(self, task: asyncio.Task[None]) -> None:
        """Its task has ended. (A callback, and not the end of ``run``: one that is cancelled at once never runs.)"""
        self.runner.forget(self)
        if task.cancelled():
            self.lost(cancelled_inside(asyncio.CancelledError()))
        elif (error := task.exception()) is not None:
            self.lost(error)
        if not self.is_over:
            self.runner.over(self)


class JobRunner:
    """The jobs of one stage. On the loop; nothing here blocks or waits."""

    def __init__(self, name: str, config: SchedulerConfig) -> None:
        self._name = name
        self._task_name = f"kes-job-{name}"
        self._loop = asyncio.get_running_loop()
        self._jobs: KeyedJobs[Job] = KeyedJobs(
            config.concurrency,
            config.worker_queue_depth,
            config.max_concurrent_keys,
            max(LEAST_WAITING, WAITING_PER_SLOT * config.concurrency),
        )
        self._refused: dict[Hashable, tuple[Entry, Hashable]] = {}  # by their lane, of which it is the next
        self._holders: dict[tuple[Hashable, Hashable], Job] = {}  # by lane and key
        self._running: dict[Job, asyncio.Task[None]] = {}
        self._context = contextvars.copy_context()  # or a job would inherit that of whichever ended before it

    def has_room(self, entry: Entry, key: Hashable) -> bool:
        """Whether a job of this key may be added; if not, the entry's line is woken when there is room."""
        if self._jobs.has_room(entry.lane, key):
            return True
        self._refused[entry.lane] = entry, key
        return False

    def add(self, job: Job) -> None:
        """Queue it; it begins when slot and key are free, now if they are."""
        if self._holders:
            self._let_pass(job)
        self._jobs.add(job.lane, job.key, job)
        self._pump()

    def over(self, job: Job, *, holds_key: bool = False) -> None:
        """It needs its slot no more, and its key neither unless it ``holds_key`` (said by itself, or when its task
        ends). A key that is held is given back by ``cancel``."""
        if job.is_over:
            return
        job.is_over, job.holds_key = True, holds_key
        if holds_key:
            self._jobs.left_slot()
            self._hold(job)
        else:
            self._jobs.ended(job.lane, job.key)
            if self._refused:
                self._look_again(job.lane)
        self._pump()

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more, or holds its key. One that runs keeps its slot until it has ended."""
        if job.holds_key:
            job.holds_key = False
            del self._holders[job.lane, job.key]
            self._jobs.left_key(job.lane, job.key)
            self._look_again(job.lane)
            self._pump()
        elif job.task is not None:
            job.task.cancel()
        elif self._jobs.withdraw(job.lane, job.key, job):
            self._look_again(job.lane)

    def forget(self, job: Job) -> None:
        """Its task has ended."""
        self._running.pop(job, None)

    def statistics(self) -> StageStatistics:
        """What is under way."""
        return StageStatistics(self._name, self._jobs.running, self._jobs.waiting, self._jobs.keys)

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel what runs. Returns it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        return tasks

    def _hold(self, job: Job) -> None:
        """It has failed, and holds its key; those before it are let pass."""
        self._holders[job.lane, job.key] = job
        for waiting in self._jobs.queued(job.lane, job.key):
            if waiting.place < job.place:
                self._jobs.withdraw(waiting.lane, waiting.key, waiting)
                self._let_pass(waiting)
                self._jobs.add(waiting.lane, waiting.key, waiting)

    def _let_pass(self, job: Job) -> None:
        """Have it wait for no key whose holder comes after it."""
        while (holder := self._holders.get((job.lane, job.key))) is not None and job.place < holder.place:
            job.key = Overtaken(job.key)

    def _pump(self) -> None:
        while (job := self._jobs.take()) is not None:
            task = job.task = self._loop.create_task(job.run(), name=self._task_name, context=self._context.copy())
            self._running[job] = task
            task.add_done_callback(job.ended, context=self._context)
            if self._refused:
                self._look_again(job.lane)

    def _look_again(self, lane: Hashable) -> None:
        """There may be room in this lane."""
        refused = self._refused.get(lane)
        if refused is not None and self._jobs.has_room(lane, refused[1]):
            del self._refused[lane]
            refused[0].line.wake()
