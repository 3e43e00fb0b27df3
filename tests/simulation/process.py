"""What the parts of one member's process share, and its threads for blocking calls.

Blocking calls run in fibers: they pause before and after their effect, may lose their answer, hang for ever, or have
their effect long after everybody has stopped waiting for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from streams.runtime.bridge import DeadlinePassed

from .faults import Faults
from .membership import SimMembership
from .virtual_time import Killed

T = TypeVar("T")
FOREVER = 1e7


class Process:
    """What the parts of one member share: its life, its clock, its faults."""

    def __init__(self, world: Any, name: str) -> None:
        self.world, self.name = world, name
        self.loop, self.rng, self.fibers = world.loop, world.rng, world.fibers
        self.broker, self.group = world.broker, world.group
        self.faults: Faults = world.faults
        self.dead = False
        self.frozen_until = 0.0
        self.memberships: list[SimMembership] = []

    def pause(self, seconds: float) -> None:
        """In a fiber: take time; longer while the process is frozen, for ever when it is dead."""
        if self.dead:
            raise Killed
        self.fibers.pause(seconds)
        while True:
            if self.dead:
                raise Killed
            left = self.frozen_until - self.loop.time()
            if left <= 0:
                return
            self.fibers.pause(left)

    def send(self, seconds: float = 0.0) -> None:
        """The way to the broker, in a fiber: a request that is under way arrives, whatever becomes of its sender."""
        if self.dead:
            raise Killed
        self.fibers.pause(seconds + self.faults.one_way())
        while (left := self.broker.down_until - self.loop.time()) > 0:
            self.fibers.pause(left + self.faults.one_way())

    def travel(self) -> None:
        """The way back: waits for the process, and for the broker."""
        self.pause(self.faults.one_way())
        while (left := self.broker.down_until - self.loop.time()) > 0:
            self.pause(left + self.faults.one_way())

    def travel_times(self) -> Any:
        """The same for coroutines: how long to sleep, again and again."""
        yield self.faults.one_way()
        while True:
            now = self.loop.time()
            left = max(self.frozen_until, self.broker.down_until, now + FOREVER if self.dead else 0.0) - now
            if left <= 0:
                return
            yield left

    def note(self, what: str, partition: int) -> None:
        """A step of a move, for those who wait for it."""
        self.world.noted(self.name, what, partition)

    def measured(self, measurement: Any) -> None:
        """For the settings of its event source."""
        self.world.watch.measured(self.name, measurement)

    def kill(self) -> None:
        self.dead = True
        for membership in self.memberships:
            membership.kill()


class SimWorker:
    """``ports.Blocking``: one call at a time, in a fiber."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._jobs: deque[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any] | None] | None] = deque()
        self._running = False

    async def call(self, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        loop = self._process.loop
        future: asyncio.Future[T] = loop.create_future()
        self._put((function, args, future))
        if timeout is None:
            return await future
        timer = loop.call_later(timeout, lambda: future.done() or future.set_exception(DeadlinePassed()))
        try:
            return await future
        finally:
            timer.cancel()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        self._put((function, args, None))

    def abandon(self) -> None:
        self._put(None)

    def _put(self, job: Any) -> None:
        self._jobs.append(job)
        if not self._running:
            self._running = True
            self._process.loop.call_soon(self._process.fibers.run, self._work)

    def _work(self) -> None:
        process = self._process
        while self._jobs:
            job = self._jobs.popleft()
            if job is None:
                return  # and nothing runs afterwards: the thread has ended
            function, args, future = job
            process.pause(process.faults.switch())
            outcome: Callable[[asyncio.Future[Any]], None]
            try:
                result = function(*args)
                outcome = lambda waiting, result=result: waiting.set_result(result)  # noqa: E731
            except Exception as error:
                outcome = lambda waiting, error=error: waiting.set_exception(error)  # noqa: E731
            process.pause(process.faults.switch())
            if future is not None and not future.done():
                outcome(future)
        self._running = False
