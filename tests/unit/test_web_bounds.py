"""The bounds of the monitor, tried over real sockets: sizes, times, numbers of requests, streams and connections; and
of heads on the metrics port."""

from __future__ import annotations

import contextlib
import re
import time

import pytest

from tests.unit.web_kit import LOOK, ask, raw, until_closed, web_port

from streams.observability import HttpServer, http_server  # isort: skip
from streams.observability.health import Verdict  # isort: skip
from streams.queries import bounded_protocol  # isort: skip
from streams.web import doors  # isort: skip

__all__ = ["web_port"]  # the fixture


@pytest.fixture
def short_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_SECONDS", 0.3)


def test_a_body_has_its_bounds(web_port: int) -> None:
    most = doors.MOST_BODY
    assert ask(web_port, "/api/v1/actions/count/start", method="POST", body=b" " * most + b"{}").status == 413
    assert ask(web_port, "/login", None, method="POST", body=b"a" * (most + 1), Origin="x").status == 413
    assert ask(web_port, "/", body=b"a" * (most + 1)).status == 413
    with raw(web_port) as connection:  # without its length, and without end
        connection.sendall(
            f"POST /login HTTP/1.1\r\nHost: 127.0.0.1:{web_port}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1_000):
                connection.sendall(b"4000\r\n" + b"a" * 0x4000 + b"\r\n")
            pytest.fail("sixteen megabytes were taken")


def test_a_body_that_never_ends_has_its_time(web_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "REQUEST_SECONDS", 0.3)
    with raw(web_port) as connection:
        connection.sendall(f"POST /login HTTP/1.1\r\nHost: 127.0.0.1:{web_port}\r\nContent-Length: 9\r\n\r\na".encode())
        assert b"HTTP/1.1 503" in connection.recv(4096)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\nX: "])
@pytest.mark.usefixtures("short_head")
def test_a_head_that_does_not_end_has_its_time(web_port: int, sent: bytes) -> None:
    with raw(web_port) as connection:
        connection.sendall(sent)
        assert until_closed(connection) == b""


def test_a_second_head_has_its_time_too(web_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw(web_port) as connection:
        connection.sendall(f"GET /live HTTP/1.1\r\nHost: 127.0.0.1:{web_port}\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(bounded_protocol, "HEAD_SECONDS", 0.3)
        connection.sendall(b"GET /")
        assert b"HTTP/1.1" not in until_closed(connection)


@pytest.mark.parametrize("piece", [b"x" * 65_536, b"X-Header: a\r\n" * 5_000])
def test_an_endless_head_is_cut_off(web_port: int, piece: bytes) -> None:
    with raw(web_port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1_000):
                connection.sendall(piece)
            pytest.fail("it was taken")


def test_an_endless_head_is_cut_off_by_the_metrics_port_as_well() -> None:
    assert http_server.MOST_RECEIVED == bounded_protocol.MOST_RECEIVED
    live = {"/live": lambda query: Verdict(True, "yes")}
    with HttpServer("127.0.0.1:0", lambda *_: [], live) as server, raw(server.port) as connection:
        assert ask(server.port, "/live", None, Large="x" * 60_000).status == 200
        connection.sendall(b"GET /live HTTP/1.0\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number in range(90):  # below the hundred headers of the standard library
                connection.sendall(b"X-%d: %s\r\n" % (number, b"x" * 60_000))
            connection.sendall(b"\r\n")
            assert connection.recv(100) == b"", "five megabytes were taken"


@pytest.mark.parametrize("path", ["/state", "/api/v1/state", "/views"])
def test_a_key_of_megabytes_is_refused(web_port: int, path: str) -> None:
    for size in (1_000_000, 3_000_000):
        with contextlib.suppress(OSError):  # it is cut off
            assert ask(web_port, f"{path}?topic=t&key={'k' * size}").status in (200, 400, 414, 503)
    assert ask(web_port, "/live", None).status == 200


def test_requests_are_not_piled_up_on_a_connection(web_port: int) -> None:
    with raw(web_port) as connection:
        one = f"GET /live HTTP/1.1\r\nHost: 127.0.0.1:{web_port}\r\n\r\n".encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(one * 1_000)
        assert until_closed(connection).count(b"HTTP/1.1 200") <= 2


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
@pytest.mark.usefixtures("short_head")
def test_what_is_no_http_is_refused(web_port: int, junk: bytes) -> None:
    with raw(web_port) as connection:
        connection.sendall(junk)
        assert until_closed(connection)[:12] in (b"", b"HTTP/1.1 400")
    assert ask(web_port, "/live", None).status == 200


@pytest.mark.parametrize(
    "sent",
    ["", "GET / HT", "POST /login HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 9\r\n\r\na"],
    ids=["nothing", "half a head", "half a body"],
)
def test_those_that_send_nothing_keep_no_others_out(web_port: int, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has been waited for longest makes room."""
    monkeypatch.setattr(bounded_protocol, "HEAD_SECONDS", 20.0)
    monkeypatch.setattr(doors, "REQUEST_SECONDS", 20.0)
    monkeypatch.setattr(bounded_protocol.BoundedProtocol, "most_connections", 20)  # both ends are files of this process
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw(web_port)) for _ in range(20)]
        for connection in idle:
            connection.sendall(sent.format(port=web_port).encode())
        for _ in range(20):
            assert ask(web_port, "/live", None).status == 200
        assert until_closed(idle[0]) == b""


def test_connections_at_work_are_not_cut_off_for_others(web_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol.BoundedProtocol, "most_connections", 2)
    head = f"GET /events?page=overview HTTP/1.1\r\nHost: 127.0.0.1:{web_port}\r\nAuthorization: Bearer {LOOK}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(raw(web_port))
            stream.sendall(head.encode())
            assert b"text/event-stream" in stream.recv(65_536)
        with raw(web_port) as late:
            assert until_closed(late) == b""
        stream.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert stream.recv(65_536) != b"", "it goes on"


@pytest.mark.parametrize("attack", ["no token", "another host", "nothing"])
def test_those_that_come_to_nothing_wait_for_their_turn(
    web_port: int, attack: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused request ends its connection, and the next one is taken at the pace of the bound. Who has a connection
    that was served goes on meanwhile."""
    monkeypatch.setattr(bounded_protocol, "WASTED_AT_ONCE", 20)
    monkeypatch.setattr(bounded_protocol, "WASTED_PER_SECOND", 100)
    monkeypatch.setattr(bounded_protocol, "_REPORT_SECONDS", 0.0)
    host = "other" if attack == "another host" else f"127.0.0.1:{web_port}"
    with raw(web_port) as guest:

        def is_served() -> bool:
            guest.sendall(f"GET /live HTTP/1.1\r\nHost: 127.0.0.1:{web_port}\r\n\r\n".encode())
            received = b""
            while not received.endswith(b"live\n"):
                data = guest.recv(4096)
                assert data
                received += data
            return received.startswith(b"HTTP/1.1 200")

        assert is_served()
        began = time.monotonic()
        for _ in range(30):
            with raw(web_port) as connection:
                if attack != "nothing":
                    connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                    assert re.match(rb"HTTP/1.1 4(01|21)", until_closed(connection))
        assert ask(web_port, "/live", None).status == 200
        assert time.monotonic() - began > 0.05, "of 31 connections 20 are taken at once"
        assert is_served()
    assert "too many connections come to nothing" in caplog.text


def test_streams_have_their_own_number(web_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MOST_STREAMS", 3)
    head = f"GET /events?page=overview HTTP/1.1\r\nHost: 127.0.0.1:{web_port}\r\nAuthorization: Bearer {LOOK}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(raw(web_port)) for _ in range(3)]
        for stream in streams:
            stream.sendall(head.encode())
            assert b"text/event-stream" in stream.recv(65_536)
        assert ask(web_port, "/events?page=overview").status == 503
        assert ask(web_port, "/live", None).status == 200, "pages have room"


def test_requests_at_a_time_have_their_number(web_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MOST_REQUESTS", 0)
    reply = ask(web_port, "/live", None)
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")


def test_an_answer_has_its_bounds(web_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MOST_ANSWER", 100)
    reply = ask(web_port, "/settings")
    assert (reply.status, reply.text) == (503, '{"error":"the answer is too large: choose less"}')
    reply = ask(web_port, "/metrics")
    assert reply.status == 200, "they grow with the partitions, and nobody could choose less"
    assert len(reply.text) > 100
