"""One connection to one broker, on the event loop: frames, correlation, TLS, SASL, and the versions the broker speaks.

Answers come in the order of the requests, because Kafka handles one request of a connection at a time. A connection
that got an answer it cannot make sense of is closed, and so is one whose caller gave up: no late answer ever meets a
new request.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from streams.kafka.wire.codec import MalformedAnswer, decode_answer, encode
from streams.kafka.wire.message import AnswerT, Request, api_name, is_flexible
from streams.kafka.wire.messages import LEAST_VERSIONS
from streams.kafka.wire.sasl import Credentials, SaslFailure
from streams.kafka.wire.schemas.api_versions import ApiVersionsRequest
from streams.kafka.wire.schemas.sasl_authenticate import SaslAuthenticateRequest
from streams.kafka.wire.schemas.sasl_handshake import SaslHandshakeRequest
from streams.kafka.wire.security import Security

CONNECT_SECONDS: Final = 10.0
"""Seconds for one connection, with TLS, versions and login."""
LARGEST_ANSWER: Final = 16 * 1024 * 1024
"""Bytes of an answer, at most, unless the caller expects more. Answers to a producer are small, so a larger length is
garbage (another program's port)."""
SESSION_SHARE: Final = 0.85
"""Share of a session's lifetime (KIP-368) after which a connection is replaced, between two transactions. A broker
closes connections whose session is over."""
_API_VERSIONS: Final = 3  # all brokers from 2.4 on take it, and it has the finalized features


EncodedRequest = tuple[int, int, Sequence[bytes]]
"""Key and version of a request, and its body in parts."""


class LostConnection(ConnectionError):
    """A broker that cannot be reached, or can no longer. ``code``: librdkafka's name of the error."""

    def __init__(self, reason: str, code: str = "_TRANSPORT") -> None:
        super().__init__(reason)
        self.code = code


class BrokerConnection(asyncio.Protocol):
    """An open connection. On the loop. ``connect`` makes one."""

    def __init__(self, address: str, client_id: str, largest_answer: int = LARGEST_ANSWER) -> None:
        self._address = address
        self._largest_answer = largest_answer
        self._is_retired = False
        self._client_id = client_id.encode()
        self._buffer = bytearray()
        self._waiting: deque[tuple[int, asyncio.Future[bytes]]] = deque()
        self._number = 0
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self.versions: Mapping[int, tuple[int, int]] = {}
        """The lowest and the highest version that the broker takes, by the key of the request."""
        self.features: Mapping[str, int] = {}
        """The finalized levels of the cluster's features."""
        self.expires_at = math.inf
        """The loop's time at which the connection is to be replaced: its session must authenticate again."""
        self.lost: LostConnection | None = None
        self.received_at = -math.inf
        """The loop's time at which the last bytes came."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. asyncio calls this."""
        self._transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """Give each complete frame to the request that waits for it. asyncio calls this."""
        buffer = self._buffer
        buffer += data
        self.received_at = self._loop.time()
        while len(buffer) >= 4:
            size = int.from_bytes(buffer[:4], "big", signed=True)
            if not 4 <= size <= self._largest_answer:
                self._end(f"a frame of {size} bytes is no answer of Kafka: is it the right port?")
                return
            if len(buffer) < size + 4:
                return
            frame = bytes(memoryview(buffer)[4 : size + 4])
            del buffer[: size + 4]
            if not self._answered(frame):
                return

    def _answered(self, frame: bytes) -> bool:
        """Give a frame to the request that waits for it. ``False``: there is none."""
        # Answers come in the order of the requests. Another number is not skipped: all later answers would meet the
        # wrong requests.
        if not self._waiting or int.from_bytes(frame[:4], "big", signed=True) != self._waiting[0][0]:
            self._end("an answer to a request that was not made")
            return False
        _, future = self._waiting.popleft()
        if not future.done():  # its caller was cancelled
            future.set_result(frame)
        if self._is_retired and not self._waiting:
            self.close()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the requests that wait for an answer. asyncio calls this."""
        if (
            isinstance(exc, ssl.SSLError) and self.lost is None
        ):  # it refuses our certificate, when the handshake is over
            self.lost = self._failure(f"TLS failed: {exc.reason or exc}", "_SSL")
            self.lost.__cause__ = exc
        self._end(str(exc or "the broker closed the connection"))

    def call(self, key: int, version: int, parts: Sequence[bytes], *, flexible: bool = True) -> asyncio.Future[bytes]:
        """Send a request at once. The result is the frame of the answer, or ``LostConnection``."""
        return self.calls([(key, version, parts)], flexible=flexible)[0]

    def calls(self, requests: Sequence[EncodedRequest], *, flexible: bool = True) -> list[asyncio.Future[bytes]]:
        """Send requests at once, in this order, by one write. The results are as those of ``call``."""
        futures: list[asyncio.Future[bytes]] = [self._loop.create_future() for _ in requests]
        if self.lost is not None or self._transport is None:
            for future in futures:
                future.set_exception(LostConnection(str(self.lost)))
            return futures
        pieces: list[bytes] = []
        for (key, version, parts), future in zip(requests, futures, strict=True):
            self._number = (self._number + 1) & 0x7FFFFFFF
            head = struct.pack(">hhih", key, version, self._number, len(self._client_id)) + self._client_id
            if flexible:
                head += b"\0"
            pieces += (struct.pack(">i", len(head) + sum(map(len, parts))), head, *parts)
            self._waiting.append((self._number, future))
        self._transport.writelines(pieces)
        return futures

    async def ask(self, request: Request[AnswerT], most: int, least: int = 0) -> AnswerT:
        """Send a request in the highest version that both sides take, at most ``most`` and at least ``least``.

        Returns the answer. Raises ``LostConnection``, also for an answer that cannot be decoded.
        """
        return await self._ask(request, self.version_of(type(request), most, least))

    def version_of(self, kind: type[Request[Any]], most: int, least: int = 0) -> int:
        """Return the highest version that both sides take, at most ``most`` and at least ``least``. Raises
        ``LostConnection``: there is none."""
        lowest, highest = self.versions.get(kind.API_KEY, (0, -1))
        version, least = min(most, highest, kind.LAST_VERSION), max(lowest, least, kind.FIRST_VERSION)
        if version < least:
            above = f" in version {least} or above" if highest >= 0 and least else ""
            raise self._failure(f"the broker does not take {kind.__name__}{above}", "UNSUPPORTED_VERSION")
        return version

    def close(self, reason: str = "the connection was closed here") -> None:
        """Close at once, whatever is under way."""
        self._end(reason)

    def retire(self) -> None:
        """Close as soon as all requests under way have their answers. No further one may be sent."""
        self._is_retired = True
        if not self._waiting:
            self.close()

    async def introduce(self, needed: Mapping[int, tuple[str, int]] = LEAST_VERSIONS) -> None:
        """Learn which versions and features the broker has. ``needed``: name and least version, by the key of the
        request. Raises ``LostConnection``."""
        request = ApiVersionsRequest(client_software_name="kafka-event-source", client_software_version="1")
        answer = await self._ask(request, _API_VERSIONS)
        if answer.error_code:
            raise self._failure("the broker is too old: Kafka 3.0 or newer is needed", "UNSUPPORTED_VERSION")
        self.versions = {entry.api_key: (entry.min_version, entry.max_version) for entry in answer.api_keys}
        self.features = {entry.name: entry.max_version_level for entry in answer.finalized_features}
        for key, (name, least) in needed.items():
            if self.versions.get(key, (0, -1))[1] < least:
                raise self._failure(
                    f"the broker does not take {name} in version {least}: Kafka 3.0 or newer is needed",
                    "UNSUPPORTED_VERSION",
                )

    async def authenticate(self, host: str, credentials: Credentials) -> None:
        """Authenticate by SASL. Raises ``LostConnection`` (``_AUTHENTICATION``: the credentials are refused, or the
        broker does not prove that it knows them)."""

        name = credentials.mechanism
        if (await self._ask(SaslHandshakeRequest(mechanism=name), 1)).error_code:
            raise self._failure(f"the broker does not take sasl.mechanism={name}", "_AUTHENTICATION")
        from anyio import to_thread  # here, so that what reads without a login does not load it

        login = credentials.login_at(host)
        highest = self.versions[SaslAuthenticateRequest.API_KEY][1]
        try:
            # On a thread: a token is fetched by the application's function, and SCRAM hashes for milliseconds.
            message = await to_thread.run_sync(login.first)
            while True:
                answer = await self._ask(SaslAuthenticateRequest(auth_bytes=message), min(highest, 2))
                if answer.error_code:
                    raise SaslFailure("the broker refuses the credentials; check the sasl.* settings")
                following = await to_thread.run_sync(login.next, answer.auth_bytes)
                if following is None:
                    break
                message = following
        except SaslFailure as failure:
            raise self._failure(str(failure), "_AUTHENTICATION") from None
        if answer.session_lifetime_ms > 0:
            self.expires_at = self._loop.time() + answer.session_lifetime_ms / 1000 * SESSION_SHARE

    async def _ask(self, request: Request[AnswerT], version: int) -> AnswerT:
        flexible = is_flexible(type(request), version)
        frame = await self.call(request.API_KEY, version, [encode(request, version)], flexible=flexible)
        try:
            return decode_answer(request, version, frame)
        except MalformedAnswer as error:
            self._end(f"the answer to {api_name(request)} cannot be decoded: {error}")
            raise LostConnection(str(self.lost)) from error

    def _failure(self, reason: str, code: str = "_TRANSPORT") -> LostConnection:
        return LostConnection(f"{self._address}: {reason}", code)

    def _end(self, reason: str) -> None:
        if self.lost is None:
            self.lost = self._failure(reason)
        if self._transport is not None:
            self._transport.abort()  # not close, which sends what is buffered first: no request may arrive after this
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            if not future.done():
                failure = LostConnection(str(self.lost), self.lost.code)
                failure.__cause__ = self.lost.__cause__
                future.set_exception(failure)


async def connect(
    host: str,
    port: int,
    client_id: str,
    security: Security,
    *,
    needed: Mapping[int, tuple[str, int]] = LEAST_VERSIONS,
    largest_answer: int = LARGEST_ANSWER,
    kind: type[BrokerConnection] = BrokerConnection,
) -> BrokerConnection:
    """Connect to a broker, learn its versions, and authenticate. ``needed``: as of ``introduce``; by default what a
    producer needs. ``kind``: a class of connections. Raises ``LostConnection``, with the address."""
    context, address = security.tls, f"{host}:{port}"
    connection: BrokerConnection | None = None
    is_ready = False
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: kind(address, client_id, largest_answer),
                host,
                port,
                ssl=context,
                server_hostname=host if context else None,
            )
            await connection.introduce(needed)
            if security.sasl is not None:
                await connection.authenticate(host, security.sasl)
        is_ready = True
        return connection
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or error
        failure = LostConnection(f"{address}: TLS failed: {reason}", "_SSL")
        failure.__cause__ = error  # a certificate that does not fit is no outage, unlike another kind of server
    except LostConnection as error:
        failure = error
    except TimeoutError:
        failure = LostConnection(f"{address}: no connection within {CONNECT_SECONDS:g} seconds")
    except OSError as error:
        # asyncio has words of its own for it; of a name with several addresses, those of each in one text.
        is_refused = f"[Errno {errno.ECONNREFUSED}]" in str(error)
        failure = LostConnection(f"{address}: {'Connection refused' if is_refused else error.strerror or error}")
    except Exception as error:  # of a token function or of Kerberos; its text may hold a secret
        failure = LostConnection(f"{address}: authentication failed: {type(error).__name__}")
    finally:
        if connection is not None and not is_ready:
            connection.close()
    raise failure
