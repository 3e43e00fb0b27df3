"""What is done to parked keys from outside: an operator lets first events go, and some events end their process."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from streams.core.parking import PREFIX, Queue
from streams.errors import MembershipLost, NotOwned, RecordRefused, Stopped
from streams.runtime.queries.operating import answered
from streams.runtime.queries.parked import ParkedQueue, ParkedRequest
from streams.testing.simulation.virtual_time import elapse

FIRST_PAUSE = 0.1
"""``ParkingConfig.first_retry_seconds``: a quarter of it is chance."""
MOST_DEATHS = 4
"""Processes that events of one world end."""


class ParkedOperator:
    """``asked``: first events that an operator wants to go. ``deaths``: how many processes each event has ended."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.asked = set[tuple[int, str, int]]()
        self.deaths = Counter[tuple[int, int]]()
        self.activated = dict[tuple[Any, int], float]()

    def ends(self, process: Any, event: tuple[int, int], most: int) -> bool:
        """Check whether an event, by partition and offset, ends the process that tries it, and end it."""
        world, (partition, _) = self._world, event
        now = world.loop.time()
        if self.deaths[event] >= most or self.deaths.total() >= MOST_DEATHS or now > world.plan.calm_at:
            return False
        since = now - self.activated[process, partition]
        if self.deaths[event] and since < FIRST_PAUSE * 0.7:
            world.differences.append(f"{event} ends a second process {since:.3f} s after that one has found it")
        self.deaths[event] += 1
        world.act(f"crash {process.name}", "an event ends it")
        world.loop.call_later(world.rng.choice((0.0, 0.5)), world.act, f"start {process.name}", "after its end")
        return True

    def operate(self) -> asyncio.Task[None] | None:
        """Have the first event of a queue let go: the request is put twice, to the owner of the time."""
        found = [
            (worker.partition, queue)
            for engine in self._engines()
            for worker in engine.workers.values()
            for queue in worker.timers.parked.by_name.values()
            if not queue.head.is_timer
        ]
        if not found:
            return None
        partition, queue = self._world.rng.choice(found)
        return self._world.loop.create_task(self._put(partition, queue))

    async def _put(self, partition: int, queue: Queue) -> None:
        seen = ParkedQueue.of(queue).named
        self.asked.add((partition, PREFIX + seen[0], seen[1]))
        request = ParkedRequest(group="sim", partition=partition, action="skip-head", seen=(seen,), as_letters=True)
        for _ in range(2):
            for engine in self._engines():
                try:
                    await asyncio.wait_for(answered(engine, request), 5.0)
                    break
                except (NotOwned, MembershipLost, Stopped, RecordRefused, TimeoutError):
                    continue
            await elapse(self._world.rng.choice((0.0, 0.3, 3.0)))

    def _engines(self) -> list[Any]:
        members = [member for member in self._world.members.values() if not member.task.done()]
        return [engine for member in members if (engine := member.source._run.engine) is not None]
