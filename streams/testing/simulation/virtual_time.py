"""An event loop whose clock jumps, and fibers: blocking calls that sleep in its time, one at a time.

Nothing here waits for real: when no callback is ready the clock goes to the next timer. A fiber is a thread that only
ever runs while the loop stands still for it, so there is no concurrency but the one that the seed decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio._backends._asyncio as anyio_backend

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
ORDERED = 1e-9
"""Seconds between two things that keep their order: timers of the very same moment have none."""
PATIENT_ROUNDS = 50
STANDSTILL = 20_000
"""Callbacks at one and the same moment: more is a loop that waits for nothing."""


class OutOfTime(AssertionError):
    """The simulated world did not come to its end."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only between callbacks. Tasks hash by their number: sets of them have the same order each run.

    ``main`` is cancelled when the world does not come to its end within ``limit_seconds``, and ``trouble`` gets the
    reason.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._virtual_now = 0.0
        self._limit = limit_seconds
        self._rounds = 0
        self.numbers = itertools.count()
        self.main: asyncio.Task[Any] | None = None
        self.trouble: OutOfTime | None = None
        self.hosts: dict[str, Callable[[Callable[[], Any], int], Coroutine[Any, Any, tuple[Any, Any]]]] = {}
        """Functions that make a connection, by the name of the host."""
        super().__init__(_Jump(self))
        self._clock_resolution = 1e-6  # what is due within it happens in the same round
        self.set_task_factory(_numbered)
        self.set_debug(False)  # or it complains that fibers are threads

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._virtual_now

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_: object
    ) -> tuple[Any, Any]:
        """Connect to a simulated host."""
        return await self.hosts[host](protocol_factory, port)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call ``call_soon``: callers are on the loop's thread, or in a fiber while the loop stands still."""
        return self.call_soon(callback, *args, context=context)

    def jump(self, seconds: float | None) -> None:
        """Move the clock on by ``seconds`` without work; ``None``: no timer is set either, so nothing will ever
        happen."""
        if seconds is None:
            self.give_up("nothing is ready and nothing will be: all tasks wait for one another")
        elif seconds > 0:
            self._virtual_now += seconds
            self._rounds = 0
            if self._virtual_now > self._limit:
                self.give_up(f"not done after {self._limit} simulated seconds")
        self._rounds += 1
        if self._rounds > PATIENT_ROUNDS:  # a real clock goes on; a wait for the rest of a rounding error would spin
            self._virtual_now += self._clock_resolution
        if self._rounds > STANDSTILL:
            self.give_up(f"time stands still at {self._virtual_now:.3f}: something is busy waiting")

    def give_up(self, text: str) -> None:
        """End the main task, which tidies up; the second time there is nothing left to tidy up with."""
        if self.trouble is not None:
            raise self.trouble
        self.trouble = OutOfTime(text)
        self._rounds, self._limit = 0, self._limit + 1_000.0
        assert self.main is not None
        self.main.cancel()

    def run_main(self, main: Coroutine[Any, Any, T]) -> T:
        """Run until this is done, once or again and again. Raises what it raises, and ``OutOfTime``."""
        with _numbered_scopes():
            self.main = self.create_task(main)
            try:
                result: T = self.run_until_complete(self.main)
            except asyncio.CancelledError:
                if self.trouble is not None:
                    raise self.trouble from None
                raise
            return result


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.jump(timeout)
        return []


class _NumberedTask(asyncio.Task[Any]):
    def __init__(self, coroutine: Any, *, loop: VirtualTimeLoop, **kwargs: Any) -> None:
        self.number = next(loop.numbers)
        super().__init__(coroutine, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


def _numbered(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> _NumberedTask:
    assert isinstance(loop, VirtualTimeLoop)
    return _NumberedTask(coroutine, loop=loop, **kwargs)


class _NumberedScope(anyio_backend.CancelScope):
    """A cancel scope with the same place in every set, each run."""

    number: int

    def __new__(cls, **_: Any) -> _NumberedScope:
        scope = object.__new__(cls)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        scope.number = next(loop.numbers)
        return scope

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


@contextlib.contextmanager
def _numbered_scopes() -> Iterator[None]:
    original = anyio_backend.CancelScope
    anyio_backend.CancelScope = _NumberedScope  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        anyio_backend.CancelScope = original  # type: ignore[misc]


async def elapse(seconds: float) -> None:
    """Wait for so much simulated time."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, _wake, future)
    try:
        await future
    finally:
        timer.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Killed(BaseException):
    """The fiber's process is dead, or the simulation is over."""


class Fiber:
    """A thread that runs while the loop stands still. Use ``Fibers``."""

    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._job: Callable[[], None] | None = None
        self.killed = False
        self.pausing = False
        self._pauses = 0
        self._wrong: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="fiber", daemon=True)
        self._thread.start()

    def enter(self, job: Callable[[], None] | None) -> None:
        """Run until it pauses or ends. Called on the loop's thread."""
        before, self._fibers.current = self._fibers.current, self
        if job is not None:
            self._job = job
        self._go.release()
        self._back.acquire()
        self._fibers.current = before
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            raise wrong

    def pause(self, seconds: float, until: asyncio.Future[Any] | None = None) -> None:
        """Called on the fiber's thread."""
        self.pausing = True
        self._pauses += 1
        timer = self._fibers.loop.call_later(seconds, self._resume, self._pauses)
        if until is not None:
            until.add_done_callback(partial(self._resume, self._pauses))
        self._switch()
        timer.cancel()
        if self.killed:
            raise Killed

    def _resume(self, number: int, *_: object) -> None:
        if self.pausing and number == self._pauses:  # else what ended another pause comes late
            self.pausing = False
            self.enter(None)

    def _switch(self) -> None:
        self._back.release()
        self._go.acquire()

    def _work(self) -> None:
        self._go.acquire()
        while (job := self._job) is not None:
            self._job = None
            try:
                job()
            except Killed:
                pass
            except BaseException as error:  # a mistake of the simulation: raised on the loop, or all would stand still
                self._wrong = error
            self._fibers.idle.append(self)
            self._switch()
        self._back.release()

    def kill(self) -> None:
        """End what it is doing. On the loop's thread (or when the loop is gone)."""
        self.killed = True
        self.pausing = False
        while self not in self._fibers.idle:
            self.enter(None)

    def end(self) -> None:
        self._job = None
        self.enter(None)
        self._thread.join(10)


class Fibers:
    """All fibers of one simulation."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.loop = loop
        self.current: Fiber | None = None
        self.idle: list[Fiber] = []
        self._all: list[Fiber] = []

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job`` in a fiber; returns when it pauses for the first time, or ends."""
        if self.idle:
            fiber = self.idle.pop()
        else:
            fiber = Fiber(self)
            self._all.append(fiber)
        fiber.enter(job)

    def pause(self, seconds: float, until: asyncio.Future[Any] | None = None) -> None:
        """Sleep in virtual time, or until a future is done. In a fiber only."""
        assert self.current is not None, "a blocking call was made on the loop"
        self.current.pause(seconds, until)

    def close(self) -> None:
        for fiber in self._all:
            if fiber not in self.idle:
                fiber.kill()
        for fiber in self._all:
            fiber.end()


def run(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]], limit_seconds: float) -> T:
    """Run a coroutine on a loop of its own, in virtual time."""
    loop = VirtualTimeLoop(limit_seconds)
    try:
        return loop.run_main(main(loop))
    finally:
        loop.close()
