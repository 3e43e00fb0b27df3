"""A monitor that serves on a free port, of a source that does not run, and a client that sends what it is told."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from streams import EventSource
from tests.unit.private_kit import private
from tests.vocabulary import config_of

for _package in ("starlette", "uvicorn", "httptools", "jinja2", "aiohttp"):
    pytest.importorskip(_package)

from streams.web import Monitor  # noqa: E402

NOWHERE = "127.0.0.1:1"
TOKENS = """
[looker]
token = "a-token-that-may-look"
scope = "look"

[asker]
token = "a-token-that-may-query"
scope = "query"

[worker]
token = "a-token-that-may-act"
scope = "act"

[former]
token = "a-token-that-has-expired"
scope = "act"
expires = 2001-01-01T00:00:00Z
"""
LOOK, QUERY, ACT = "a-token-that-may-look", "a-token-that-may-query", "a-token-that-may-act"


class Reply(NamedTuple):
    """An answer of the monitor."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def cookie(self) -> str:
        """Name and value of the cookie that it sets."""
        return self.headers["set-cookie"].partition(";")[0]


def source_of(group: str = "shop", servers: str = NOWHERE, **settings: Any) -> EventSource[Any]:
    """A source that has not been started."""
    return EventSource(
        config_of(group_id=group, topic="orders", num_partitions=4, bootstrap_servers=servers, **settings)
    )


def ask(
    port: int,
    path: str,
    token: str | None = ACT,
    *,
    method: str = "GET",
    body: bytes | str | dict[str, Any] | None = None,
    **headers: str,
) -> Reply:
    """Send one request. A dictionary is sent as a form."""
    sent = {"Host": f"127.0.0.1:{port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    if isinstance(body, dict):
        body = urlencode(body, doseq=True)
        sent["Content-Type"] = "application/x-www-form-urlencoded"
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        data = body.encode() if isinstance(body, str) else body
        if data is not None:
            sent.setdefault("Content-Length", str(len(data)))
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(data)
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())


def signed_in(port: int, token: str = ACT) -> str:
    """The cookie of a browser that has shown its token."""
    return ask(port, "/login", None, method="POST", body={"token": token}, Origin=f"http://127.0.0.1:{port}").cookie


def form_of(port: int, cookie: str, path: str = "/settings") -> str:
    """What the forms of this session carry."""
    page = ask(port, path, None, Cookie=cookie, Accept="text/html").text
    return page.partition('name="form" value="')[2].partition('"')[0]


@contextlib.contextmanager
def raw(port: int, seconds: float = 30.0) -> Iterator[socket.socket]:
    """A connection, for what no client would send."""
    with socket.create_connection(("127.0.0.1", port), seconds) as connection:
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def served(source: EventSource[Any], tokens: str, **settings: Any) -> Monitor:
    """A monitor on a free port of loopback."""
    return Monitor(source, address="127.0.0.1:0", token_file=tokens, **settings)


@pytest.fixture(scope="module")
def web_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = private(tmp_path_factory.mktemp("tokens") / "tokens.toml", TOKENS)
    monitor = served(source_of(), str(path))

    @monitor.action("count")
    async def count() -> str:
        return "counted"

    with monitor:
        yield monitor.port
