"""An HTTP server on a thread and an event loop of its own, with bounds on what a client can make it keep."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from errno import EADDRINUSE
from typing import Any, Final

import uvicorn

from streams.errors import ConfigError
from streams.observability.http_server import parse_address
from streams.queries.bounded_protocol import REFUSALS, BoundedProtocol, BoundedServer, closing_refusals

_SHUTDOWN_SECONDS: Final = 2
_START_SECONDS: Final = 10.0


class ServerThread:
    """Serves an ASGI application at an address until ``close``. ``opened`` and ``closing`` are called on its loop.

    Raises ``ConfigError`` when the address is none, or taken, or the certificate cannot be read.
    """

    def __init__(
        self,
        address: str,
        application: Any,
        *,
        certificate: str = "",
        key: str = "",
        opened: Callable[[], None],
        closing: Callable[[], None],
    ) -> None:
        self._socket = bound_socket(address)
        self.port: int = self._socket.getsockname()[1]
        tls: dict[str, Any] = {"ssl_certfile": certificate, "ssl_keyfile": key or None} if certificate else {}
        application = closing_refusals(application, REFUSALS | {421})  # another host is meant
        config = uvicorn.Config(
            application, loop="asyncio", http=BoundedProtocol, ws="none", lifespan="off", log_config=None,
            log_level="critical", access_log=False, proxy_headers=False, server_header=False, timeout_keep_alive=5,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS, **tls,
        )  # fmt: skip
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            self._socket.close()
            raise ConfigError(f"the certificate {certificate} cannot be used: {error.strerror or error}") from error
        self._server = BoundedServer(config)
        self._opened, self._closing = opened, closing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kes-web", daemon=True)
        self._thread.start()
        self._ready.wait(_START_SECONDS)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop, and free the port. Any thread but its own; waits for some seconds at most."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has ended since
                loop.call_soon_threadsafe(self._end)
        self._thread.join(_SHUTDOWN_SECONDS + 3.0)

    def _end(self) -> None:
        self._closing()
        self._server.should_exit = True

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._ready.is_set():
                raise
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened()
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.005)
        if serving.done():
            await serving  # it could not start
        self._ready.set()
        await serving


def bound_socket(address: str) -> socket.socket:
    """Return a listening socket at ``HOST:PORT`` or ``PORT`` (of 127.0.0.1). Raises ``ConfigError``."""
    host, port = parse_address(address)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host or "127.0.0.1", port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"the monitor cannot be served at {address}: {error.strerror or error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        made.listen(64)
        made.setblocking(False)
    except OSError as error:
        made.close()
        way_out = "; stop the process that has it, or name another port" if error.errno == EADDRINUSE else ""
        raise ConfigError(f"the monitor cannot be served at {address}: {error.strerror or error}{way_out}") from error
    return made


def is_loopback(host: str) -> bool:
    """Check whether an address can be reached from this machine only. A name counts if it is ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
