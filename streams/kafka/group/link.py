"""The two sides of a group member: what it is (``membership``), and a client that speaks the protocol for it.

All but ``post``, ``call``, ``start`` and ``close`` belongs to the client's I/O thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

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


class Notifier(Protocol):
    """A bell that remembers one ring."""

    def notify(self) -> None:
        """Ring. Raises ``RuntimeError`` when the I/O thread has ended."""
        ...

    def __call__(self, seconds: float, /) -> Awaitable[None]:
        """Wait for a ring, at most so long."""
        ...


class Link(Protocol):
    """One member's client."""

    @property
    def member_id(self) -> str:
        """Return the broker's name for the member; empty before the first answer to a JoinGroup."""
        ...

    def start(self, hooks: Hooks, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to run the main coroutine. It ends with ``close`` at the latest."""
        ...

    def post(self, work: Callable[[], Any]) -> bool:
        """Run a function, or a coroutine function, on the I/O thread. ``False``: that thread has ended."""
        ...

    def call(self, work: Callable[[], Coroutine[Any, Any, None]], deadline: float) -> None:
        """Run a coroutine function there, and wait for it. Raises ``BrokerUnavailable`` when it has not ended a second
        after the deadline. From other threads only."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """End the client, its connections and what it still does. Blocks. Repeating is harmless."""
        ...

    def now(self) -> float:
        """Return the time that deadlines are of. Any thread."""
        ...

    def notifier(self) -> Notifier:
        """Make a bell for this I/O thread."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    async def connected(self) -> None:
        """Wait for a broker that answers, however long; the log says that none does. Raises ``StreamsError`` for what
        trying cannot cure."""
        ...

    async def ensure_joined(self) -> None:
        """Join if there is a reason to, and apply what comes of it; note that the member is at work. Raises
        ``NoCommonStrategy``, ``CannotJoinYet``, and a ``StreamsError`` for what trying cannot cure."""
        ...

    def request_rejoin(self) -> None:
        """Have the next ``ensure_joined`` join, and wake the main coroutine."""
        ...

    def stop(self) -> None:
        """End joining and heartbeats."""
        ...

    async def leave(self, member_id: str, deadline: float) -> None:
        """Leave the group as this member: the others rebalance at once. Raises what kept it from it."""
        ...
