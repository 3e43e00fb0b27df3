"""One member's client (``link.Link``) over our own wire. All members of a process share the thread ``kes-group``, so a
handler that blocks the application's loop does not stop heartbeats."""

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
    """``link.Link`` documents the methods. ``client`` is for this member; ``close`` ends it. ``clock`` returns the time
    of its loop."""

    def __init__(
        self, client: WireClient, settings: GroupSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._settings, self._clock = client, settings, clock
        self._protocol: JoinProtocol | None = None
        self._hooks: Hooks | None = None

    @property
    def member_id(self) -> str:
        return "" if self._protocol is None else self._protocol.member_id

    def start(self, hooks: Hooks, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._hooks = hooks
        self._client.on_crash = self._crashed
        self._client.start()
        self._client.post(main)

    def _crashed(self, error: BaseException) -> None:
        assert self._hooks is not None
        group = f"group {self._settings.group_id}"
        self._hooks.fatal(MembershipFatal(f"{group}: the thread of the membership failed: {error!r}"))

    def post(self, work: Callable[[], Any]) -> bool:
        return self._client.post(work)

    def call(self, work: Callable[[], Coroutine[Any, Any, None]], deadline: float) -> None:
        self._client.call(work, deadline)

    def close(self, timeout_seconds: float) -> None:
        self._client.close(timeout_seconds)

    def now(self) -> float:
        return self._clock()

    def notifier(self) -> Notifier:
        return _Bell()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def connected(self) -> None:
        assert self._hooks is not None
        await self._client.connected()
        self._protocol = JoinProtocol(self._hooks, self._client, self._settings)

    async def ensure_joined(self) -> None:
        assert self._protocol is not None
        await self._protocol.ensure_joined()

    def request_rejoin(self) -> None:
        if self._protocol is not None:
            self._protocol.request_rejoin()

    def stop(self) -> None:
        if self._protocol is not None:
            self._protocol.stop()

    async def leave(self, member_id: str, deadline: float) -> None:
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
