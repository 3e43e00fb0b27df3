"""An HTTP server for queries, on a thread and loop of its own: a slow client never touches the event source's loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import uvicorn

from streams.errors import ConfigError
from streams.queries.bounded_protocol import BoundedProtocol, BoundedServer, closing_refusals
from streams.queries.routing import LOOPBACK, checked_address
from streams.queries.service import query_app
from streams.queries.tickets import group_secret
from streams.source.event_source import EventSource

_log = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 2.0
MOST_CONNECTIONS: Final = 512


class _Joined:
    """A transport that sends what is written in one turn of the loop by one call: head and body of an answer. Each
    call gives the interpreter away, and a busy event source gives it back 5 ms later."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._written: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send this at the end of the turn."""
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        """Close it behind what was written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        written, self._written = self._written, []
        if written:
            self._transport.write(b"".join(written))


class _Connection(BoundedProtocol):
    """One connection of many readers."""

    most_connections = MOST_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection."""
        super().connection_made(cast("asyncio.Transport", _Joined(transport)))


class QueryServer:
    """Answers the queries of other processes until ``close``, or the end of its ``with``; and has the source publish
    the address. Make it before the source starts.

    ``address``: ``HOST:PORT``; port 0 is a free one. Off the loopback it needs the files of a certificate and its key
    (``QueryConfig``), whose name is ``QueryConfig.address`` then, or the host. Raises ``ConfigError``.
    """

    def __init__(self, source: EventSource[Any], address: str) -> None:
        settings = source.config.queries
        secret = group_secret(settings.secret_file)
        host, port = _parsed(address)
        has_tls = bool(settings.tls_certificate_file)
        if host not in LOOPBACK and not has_tls:
            raise ConfigError(
                f"queries are not served at {address} without TLS: set QueryConfig.tls_certificate_file and "
                "tls_key_file, or use 127.0.0.1"
            )
        if host in ("0.0.0.0", "::") and not settings.address:
            raise ConfigError(
                f"queries at {address} need a name that readers can reach: set QueryConfig.address "
                "(https://HOST:PORT), or serve at one address"
            )
        for name in ("tls_certificate_file", "tls_key_file"):
            path = getattr(settings, name)
            if has_tls and not Path(path).is_file():
                raise ConfigError(f"QueryConfig.{name} is {path!r}, which is no file")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"queries cannot be served at {address}: {error.strerror or error}; stop the process that has it, or "
                "name another port"
            ) from error
        bound = self._socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.address = settings.address or checked_address(f"{'https' if has_tls else 'http'}://{shown}:{bound}")
        source.config = msgspec.structs.replace(
            source.config, queries=msgspec.structs.replace(settings, address=self.address)
        )
        config = uvicorn.Config(
            closing_refusals(query_app(source, secret, lambda: self.address)),
            http=_Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            ssl_certfile=settings.tls_certificate_file or None,
            ssl_keyfile=settings.tls_key_file or None,
        )
        try:
            config.load()
        except OSError as error:  # of TLS, too
            self._socket.close()
            raise ConfigError(
                f"the certificate {settings.tls_certificate_file} cannot be used: {error.strerror or error}"
            ) from error
        self._server = BoundedServer(config)
        self._thread = threading.Thread(target=self._run, name="kes-queries", daemon=True)
        self._thread.start()
        _log.info("queries are answered at %s", self.address)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Stop, and free the port; requests that are under way have a second."""
        self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS)
        self._socket.close()

    def __enter__(self) -> QueryServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65_535):
        raise ConfigError(f"the address {address!r} is none: use HOST:PORT or PORT, as in 127.0.0.1:9200")
    return host.strip("[]") or "127.0.0.1", int(port)
