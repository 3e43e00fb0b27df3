"""A client of a cluster for everything that is no transaction and no live reading: membership, take-over, tools.

Threads: coroutines below run on a loop, that of ``io_thread.IoThread`` unless another one is given; ``call`` and
``close`` are for all other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Final, Self, TypeVar
from weakref import WeakSet

from streams.errors import BrokerUnavailable, StreamsError
from streams.kafka.permissions import Right
from streams.kafka.wire.codes import BrokerRefusal, Code, raise_for
from streams.kafka.wire.connection import BrokerConnection, LostConnection, connect
from streams.kafka.wire.explaining import explained, plain
from streams.kafka.wire.io_thread import IoThread
from streams.kafka.wire.lines import CLOSED, HOPELESS, Address, Connect, Lines, address_of, is_hopeless, until_deadline
from streams.kafka.wire.message import AnswerT, Request
from streams.kafka.wire.schemas.find_coordinator import FindCoordinatorRequest
from streams.kafka.wire.schemas.metadata import MetadataRequest, MetadataResponse
from streams.kafka.wire.security import PLAINTEXT, Security
from streams.settings.sources import checked_addresses

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP: Final = 0
TRANSACTION: Final = 1
"""Kinds of coordinators."""
CLOSE_SECONDS: Final = 2.0
"""Seconds for the end of connections, unless the caller sets another time."""
LARGEST_ANSWER: Final = 100_000_000
"""Bytes of an answer, at most: lists of transactions of large clusters."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2
"""Seconds between two tries of one request: the first pause, and the longest, each twice as long as the one before."""
_LOG_UNREACHABLE_AFTER = 2.0
"""Seconds without an answer after which the log says so."""
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 1.0, 10.0
"""Seconds for one look for a broker: the first, and the longest, each longer by a half; it may only be slow."""
_ADVICE = "check the address, security.protocol and that it runs"
_METADATA = 4  # the least version that makes no topic
_UNKNOWN_BROKER, _TIMED_OUT = "_UNKNOWN_BROKER", "_TIMED_OUT"
_PATIENT = Code.UNSTABLE_OFFSET_COMMIT, Code.CONCURRENT_TRANSACTIONS


class WireClient:
    """Connections to a cluster, and the loop that serves them.

    ``bootstrap_servers`` is a comma-separated list. ``loop``: that of a simulation, in place of the thread of the
    process. ``connecting`` makes connections, in place of sockets. Making a client does no I/O. Raises ``ConfigError``
    for addresses that are none.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        client_id: str,
        security: Security = PLAINTEXT,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        connecting: Connect | None = None,
    ) -> None:
        checked_addresses(bootstrap_servers)
        self.addresses = bootstrap_servers
        self.on_crash: Callable[[BaseException], None] | None = None
        """Called on the I/O thread when that ends by an error."""
        self._bootstrap = [address_of(part) for part in bootstrap_servers.split(",")]
        self._connect = connecting or partial(
            connect, client_id=client_id, security=security, needed={}, largest_answer=LARGEST_ANSWER
        )
        self._loop = loop
        self._thread: IoThread | None = None
        self._lines = Lines(self._connect)
        self._own: WeakSet[BrokerConnection] = WeakSet()  # of callers
        self._brokers: dict[int, Address] = {}
        self._any: Address | None = None  # the broker that has questions for any of them
        self._turn = -1
        self._is_stale = False  # the brokers may be other ones by now
        self._is_reported = False  # the log says that no broker answers
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._asking: set[Future[Any]] | None = set()  # calls that wait; None: closed, no answer will come
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the I/O thread, or take part in that of the process. Repeating it is harmless, and cures a client whose
        thread has failed. Raises ``ConfigError`` in a child of the process that started it."""
        with self._lock:
            former = self._thread
            if self._closed or (self._loop is not None and (former is None or former.is_alive())):
                return
            if former is not None:
                former.check()
                former.release(self._crashed, 0.0)
                # What belongs to the loop that is gone.
                self._lines, self._own, self._any, self._tasks = Lines(self._connect), WeakSet(), None, set()
            self._thread = IoThread.acquire(self._crashed)
            self._loop = self._thread.loop

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WireClient {self.addresses}>"

    # ------------------------------------------------------------------ for other threads

    def call(self, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """Run ``work`` on the loop and wait for it. ``work`` keeps to the deadline (``time.monotonic``) by itself,
        within a second.

        Raises what ``work`` raises, and ``BrokerUnavailable`` when there is no answer, also because of ``close``.
        """
        if self._thread is not None:
            self._thread.check()
        if self._is_on_loop():
            raise RuntimeError("a blocking call on the loop that is to answer it; await the coroutine")
        answer: Future[T] = Future()

        async def run() -> None:
            try:
                found = await work()
            except StreamsError as error:
                _fail(answer, error)
            except asyncio.CancelledError:  # by ``close``
                _fail(answer, self._was_closed())
                raise
            except Exception as error:  # closed below us, it may meet whatever it happens to meet
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
                raise BrokerUnavailable(f"the client of {self.addresses} is closed, or was never started")
            # A second more than the work has: its own error comes first, and says what it waited for.
            return answer.result(max(0.0, deadline - time.monotonic()) + 1.0)
        except TimeoutError:
            raise BrokerUnavailable(f"no answer from {self.addresses} in time") from None
        finally:
            with self._lock:
                if self._asking is not None:
                    self._asking.discard(answer)

    def ask(
        self,
        step: str,
        deadline: float,
        attempt: Callable[[], Awaitable[T]],
        *,
        needed: Sequence[Right] = (),
    ) -> T:
        """Connect (``connected``), and ``attempt`` it ``until`` it works. Raises as ``call`` does."""

        async def work() -> T:
            await self.connected(deadline)
            return await self.until(deadline, step, attempt, needed)

        return self.call(work, deadline)

    def post(self, work: Callable[[], Any]) -> bool:
        """Run ``work`` (a function or a coroutine function) on the loop. ``False``: it is closed, or not started."""
        return not self._closed and self._hand_over(self._run, work)

    def _hand_over(self, step: Callable[..., object], *work: Callable[[], Any]) -> bool:
        if self._loop is None or (self._thread is not None and not self._thread.is_alive()):
            return False
        try:
            self._loop.call_soon_threadsafe(step, *work)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Close all connections and leave the I/O thread; calls that wait for an answer fail, coroutines under way are
        cancelled. Repeating it is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._end(time.monotonic() + timeout_seconds)
        finally:
            with self._lock:
                asking, self._asking = self._asking or set(), None
            for answer in asking:  # that came too late for the loop, or are left with it
                _fail(answer, self._was_closed())

    def _end(self, deadline: float) -> None:
        if self._is_on_loop():
            self._shut()
        elif self._loop is not None:
            closing: Future[None] = Future()

            async def ended() -> None:
                try:
                    await asyncio.wait([*self._shut(), asyncio.ensure_future(asyncio.sleep(0))])
                finally:
                    closing.set_result(None)

            try:
                if self._hand_over(lambda: asyncio.ensure_future(ended())):
                    closing.result(max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                log.warning("the Kafka client of %s did not close its connections in time", self.addresses)
        if self._thread is not None and not self._thread.release(self._crashed, max(0.1, deadline - time.monotonic())):
            log.warning("the Kafka client of %s did not end in time; its thread is left behind", self.addresses)

    def _is_on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _was_closed(self, cause: BaseException | None = None) -> BrokerUnavailable:
        closed = BrokerUnavailable(f"the client of {self.addresses} was closed")
        closed.__cause__ = cause
        return closed

    # ------------------------------------------------------------------ for the loop

    def brokers(self) -> Mapping[int, Address]:
        """Return host and port of each broker; empty until one has answered (``connected``)."""
        return self._brokers

    def spawn(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Run a coroutine beside the caller's. ``close`` cancels it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def connected(self, deadline: float = math.inf) -> None:
        """Wait until a broker has answered; log once in an outage that none does. Raises what trying cannot cure, and
        at a deadline."""
        if self._brokers and self._any is not None and self._lines.get(self._any).is_live():
            return
        clock = asyncio.get_running_loop().time
        start, pause, patience = clock(), _FIRST_PAUSE, _LOOK_SECONDS
        while True:
            try:
                await self.refreshed(min(deadline, clock() + patience))
                break
            except LostConnection as failure:
                if is_hopeless(failure):
                    raise self.translated(failure, "connecting") from failure
                reasons = self._lines.failure()
                last = LostConnection(reasons) if reasons else failure
            said = f"no broker answers at {self.addresses} ({plain(str(last), self.addresses)})"
            if clock() + pause >= deadline:
                raise BrokerUnavailable(f"{said}; {_ADVICE}") from last
            if not self._is_reported and clock() - start > _LOG_UNREACHABLE_AFTER:
                self._is_reported = True
                log.warning("%s; %s; trying on", said, _ADVICE)
            await asyncio.sleep(pause)
            pause, patience = min(pause * 2, _LONGEST_PAUSE), min(patience * 1.5, _LONGEST_LOOK_SECONDS)
        if self._is_reported:
            self._is_reported = False
            log.info("broker at %s answers", self.addresses)

    async def send(
        self,
        request: Request[AnswerT],
        node: int | None,
        deadline: float,
        *,
        least: int = 0,
        most: int | None = None,
    ) -> AnswerT:
        """Send one request to a broker (``None``: any) and return its answer. ``least`` and ``most``: its versions.

        Raises ``LostConnection`` when there is no answer before the deadline (the loop's time), or for
        ``lines.REQUEST_SECONDS``: the connection is taken for dead then.
        """
        address = await (self._some_broker(deadline) if node is None else self._address_of(node, deadline))
        most = request.LAST_VERSION if most is None else most
        answer = await self._lines.get(address).ask(request, least, most, deadline)
        if isinstance(answer, MetadataResponse):
            self._note(answer)
        return answer

    async def connect(self, node: int, deadline: float) -> BrokerConnection:
        """Make a connection to a broker for the caller alone, who closes it; ``close`` closes what is left.

        Raises ``LostConnection``, also for a broker that is not known.
        """
        address = await self._address_of(node, deadline)
        try:
            async with until_deadline(deadline):
                connection = await self._connect(*address)
        except TimeoutError:
            raise LostConnection(f"{address[0]}:{address[1]}: no connection in time", _TIMED_OUT) from None
        self._own.add(connection)
        return connection

    async def coordinator(self, kind: int, key: str, deadline: float) -> int:
        """Find the broker that coordinates a group or a transactional id."""
        # Requested each time: it moves with the leader of its log, and no take-over is to wait for one that is gone.
        request = FindCoordinatorRequest(key=key, key_type=kind, coordinator_keys=[key])
        answer = await self.send(request, None, deadline, least=1)
        found = answer.coordinators[0] if answer.coordinators else answer  # before v4 it is the answer itself
        raise_for(found.error_code, found.error_message)
        if found.host:
            self._brokers[found.node_id] = found.host, found.port
        return found.node_id

    async def refreshed(self, deadline: float) -> None:
        """Ask for the list of brokers again."""
        await self.send(MetadataRequest(topics=[], allow_auto_topic_creation=False), None, deadline, least=_METADATA)

    async def until(
        self, deadline: float, step: str, attempt: Callable[[], Awaitable[T]], needed: Sequence[Right] = ()
    ) -> T:
        """Try until it works, trying cannot cure it, or the deadline passes (``BrokerUnavailable``). ``needed``: the
        rights that it takes, for messages."""
        pause, clock = _FIRST_PAUSE, asyncio.get_running_loop().time
        last: BrokerRefusal | LostConnection | None = None
        while True:
            try:
                return await attempt()
            except (BrokerRefusal, LostConnection) as error:
                if last is None or error.code != _TIMED_OUT:  # the deadline may cut a try off: that says nothing
                    last = error
                refusal = error if isinstance(error, BrokerRefusal) else None
                # A certificate is not hopeless here: it may just be renewed, on one broker after the other.
                if error.code in HOPELESS if refusal is None else not refusal.retriable:
                    raise self.translated(error, step, needed) from error
                if clock() + pause >= deadline:
                    raise self.translated(last, step) from last
                if refusal is None or refusal.stale_metadata:
                    self._is_stale = True
                # Waiting for the markers of a transaction is short, and readers stall meanwhile: no growing pause.
                patient = refusal is not None and refusal.code in _PATIENT
            await asyncio.sleep(pause)
            pause = _FIRST_PAUSE if patient else min(pause * 2, _LONGEST_PAUSE)

    def translated(self, error: BaseException, step: str, needed: Sequence[Right] = ()) -> StreamsError:
        """Translate an error below the face into ours. Messages name the step and the addresses, never credentials."""
        return explained(error, f"{step} at {self.addresses}", needed)

    async def _some_broker(self, deadline: float) -> Address:
        """Return the address of a broker that answers, the same as long as it does."""
        if self._any is not None and self._lines.get(self._any).is_live():
            return self._any
        # The configured ones at the end: all others may have moved. Another one first each time.
        self._turn += 1
        known = [*dict.fromkeys([*self._brokers.values(), *self._bootstrap])]
        at = self._turn % len(known)
        try:
            async with until_deadline(deadline):
                line = await self._lines.first_of(known[at:] + known[:at])
        except TimeoutError:
            raise LostConnection(f"no connection to any of {len(known)} addresses in time", _TIMED_OUT) from None
        self._any = line.address
        return line.address

    async def _address_of(self, node: int, deadline: float) -> Address:
        if self._is_stale or node not in self._brokers:
            try:
                # Bounded: a broker that is known may answer although the list of them cannot be fetched.
                await self.refreshed(min(deadline, asyncio.get_running_loop().time() + _LOOK_SECONDS))
            except LostConnection:
                if node not in self._brokers:
                    raise
        if node not in self._brokers:
            raise LostConnection(f"no broker {node} is known", _UNKNOWN_BROKER)
        return self._brokers[node]

    def _note(self, answer: MetadataResponse) -> None:
        if answer.brokers:  # none: one that has just started knows none
            self._brokers = {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
            self._lines.keep({*self._brokers.values(), *self._bootstrap})
            self._is_stale = False

    def _run(self, work: Callable[[], Any]) -> None:
        if self._closed:  # posted too late: ``close`` fails what waits for it
            return
        found = work()
        if asyncio.iscoroutine(found):
            self.spawn(found).add_done_callback(_report)

    def _shut(self) -> list[asyncio.Task[Any]]:
        """Cancel what is under way, but for the caller, and close all connections; return the tasks that end by it."""
        tasks = [*(self._tasks - {asyncio.current_task()})]
        for task in tasks:
            task.cancel()
        self._lines.close()
        for connection in [*self._own]:
            connection.close(CLOSED)
        return tasks

    def _crashed(self, error: BaseException) -> None:
        with self._lock:
            asking = [*(self._asking or ())]
        for answer in asking:
            _fail(answer, BrokerUnavailable(f"the I/O thread of the client of {self.addresses} failed: {error!r}"))
        if self.on_crash is not None:
            self.on_crash(error)


def _fail(answer: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # set already, by the loop or by ``close``
        answer.set_exception(error)


def _report(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a step on the I/O thread failed", exc_info=error)
