"""The tasks that wait for the replies to commands of one partition, by the digests of their ids."""

from __future__ import annotations

import asyncio


class AwaitedReplies:
    """On the loop. A reply that is noted wakes those that wait for it; it is not committed at that moment."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[asyncio.Future[None]]] = {}

    async def wait(self, digest: bytes, seconds: float) -> None:
        """Wait until this reply is noted, or for so many seconds."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(digest, []).append(future)
        alarm = loop.call_later(max(seconds, 0.0), _end, future)
        try:
            await future
        finally:
            alarm.cancel()
            waiting = self._waiting[digest]
            waiting.remove(future)
            if not waiting:
                del self._waiting[digest]

    def notify(self, digest: bytes) -> None:
        """Wake those that wait for this reply."""
        for future in self._waiting.get(digest, ()):
            _end(future)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
