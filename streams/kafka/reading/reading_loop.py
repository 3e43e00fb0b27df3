"""The event loop of a thread that reads: it runs while the thread waits, and has one connection to each broker.

A thread of its own for the loop would have to be waited for twice with every answer: by it, and by the reading thread.
And what a loop on another thread receives while records are decoded here it cannot take before it gets the interpreter;
the kernel's buffers take it without.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from streams.kafka.settings import ClientSettings
from streams.kafka.wire.cluster import Cluster, SlotConnections
from streams.kafka.wire.connection import BrokerConnection
from streams.kafka.wire.security import Security
from streams.kafka.wire.settings import ProducerSettings
from streams.kafka.wire.wide_connection import WideConnection

T = TypeVar("T")


class ReadingLoop:
    """The cluster as one thread reads from it, and the connections. One thread at a time. Raises ``ConfigError``."""

    def __init__(self, settings: ClientSettings) -> None:
        security = Security.of(settings.overrides)
        limits = ProducerSettings(settings.bootstrap_servers, settings.client_id, security, 0, None)
        self.cluster = Cluster(limits, needed={}, kind=WideConnection)
        self._connections = SlotConnections(self.cluster)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Tasks that it leaves go on in the next call."""
        if not _is_loop_running():
            return self._run(work)
        # A loop of the caller's runs on this thread, and waits meanwhile. A thread has one running loop at most.
        with ThreadPoolExecutor(1, "kes-reading") as other:
            return other.submit(self._run, work).result()

    async def connection(self, node: int) -> BrokerConnection:
        """Return the connection to a broker. On the loop. Raises ``LostConnection``."""
        return await self._connections.get(node)

    def close(self) -> None:
        """Close connections and loop. Repeating it is harmless; ``run`` makes others."""
        if self._loop is not None:
            self.run(self._shut())
            self._loop.close()
            self._loop = None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # Ctrl-C: what is left of it must not run beside the next call
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(task)
            raise

    async def _shut(self) -> None:
        self._connections.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets are closed in the loop's next turn


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
