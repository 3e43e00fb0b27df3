"""The door of the queries, tried over sockets, at a source that does not run."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams.cli.worker import port_behind
from streams.errors import BrokerUnavailable, ConfigError, NotOwned, StoreError
from streams.model.answers import Answer
from streams.settings.groups import QueryConfig
from tests.unit.private_kit import private
from tests.unit.waiting import PATIENCE, wait_until
from tests.unit.web_kit import raw, source_of, until_closed

from streams.queries import QueryServer, StateReader, bounded_protocol, service  # isort: skip
from streams.queries import asking as asking_module  # isort: skip
from streams.queries import server as server_module  # isort: skip
from streams.runtime.queries.commands import CommandQuestion

from streams.runtime.queries.questions import MOST_BYTES_READ, PATH, Question, Refusal, Reply, TurnRows  # isort: skip
from streams.queries.routing import Server  # isort: skip
from streams.queries.tickets import SEAL_HEADER, TICKET_HEADER, TicketRefused, check_seal, ticket  # isort: skip

SECRET = b"a secret of the group"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[QueryServer]:
    path = private(tmp_path / "secret", SECRET)
    source = source_of(queries=QueryConfig(secret_file=str(path)))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    source._run.loop = loop
    with QueryServer(source, "127.0.0.1:0") as made:
        SOURCES[port_of(made)] = source
        yield made
    SOURCES.clear()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


SOURCES: dict[int, Any] = {}
"""By the port of their server."""


def source_at(server: QueryServer) -> Any:
    return SOURCES[port_of(server)]


def port_of(server: QueryServer) -> int:
    return int(server.address.rpartition(":")[2])


def put(server: QueryServer, kind: str = "len") -> tuple[int, Any]:
    """Put a question as a reader does; the answer has to be sealed."""
    key = b"ann" if kind == "get" else None
    return put_to(server, Question(group="shop", kind=kind, partition=0, key=key))


def put_to(server: QueryServer, question: Question | CommandQuestion) -> tuple[int, Any]:
    path, body = question.path, msgspec.json.encode(question)
    asked = ticket(SECRET, "POST", path, body, server.address, time.time())
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)) as connection:
        connection.request("POST", path, body, {TICKET_HEADER: asked})
        answer = connection.getresponse()
        content = answer.read()
        check_seal(SECRET, answer.getheader(SEAL_HEADER, ""), asked, answer.status, content)
        return answer.status, msgspec.json.decode(content)


def answers(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    async def ask(self: Any, question: Question) -> Reply:
        if isinstance(found, BaseException):
            raise found
        return Reply(partition=0, positions=(), age_seconds=0.0, served_by="w-0", value=found)

    monkeypatch.setattr(service._Service, "_ask", ask)


@pytest.mark.parametrize("sent", [b"", f"POST {PATH} HTTP/1.1\r\nHost: a\r\nX: ".encode()], ids=["nothing", "half"])
def test_a_head_that_does_not_end_has_its_time(
    server: QueryServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_SECONDS", 0.3)
    with raw(port_of(server), 5.0) as connection:
        connection.sendall(sent)
        assert until_closed(connection) == b""


def test_those_without_a_ticket_take_no_place(server: QueryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_AT_A_TIME", 2)
    answers(monkeypatch, b"1")
    with ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(raw(port_of(server)))
            connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\na".encode())
        wait_until(lambda: len(server._server.server_state.tasks) == 4, "their requests", step=0.01)
        assert put(server)[0] == 200


def test_callers_of_commands_have_room_of_their_own(server: QueryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait long, so readers do not wait behind them; beyond their bound they come again."""
    answers(monkeypatch, b"1")
    command = CommandQuestion(group="shop", partition=0, id="1", key=b"ann")
    monkeypatch.setattr(service, "MOST_AWAITED", 0)
    status, refusal = put_to(server, command)
    assert (status, refusal["error"], put(server)[0]) == (503, "Busy", 200)
    monkeypatch.setattr(service, "MOST_AWAITED", 1)
    monkeypatch.setattr(service, "MOST_AT_A_TIME", 0)
    status, refusal = put_to(server, command)
    assert (status, refusal["error"], put(server)[0]) == (421, "Stopped", 503)
    for wrong in ({"group": "other"}, {"partition": 99}, {"id": ""}):
        assert put_to(server, msgspec.structs.replace(command, **wrong))[0] == 400


@pytest.mark.parametrize(
    ("found", "status", "error"),
    [
        (b"v" * MOST_BYTES_READ, 400, "StoreError"),
        (ValueError("a key of a user"), 500, "StreamsError"),
        (RuntimeError("a key of a user"), 500, "StreamsError"),
        (asyncio.CancelledError(), 421, "Stopped"),
    ],
    ids=["too large", "error", "runtime error", "end of the source"],
)
def test_a_question_that_fails_gets_an_answer_of_a_member(
    server: QueryServer, monkeypatch: pytest.MonkeyPatch, found: Any, status: int, error: str
) -> None:
    answers(monkeypatch, found)
    answered, refusal = put(server)
    assert (answered, refusal["error"]) == (status, error)
    assert "a key of a user" not in msgspec.convert(refusal, Refusal).message
    answers(monkeypatch, b"1")
    assert put(server)[0] == 200


def test_an_answer_waits_for_no_acknowledgement(server: QueryServer) -> None:
    """Its head and its body would be 40 ms apart."""
    with raw(port_of(server)):
        connections = server._server.server_state.connections
        wait_until(lambda: connections, "the connection", step=0.01)
        (connection,) = connections
        link = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_those_that_want_a_key_share_a_wake_up(server: QueryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loop that is held up meanwhile; as many as a member answers at a time."""
    held, taken = threading.Event(), []

    class Points:
        def read(self, reads: list[Any], done: Any) -> None:
            taken.append(len(reads))
            for number, read in enumerate(reads):
                if number:
                    read.outcome = Reply(partition=0, positions=(), age_seconds=0.0, served_by="w-0", value=b"1")
                else:
                    read.outcome = StoreError("no such store")
                done(read)

    monkeypatch.setattr(source_at(server)._run, "queries", lambda: SimpleNamespace(points=Points()))
    monkeypatch.setattr(service, "MOST_AT_A_TIME", 8)
    source_at(server)._run.loop.call_soon_threadsafe(held.wait)
    with ThreadPoolExecutor(9) as threads:
        waiting = [threads.submit(put, server, "get") for _ in range(8)]
        wait_until(lambda: len(server._server.server_state.tasks) == 8, "their requests", step=0.01)
        status, retry = refused(server)
        held.set()
        answers = sorted(one.result()[0] for one in waiting)
    assert (status, retry) == (503, "1"), "at once"
    assert answers == [200] * 7 + [400]
    assert taken == [8]


def refused(server: QueryServer) -> tuple[int, str | None]:
    """Put a question that is one too many."""
    body = msgspec.json.encode(Question(group="shop", kind="len", partition=0))
    head = {TICKET_HEADER: ticket(SECRET, "POST", PATH, body, server.address, time.time())}
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)) as connection:
        connection.request("POST", PATH, body, head)
        answer = connection.getresponse()
        return answer.status, answer.getheader("retry-after")


def test_a_key_of_a_source_that_does_not_run(server: QueryServer) -> None:
    assert put(server, "get")[1]["error"] == "Stopped"
    closed = asyncio.new_event_loop()
    closed.close()
    source = source_at(server)
    loop, source._run.loop = source._run.loop, closed
    try:
        assert put(server, "get") == (421, {"error": "Stopped", "message": "the event source is not running"})
    finally:
        source._run.loop = loop


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_only_questions_are_answered(server: QueryServer, method: str) -> None:
    """Nothing is said without a ticket, nor sealed."""
    tries = [(method, PATH), (method, "/"), ("POST", "/"), ("POST", f"{PATH}/../x"), ("POST", f"{PATH}%00")]
    for sent, path in [*tries, ("POST", PATH), ("POST", f"{PATH}?group=shop")]:
        with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)) as connection:
            connection.request(sent, path, b"{}" if sent == "POST" else None)
            answer = connection.getresponse()
            is_question = sent == "POST" and path.partition("?")[0] == PATH
            assert answer.status in ((401,) if is_question else (404, 405)), path
            assert answer.getheader(SEAL_HEADER) is None
            assert b"shop" not in answer.read()


async def test_a_key_that_no_member_takes_is_refused_at_once(tmp_path: Path) -> None:
    path = private(tmp_path / "secret", SECRET)
    config = source_of(queries=QueryConfig(secret_file=str(path))).config
    async with StateReader(config, key=str, value=str) as states:
        states._finder.found = (Server("w-0", "http://127.0.0.1:1", frozenset(range(4))),)
        with pytest.raises(ConfigError, match="its keys included; members take 65536"):
            await states.get("k" * 1_000_000)


def test_an_address_that_readers_cannot_reach_is_not_published(tmp_path: Path) -> None:
    path = private(tmp_path / "secret", SECRET)
    settings = QueryConfig(secret_file=str(path), tls_certificate_file=str(path), tls_key_file=str(path))
    with pytest.raises(ConfigError, match=r"set QueryConfig\.address"):
        QueryServer(source_of(queries=settings), "0.0.0.0:0")


def test_a_certificate_that_is_none_ends_the_start(tmp_path: Path) -> None:
    path = private(tmp_path / "secret", SECRET)
    settings = QueryConfig(secret_file=str(path), tls_certificate_file=str(path), tls_key_file=str(path))
    with pytest.raises(ConfigError, match="cannot be used"):
        QueryServer(source_of(queries=settings), "127.0.0.1:0")


@pytest.mark.parametrize(("set_back", "second", "age"), [(3_600.0, 2.0, 2.0), (0.0, 7.0, 4.0)], ids=["clock", "copy"])
async def test_a_page_is_as_old_as_its_oldest_turn_was_when_the_question_came(
    set_back: float, second: float, age: float
) -> None:
    """Two turns: the first is two seconds old; the next one comes three seconds later, by a clock that was set back, or
    from a copy that is older."""
    wall, elapsed = 10_000.0, 0.0
    environment = SimpleNamespace(wall_seconds=lambda: wall, elapsed_seconds=lambda: elapsed)

    async def turn(partition: int, read: Any, **more: Any) -> Answer[TurnRows]:
        nonlocal wall, elapsed
        is_first = read.args[0].after is None
        if not is_first:
            wall, elapsed = wall + 3.0 - set_back, 3.0
        old = 2.0 if is_first else second
        return Answer(TurnRows([(b"a", b"")], is_first), partition, {}, wall - old, "w-0")

    source: Any = source_of()
    source._run.present = lambda: SimpleNamespace(environment=environment)
    source._run.queries = lambda: SimpleNamespace(query=turn)
    question = Question(group="shop", kind="range", partition=0, max_staleness=5.0)
    reply = await service._Service(source, SECRET, lambda: "")._ask(question)
    assert (len(reply.rows), reply.age_seconds) == (2, age)


def test_workers_take_the_ports_behind_the_first_one() -> None:
    assert port_behind("127.0.0.1:9200", 3) == "127.0.0.1:9203"
    assert port_behind("https://shop-a.example:9200", 1) == "https://shop-a.example:9201"
    assert [port_behind(each, 2) for each in ("9200", "127.0.0.1:0", "[::1]:9200", "none")] == [
        "9202", "127.0.0.1:0", "[::1]:9202", "none",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio drops what is refused
def test_tls_bounds_connections_before_their_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take the files of the process, which are the source's, too. The one that has let the server wait for
    the longest time makes room, so those that never end theirs keep no others out: an answer comes by TLS."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "cert.pem")
    path = private(tmp_path / "secret", SECRET)
    certificate = str(tmp_path / "cert.pem")
    settings = QueryConfig(secret_file=str(path), tls_certificate_file=certificate, tls_key_file=certificate)
    monkeypatch.setattr(bounded_protocol, "HEAD_SECONDS", 60.0)
    monkeypatch.setattr(server_module._Connection, "most_connections", 2)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with QueryServer(source_of(queries=settings), "127.0.0.1:0") as made:
        wait_until(lambda: made._server.started, "its start", step=0.01)
        with ExitStack() as stack:
            connections = [stack.enter_context(raw(port_of(made), 30.0)) for _ in range(5)]
            assert [until_closed(each) for each in connections[:3]] == [b""] * 3, "there is no room for them"
            asking = stack.enter_context(
                closing(http.client.HTTPSConnection("127.0.0.1", port_of(made), timeout=30, context=context))
            )
            for _ in range(2):
                asking.request("POST", PATH, b"{}")
                answer = asking.getresponse()
                assert (answer.status, len(answer.read()) > 0) == (401, True)
            assert until_closed(connections[3]) == b""


async def test_a_reader_comes_again_when_a_member_wants_it(
    server: QueryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that is busy owns the partition all the same: the group is not looked at again."""
    monkeypatch.setattr(service, "MOST_AT_A_TIME", 0)
    pauses = [0, 60]
    asked: list[int] = []

    class Reader(StateReader[str, str]):
        async def _put(self, server: Server, question: Question, left: float) -> Reply:
            asked.append(pauses[len(asked)])
            monkeypatch.setattr(asking_module, "BUSY_SECONDS", asked[-1])
            return await super()._put(server, question, left)

    async with Reader(source_at(server).config, key=str, value=str) as states:
        monkeypatch.setattr(states._finder, "_read_group", lambda seconds: pytest.fail("it looks at the group"))
        states._finder.found = (Server("w-0", server.address), Server("w-1", "http://127.0.0.1:1"))
        with pytest.raises(NotOwned, match="w-0: busy: 0 requests are under way"):
            await states.get("ann", timeout_seconds=0.5)
    assert asked == pauses, "at once, and no third time before the end of the minute"


async def test_a_forged_address_does_not_make_a_reader_wait(
    server: QueryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no seal for its 503: the reader goes on to the next member."""
    monkeypatch.setattr(asking_module, "BUSY_SECONDS", 60)
    answers(monkeypatch, b"1")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nRetry-After: 60\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as made,
        StateReader(source_at(server).config, key=str, value=str) as states,
    ):
        forged = Server("w-0", f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}", owned=frozenset({0}))
        monkeypatch.setattr(states._finder, "_read_group", lambda seconds: (forged, Server("w-1", server.address)))
        reply, _ = await states._ask(Question(group="shop", kind="len", partition=0), 30.0)
    assert reply.value == b"1"


async def test_a_reader_does_not_wait_beyond_its_time_for_the_look_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = private(tmp_path / "secret", SECRET)
    config = source_of(queries=QueryConfig(secret_file=str(path))).config
    begun, goes_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def look(seconds: float) -> tuple[Server, ...]:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait(30.0)
        return ()

    async with StateReader(config, key=str, value=str) as states:
        monkeypatch.setattr(states._finder, "_read_group", look)
        patient = asyncio.create_task(states.get("ann", timeout_seconds=60.0))
        await begun.wait()
        try:
            async with asyncio.timeout(PATIENCE / 2):  # far below the other one's minute
                with pytest.raises(BrokerUnavailable, match="the group shop could not be looked at"):
                    await states.get("bob", timeout_seconds=0.1)
        finally:
            goes_on.set()
            patient.cancel()


async def test_a_question_has_all_the_time_of_its_caller(server: QueryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members take none that may wait for more than an hour."""
    answers(monkeypatch, b"1")
    states = StateReader(source_at(server).config, key=str, value=str)
    async with states:
        states._finder.found = (Server("w-0", server.address),)
        assert await states.len(timeout_seconds=7_200.0) == 0


async def test_what_a_forged_address_is_sent_is_of_no_use_at_a_member(server: QueryServer, tmp_path: Path) -> None:
    """A status note, which anybody may write, names it: it gets a question with a ticket, and puts it to a member."""
    sent: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        sent.append(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: " + server.address.encode() + b"\r\n\r\n")
        writer.close()

    path = private(tmp_path / "reader's secret", SECRET)
    config = source_of(queries=QueryConfig(secret_file=str(path))).config
    async with await asyncio.start_server(listen, "127.0.0.1", 0) as made:
        forged = Server("w-0", f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}")
        async with StateReader(config, key=str, value=str) as states:
            with pytest.raises(TicketRefused):  # also that it leads elsewhere
                await states._put(forged, Question(group="shop", kind="get", partition=0, key=b"ann"), 5.0)
    assert SECRET not in sent[0]
    assert TICKET_HEADER.encode() in sent[0].lower()

    def replay() -> bytes:
        with raw(port_of(server), 5.0) as connection:
            connection.sendall(sent[0].replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            return until_closed(connection)

    assert (await asyncio.to_thread(replay)).startswith(b"HTTP/1.1 401")


async def test_an_answer_that_grows_without_end_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an address that was forged: sixteen megabytes of nothing in a few kilobytes."""
    path = private(tmp_path / "secret", SECRET)
    packed = gzip.compress(bytes(16 * 1024 * 1024))
    read: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
        writer.write(head.encode() + packed)
        await writer.drain()
        writer.close()

    def check(secret: bytes, text: str, asked: str, status: int, body: bytes) -> None:
        read.append(len(body))
        check_seal(secret, text, asked, status, body)

    monkeypatch.setattr(asking_module, "check_seal", check)
    config = source_of(queries=QueryConfig(secret_file=str(path))).config
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as made:
        forged = Server("w-0", f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}")
        async with StateReader(config, key=str, value=str) as states:
            with pytest.raises(TicketRefused):
                await states._put(forged, Question(group="shop", kind="get", partition=0, key=b"ann"), 5.0)
    assert read == [len(packed)]
