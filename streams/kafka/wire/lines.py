"""Connections to the brokers of a cluster, by their addresses: made when they are needed, and again when they are lost.

On one event loop. A broker that gives no answer holds up the requests to it, and no others.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Final

from streams.kafka.wire.connection import BrokerConnection, LostConnection
from streams.kafka.wire.message import AnswerT, Request

Address = tuple[str, int]
"""Host and port."""
Connect = Callable[[str, int], Awaitable[BrokerConnection]]
"""Makes a connection to a host and a port. Raises ``LostConnection``."""

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 1.0
"""Seconds between two tries to connect to one broker: the first pause, and the longest, each twice as long as the one
before."""
NEXT_SECONDS: Final = 0.5
"""Seconds after which a broker that has not answered yet gets company: the next address is tried beside it."""
REQUEST_SECONDS: Final = 10.0
"""Seconds in which nothing comes, no byte of an answer, before the connection is taken for dead."""
MOST_THROTTLE_SECONDS: Final = 2.0
"""Seconds, at most, for which a broker's throttle time keeps requests back. It holds the connection back by itself
(KIP-219), so a request sent early does no harm; and a time that is nonsense must not stop heartbeats."""
HOPELESS: Final = ("_AUTHENTICATION", "UNSUPPORTED_VERSION")
"""Codes of ``LostConnection`` that trying again does not cure."""
CLOSED: Final = "the client was closed"


class Line:
    """A connection to one broker. Several requests may be under way on it; the broker takes one at a time."""

    def __init__(self, address: Address, connect: Connect) -> None:
        self.address, self._connect = address, connect
        self._loop = asyncio.get_running_loop()
        self._connection: BrokerConnection | None = None
        self._connecting: asyncio.Task[BrokerConnection] | None = None
        self._pause, self._throttled_until = 0.0, -math.inf
        self.retry_at = -math.inf
        """The loop's time before which it does not connect: it has just failed."""
        self.failure: LostConnection | None = None
        """The failure of the last try to connect."""
        self.is_silent = False
        """Whether a caller waited in vain, and no answer has come since."""

    def is_live(self) -> bool:
        """Check whether there is a connection, and no doubt about it."""
        return self._current() is not None and not self.is_silent

    async def open(self) -> BrokerConnection:
        """Return the connection; a new one if there is none, it is lost, or it must authenticate again soon.

        Raises ``LostConnection``. Connecting goes on when the caller gives up.
        """
        found = self._current()
        if found is not None:
            return found
        if self._connection is not None:
            self._connection.retire()  # what is under way still gets its answers
            self._connection = None
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connected())
            self._connecting.add_done_callback(_look_at)
        connecting = self._connecting
        # Waited for, not awaited: a caller that is cancelled must not cancel the connecting, for which others wait.
        await asyncio.wait([connecting])
        if connecting.cancelled():
            raise self._lost(CLOSED)
        return connecting.result()

    async def ask(self, request: Request[AnswerT], least: int, most: int, deadline: float) -> AnswerT:
        """Send a request, in a version from ``least`` to ``most``, and return its answer.

        Raises ``LostConnection``; its code is ``_TIMED_OUT`` after the deadline. The connection is taken for dead after
        ``REQUEST_SECONDS`` of silence, whether the caller still waits or not.
        """
        try:
            async with until_deadline(deadline):
                connection = await self.open()
                while (held := self._throttled_until - self._loop.time()) > 0:
                    await asyncio.sleep(held)
                # Again: its session may have ended, or the broker gone, while the throttle time went by.
                connection = await self.open()
        except TimeoutError:
            raise self._lost("no connection in time", "_TIMED_OUT") from None
        # A task, not awaited with a limit: one caller that gives up must not end what others wait for. An answer that
        # comes late meets no new request, because each request has its number.
        asking = self._loop.create_task(connection.ask(request, most, least))
        expiry = self._loop.call_later(REQUEST_SECONDS, self._close_if_silent, connection, asking)
        asking.add_done_callback(lambda _: expiry.cancel())
        asking.add_done_callback(self._answered)
        left = None if deadline == math.inf else max(0.0, deadline - self._loop.time())
        await asyncio.wait([asking], timeout=left)
        if not asking.done():
            self.is_silent = True
            raise self._lost("no answer in time", "_TIMED_OUT")
        return asking.result()

    def retire(self) -> None:
        """Close as soon as the requests under way have their answers."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.retire()

    def close(self) -> None:
        """Close at once. What is under way fails."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close(CLOSED)

    def _current(self) -> BrokerConnection | None:
        found = self._connection
        is_good = found is not None and found.lost is None and self._loop.time() < found.expires_at
        return found if is_good else None

    async def _connected(self) -> BrokerConnection:
        try:
            await asyncio.sleep(max(0.0, self.retry_at - self._loop.time()))
            self._connection = await self._connect(*self.address)
            self._pause, self.failure, self.is_silent = 0.0, None, False
            return self._connection
        except LostConnection as failure:
            self.failure = failure
            self._pause = next_pause(self._pause)
            self.retry_at = self._loop.time() + self._pause
            raise
        finally:
            self._connecting = None

    def _close_if_silent(self, connection: BrokerConnection, asking: asyncio.Task[AnswerT]) -> None:
        # Not by the time of the whole answer: a large one over a link of a few kilobytes a second would never come.
        left = connection.received_at + REQUEST_SECONDS - self._loop.time()
        if left <= 0:
            connection.close(f"no answer within {REQUEST_SECONDS:g} seconds")
        elif not asking.done():
            self._loop.call_later(left, self._close_if_silent, connection, asking)

    def _answered(self, asking: asyncio.Task[AnswerT]) -> None:
        if asking.cancelled() or asking.exception() is not None:
            return
        self.is_silent = False
        throttle = getattr(asking.result(), "throttle_time_ms", 0) / 1000
        if throttle > 0:
            self._throttled_until = self._loop.time() + min(throttle, MOST_THROTTLE_SECONDS)

    def _lost(self, reason: str, code: str = "_TRANSPORT") -> LostConnection:
        return LostConnection(f"{self.address[0]}:{self.address[1]}: {reason}", code)


class Lines:
    """The lines of one client."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._lines: dict[Address, Line] = {}

    def get(self, address: Address) -> Line:
        """Return the line to an address. It connects when it is used."""
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = Line(address, self._connect)
        return line

    async def first_of(self, addresses: Sequence[Address]) -> Line:
        """Return the line of the first address that takes a connection. Raises ``LostConnection`` when none does.

        They are tried in this order, but for those that failed or gave no answer: they come last.
        """
        lines = [self.get(address) for address in addresses]
        left = deque(sorted(lines, key=lambda line: (line.is_silent, line.retry_at)))
        opening: dict[asyncio.Task[BrokerConnection], Line] = {}
        failures: list[str] = []
        try:
            while left or opening:
                if left:
                    line = left.popleft()
                    opening[asyncio.ensure_future(line.open())] = line
                done, _ = await asyncio.wait(
                    opening, timeout=NEXT_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    line, error = opening.pop(task), task.exception()
                    if error is None:
                        return line
                    if not isinstance(error, LostConnection) or is_hopeless(error):
                        raise error
                    failures.append(str(error))
        finally:
            for task in opening:
                task.cancel()  # it only waits; the connections are made, and are used next time
        raise LostConnection("; ".join(dict.fromkeys(failures)))

    def failure(self) -> str:
        """Return the reasons for which there is no connection, as far as it was tried."""
        return "; ".join(dict.fromkeys(str(line.failure) for line in self._lines.values() if line.failure is not None))

    def keep(self, addresses: Set[Address]) -> None:
        """Retire the lines to all other addresses: no broker is there any more."""
        for address in self._lines.keys() - addresses:
            self._lines.pop(address).retire()

    def close(self) -> None:
        """Close all at once."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()


def next_pause(pause: float) -> float:
    """Return the pause after another try in vain to connect to a broker. ``pause``: the one before, at first 0."""
    return min(max(2 * pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)


def is_hopeless(failure: LostConnection) -> bool:
    """Check for wrong credentials, a certificate that does not fit, or an old broker: the next one will refuse, too."""
    return failure.code in HOPELESS or refuses_certificate(failure.__cause__)


def refuses_certificate(cause: BaseException | None) -> bool:
    """Check whether one of the two sides does not take the certificate of the other: ours is refused by an alert."""
    return isinstance(cause, ssl.SSLCertVerificationError) or (
        isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "")
    )


def address_of(text: str) -> Address:
    """Read ``host:port``."""
    host, _, port = text.strip().rpartition(":")
    return host.strip("[]"), int(port)


def until_deadline(deadline: float) -> asyncio.Timeout:
    """Limit a block by the loop's time; infinity is no limit."""
    return asyncio.timeout_at(None if deadline == math.inf else deadline)


def _look_at(task: asyncio.Task[BrokerConnection]) -> None:
    """Take note of a failure. The callers may all have given up, and asyncio logs failures that no caller looked at."""
    if not task.cancelled():
        task.exception()
