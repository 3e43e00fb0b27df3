"""kafka-python's connections and event loop, with the failures reported that it only logs, leaves open or waits for."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from streams.kafka.wire.kafka_python import (
    KafkaConnectionManager,
    KafkaNetSocket,
    KafkaSSLTransport,
    NetworkSelector,
    create_connection,
)
from streams.kafka.wire.kafka_python import errors as kafka_errors

_log = logging.getLogger(__name__)

REFUSED_LOGINS: Final = kafka_errors.SaslAuthenticationFailedError, kafka_errors.UnsupportedSaslMechanismError
LOST_SECONDS: Final = 30.0
"""Seconds between two tries of a bootstrap, at most: each has 6 s for its connection, and 10 s for its answer."""
_HANDSHAKE_MS: Final = 5000
"""Milliseconds for a TLS handshake."""


class _Socket(KafkaNetSocket):
    """Closes a socket that could not connect; kafka-python leaves that to the garbage collector.

    How kafka-python finds it: a subclass serves the proxy addresses of its schemes, and this one asks no proxy.
    """

    SCHEMES = ("direct",)

    async def sock_connect(self, net: Any, sock: socket.socket, sockaddr: Any, timeout_at: float | None = None) -> Any:
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise


def with_last_words(transport: Any) -> Any:
    """Have a transport of kafka-python hand over what came right before the end of the connection."""
    # It throws that away, and the answer that a login is refused is always there: wrong credentials would look like an
    # outage, and be tried forever.
    receive = transport._sock_recv

    def received() -> tuple[bytes, BaseException | None]:
        data, error = receive()
        return data, None if data else error  # the next call meets the end again

    transport._sock_recv = received
    return transport


class ConnectionManager(KafkaConnectionManager):
    """Remembers the failure of the last connection, which kafka-python only logs, and when a bootstrap last tried."""

    last_failure: BaseException | None = None
    refused_login: BaseException | None = None
    tried_at = 0.0
    """When a bootstrap tried one of the configured addresses, or began (``time.monotonic``)."""

    def bootstrap_async(self, *args: Any, **options: Any) -> Any:
        before = self._bootstrap_future
        bootstrap = super().bootstrap_async(*args, **options)
        if bootstrap is not before:
            self.tried_at = time.monotonic()
        return bootstrap

    def get_connection(self, node_id: Any, *args: Any, **options: Any) -> Any:
        if self.cluster.is_bootstrap(node_id):
            self.tried_at = time.monotonic()
        return super().get_connection(node_id, *args, **options)

    def bootstrap_anew(self) -> Any:
        """Give up a bootstrap that makes no progress, and fail what waits for it; return the future of a new one."""
        self._bootstrap_future = None
        if self.cluster.metadata_refresh_in_progress:
            self.cluster._refresh_future.failure(kafka_errors.KafkaTimeoutError("no answer"))
        for node_id in [known for known in self._conns if self.cluster.is_bootstrap(known)]:
            self._conns.pop(node_id).close(kafka_errors.KafkaConnectionError("no answer"))
        return self.bootstrap_async(None)

    async def _connect(self, node: Any, conn: Any, *args: Any, **options: Any) -> None:
        await super()._connect(node, conn, *args, **options)
        failure = conn.init_future.exception if conn.init_future.failed() else None
        self.refused_login = failure if isinstance(failure, REFUSED_LOGINS) else None

    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        build = self._build_tls if self.ssl_enabled else super()._build_transport
        try:
            transport = await build(node, timeout_at)
        except Exception as error:
            self.last_failure = error
            raise
        self.last_failure = None
        return with_last_words(transport)

    async def _build_tls(self, node: Any, timeout_at: float | None) -> Any:
        """Open a TLS connection as kafka-python does, but with a time limit; a failed handshake closes its socket."""
        options, proxy = self.config["socket_options"], self.config["proxy_url"]
        sock = await create_connection(self._net, node.host, node.port, options, proxy, timeout_at)
        transport = KafkaSSLTransport(self._net, sock, host=node.host, ssl_context=self.config["ssl_context"])
        try:
            await self.wait_for(self.call_soon(transport.handshake), _HANDSHAKE_MS)
        except BaseException as error:
            transport.abort(error)
            if isinstance(error, OSError):  # ssl.SSLError among them
                raise kafka_errors.KafkaConnectionError(f"TLS handshake failed: {error}") from error
            raise
        return transport


class IoLoop(NetworkSelector):
    """Reports its end by an error to ``on_crash``; kafka-python's loop dies silently, and heartbeats with it."""

    on_crash: Callable[[BaseException], None] | None = None

    def run_forever(self) -> None:
        try:
            super().run_forever()
        except Exception as error:
            _log.exception("the IO thread of the group member failed")
            if self.on_crash is not None:
                self.on_crash(error)
