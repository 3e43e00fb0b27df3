"""One member's client. All members of a process share the thread ``kes-group``, so a handler that blocks the
application's loop does not stop heartbeats.

All but ``start``, ``post``, ``call``, ``close`` and ``now`` belongs to that thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from streams.errors import MembershipFatal
from streams.kafka.group.group_settings import GroupSettings
from streams.kafka.group.join_protocol import JoinProtocol
from streams.kafka.group.leaving import depart
from streams.kafka.group.link import Hooks, Notifier
from streams.kafka.wire.client import WireClient


class WireLink:
    """``client`` is for this member; ``close`` ends it. ``clock`` returns the time of its loop."""

    def __init__(
        self, client: WireClient, settings: GroupSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._settings, self._clock = client, settings, clock
        self._protocol: JoinProtocol | None = None
        self._hooks: Hooks | None = None

    @property
    def member_id(self) -> str:
        """Return the broker's name for the member; empty before the first answer to a JoinGroup."""
        return "" if self._protocol is None else self._protocol.member_id

    def start(self, hooks: Hooks, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to run the main coroutine. It ends with ``close`` at the latest."""
        self._hooks = hooks
        self._client.on_crash = self._crashed
        self._client.start()
        self._client.post(main)

    def _crashed(self, error: BaseException) -> None:
        assert self._hooks is not None
        group = f"group {self._settings.group_id}"
        self._hooks.fatal(MembershipFatal(f"{group}: the thread of the membership failed: {error!r}"))

    def post(self, work: Callable[[], Any]) -> bool:
        """Run a function, or a coroutine function, on the I/O thread. ``False``: that thread has ended."""
        return self._client.post(work)

    def call(self, work: Callable[[], Coroutine[Any, Any, None]], deadline: float) -> None:
        """Run a coroutine function there, and wait for it. Raises ``BrokerUnavailable`` when it has not ended a second
        after the deadline. From other threads only."""
        self._client.call(work, deadline)

    def close(self, timeout_seconds: float) -> None:
        """End the client, its connections and what it still does. Blocks. Repeating is harmless."""
        self._client.close(timeout_seconds)

    def now(self) -> float:
        """Return the time that deadlines are of. Any thread."""
        return self._clock()

    def notifier(self) -> Notifier:
        """Make a bell for this I/O thread."""
        return _Bell()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def connected(self) -> None:
        """Wait for a broker that answers, however long; the log says that none does. Raises ``StreamsError`` for what
        trying cannot cure."""
        assert self._hooks is not None
        await self._client.connected()
        self._protocol = JoinProtocol(self._hooks, self._client, self._settings)

    async def ensure_joined(self) -> None:
        """Join if there is a reason to, and apply what comes of it; note that the member is at work. Raises
        ``NoCommonStrategy``, ``CannotJoinYet``, and a ``StreamsError`` for what trying cannot cure."""
        assert self._protocol is not None
        await self._protocol.ensure_joined()

    def request_rejoin(self) -> None:
        """Have the next ``ensure_joined`` join, and wake the main coroutine."""
        if self._protocol is not None:
            self._protocol.request_rejoin()

    def stop(self) -> None:
        """End joining and heartbeats."""
        if self._protocol is not None:
            self._protocol.stop()

    async def leave(self, member_id: str, deadline: float) -> None:
        """Leave the group as this member: the others rebalance at once. Raises what kept it from it."""
        await depart(self._client, self._settings.group_id, member_id, self._settings.static_id, deadline)


class _Bell:
    """``link.Notifier`` on asyncio."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def notify(self) -> None:
        self._rung.set()

    async def __call__(self, seconds: float, /) -> None:
        if not self._rung.is_set():
            # A wait that a timer ends, as of ``asyncio.timeout``; without its task and its error.
            timer = asyncio.get_running_loop().call_later(seconds, self._rung.set)
            try:
                await self._rung.wait()
            finally:
                timer.cancel()
        self._rung.clear()
