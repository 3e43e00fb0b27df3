"""The two sides of a group member: what it is (``membership``), and what its protocol (``join_protocol``) calls and
raises.

All on the client's I/O thread.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from streams.errors import StreamsError


class NoCommonStrategy(Exception):
    """The group has members that know no strategy of this one."""


class CannotJoinYet(Exception):
    """A join that failed for a reason that may pass. ``is_outage``: the client has logged it already."""

    def __init__(self, trouble: str, *, is_outage: bool) -> None:
        super().__init__(trouble)
        self.trouble, self.is_outage = trouble, is_outage


class Hooks(Protocol):
    """Calls of the client to the membership. All on the I/O thread."""

    def subscriptions(self) -> list[tuple[str, bytes]]:
        """Return (protocol, bytes) for the next JoinGroup, the preferred protocol first."""
        ...

    def lead(self, protocol: str, members: dict[str, bytes]) -> dict[str, bytes]:
        """Assign as leader: member id -> subscription to member id -> assignment, by the protocol chosen. Heartbeats
        wait for it."""
        ...

    def published(self, generation: int, member_id: str) -> None:
        """Take the JoinGroup answer: this generation is valid for commits from now on."""
        ...

    async def joined(self, generation: int, data: bytes) -> None:
        """Apply the assignment of a complete rebalance. Heartbeats go on meanwhile."""
        ...

    def voided(self, reason: str) -> None:
        """Void the membership: nothing that was owned is owned any more."""
        ...

    def woken(self) -> None:
        """Wake the main coroutine: it has something to do."""
        ...

    def fatal(self, error: StreamsError) -> None:
        """End the membership: the group refuses this member."""
        ...


class Notifier:
    """A bell that remembers one ring. On a loop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def notify(self) -> None:
        """Ring. Raises ``RuntimeError`` when the I/O thread has ended."""
        self._rung.set()

    async def __call__(self, seconds: float, /) -> None:
        """Wait for a ring, at most so long."""
        if not self._rung.is_set():
            # A wait that a timer ends, as of ``asyncio.timeout``; without its task and its error.
            timer = asyncio.get_running_loop().call_later(seconds, self._rung.set)
            try:
                await self._rung.wait()
            finally:
                timer.cancel()
        self._rung.clear()
