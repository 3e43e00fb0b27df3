"""A connection of an HTTP server with bounds on what a client can make it keep.

uvicorn bounds neither the time for a request's head, nor the size of heads and trailers, nor the wait for a client that
does not read. Here each of them has a bound; beyond it the connection is cut off. Nor does it bound how many clients it
refuses: each takes time of the interpreter from the event source beside it, so beyond a bound they wait in the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS: Final = 5.0
"""The time for a request's head, from the connection or from its first byte."""
STALLED_SECONDS: Final = 10.0
"""The time for a client to read on, when it has let the buffer fill up, or the connection is closing."""
MOST_CONNECTIONS: Final = 128
MOST_RECEIVED: Final = 1024 * 1024
"""Bytes of one request with all that comes behind it; a body is refused far below, with an answer."""

WASTED_AT_ONCE: Final = 100
WASTED_PER_SECOND: Final = 50
"""So many connections at once may come to nothing (a wrong token, no request, no room); further ones are taken at this
rate. One costs about half a millisecond of the interpreter."""
REFUSALS: Final = frozenset({401, 403, 404, 405, 413, 429})
"""Answers to those who have no business here: their connection comes to nothing, and is closed."""
_REFUSED: Final = "is_refused"
_REPORT_SECONDS: Final = 60.0
_log = logging.getLogger(__name__)

Application = Callable[[Any, Any, Any], Awaitable[None]]


def closing_refusals(application: Application, refusals: frozenset[int] = REFUSALS) -> Application:
    """Return an ASGI application whose ``refusals`` end their connection: the next request waits for its turn again."""

    async def closing(scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] in refusals:
                scope["state"][_REFUSED] = True
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await application(scope, receive, sending)

    return closing


class Arrivals:
    """The pace at which a server takes connections: as they come, until too many came to nothing. On its loop."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at = self._reported_at = -_REPORT_SECONDS

    def taken(self) -> None:
        """Count a connection as one that comes to nothing, until it is ``served``."""
        self._count(1.0)

    def served(self) -> None:
        """Note that a connection has not come to nothing."""
        self._count(-1.0)

    async def wait(self, address: object) -> None:
        """Wait until the next connection may be taken."""
        loop = asyncio.get_running_loop()
        while (over := self._left(loop.time()) - WASTED_AT_ONCE + 1) > 0:
            if loop.time() - self._reported_at >= _REPORT_SECONDS:
                self._reported_at = loop.time()
                text = "%s: too many connections come to nothing (wrong tokens, no request): %d a second are taken now"
                _log.warning(text, address, WASTED_PER_SECOND)
            await asyncio.sleep(over / WASTED_PER_SECOND)

    def _count(self, change: float) -> None:
        now = asyncio.get_running_loop().time()
        self._level, self._at = max(0.0, self._left(now) + change), now

    def _left(self, now: float) -> float:
        return max(0.0, self._level - (now - self._at) * WASTED_PER_SECOND)


class BoundedProtocol(HttpToolsProtocol):
    """One connection, with its bounds. ``waiting``: those of its server from which a handshake, a request, or the rest
    of one, is awaited, the longest first; where there are too many connections, the first of them makes room.
    ``handshake``: the task that waits for that of TLS; ``None``: there is none."""

    most_connections = MOST_CONNECTIONS
    waiting: dict[BoundedProtocol, None]
    arrivals: Arrivals
    handshake: asyncio.Task[Any] | None = None
    _is_refused = False
    _was_served = False
    _received = 0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless there are too many, and all of them at work."""
        if len(self.connections) >= self.most_connections and not self.make_room(self.waiting):
            self._is_refused = True
            transport.abort()
            return
        self.handshake = None
        self.waiting[self] = None
        link = transport.get_extra_info("socket")
        if link is not None and link.family != socket.AF_UNIX:
            # asyncio does so for sockets that were made with the number of the protocol, which a listening one of
            # ``socket.create_server`` has not: a body would wait until the client has acknowledged the head, 40 ms.
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._await_head()

    @staticmethod
    def make_room(waiting: dict[BoundedProtocol, None]) -> BoundedProtocol | None:
        """Cut off the connection that has let the server wait for the longest time; ``None``: there is none."""
        longest = next(iter(waiting), None)
        if longest is not None:
            del waiting[longest]
            if longest.handshake is not None:
                longest.handshake.cancel()  # asyncio ends the connection then; nothing else of it is here yet
            else:
                longest.connections.discard(longest)
                longest.transport.abort()
        return longest

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if not self._is_refused:
            self.waiting.pop(self, None)
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, up to ``MOST_RECEIVED`` bytes a request."""
        if self._is_refused or self.transport.is_closing():
            return
        self._received += len(data)
        if self._received > MOST_RECEIVED:
            self.transport.abort()
            return
        if self._head_timer is None and not self._is_at_work:
            self._await_head()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Begin the request. One connection has one at a time: browsers and clients do not pipeline."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self._is_at_work:
            self.transport.abort()
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Work on the request."""
        self.waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Count anew; a connection that is to close has its time for that."""
        self._received = 0
        if not self._was_served and _REFUSED not in self.scope.get("state", {}):
            self._was_served = True
            self.arrivals.served()
        if self in self.connections:
            self.waiting.pop(self, None)
            self.waiting[self] = None
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def pause_writing(self) -> None:
        """Wait for a client that does not read, for a while."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        if self._stall_timer is not None and not self.transport.is_closing():
            self._stall_timer.cancel()
            self._stall_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, whether its client reads the rest or not."""
        super().timeout_keep_alive_handler()
        self._await_reader()

    @property
    def _is_at_work(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _await_reader(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALLED_SECONDS, self.transport.abort)


class BoundedServer(uvicorn.Server):
    """A server of such connections (``http=`` of its settings), which bounds them before their TLS handshake, too."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        kind: type[BoundedProtocol] = self.config.http_protocol_class  # type: ignore[assignment]
        alive: weakref.WeakSet[BoundedProtocol] = weakref.WeakSet()
        waiting: dict[BoundedProtocol, None] = {}
        arrivals = Arrivals()
        tls: dict[str, Any] = {"ssl_handshake_timeout": HEAD_SECONDS} if self.config.ssl else {}

        def protocol(_loop: asyncio.AbstractEventLoop | None = None) -> BoundedProtocol:
            if tls and len(alive) >= kind.most_connections:  # it is cut off before the handshake
                longest = kind.make_room(waiting)
                if longest is None:
                    raise ConnectionRefusedError
                alive.discard(longest)
            made = kind(self.config, self.server_state, self.lifespan.state)
            made.waiting, made.arrivals = waiting, arrivals
            alive.add(made)
            if tls and (accepting := asyncio.current_task()) is not None:
                made.handshake, waiting[made] = accepting, None
                accepting.add_done_callback(partial(accepted, made))
            return made

        def accepted(made: BoundedProtocol, _: asyncio.Task[Any]) -> None:
            if made.handshake is not None:  # it has failed
                waiting.pop(made, None)
                alive.discard(made)

        async def take(link: socket.socket) -> None:
            with contextlib.suppress(OSError):  # it is gone, or its handshake fails
                await loop.connect_accepted_socket(protocol, link, ssl=self.config.ssl, **tls)

        async def listen(listening: socket.socket) -> None:
            taking: set[asyncio.Task[None]] = set()
            address = listening.getsockname()
            while True:
                await asyncio.sleep(0)  # the others on this loop have their turn, also while more are waiting
                await arrivals.wait(address)
                try:
                    link, _ = await loop.sock_accept(listening)
                except OSError as error:  # no descriptor is left, say
                    _log.warning("%s: a connection cannot be taken: %s", address, error)
                    await asyncio.sleep(1.0)
                    continue
                arrivals.taken()
                task = loop.create_task(take(link))
                taking.add(task)
                task.add_done_callback(taking.discard)

        self.servers = []
        for each in sockets or ():
            each.setblocking(False)
            each.listen(64)
            self.servers.append(_Listening(loop.create_task(listen(each))))  # type: ignore[arg-type]
        self.started = True


class _Listening:
    """The part of an ``asyncio.Server`` that uvicorn needs at its end."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def close(self) -> None:
        """Take no further connection."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn waits for the connections itself."""
