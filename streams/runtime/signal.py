"""A flag that tasks wait for again and again: "something changed, look again"."""

from __future__ import annotations

import anyio


class Signal:
    """``notify`` wakes everybody who waits now; without anybody waiting, the next ``wait`` returns at once."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Something changed. Cheap when it was said already."""
        self._event.set()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; ``False`` if ``timeout`` seconds passed before."""
        event = self._event
        if not event.is_set():
            if timeout is None:
                await event.wait()
            else:
                with anyio.move_on_after(max(timeout, 0)):
                    await event.wait()
        notified = event.is_set()
        if notified and self._event is event:
            self._event = anyio.Event()
        return notified


class Broadcast:
    """As ``Signal``, for several who wait: ``notify`` wakes all who wait at that moment, and nobody later."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = anyio.Event()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until notified, or until ``timeout`` seconds have passed."""
        event = self._event
        if timeout is None:
            await event.wait()
        else:
            with anyio.move_on_after(max(timeout, 0)):
                await event.wait()
