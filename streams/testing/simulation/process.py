"""The process of one simulated member: the state its parts share, and its threads for blocking calls.

Blocking calls run in fibers: they pause before and after their effect, may lose their answer, never return, or have
their effect long after the caller has stopped waiting for it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from streams.core.group_member import Holdings
from streams.errors import Stopped
from streams.metrics import Measurement
from streams.runtime.bridge import for_future
from streams.runtime.system import LoopEvents
from streams.testing.simulation.broker import Broker
from streams.testing.simulation.faults import Faults, Strike
from streams.testing.simulation.group import Group
from streams.testing.simulation.virtual_time import Fibers, Killed, VirtualTimeLoop

T = TypeVar("T")
FOREVER = 1e7


class SourceReader(Protocol):
    """A reader of a source topic, as the other processes know it."""

    @property
    def is_closed(self) -> bool: ...

    def wake(self) -> None:
        """Poll, if it does not: a topic has grown."""
        ...


class Membership(Protocol):
    """A membership of a process. ``failures``: errors of the simulation itself."""

    @property
    def member(self) -> str: ...
    @property
    def holdings(self) -> Holdings: ...
    @property
    def failures(self) -> list[BaseException]: ...

    def kill(self) -> None:
        """End it without a word to the group."""
        ...


class World(Protocol):
    """The state that all processes of one simulation share. ``inputs``: the readers of source topics, to be woken."""

    @property
    def loop(self) -> VirtualTimeLoop: ...
    @property
    def rng(self) -> random.Random: ...
    @property
    def fibers(self) -> Fibers: ...
    @property
    def broker(self) -> Broker: ...
    @property
    def group(self) -> Group: ...
    @property
    def faults(self) -> Faults: ...
    @property
    def inputs(self) -> list[SourceReader]: ...

    def noted(self, name: str, what: str, partition: int) -> None:
        """Note that a process came to this step of a move."""
        ...

    def passed(self, name: str, point: str, partition: int) -> bool:
        """Note that a process passes this point; return whether a trap there did something to it."""
        ...

    def measured(self, name: str, measurement: Measurement) -> None:
        """Take a measurement of a process's event source."""
        ...


class Watched:
    """``system.LoopWatch`` in virtual time: a loop that never stands still has nothing to be watched for."""

    def __init__(self, limit_seconds: float) -> None: ...

    def alive(self) -> bool:
        """Return ``True``, always."""
        return True

    async def run(self, events: LoopEvents | None = None) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    def stop(self) -> None:
        """Do nothing: there is nothing to stop."""


class Process:
    """The state that the parts of one member share: its life, its clock, its faults."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.loop, self.rng, self.fibers = world.loop, world.rng, world.fibers
        self.broker, self.group = world.broker, world.group
        self.faults: Faults = world.faults
        self.dead = False
        self.frozen_until = 0.0
        self.longest_wait = math.inf
        """Seconds after which it looks again whether it is still frozen: the test may thaw it."""
        self.memberships: list[Membership] = []
        self.forced: dict[str, deque[Strike]] = {}
        """Faults of the next calls, by kind."""

    def pause(self, seconds: float, until: asyncio.Future[Any] | None = None) -> None:
        """Take time, in a fiber, at most until a future is done; longer while the process is frozen, without end when
        it is dead."""
        if self.dead:
            raise Killed
        self.fibers.pause(seconds, until)
        while True:
            if self.dead:
                raise Killed
            left = self.frozen()
            if left <= 0:
                return
            self.fibers.pause(left)

    def frozen(self) -> float:
        """Seconds to wait before it looks whether it goes on; 0 or less: it does."""
        return min(self.frozen_until - self.loop.time(), self.longest_wait)

    def away(self) -> float:
        """Seconds to wait for the process and for its broker; 0 or less: both go on."""
        until = max(self.frozen_until, self.broker.down_until)
        return min(until - self.loop.time(), self.longest_wait)

    def send(self, seconds: float = 0.0) -> None:
        """Travel to the broker, in a fiber: a request that is under way arrives, whatever becomes of its sender."""
        if self.dead:
            raise Killed
        self.fibers.pause(seconds + self.faults.one_way())
        while (left := self.broker.down_until - self.loop.time()) > 0:
            self.fibers.pause(left + self.faults.one_way())

    def travel(self) -> None:
        """Travel back, in a fiber: waits for the process, and for the broker."""
        self.pause(self.faults.one_way())
        while (left := self.broker.down_until - self.loop.time()) > 0:
            self.pause(left + self.faults.one_way())

    def travel_times(self) -> Iterator[float]:
        """Yield the seconds of each sleep of the way back, for coroutines."""
        yield self.faults.one_way()
        while True:
            left = FOREVER if self.dead else self.away()
            if left <= 0:
                return
            yield left

    def at(self, point: str, partition: int = -1) -> None:
        """Pass a point in a fiber: traps spring now, and take effect at once."""
        if self.world.passed(self.name, point, partition):
            self.pause(0.0)

    def passes(self, point: str, partition: int = -1) -> None:
        """Pass a point on the loop: traps take effect later."""
        self.world.passed(self.name, point, partition)

    def strike(self, call: str, at_least: float = 0.0) -> Strike | None:
        """Return the fault of this call: one that the test demands, or one by chance."""
        forced = self.forced.get(call)
        if forced:
            return forced.popleft()
        return self.faults.strike(call, self.loop.time(), at_least)

    def note(self, what: str, partition: int) -> None:
        """Note a step of a move, for the traps that wait for it."""
        self.world.noted(self.name, what, partition)

    def measured(self, measurement: Measurement) -> None:
        """Pass a measurement on; ``metrics_handler`` of its event source."""
        self.world.measured(self.name, measurement)

    def kill(self) -> None:
        """Kill the process: nothing of it happens any more, except requests under way to the broker."""
        self.dead = True
        for membership in self.memberships:
            membership.kill()


class SimWorker:
    """``ports.Blocking``: one call at a time, in a fiber."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._jobs: deque[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any] | None] | None] = deque()
        self._running = False

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """See ``bridge.Worker``."""
        future: asyncio.Future[T] = self._process.loop.create_future()
        self._put((function, args, future))
        return await future

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """See ``bridge.Worker``."""
        self._put((function, args, None))

    def abandon(self) -> None:
        """See ``bridge.Worker``."""
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
            result: Any = None
            failure: BaseException | None = None
            try:
                result = function(*args)
            except Killed:
                raise
            except BaseException as error:  # as on a real thread
                failure = error
            process.pause(process.faults.switch())
            if future is None or future.done():
                continue
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(for_future(failure))
        self._running = False


def wait_for(process: Process, start: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None) -> T:
    """Wait as ``bridge.wait_for`` does, in a fiber."""
    loop = process.loop
    task = loop.create_task(start())
    deadline = math.inf if timeout_seconds is None else loop.time() + timeout_seconds
    while not task.done():
        if loop.time() >= deadline:
            task.cancel()
            raise TimeoutError
        process.pause(min(0.001, max(deadline - loop.time(), 0.0)))
    if task.cancelled():
        raise Stopped("the event source stops")
    return task.result()
