"""The kafka-python client of a membership: its IO thread, its connections, its end.

Threads: kafka-python runs one IO thread (an event loop of its own). Coroutines below run there; ``call`` and ``close``
are for all other threads. No record goes through here.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from streams.errors import BrokerUnavailable, ConfigError, StreamsError, TopicError
from streams.kafka.permissions import Right, denied
from streams.kafka.wire.kafka_python import (
    FindCoordinatorRequest,
    KafkaNetClient,
)
from streams.kafka.wire.kafka_python import errors as kafka_errors
from streams.kafka.wire.kafka_python_manager import LOST_SECONDS, REFUSED_LOGINS, ConnectionManager, IoLoop
from streams.settings.sources import checked_addresses

log = logging.getLogger(__name__)

_CARRY_CREDENTIALS = ("SaslAuthenticateRequest", "SaslBytesRequest")

T = TypeVar("T")

REQUEST_TIMEOUT_MS = 10_000
"""Milliseconds for an answer, before the connection is taken for dead. A JoinGroup has its own time, from the rebalance
timeout."""

_LOG_UNREACHABLE_AFTER = 2.0
"""Seconds without an answer after which the log says so."""


class KafkaPythonClient:
    """Connections to a cluster, and the thread that serves them.

    ``bootstrap_servers`` is a comma-separated list; ``security`` are kafka-python settings
    (``kafka_python_settings.translated``). Making one does no I/O. Raises ``ConfigError`` for addresses that are none.
    """

    def __init__(self, bootstrap_servers: str, client_id: str, security: Mapping[str, Any]) -> None:
        _quiet_kafka_python()
        self.addresses = bootstrap_servers
        settings = {
            **security,
            "bootstrap_servers": bootstrap_servers,
            "client_id": client_id,
            "proxy_url": "direct://",
            "reconnect_backoff_max_ms": 1000,  # the default of 30 s would outlast most outages
            "socket_connection_setup_timeout_ms": 2000,  # a frozen broker in the list costs each new client as much
            "socket_connection_setup_timeout_max_ms": 5000,
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "receive_message_max_bytes": 100_000_000,  # lists of transactions of large clusters
        }
        checked_addresses(bootstrap_servers)
        self.net: Any = IoLoop(**settings)
        self.manager: Any = ConnectionManager(self.net, **settings)
        self.kafka: Any = KafkaNetClient(net=self.net, manager=self.manager)
        self._closed = False
        self._asking: set[Future[Any]] | None = set()  # calls that wait; None: closed, no answer will come
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the IO thread. Repeating it is harmless."""
        self.net.start()

    def __repr__(self) -> str:
        return f"<KafkaPythonClient {self.addresses}>"

    # ------------------------------------------------------------------ for other threads

    def call(self, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """Run ``work`` on the IO thread and wait for it. ``work`` keeps to the deadline by itself, within a second.

        Raises what ``work`` raises, and ``BrokerUnavailable`` when there is no answer, also because of ``close``.
        """
        answer: Future[T] = Future()

        async def run() -> None:
            try:
                found = await work()
            except StreamsError as error:
                _fail(answer, error)
            except Exception as error:  # closed below us, kafka-python raises whatever it happens to meet
                _fail(answer, self._was_closed(error) if self._closed else error)
            else:
                with contextlib.suppress(InvalidStateError):
                    answer.set_result(found)

        with self._lock:
            if self._asking is not None:
                self._asking.add(answer)
        try:
            # Noted before it is posted: ``close`` fails all that are noted, and a call behind it is refused here.
            if self._asking is None or not self.post(run):
                raise BrokerUnavailable(f"the client of {self.addresses} is closed")
            # A second more than the work has: its own error comes first, and says what it waited for.
            return answer.result(max(0.0, deadline - time.monotonic()) + 1.0)
        except TimeoutError:
            raise BrokerUnavailable(f"no answer from {self.addresses} in time") from None
        finally:
            with self._lock:
                if self._asking is not None:
                    self._asking.discard(answer)

    def post(self, work: Callable[[], Any]) -> bool:
        """Run ``work`` (a function or a coroutine function) on the IO thread. ``False``: that thread has ended."""
        try:
            self.net.call_soon_threadsafe(work)
        except Exception:  # closed: RuntimeError; crashed: whatever it crashed with
            return False
        return True

    def close(self, timeout_seconds: float) -> None:
        """End the IO thread and all connections; calls that wait for an answer fail. Repeating it is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            self._end(time.monotonic() + timeout_seconds)
        finally:
            with self._lock:
                asking, self._asking = self._asking or set(), None
            for answer in asking:  # that came too late for the thread, or are left with it
                _fail(answer, self._was_closed())

    def _end(self, deadline: float) -> None:
        if self.net._io_thread is not None:
            closing: Future[None] = Future()

            def close_connections() -> None:
                try:
                    self.manager.close()
                finally:
                    closing.set_result(None)

            try:
                if self.post(close_connections):
                    closing.result(max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                log.warning("the Kafka client of %s did not close its connections in time", self.addresses)
            thread = self.net._io_thread
            self.net.stop(timeout_ms=max(100.0, (deadline - time.monotonic()) * 1000))
            if thread.is_alive():
                log.warning("the Kafka client of %s did not end in time; its thread is left behind", self.addresses)
                return
        self.net.close()

    def _was_closed(self, cause: BaseException | None = None) -> BrokerUnavailable:
        closed = BrokerUnavailable(f"the client of {self.addresses} was closed")
        closed.__cause__ = cause
        return closed

    # ------------------------------------------------------------------ for the IO thread

    async def connected(self, deadline: float = float("inf"), *, quiet: bool = False) -> None:
        """Wait until a broker has answered; log once that none does, unless the caller logs it (``quiet``). Raises
        what trying cannot cure, and at a deadline."""
        logged, start = False, time.monotonic()
        bootstrap = self.manager.bootstrap_async(None)
        while not bootstrap.succeeded():
            if time.monotonic() >= deadline:
                raise BrokerUnavailable(self._no_answer())
            # Looked at, not awaited: each wait with a timeout would leave a callback behind, for days if need be.
            await self.net.sleep(0.01 if time.monotonic() - start < 1 else 0.1)
            self._raise_hopeless()
            if bootstrap.failed():
                if not bootstrap.exception.retriable:
                    raise self.translated(bootstrap.exception, "connecting") from bootstrap.exception
                bootstrap = self.manager.bootstrap_async(None)
            elif time.monotonic() - self.manager.tried_at > LOST_SECONDS:
                # Seen once in hours of killed brokers: it neither ended nor tried on, beside brokers that answered.
                log.warning("no progress in connecting to %s; trying again", self.addresses)
                bootstrap = self.manager.bootstrap_anew()
            if not (logged or quiet) and time.monotonic() - start > _LOG_UNREACHABLE_AFTER:
                logged = True
                log.warning("%s; trying on", self._no_answer())
        if logged:
            log.info("broker at %s answers", self.addresses)

    def _no_answer(self) -> str:
        why = f" ({self.manager.last_failure})" if self.manager.last_failure else ""
        return f"no broker answers at {self.addresses}{why}; check the address, security.protocol and that it runs"

    def _raise_hopeless(self) -> None:
        """Raise for wrong credentials and certificates that do not fit: trying again does not cure them."""
        if (refused := self.manager.refused_login) is not None:
            raise self.translated(refused, "connecting") from refused
        cause: BaseException | None = self.manager.last_failure
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{self.addresses}: the broker's certificate is refused: {cause.verify_message}; "
                    "check ssl.ca.location and the host name in bootstrap.servers"
                ) from cause
            cause = cause.__cause__ or cause.__context__

    async def send(self, request: Any, node: int | str | None, deadline: float) -> Any:
        """Send one request and return its answer. Raises ``KafkaError`` when there is none before the deadline."""
        left = max(1.0, (deadline - time.monotonic()) * 1000)
        return await self.manager.wait_for(self.manager.send(request, node_id=node), left)

    async def coordinator(self, kind: int, key: str, deadline: float) -> int:
        """Find the broker that coordinates a group or a transactional id."""
        # Requested each time: it moves with the leader of its log, and no take-over is to wait for one that is gone.
        request = FindCoordinatorRequest(key=key, key_type=kind, coordinator_keys=[key])
        answer = await self.send(request, None, deadline)
        found = answer.coordinators[0] if answer.coordinators else answer
        raise_for(found.error_code)
        node: int = found.node_id
        if self.manager.cluster.broker_metadata(node) is None:
            await self.refreshed(deadline)
        return node

    async def refreshed(self, deadline: float) -> None:
        """Ask for the list of brokers again."""
        update = self.manager.cluster.request_update()
        await self.manager.wait_for(update, max(1.0, (deadline - time.monotonic()) * 1000))

    def translated(self, error: BaseException, step: str, needed: Sequence[Right] = ()) -> StreamsError:
        """Translate a kafka-python error into ours. Messages name the step and the addresses, never credentials."""
        where = f"{step} at {self.addresses}"
        if isinstance(error, REFUSED_LOGINS):
            return ConfigError(
                f"{where}: the broker refuses the credentials; check sasl.mechanism, sasl.username, sasl.password"
            )
        if isinstance(error, kafka_errors.AuthorizationError):
            return ConfigError(f"{where}: {denied(getattr(error, 'message', ''), needed)}")
        if isinstance(error, kafka_errors.UnsupportedVersionError):
            return ConfigError(f"{where}: the broker is too old, Kafka 3.0 or newer is needed ({error})")
        if isinstance(error, kafka_errors.UnknownTopicOrPartitionError | kafka_errors.InvalidTopicError):
            return TopicError(f"{where}: topic or partition does not exist")
        return BrokerUnavailable(f"{where}: no answer in time, the last was {type(error).__name__}")


def _fail(answer: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # set already, by the IO thread or by ``close``
        answer.set_exception(error)


def raise_for(error_code: int) -> None:
    """Raise the kafka-python error for a code that is not 0."""
    if error_code:
        raise kafka_errors.for_code(error_code)()


def _quiet_kafka_python() -> None:
    """kafka-python logs some 15 lines a second while a broker is away, and what matters is logged here.

    A level that the application gave the ``kafka`` logger, or one below it, is left as it is. But at DEBUG kafka-python
    logs each request with what is in it: credentials are taken out of these lines.
    """
    for name in ("kafka.net.connection", "kafka.protocol.parser"):
        logging.getLogger(name).addFilter(hide_credentials)
    logger = logging.getLogger("kafka")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


def hide_credentials(record: logging.LogRecord) -> bool:
    """Replace requests that carry a password or a token by their names. A filter of loggers: lets all records pass."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            type(value).__name__ if type(value).__name__ in _CARRY_CREDENTIALS else value for value in record.args
        )
    return True
