"""A TCP proxy before Kafka that knows the protocol: it loses, delays, holds and doubles what a test names.

    with KafkaProxy(kafka.bootstrap_servers) as proxy:
        lost = proxy.add(Rule(apis={"EndTxn"}, on="reply", action="drop", times=1))
        ...                                     # clients connect to proxy.bootstrap_servers
        assert lost.wait_struck()               # committed, and the client does not know
        proxy.cut_off(client="bank.member-0*")  # from now on nothing of it arrives, and nothing reaches it
        proxy.restore()

It listens on one port per broker, and puts its own addresses into the answers that name brokers (Metadata,
FindCoordinator, DescribeCluster, and the leaders that Produce and Fetch point to), so that clients stay on it.
Everything else passes byte for byte. Brokers need a listener without TLS: what is encrypted cannot be read.

A request that waits in the proxy is sent on even if its sender has closed the connection meanwhile: late, as a packet
on a bad line comes late. That is how requests of processes that were killed or fenced long ago arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from streams.broker.probe import HOST, free_port
from streams.errors import ConfigError, StreamsError
from streams.testing.proxy_links import Link, PendingRequest, close, read, write
from streams.testing.proxy_rules import Action, ArmedRule, Rule, Side
from streams.testing.proxy_wire import (
    Address,
    MalformedFrame,
    RequestHeader,
    reply_correlation,
    request_header,
    with_addresses,
)

log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 5.0
_BUFFER: Final = 1 << 20
_START_SECONDS: Final = 10.0
_PORT_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class _Cut:
    client: str
    node: int | None


class KafkaProxy:
    """Stands between clients and the brokers at ``bootstrap_servers`` (``host:port``, or several with commas between),
    and all others of that cluster.

    Use it as a context manager, or call ``start()`` and ``stop()``. It works on a thread of its own; methods may be
    called from any thread. Raised: ``ConfigError`` for a wrong address, ``StreamsError`` when it cannot listen.
    """

    def __init__(self, bootstrap_servers: str) -> None:
        self._bootstrap = [_parsed(part) for part in bootstrap_servers.split(",") if part.strip()]
        if not self._bootstrap:
            raise ConfigError("bootstrap_servers is empty: give host:port of the brokers that the proxy stands before")
        self._lock = threading.Lock()
        self._rules: list[ArmedRule] = []
        self._cuts: set[_Cut] = set()
        self._ports: dict[Address, int] = {}
        self._nodes: dict[Address, int] = {}
        self._passed: Counter[str] = Counter()
        self._answered: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        self._struck: Counter[tuple[str, Side, Action]] = Counter()
        self._versions: dict[str, set[int]] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen, and return."""
        if self._thread is not None:
            raise StreamsError("the proxy is started already")
        ready: list[BaseException | None] = []
        started = threading.Event()

        def announce(error: BaseException | None) -> None:
            ready.append(error)
            started.set()

        self._thread = threading.Thread(target=self._run, args=(announce,), name="kafka-proxy", daemon=True)
        self._thread.start()
        started.wait(_START_SECONDS)
        if not ready or ready[0] is not None:
            self.stop()
            raise StreamsError("the proxy cannot listen") from (ready[0] if ready else None)
        return self

    def stop(self) -> None:
        """Close all connections and end the thread. Safe to repeat."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._call(lambda: self._stopping.set())
        thread.join(_START_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` for clients, as many as the proxy was given."""
        if not self._ports:
            raise StreamsError("the proxy is not started: call start(), or use it as a context manager")
        return ",".join(f"{HOST}:{self._ports[address]}" for address in self._bootstrap)

    # -- what it does to whom -----------------------------------------------------------------------------------------

    def add(self, rule: Rule) -> ArmedRule:
        """Apply this rule from now on. When several would strike, the one that was added first does."""
        armed = ArmedRule(rule, self._forget)
        with self._lock:
            self._rules.append(armed)
        return armed

    def clear(self) -> None:
        """Release and remove all rules, and restore what is cut off."""
        with self._lock:
            rules = list(self._rules)
        for armed in rules:
            armed.release()
        self.restore()

    def cut_off(self, *, client: str = "*", node: int | None = None) -> None:
        """Cut these clients (pattern of ids) off from the broker (all, without ``node``): nothing passes any more, in
        either direction. Connections stay open, new ones can be made; what was sent arrives after ``restore``.
        """
        with self._lock:
            self._cuts.add(_Cut(client, node))

    def restore(self) -> None:
        """End every cut."""
        with self._lock:
            self._cuts.clear()
        self._call(self._wake)

    def disconnect(self, *, client: str = "*", node: int | None = None) -> None:
        """Close the connections that there are now; what is on its way is lost."""

        def close() -> None:
            for link in list(self._links):
                if self._concerns(_Cut(client, node), link):
                    link.abort()

        self._call(close)

    # -- what it has seen ---------------------------------------------------------------------------------------------

    @property
    def passed(self) -> Mapping[str, int]:
        """Name of request -> how many came."""
        with self._lock:
            return dict(self._passed)

    @property
    def answered(self) -> Mapping[str, int]:
        """Name of request -> bytes of the brokers' answers to it, as they came."""
        with self._lock:
            return dict(self._answered)

    @property
    def clients(self) -> Mapping[str, int]:
        """Client id -> how many requests came from it."""
        with self._lock:
            return dict(self._clients)

    @property
    def struck(self) -> Mapping[tuple[str, Side, Action], int]:
        """(name of request, side, action) -> how often a rule did that."""
        with self._lock:
            return dict(self._struck)

    @property
    def versions(self) -> Mapping[str, tuple[int, ...]]:
        """Name of request -> the versions that came."""
        with self._lock:
            return {name: tuple(sorted(versions)) for name, versions in self._versions.items()}

    @property
    def nodes(self) -> Mapping[int, str]:
        """Number of a broker -> its own ``host:port``, as far as answers have named it."""
        with self._lock:
            return {node: f"{host}:{port}" for (host, port), node in self._nodes.items()}

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, announce: Callable[[BaseException | None], None]) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve(announce))
        self._loop = None

    def _call(self, function: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(function)

    async def _serve(self, announce: Callable[[BaseException | None], None]) -> None:
        self._stopping, self._restored = asyncio.Event(), asyncio.Event()
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[socket.socket] = []
        self._listening = asyncio.Lock()
        try:
            for address in self._bootstrap:
                await self._listen(address)
        except OSError as error:
            announce(error)
        else:
            announce(None)
            await self._stopping.wait()
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        for link in list(self._links):
            link.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close their sockets in callbacks

    async def _listen(self, address: Address) -> int:
        """The port that stands for this broker."""
        async with self._listening:
            for attempt in range(_PORT_ATTEMPTS):
                if address in self._ports:
                    break
                port = free_port(frozenset(self._ports.values()))
                try:
                    listener = socket.create_server((HOST, port))
                except OSError:
                    if attempt == _PORT_ATTEMPTS - 1:
                        raise
                else:
                    # No asyncio.Server: what it has accepted right before it is closed is closed by nothing.
                    listener.setblocking(False)
                    asyncio.get_running_loop().add_reader(listener, self._accept, listener, address)
                    self._listeners.append(listener)
                    self._ports[address] = port
            return self._ports[address]

    def _accept(self, listener: socket.socket, address: Address) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone again
            return
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._connect(address, connection))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            connection.close()  # also when the task was cancelled before it began

        task.add_done_callback(ended)

    async def _connect(self, address: Address, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=_BUFFER)
        try:
            await self._forward(address, reader, writer)
        finally:
            writer.transport.abort()  # also when it was cancelled while it was connecting to the broker

    async def _forward(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                broker = await asyncio.open_connection(*address, limit=_BUFFER)
        except OSError:  # also its subclass TimeoutError: the broker is not there
            return
        link = Link(address, (reader, writer), broker)
        self._links.add(link)
        requests = asyncio.ensure_future(_quietly(self._requests(link)))
        replies = asyncio.ensure_future(_quietly(self._replies(link)))
        try:
            await asyncio.wait({requests, replies}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            requests.cancel()
            replies.cancel()
            try:
                await asyncio.gather(requests, replies, return_exceptions=True)
                for _, side in (link.client, link.broker):
                    await close(side)
            finally:
                link.abort()  # also when the proxy was stopped in between

    # -- two directions -----------------------------------------------------------------------------------------------

    async def _requests(self, link: Link) -> None:
        reader, _ = link.client
        _, writer = link.broker
        while (frame := await read(reader)) is not None:
            header = request_header(frame)
            link.client_id = header.client_id
            with self._lock:
                self._passed[header.name] += 1
                self._clients[header.client_id] += 1
                self._versions.setdefault(header.name, set()).add(header.version)
            armed = self._strike("request", header, link)
            waiting = PendingRequest(header)
            if armed is not None:
                if armed.rule.action == "drop":
                    link.abort()
                    return
                if armed.rule.action == "double":
                    waiting.expected, waiting.deliver = 2, 1 if armed.rule.answer == "first" else 2
                await self._pause(armed, len(frame))
            await self._passage(link)
            link.waiting[header.correlation] = waiting
            for _ in range(waiting.expected):
                write(writer, frame)
            await writer.drain()

    async def _replies(self, link: Link) -> None:
        reader, _ = link.broker
        _, writer = link.client
        while (frame := await read(reader)) is not None:
            waiting = link.waiting.get(reply_correlation(frame))
            copies = 1
            if waiting is not None:
                waiting.seen += 1
                with self._lock:
                    self._answered[waiting.header.name] += len(frame)
                if waiting.seen == waiting.expected:
                    del link.waiting[waiting.header.correlation]
                if waiting.seen != waiting.deliver:
                    continue
                frame = await self._translated(waiting.header, frame)
                armed = self._strike("reply", waiting.header, link)
                if armed is not None:
                    if armed.rule.action == "drop":
                        link.abort()
                        return
                    copies = 2 if armed.rule.action == "double" else 1
                    await self._pause(armed, len(frame))
            await self._passage(link)
            if not writer.is_closing():  # if so, requests of this client may still wait to be sent
                for _ in range(copies):
                    write(writer, frame)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()

    def _strike(self, on: Side, header: RequestHeader, link: Link) -> ArmedRule | None:
        with self._lock:
            rules, node = list(self._rules), self._nodes.get(link.address)
        for armed in rules:
            if armed.strikes(on, header, node):
                with self._lock:
                    self._struck[header.name, on, armed.rule.action] += 1
                log.debug("%s of %s, %s: %s", header.name, header.client_id, on, armed.rule.action)
                return armed
        return None

    async def _pause(self, armed: ArmedRule, size: int) -> None:
        if armed.rule.action == "delay":
            await asyncio.sleep(armed.draw_seconds())
        elif armed.rule.action == "slow":
            await asyncio.sleep(size / armed.rule.bytes_per_second)
        elif armed.rule.action == "hold":
            released = asyncio.Event()
            armed.on_release(lambda: self._call(released.set))
            await released.wait()

    async def _passage(self, link: Link) -> None:
        """Wait while this connection is cut off."""
        while True:
            restored = self._restored
            with self._lock:
                if not any(self._concerns(cut, link) for cut in self._cuts):
                    return
            await restored.wait()

    def _wake(self) -> None:
        restored, self._restored = self._restored, asyncio.Event()
        restored.set()

    def _concerns(self, cut: _Cut, link: Link) -> bool:
        return (cut.node is None or self._nodes.get(link.address) == cut.node) and fnmatch.fnmatchcase(
            link.client_id, cut.client
        )

    async def _translated(self, header: RequestHeader, reply: bytes) -> bytes:
        """The reply with our addresses. Twice, because a broker that is new to us needs a port first."""
        named: dict[Address, int] = {}

        def note(node: int, address: Address) -> Address:
            named[address] = node
            return address

        with_addresses(header.api, header.version, reply, note)
        if not named:
            return reply
        for address, node in named.items():
            await self._listen(address)
            if node >= 0:
                with self._lock:
                    self._nodes[address] = node
        return with_addresses(header.api, header.version, reply, lambda _, address: (HOST, self._ports[address]))

    def _forget(self, armed: ArmedRule) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._rules.remove(armed)


async def _quietly(pump: Coroutine[Any, Any, None]) -> None:
    try:
        await pump
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # one of the two has gone
    except MalformedFrame as error:
        log.warning("proxy: a connection is closed: %s", error)


def _parsed(address: str) -> Address:
    host, _, port = address.strip().rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"bootstrap_servers: {address!r} is not host:port")
    return host.strip("[]"), int(port)
