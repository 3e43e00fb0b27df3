"""The proxy without a broker: what each rule does on a line."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from streams.errors import ConfigError, StreamsError
from streams.testing import proxy as proxy_module
from streams.testing.proxy import KafkaProxy
from streams.testing.proxy_rules import ArmedRule, Rule
from streams.testing.proxy_wire import Api, request_header
from tests.unit.waiting import only_new_garbage, threads_since, wait_until

# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apis", ["EndTxn", {"endtxn"}])
def test_wrong_rules(apis: Any) -> None:
    fields: Any = {"apis": apis, "on": "answer", "action": "lose", "answer": "second", "probability": 1.5, "nth": 0}
    for name, value in {**fields, "times": -1}.items():
        with pytest.raises(ConfigError):
            Rule(**{name: value})


def struck(rule: Rule, count: int, **header: Any) -> list[int]:
    armed = ArmedRule(rule, lambda _: None)
    request = request_header(struct.pack(">hhih", header.get("api", 26), 1, 9, 3) + b"one")
    return [number for number in range(1, count + 1) if armed.strikes(rule.on, request, header.get("node"))]


def test_which_are_struck() -> None:
    assert struck(Rule(), 3) == [1, 2, 3]
    assert struck(Rule(nth=2, times=2), 5) == [2, 3]
    assert struck(Rule(apis={"Produce"}), 3) == []
    assert struck(Rule(apis={"EndTxn"}, client="o*"), 2) == [1, 2]
    assert struck(Rule(client="other"), 2) == []
    assert struck(Rule(node=1), 2) == []
    assert struck(Rule(node=1), 2, node=1) == [1, 2]


def test_chance_comes_from_the_seed() -> None:
    one, same, other = (struck(Rule(probability=0.3, seed=seed), 1000) for seed in (1, 1, 2))
    assert one == same != other
    assert 200 < len(one) < 400


# -- on a line --------------------------------------------------------------------------------------------------------


class Line:
    """A broker that answers each frame with its correlation and a count of its own."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = [self._server]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._open.append(self._server.accept()[0])
                self._threads.append(threading.Thread(target=self._answer, args=(self._open[-1],)))
                self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while (frame := read(connection)) is not None:
                self.received.append(frame)
                send(connection, frame[4:8] + b"answer %d" % len(self.received))

    def close(self) -> None:
        for part in self._open:
            with contextlib.suppress(OSError):
                part.shutdown(socket.SHUT_RDWR)
            part.close()
        for thread in self._threads:
            thread.join(30)


def read(connection: socket.socket) -> bytes | None:
    data = b""
    while (missing := 4 + int.from_bytes(data[:4], "big") * (len(data) >= 4) - len(data)) > 0:
        part = connection.recv(missing)
        if not part:
            return None
        data += part
    return data[4:]


def send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(len(frame).to_bytes(4, "big") + frame)


def ask(connection: socket.socket, frame: bytes) -> bytes | None:
    send(connection, frame)
    return read(connection)


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(30)
    return False


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return read(connection) is None
    except ConnectionError:
        return True


def connected(proxy: KafkaProxy) -> socket.socket:
    host, _, port = proxy.bootstrap_servers.partition(":")
    return socket.create_connection((host, int(port)), 30)


def request(correlation: int, api: int = Api.EndTxn, client: bytes = b"one") -> bytes:
    return struct.pack(">hhih", api, 1, correlation, len(client)) + client + b"rest"


def answer(correlation: int, number: int) -> bytes:
    return struct.pack(">i", correlation) + b"answer %d" % number


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


@pytest.fixture
def proxy(line: Line) -> Iterator[KafkaProxy]:
    with KafkaProxy(line.address) as proxy:
        yield proxy


Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(proxy: KafkaProxy) -> Iterator[Connect]:
    with contextlib.ExitStack() as sockets:
        yield lambda: sockets.enter_context(connected(proxy))


def test_passes_on(proxy: KafkaProxy, connect: Connect) -> None:
    client = connect()
    for number in (1, 2):
        assert ask(client, request(number)) == answer(number, number)
    assert ask(client, request(3, api=4711) + bytes(3_000_000)) == answer(3, 3)
    assert proxy.passed == {"EndTxn": 2, "4711": 1}
    assert proxy.versions == {"EndTxn": (1,), "4711": (1,)}
    assert proxy.struck == {}


def test_lost_reply(proxy: KafkaProxy, line: Line, connect: Connect) -> None:
    armed = proxy.add(Rule(apis={"EndTxn"}, nth=2, times=1))
    client = connect()
    assert ask(client, request(1)) == answer(1, 1)
    send(client, request(2))
    assert is_hung_up(client)
    assert len(line.received) == 2, "the broker had the request"
    assert armed.wait_struck()
    assert (armed.seen, armed.struck, proxy.struck) == (2, 1, {("EndTxn", "reply", "drop"): 1})
    assert ask(connect(), request(3)) == answer(3, 3)


def test_lost_request(proxy: KafkaProxy, line: Line, connect: Connect) -> None:
    proxy.add(Rule(apis={"EndTxn"}, on="request", action="drop"))
    client = connect()
    assert ask(client, request(1, api=Api.Produce)) == answer(1, 1)
    send(client, request(2))
    assert is_hung_up(client)
    assert len(line.received) == 1


@pytest.mark.parametrize(("api", "on"), [(Api.EndTxn, "reply"), (Api.Produce, "request")])
def test_delays(proxy: KafkaProxy, connect: Connect, api: Api, on: Any) -> None:
    client, other = connect(), connect()
    delayed = proxy.add(Rule(apis={api.name}, on=on, action="delay", seconds=3_600))
    send(client, request(api, api))
    assert delayed.wait_struck()
    assert ask(other, request(1, Api.Fetch)) is not None, "others do not wait"
    delayed.remove()
    proxy.add(Rule(apis={api.name}, on=on, action="delay", seconds=(0.05, 0.1)))
    began = time.monotonic()
    assert ask(other, request(api, api)) is not None
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("on", ["request", "reply"])
def test_holds_until_released(proxy: KafkaProxy, line: Line, connect: Connect, on: Any) -> None:
    armed = proxy.add(Rule(apis={"EndTxn"}, on=on, action="hold"))
    client = connect()
    send(client, request(1))
    assert armed.wait_struck()
    if on == "reply":
        wait_until(lambda: len(line.received) == 1)
    assert is_silent(client)
    assert len(line.received) == (on == "reply")
    armed.release()
    assert read(client) == answer(1, 1)
    assert ask(client, request(2)) == answer(2, 2), "a released rule strikes no more"


def test_held_request_arrives_though_its_sender_has_gone(proxy: KafkaProxy, line: Line, connect: Connect) -> None:
    armed = proxy.add(Rule(apis={"EndTxn"}, on="request", action="hold"))
    client = connect()
    send(client, request(1))
    assert armed.wait_struck()
    client.close()
    assert not line.received
    armed.release()
    wait_until(lambda: len(line.received) == 1)


@pytest.mark.parametrize(("which", "number"), [("first", 1), ("last", 2)])
def test_doubled_request(proxy: KafkaProxy, line: Line, connect: Connect, which: Any, number: int) -> None:
    proxy.add(Rule(apis={"EndTxn"}, on="request", action="double", times=1, answer=which))
    client = connect()
    assert ask(client, request(5)) == answer(5, number), "one of the two answers, not both"
    assert ask(client, request(6)) == answer(6, 3)
    assert line.received[0] == line.received[1]


def test_doubled_reply(proxy: KafkaProxy, line: Line, connect: Connect) -> None:
    proxy.add(Rule(apis={"EndTxn"}, action="double", times=1))
    client = connect()
    send(client, request(5))
    assert [read(client), read(client)] == [answer(5, 1)] * 2
    assert len(line.received) == 1


def test_cut_off_and_restored(proxy: KafkaProxy, line: Line, connect: Connect) -> None:
    client, other = connect(), connect()
    assert ask(client, request(1, client=b"one.a")) is not None
    proxy.cut_off(client="one.*")
    send(client, request(2, client=b"one.a"))
    assert ask(other, request(3, client=b"two")) is not None, "only the one that was named"
    assert is_silent(client)
    assert len(line.received) == 2
    proxy.restore()
    assert read(client) == answer(2, 3)
    proxy.disconnect(client="one.a")
    assert is_hung_up(client)
    assert ask(other, request(2, client=b"two")) is not None


def test_clear_releases_everything(proxy: KafkaProxy, connect: Connect) -> None:
    held = proxy.add(Rule(action="hold"))
    client = connect()
    send(client, request(1))
    assert held.wait_struck()
    proxy.cut_off()
    proxy.clear()
    assert read(client) is not None


def test_what_is_not_kafka_is_closed(proxy: KafkaProxy, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    client = connect()
    client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # how TLS begins
    assert is_hung_up(client)
    assert "without TLS" in caplog.text


def test_broker_that_is_not_there(line: Line) -> None:
    line.close()
    with KafkaProxy(line.address) as proxy, connected(proxy) as client:
        assert is_hung_up(client)


@contextlib.contextmanager
def nothing_is_forgotten() -> Iterator[None]:
    """No warning of a task or a socket that was left to the garbage collector."""
    only_new_garbage()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(each.message) for each in said] == []


def test_stopped_while_clients_come() -> None:
    """Connections that are accepted right before the end are closed."""
    with nothing_is_forgotten():
        for _ in range(20):
            line = Line()
            with KafkaProxy(line.address) as proxy, contextlib.ExitStack() as clients:
                for _ in range(3):
                    clients.enter_context(connected(proxy))
                proxy.stop()
            line.close()


def test_stopped_while_it_connects() -> None:
    """A client whose broker does not answer yet is hung up on, not forgotten."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as waiting:
        for _ in range(4):  # the queue of a server that accepts nothing is full now: the next connection hangs
            full = waiting.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(silent.getsockname())
        with nothing_is_forgotten(), KafkaProxy(f"127.0.0.1:{silent.getsockname()[1]}") as proxy:
            client = waiting.enter_context(connected(proxy))
            wait_until(lambda: bool(proxy._tasks))
        assert is_hung_up(client)


def test_stopped_while_a_link_ends(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has gone and its broker's side is about to be closed: it is, whatever comes in between."""
    ending, quietly = threading.Event(), proxy_module._quietly

    async def slow_to_end(pump: Coroutine[Any, Any, None]) -> None:
        try:
            await quietly(pump)
        except asyncio.CancelledError:
            ending.set()
            await asyncio.Event().wait()  # until it is cancelled once more: by the end of the proxy

    monkeypatch.setattr(proxy_module, "_quietly", slow_to_end)
    with nothing_is_forgotten(), KafkaProxy(line.address) as proxy:
        with connected(proxy) as client:
            assert ask(client, request(1)) == answer(1, 1)
        assert ending.wait(30)


@pytest.mark.parametrize("address", ["", "kafka", "kafka:port", ":9092"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ConfigError):
        KafkaProxy(address)


def test_life(line: Line) -> None:
    proxy = KafkaProxy(line.address)
    with pytest.raises(StreamsError):
        _ = proxy.bootstrap_servers
    before = set(threading.enumerate())
    with proxy:
        with pytest.raises(StreamsError):
            proxy.start()
        assert threads_since(before).count("kafka-proxy") == 1
    proxy.stop()
    proxy.restore()
    assert "kafka-proxy" not in threads_since(before)
