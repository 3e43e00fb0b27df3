"""Each door of the monitor, tried from outside, over real sockets: token, scope, host, origin, form, size, time."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.errors import ConfigError
from streams.queries.tickets import group_secret
from streams.runtime.keeping.snapshots.bundles import read_secret
from tests.unit.private_kit import private
from tests.unit.web_kit import (
    ACT,
    LOOK,
    QUERY,
    ask,
    form_of,
    raw,
    served,
    signed_in,
    source_of,
    until_closed,
    web_port,
)

from streams.queries import bounded_protocol  # isort: skip
from streams.web import Monitor, doors, tokens  # isort: skip

__all__ = ["web_port"]  # the fixture

PATHS = [
    "/",
    "/source",
    "/views",
    "/state?key=a",
    "/dead-letters",
    "/parked-keys",
    "/jobs",
    "/actions",
    "/settings",
    "/ready",
    "/metrics",
    "/events?page=source",
]
API = ["group", "topology", "settings", "views", "state?key=a", "actions", "openapi.json"]
STARTS = "/actions/start"


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "FREE_TRIES", 10**6)


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, *(f"/api/v1/{name}" for name in API)])
def test_no_address_answers_without_a_token_or_with_a_wrong_or_expired_one(web_port: int, path: str) -> None:
    for token in (None, "", "a-token-that-is-wrong", "a-token-that-has-expired", ACT[:-1], ACT + "\u00e9"):
        with contextlib.suppress(UnicodeEncodeError):
            reply = ask(web_port, path, token)
            assert reply.status == 401, token
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "shop" not in reply.text
    assert ask(web_port, path, None, Authorization="Basic b3BzOmE=").status == 401
    assert ask(web_port, f"{path}{'&' if '?' in path else '?'}token={ACT}", None).status == 401, (
        "an address is no place"
    )


def test_only_these_answer_without_a_token(web_port: int) -> None:
    for path in sorted(doors.OPEN_PATHS):
        assert ask(web_port, path, None).status == 200, path
    assert ask(web_port, "/live", None).text == "live\n"


def test_a_browser_without_a_session_comes_to_the_sign_in_page(web_port: int) -> None:
    reply = ask(web_port, "/source", None, Accept="text/html")
    assert (reply.status, reply.headers["location"]) == (303, "/login")


def test_a_token_that_may_look_changes_nothing_and_sees_no_values(web_port: int) -> None:
    runs = ask(web_port, "/api/v1/actions", ACT).text.count('"began_ms"')  # by other tests
    for path in ("/", "/source", "/settings", "/api/v1/group"):
        assert ask(web_port, path, LOOK).status == 200
    for path in (
        STARTS,
        "/actions/cancel",
        "/dead-letters/replay",
        "/dead-letters/drop",
        "/parked-keys/act",
        "/jobs/act",
        "/api/v1/actions/act-on-parked-keys/start",
        "/api/v1/actions/act-on-jobs/start",
        "/api/v1/actions/count/start",
    ):
        for token in (LOOK, QUERY):
            assert ask(web_port, path, token, method="POST", body={"action": "count"}).status == 403, path
    assert ask(web_port, "/api/v1/dead-letters", LOOK).status == 403
    assert ask(web_port, "/api/v1/parked-keys", LOOK).status == 403
    assert ask(web_port, "/api/v1/jobs", LOOK).status == 403
    assert ask(web_port, "/api/v1/views/orders?key=a", LOOK).status == 403
    assert ask(web_port, "/views?topic=orders&key=a", LOOK).status == 403
    assert ask(web_port, "/api/v1/state?key=a", LOOK).status == 403
    assert ask(web_port, "/state?key=a", LOOK).status == 403
    assert ask(web_port, "/api/v1/actions", ACT).text.count('"began_ms"') == runs, "nothing has been started"


def test_wrong_tokens_have_to_wait_longer_and_longer() -> None:
    now = 100.0
    back_off = tokens.BackOff(lambda: now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "FREE_TRIES", 2)
        waits = []
        for _ in range(9):
            back_off.wrong("10.0.0.1")
            waits.append(back_off.wait_seconds("10.0.0.1"))
        assert waits == [0.0, 0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
        assert back_off.wait_seconds("10.0.0.2") == 0.0
        now += 30.0
        assert back_off.wait_seconds("10.0.0.1") == 0.0
        for number in range(5_000):
            back_off.wrong(f"address {number}")
        assert len(back_off._wrong) <= 1024


def test_behind_a_proxy_one_client_does_not_lock_out_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All come from the proxy's address. What counts is the one that the proxy has added, not what a client claims."""
    monkeypatch.setattr(tokens, "FREE_TRIES", 0)
    path = private(tmp_path / "token", ACT)

    def status(port: int, token: str, *forwarded: str) -> int:
        head = [f"Host: monitor.example\r\nAuthorization: Bearer {token}\r\n"]
        head += [f"X-Forwarded-For: {each}\r\n" for each in forwarded]
        with raw(port) as connection:
            connection.sendall(f"GET /settings HTTP/1.1\r\n{''.join(head)}Connection: close\r\n\r\n".encode())
            return int(until_closed(connection).split()[1])

    with served(source_of(), str(path), behind_tls_proxy=True, names=["monitor.example"]) as monitor:
        assert status(monitor.port, "wrong", "10.0.0.1") == 401
        for forwarded in (["10.0.0.1"], ["10.0.0.2, 10.0.0.1"], ["10.0.0.2", "10.0.0.1"]):
            assert status(monitor.port, ACT, *forwarded) == 429, forwarded
        for forwarded in (["10.0.0.2"], ["10.0.0.1, 10.0.0.2"], ["10.0.0.1", "10.0.0.2"], ["2001:db8::1"], []):
            assert status(monitor.port, ACT, *forwarded) == 200, forwarded
        assert status(monitor.port, "wrong", "what is no address") == 401
        assert status(monitor.port, ACT) == 429, "the proxy's own"
    with served(source_of(), str(path)) as monitor:  # without a proxy the header is anybody's
        head = {"X_Forwarded_For": "10.0.0.1"}
        assert ask(monitor.port, "/settings", "wrong", **head).status == 401
        assert ask(monitor.port, "/settings", ACT, X_Forwarded_For="10.0.0.2").status == 429


def test_while_it_waits_no_token_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "FREE_TRIES", 1)
    path = private(tmp_path / "token", ACT)
    with served(source_of(), str(path)) as monitor:
        assert ask(monitor.port, "/settings").status == 200
        assert [ask(monitor.port, "/settings", "wrong").status for _ in range(3)] == [401, 401, 429]
        refused = ask(monitor.port, "/settings")
        assert (refused.status, int(refused.headers["retry-after"]) >= 1) == (429, True)


def test_a_secret_that_other_users_can_read_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = private(tmp_path / "secret", ACT)
    uses: list[Callable[[str], object]] = [tokens.Tokens.of_file, group_secret, read_secret]
    for mode in (0o644, 0o604, 0o602, 0o620, 0o666):
        path.chmod(mode)
        for use in uses:
            with pytest.raises(ConfigError, match=f"its mode is {mode:o}.*: chmod g-w,o= {path}") as raised:
                use(str(path))
            assert ACT not in str(raised.value)
    for mode in (0o600, 0o400, 0o440, 0o640):  # a service may have its secrets by its group
        path.chmod(mode)
        for use in uses:
            use(str(path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read: No such file"),
        ("short", "16 characters or more"),
        ("two words", "is neither one token nor TOML"),
        ('[a]\ntoken = "a-token-that-is-long"', "scope must be one of look, query, act"),
        ('[a]\ntoken = "a-token-that-is-long"\nscope = "root"', "scope must be one of"),
        ('[a]\ntoken = "a-token-that-is-long"\nscope = "act"\nexpires = 2030-01-01', "expires must be a time"),
        ('[a]\ntoken = "a-token-that-is-long', "is neither one token nor TOML"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_named_and_not_quoted(
    tmp_path: Path, text: str | None, complaint: str
) -> None:
    path = tmp_path / "tokens"
    if text is not None:
        private(path, text)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as raised:
        tokens.Tokens.of_file(path)
    assert str(path) in str(raised.value)
    assert text is None or "a-token-that-is-long" not in str(raised.value)


# -- host, origin, form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "", "a b", "0"])
def test_a_foreign_host_name_is_refused(web_port: int, host: str) -> None:
    assert ask(web_port, "/", Host=host).status == 421
    assert ask(web_port, "/live", None, Host=host).status == 421


def test_a_request_has_one_host_name(web_port: int) -> None:
    for hosts in (b"", b"Host: 127.0.0.1\r\nHost: evil.example\r\n"):
        with raw(web_port) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n")
            assert until_closed(connection).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_names_of_loopback_are_its_own(web_port: int, host: str) -> None:
    assert ask(web_port, "/live", None, Host=f"{host}:{web_port}").status == 200


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_a_request_of_another_page_is_refused(web_port: int, origin: str) -> None:
    origin = origin.format(port=web_port)
    cookie = signed_in(web_port)
    form = {"form": form_of(web_port, cookie), "action": "count"}
    assert ask(web_port, STARTS, None, method="POST", body=form, Cookie=cookie, Origin=origin).status == 403
    assert ask(web_port, STARTS, method="POST", body=form, Origin=origin).status == 403
    assert ask(web_port, "/login", None, method="POST", body={"token": ACT}, Origin=origin).status == 403
    assert ask(web_port, "/", Origin=origin).status == 403


def test_a_form_needs_its_origin_and_what_its_session_was_given(web_port: int) -> None:
    cookie, other = signed_in(web_port), signed_in(web_port)
    own = f"http://127.0.0.1:{web_port}"
    right = {"form": form_of(web_port, cookie), "action": "count"}
    assert ask(web_port, STARTS, None, method="POST", body=right, Cookie=cookie).status == 403, "no origin"
    assert ask(web_port, "/login", None, method="POST", body={"token": ACT}).status == 403, "no origin"
    for form in ({"action": "count"}, {**right, "form": ""}, {**right, "form": form_of(web_port, other)}):
        assert ask(web_port, STARTS, None, method="POST", body=form, Cookie=cookie, Origin=own).status == 403
    assert ask(web_port, STARTS, None, method="POST", body=right, Cookie=cookie, Origin=own).status == 303


def test_the_cookie_is_out_of_reach_and_ends_with_the_session(web_port: int) -> None:
    own = f"http://127.0.0.1:{web_port}"
    reply = ask(web_port, "/login", None, method="POST", body={"token": ACT}, Origin=own)
    parts = {part.strip().lower() for part in reply.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= parts
    assert ACT not in str(reply)
    assert ask(web_port, "/", None, Cookie=reply.cookie).status == 200
    form = {"form": form_of(web_port, reply.cookie)}
    assert ask(web_port, "/logout", None, method="POST", body=form, Cookie=reply.cookie, Origin=own).status == 303
    assert ask(web_port, "/", None, Cookie=reply.cookie).status == 401
    for cookie in (reply.cookie[:-1], reply.cookie + "x", "kes-monitor=1", "a=b; =; ;;", "\xff"):
        assert ask(web_port, "/", None, Cookie=cookie).status == 401
    wrong = ask(web_port, "/login", None, method="POST", body={"token": "wrong"}, Origin=own, Accept="text/html")
    assert (wrong.status, "set-cookie" in wrong.headers) == (401, False)


def test_sessions_end_in_time_and_are_bounded() -> None:
    now = 1_000.0
    sessions = tokens.Sessions(lambda: now)
    soon = sessions.begin(tokens.Token("a", tokens.Scope.LOOK, b"", expires=1_010.0))
    later = sessions.begin(tokens.Token("b", tokens.Scope.LOOK, b""))
    assert sessions.find(soon) is not None
    now += 10.0
    assert sessions.find(soon) is None
    now += tokens.SESSION_SECONDS
    assert sessions.find(later) is None
    first = sessions.begin(tokens.Token("c", tokens.Scope.LOOK, b""))
    for _ in range(tokens.MOST_SESSIONS):
        sessions.begin(tokens.Token("d", tokens.Scope.LOOK, b""))
    assert sessions.find(first) is None
    assert len(sessions._sessions) == tokens.MOST_SESSIONS


@pytest.mark.parametrize(
    "path", [STARTS, "/actions/cancel", "/dead-letters/drop", "/parked-keys/act", "/jobs/act", "/logout"]
)
def test_nothing_is_changed_by_looking(web_port: int, path: str) -> None:
    assert ask(web_port, f"{path}?action=count").status == 405
    assert ask(web_port, "/api/v1/actions/count/start").status == 405
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert ask(web_port, path, method=method).status == 405


def test_every_answer_forbids_what_pages_do_not_need(web_port: int) -> None:
    for reply in (
        ask(web_port, "/"),
        ask(web_port, "/nowhere"),
        ask(web_port, "/", None),
        ask(web_port, "/", Host="evil.example"),
    ):
        assert reply.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["referrer-policy"] == "same-origin"
        assert reply.headers["cache-control"] == "no-store"
        assert "server" not in reply.headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../monitor.py", "/static/%2e%2e/monitor.py", "/static/..%2fmonitor.py", "/static/%00", "/../x",
        "/%2e%2e/%2e%2e/etc/passwd", "/static/monitor.css%00.js", "//evil.example", "/api/v1/../settings%00",
        "/static//monitor.py", "/%ff%fe", "/login/", "/%0d%0aSet-Cookie:a=b",
    ],
)  # fmt: skip
def test_no_path_leads_out(web_port: int, path: str) -> None:
    reply = ask(web_port, path)
    assert reply.status in (400, 404)
    assert "import" not in reply.text
    assert "set-cookie" not in reply.headers


# -- where it serves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"address": "0.0.0.0:0"}, "without TLS"),
        ({"address": "192.0.2.1:0"}, "without TLS"),
        ({"address": "monitor.example:0"}, "without TLS"),
        ({"address": "0.0.0.0:0", "behind_tls_proxy": True}, "by which names"),
        ({"address": "nine"}, "the address 'nine' is none"),
        ({"address": "0.0.0.0:0", "certificate": "a", "behind_tls_proxy": True}, "choose one"),
        ({"group": "shop"}, "a source, or the name of a group"),
    ],
)
def test_where_others_can_reach_it_it_does_not_start_without_tls(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        Monitor(source_of(), **settings)  # type: ignore[arg-type]


def test_a_port_that_is_taken_and_a_certificate_that_is_none_are_named(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        monitor = Monitor(source_of(), address=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="stop the process that has it, or name another port"):
            monitor.start()
    (tmp_path / "cert.pem").write_text("none")
    for path in (tmp_path / "cert.pem", tmp_path / "missing.pem"):
        monitor = Monitor(source_of(), address="127.0.0.1:0", certificate=str(path))
        with pytest.raises(ConfigError, match="cannot be used"):
            monitor.start()


def test_by_tls_the_cookie_is_for_tls_alone_and_plain_text_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    certificate = str(tmp_path / "cert.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    path = private(tmp_path / "token", ACT)
    with served(source_of(), str(path), certificate=certificate, key=certificate) as monitor:
        assert monitor.address == f"https://127.0.0.1:{monitor.port}/"

        def login(origin: str) -> tuple[int, str]:
            head = {"Origin": f"{origin}://127.0.0.1:{monitor.port}"}
            with contextlib.closing(
                http.client.HTTPSConnection("127.0.0.1", monitor.port, timeout=30, context=context)
            ) as connection:
                connection.request("POST", "/login", f"token={ACT}", head)
                answer = connection.getresponse()
                return answer.status, answer.getheader("set-cookie", "")

        assert login("http")[0] == 403
        status, cookie = login("https")
        assert (status, cookie.startswith("__Host-kes-monitor-"), "; Secure" in cookie) == (303, True, True)
        with raw(monitor.port) as connection:
            connection.sendall(f"GET /live HTTP/1.1\r\nHost: 127.0.0.1:{monitor.port}\r\n\r\n".encode())
            assert b"HTTP" not in until_closed(connection)
        monkeypatch.setattr(bounded_protocol.BoundedProtocol, "most_connections", 2)
        with contextlib.ExitStack() as stack:
            stalled = [stack.enter_context(raw(monitor.port)) for _ in range(2)]
            assert login("https")[0] == 303, "those that never end their handshake keep no others out"
            assert until_closed(stalled[0]) == b""


def test_behind_a_proxy_it_is_reached_by_its_name(tmp_path: Path) -> None:
    path = private(tmp_path / "token", ACT)
    with served(source_of(), str(path), behind_tls_proxy=True, names=["monitor.example"]) as monitor:
        own = "https://monitor.example"
        reply = ask(
            monitor.port, "/login", None, method="POST", body={"token": ACT}, Host="monitor.example", Origin=own
        )
        assert reply.status == 303
        assert reply.cookie.startswith("__Host-kes-monitor-")
        assert "; secure" in reply.headers["set-cookie"].lower()


# -- the token is nowhere ----------------------------------------------------------------------------------------------


def test_the_token_is_in_no_log_no_page_and_no_error(
    web_port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    texts = [ask(web_port, path).text for path in (*PATHS[:-1], *(f"/api/v1/{name}" for name in API), "/nowhere")]
    texts += [ask(web_port, "/settings", "a-wrong-token-that-is-secret").text]
    for token in ("a-wrong-token-that-is-secret", ACT):
        form = {"token": token}
        texts.append(
            str(ask(web_port, "/login", None, method="POST", body=form, Origin=f"http://127.0.0.1:{web_port}"))
        )
    texts += [record.getMessage() for record in caplog.records]
    texts += [*capfd.readouterr(), Path("/proc/self/cmdline").read_text() if os.path.exists("/proc/self") else ""]
    for secret in (ACT, LOOK, QUERY, "a-wrong-token-that-is-secret"):
        assert not [text for text in texts if secret in text], secret
    assert "a wrong token, from 127.0.0.1" in caplog.text


def test_a_token_that_is_made_is_written_to_no_file(capfd: pytest.CaptureFixture[str]) -> None:
    with Monitor(source_of(), address="127.0.0.1:0") as monitor:
        address, _, token = monitor.link.partition("login#")
        assert (address, len(token) > 30) == (f"http://127.0.0.1:{monitor.port}/", True)
        assert ask(monitor.port, "/settings", token).status == 200
    assert token not in "".join(capfd.readouterr()), "standard error is no terminal here"
