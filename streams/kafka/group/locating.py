"""The coordinator of a group: the member's own connection to it, looked for again when it moves or falls silent.

On the loop of the client. The connection is the member's own, because a JoinGroup waits at the broker for all others,
and a broker handles one request of a connection at a time: whatever shared it would wait too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from streams.kafka.wire.client import GROUP, WireClient
from streams.kafka.wire.codes import BrokerRefusal
from streams.kafka.wire.connection import BrokerConnection, LostConnection
from streams.kafka.wire.message import AnswerT, Request, api_name

log = logging.getLogger(__name__)

LOCATE_SECONDS: Final = 5.0
"""Seconds to find a coordinator and to connect to it. A frozen broker costs as much; then it is looked for again."""


class CoordinatorLine:
    """The connection of one member to its group's coordinator."""

    def __init__(self, client: WireClient, group_id: str) -> None:
        self._client, self._group_id = client, group_id
        self._connection: BrokerConnection | None = None
        self._locating = asyncio.Lock()  # heartbeats and the next join may both find that it is lost
        self._node = -1
        self._is_silent = False
        self.is_quiet = False
        """Whether nothing is logged: the member goes."""

    async def ready(self) -> BrokerConnection:
        """Return the connection; a new one, to the coordinator of now, if it is lost or must authenticate again soon.

        Raises ``LostConnection`` and ``BrokerRefusal``.
        """
        clock = asyncio.get_running_loop().time
        async with self._locating:
            found = self._connection
            if found is not None and found.lost is None and clock() < found.expires_at:
                return found
            self._drop()
            deadline = clock() + LOCATE_SECONDS
            self._node = await self._client.coordinator(GROUP, self._group_id, deadline)
            self._connection = await self._client.connect(self._node, deadline)
            return self._connection

    async def ask(self, request: Request[AnswerT], most: int, seconds: float) -> AnswerT:
        """Ask the coordinator, in a version of at most ``most``. Raises ``LostConnection``, also after so many seconds
        without an answer, and ``BrokerRefusal`` when it is looked for; ``forget`` has to follow."""
        connection = await self.ready()
        try:
            # A throttle time in the answer is not waited for: the broker holds the connection back by itself (KIP-219).
            # A heartbeat that it held back for too long goes over the next connection, whatever the time says.
            async with asyncio.timeout(seconds):
                return await connection.ask(request, most)
        except TimeoutError:
            raise LostConnection(f"no answer to {api_name(request)} for {seconds:g} seconds", "_TIMED_OUT") from None

    async def ask_patiently(self, request: Request[AnswerT], most: int, seconds: float, look_seconds: float) -> AnswerT:
        """``ask`` for what a broker answers late. Each ``look_seconds`` it is checked that the group is still there: a
        frozen broker keeps the connection, and the others join elsewhere."""
        watch = self._client.spawn(self._watch(look_seconds))
        try:
            return await self.ask(request, most, seconds)
        finally:
            watch.cancel()

    async def _watch(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(seconds)
            with contextlib.suppress(LostConnection, BrokerRefusal):
                if await self._client.coordinator(GROUP, self._group_id, clock() + LOCATE_SECONDS) != self._node:
                    self.forget(LostConnection("the group has another coordinator"))
                    return

    def forget(self, reason: Exception) -> None:
        """Close the connection, so that the coordinator is looked for; log that once, until it ``answers``."""
        self._drop()
        if not (self._is_silent or self.is_quiet):
            self._is_silent = True
            log.warning("group %s: its coordinator does not answer (%s); looking for it", self._group_id, reason)

    def answers(self) -> None:
        """Note an answer that was a good one."""
        if self._is_silent:
            self._is_silent = False
            log.info("group %s: its coordinator answers again", self._group_id)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
