"""Fire the timers of one partition that are due, among them parked heads, jobs and runs by cron: between two turns,
each as an event of its own."""

from __future__ import annotations

import asyncio
from typing import Final

from streams.core.cron import TIMER_PREFIX, CronSchedule, CronTimer, adopted
from streams.core.jobs import JobRecord
from streams.core.parking import QueueRecord
from streams.core.timers import Timer
from streams.records import IncomingRecord
from streams.runtime.partition.execution import Execution
from streams.runtime.partition.host import Host
from streams.runtime.partition.job_runs import JobRuns
from streams.runtime.partition.parked_heads import ParkedHeads
from streams.runtime.partition.state import Partition
from streams.runtime.partition.timers import as_record

AT_ONCE: Final = 32
"""Timers that fire between two turns, at most: many that are due at once must not hold events up."""
LONGEST_SECONDS: Final = 0.005
"""Seconds after which no further timer fires between two turns."""
LONGEST_WAIT_SECONDS: Final = 1.0
"""Seconds between two checks of the time of day while timers are set, at most: the clock may be set meanwhile."""


class DueTimers:
    """The due timers of one partition. On its task."""

    def __init__(
        self, partition: Partition, host: Host, execution: Execution, heads: ParkedHeads, jobs: JobRuns
    ) -> None:
        self._partition = partition
        self._heads = heads
        self._jobs = jobs
        self._timers = partition.timers
        self._host = host
        self._execution = execution
        self._schedules = {
            route.name: (schedule, route) for schedule, route in host.schedules if isinstance(schedule, CronSchedule)
        }

    async def start(self) -> None:
        """Begin with the jobs that are there, and set the timers of schedules that have none yet."""
        self._jobs.start()
        schedules = {name: schedule for name, (schedule, _) in self._schedules.items()}
        if changes := adopted(schedules, self._timers, self._timers.now_ms()):
            await self._execution.change(changes)

    def seconds_to_next(self) -> float | None:
        """Return how long to wait before the next look at the time of day; ``None``: nothing is set."""
        due_ms = self._timers.next_due_ms
        if due_ms is None or not self._host.fires_timers:
            return None
        return min(max(0.0, (due_ms - self._timers.now_ms()) / 1000), LONGEST_WAIT_SECONDS)

    async def run_due(self) -> bool:
        """Fire those that are due, the oldest first, as many as there is time for between two turns. Returns whether
        there was any. Raises as ``PartitionWorker.run``."""
        first = self._timers.first()
        if first is None or first.due_ms > self._timers.now_ms() or not self._host.fires_timers:
            return False
        now, began, fired = self._host.now, self._host.now(), 0
        while True:
            if fired and self._partition.is_closing:
                break
            await self.fire(first)
            fired += 1
            # Anew each time: the handler may have set, replaced or removed timers.
            first = self._timers.first()
            if first is None or first.due_ms > self._timers.now_ms():
                break
            if fired < AT_ONCE and now() - began <= LONGEST_SECONDS:
                continue
            # Otherwise input could fill a queue faster than it is worked off.
            if not self._timers.parked.is_urgent(first.name, self._host.config.parking):
                break
            await asyncio.sleep(0)
            began = now()
        return True

    async def fire(self, timer: Timer) -> None:
        """Handle the event of a timer. Raises as ``PartitionWorker.run``."""
        execution, topic_partition = self._execution, self._partition.topic_partition
        if isinstance(timer, QueueRecord):
            await self._heads.attempt(timer)
            return
        if isinstance(timer, JobRecord):
            await self._jobs.attempt(timer)
            return
        if isinstance(timer, CronTimer):
            schedule, route = self._schedules[timer.name.removeprefix(TIMER_PREFIX)]  # ``start`` removes all others
            run = schedule.run(timer, self._timers.now_ms())
            await execution.retrying(as_record(run, topic_partition), route, route.handler, timer=run)
            return
        queue = self._partition.parked.get(timer.key) if timer.key is not None else None
        if queue is not None:  # it takes its place, and stays set
            await execution.change(execution.parked_events.timer_behind(queue, timer))
            return
        where = f"timer {timer.name!r} of {topic_partition}"
        record = as_record(timer, topic_partition)
        with execution.traced(record):
            await self._handle_timer(timer, record, where)

    async def _handle_timer(self, timer: Timer, record: IncomingRecord, where: str) -> None:
        execution = self._execution
        route, event, unreadable = execution.read(record, where)
        if unreadable is None:
            assert route is not None
            await execution.retrying(record, route, execution.in_turn(route, event, record), timer=timer)
        else:
            await execution.failed(record, None, unreadable, 1, timer)
