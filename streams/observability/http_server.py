"""A small HTTP server beside an event source: metrics, and probes. Threads of its own, never the event loop's.

A client that hangs holds one thread, for ``CLIENT_SECONDS`` at most, and one whose head is larger than
``MOST_RECEIVED`` is cut off. Where there are ``MOST_CLIENTS``, the one whose request has been waited for longest makes
room for a new one; without such a one, the new one is turned away.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from errno import EADDRINUSE
from socketserver import TCPServer
from typing import Any, Final
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from streams.errors import ConfigError
from streams.observability.health import Verdict

CLIENT_SECONDS: Final = 10.0
MOST_CLIENTS: Final = 32
MOST_RECEIVED: Final = 1024 * 1024
"""Bytes of a request's head, as for the ports of pages and queries."""
_ROOM_SECONDS: Final = 1.0
"""The time for the thread of a client that is cut off to end."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


Probe = Callable[[dict[str, str]], Verdict]
"""Gets the query of the request. A ``ValueError`` is a bad request."""


def metrics_application(registry: Collector) -> Application:
    """Make the application that serves a registry, in the format that the client accepts."""
    return make_wsgi_app(registry)


class HttpServer:
    """Serves ``/metrics`` and probes at an address until ``close``, or the end of its ``with``. With a ``secret`` it
    answers only requests that have it (``Authorization: Bearer SECRET``)."""

    def __init__(self, address: str, metrics: Application, probes: Mapping[str, Probe], secret: str = "") -> None:
        host, port = parse_address(address)
        self._expected = f"Bearer {secret}".encode() if secret else b""
        self._metrics = metrics
        self._probes = probes
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            kind = type("_Server", (_BoundedServer,), {"address_family": family})
            self._server: Any = make_server(host, port, self._answer, kind, _Handler)
        except OSError as error:
            way_out = "; stop the process that has it, or name another port" if error.errno == EADDRINUSE else ""
            raise ConfigError(f"metrics cannot be served at {address}: {error.strerror or error}{way_out}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="kes-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and free the port. Clients that are being served are not waited for."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        is_let_in = not self._expected or hmac.compare_digest(_given(environ), self._expected)
        if is_let_in and path == "/metrics":
            return self._metrics(environ, start)
        probe = self._probes.get(path)
        if not is_let_in:
            status, text = "401 Unauthorized", "this is for the supervisor"
        elif probe is None:
            status, text = "404 Not Found", f"there are /metrics, {', '.join(self._probes)}"
        elif environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "use GET or HEAD"
        else:
            try:
                is_good, text = probe(dict(parse_qsl(environ.get("QUERY_STRING", ""))))
                status = "200 OK" if is_good else "503 Service Unavailable"
            except ValueError as error:
                status, text = "400 Bad Request", str(error)
        body = f"{text}\n".encode()
        start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _given(environ: dict[str, Any]) -> bytes:
    return str(environ.get("HTTP_AUTHORIZATION", "")).encode(errors="replace")


def parse_address(address: str) -> tuple[str, int]:
    """``"9100"``, ``":9100"``, ``"localhost:9100"``, ``"[::1]:9100"`` -> (host, port); without a host it is empty: all
    addresses. Raises ``ConfigError``."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65_535) or (":" in host and not host.startswith("[")):
        raise ConfigError(f"the address {address!r} is none: use HOST:PORT or PORT, as in 0.0.0.0:9100")
    return host.strip("[]"), int(port)


class _BoundedReader(io.BufferedReader):
    _received = 0

    def readline(self, size: int | None = -1) -> bytes:
        """Read a line of the head, which has its bound. The standard library has one for each line only."""
        line = super().readline(size)
        self._received += len(line)
        if self._received > MOST_RECEIVED:
            raise ConnectionError("the head is too large")
        return line


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def setup(self) -> None:
        """Take the connection."""
        super().setup()
        self.rfile = _BoundedReader(self.rfile.detach())

    def parse_request(self) -> bool:
        """Parse the head of the request, which is not waited for any more."""
        is_good = super().parse_request()
        self.server.waiting.pop(self.request, None)  # type: ignore[attr-defined]
        return is_good

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is no news."""


class _BoundedServer(ThreadingWSGIServer):
    """``waiting``: connections whose request is awaited, the longest first; no method takes two steps with it."""

    request_queue_size = 512  # with the 5 of the standard library a burst of clients keeps others out for a second

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._room = threading.BoundedSemaphore(MOST_CLIENTS)
        self.waiting: OrderedDict[socket.socket, None] = OrderedDict()
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        """Bind, without looking up the name of the address, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False) or self._make_room():
            self.waiting[request] = None
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _make_room(self) -> bool:
        """Cut off the client that has let the server wait for the longest time; ``False``: there is none."""
        try:
            longest, _ = self.waiting.popitem(last=False)
        except KeyError:
            return False
        with contextlib.suppress(OSError):  # it is closed by now
            longest.shutdown(socket.SHUT_RDWR)
        return self._room.acquire(timeout=_ROOM_SECONDS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.waiting.pop(request, None)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client is gone, or too slow."""
