"""A flag that tasks wait for again and again: "something changed, look again"."""

from __future__ import annotations

import asyncio


class _Waiters:
    """Tasks that wait for the same thing."""

    __slots__ = ("futures", "woken")

    def __init__(self) -> None:
        self.woken = False
        self.futures: list[asyncio.Future[None]] = []

    def wake(self) -> None:
        """Wake the waiting tasks; tasks that come later do not wait."""
        self.woken = True
        for future in self.futures:
            _end(future)

    async def wait(self, timeout: float | None) -> None:
        # A future of asyncio is enough. With 400 partitions a task is woken for a handful of events, and an event
        # object of anyio for each wait, which looks for its backend first, was a tenth of what these cost.
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self.futures.append(future)
        alarm = None if timeout is None else loop.call_later(max(timeout, 0), _end, future)
        try:
            await future
        finally:
            self.futures.remove(future)
            if alarm is not None:
                alarm.cancel()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():  # else it was woken before, or its task is cancelled
        future.set_result(None)


class Signal:
    """A flag whose ``notify`` wakes all waiting tasks; without any, the next ``wait`` returns at once. On one loop."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters = _Waiters()

    def notify(self) -> None:
        """Wake the waiting tasks, or the next one. Cheap when repeated."""
        if not self._waiters.woken:
            self._waiters.wake()

    @property
    def is_set(self) -> bool:
        """Check for a notification that no task has taken yet."""
        return self._waiters.woken

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; ``False`` if ``timeout`` seconds passed before."""
        waiters = self._waiters
        if not waiters.woken:
            await waiters.wait(timeout)
        notified = waiters.woken
        # Only the first of the tasks that were woken together takes the flag back: a later one would take a new
        # notification.
        if notified and self._waiters is waiters:
            if waiters.futures:
                self._waiters = _Waiters()
            else:  # nearly always: no other task has waited
                waiters.woken = False
        return notified


class Broadcast:
    """A ``Signal`` for several tasks: ``notify`` wakes all that wait at that moment, and none later."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters = _Waiters()

    def notify(self) -> None:
        """Wake the tasks that wait now."""
        # The exchange comes first: a task that waits again at once waits for the next notification.
        waiters, self._waiters = self._waiters, _Waiters()
        waiters.wake()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until notified, or until ``timeout`` seconds have passed."""
        await self._waiters.wait(timeout)
