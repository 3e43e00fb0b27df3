"""The doors before the pages: where a request may come from, how large it may be, and what its token allows.

Every request passes them in this order: size, room, host, token, origin and form, right, time. A refusal is an answer
at once, with nothing in it of what was sent.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from streams.web.tokens import BackOff, Scope, Session, Sessions, Token, Tokens

_log = logging.getLogger("streams.web")

MOST_REQUESTS: Final = 64
MOST_STREAMS: Final = 32
REQUEST_SECONDS: Final = 5.0
MOST_BODY: Final = 64 * 1024
MOST_ANSWER: Final = 1024 * 1024
"""Bytes of an answer that is neither a stream nor the metrics, which grow with the partitions."""
STREAM_PATH: Final = "/events"
METRICS_PATH: Final = "/metrics"
OPEN_PATHS: Final = frozenset({"/live", "/login", "/static/icon.svg", "/static/monitor.css", "/static/monitor.js"})
"""Paths that need no token."""
FORM_FIELD: Final = "form"
_MOST_FIELDS: Final = 4096

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: a browser would then send no origin with a form. No address of ours has a secret in it.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Messages = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Messages]]
Send = Callable[[Messages], Awaitable[None]]
Refuse = Callable[[Request, int, str], Response]


class _AnswerTooLarge(Exception):
    """An answer has more than ``MOST_ANSWER`` bytes."""


class Address(msgspec.Struct, frozen=True):
    """The ways to the monitor: the names that ``Host`` may have, whether by TLS, and whether through a proxy."""

    names: frozenset[str]
    is_tls: bool
    cookie: str
    is_proxied: bool = False


class Doors:
    """An ASGI application around the pages. ``pages``, ``tokens`` and ``address`` are set before it
    serves."""

    def __init__(self, pages: Any, refuse: Refuse) -> None:
        self.pages, self._refuse = pages, refuse
        self.tokens = Tokens([])
        self.address = Address(frozenset(), False, "")
        self.sessions = Sessions()
        self.back_off = BackOff()
        self._requests = self._streams = 0

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        is_stream = scope["path"] == STREAM_PATH
        await self._bounded(request, is_stream, _with_headers(send, request))

    @contextmanager
    def _permit(self, is_stream: bool) -> Iterator[bool]:
        """Take the place of a request, if there is one: ``False`` otherwise."""
        if self._streams >= MOST_STREAMS if is_stream else self._requests >= MOST_REQUESTS:
            yield False
            return
        self._streams, self._requests = self._streams + is_stream, self._requests + (not is_stream)
        try:
            yield True
        finally:
            self._streams, self._requests = self._streams - is_stream, self._requests - (not is_stream)

    async def _bounded(self, request: Request, is_stream: bool, send: Send) -> None:
        sent, is_bounded = False, not is_stream and request.scope["path"] != METRICS_PATH
        held: list[Messages] = []  # the head of an answer waits for its body, whose size may refuse it

        async def sending(message: Messages) -> None:
            nonlocal sent
            if message["type"] == "http.response.start" and not is_stream:
                held.append(message)
                return
            if is_bounded and len(message.get("body", b"")) > MOST_ANSWER:
                raise _AnswerTooLarge
            sent = True
            for each in (*held, message):
                await send(each)
            held.clear()

        answer: Response | None = None
        try:
            async with asyncio.timeout(REQUEST_SECONDS) as patience:
                body = await _body_of(request)  # a slow one takes no place from others
                with self._permit(is_stream) as has_permit:
                    if not has_permit:
                        head = {"Retry-After": "1", "Connection": "close"}
                        answer = PlainTextResponse("too many requests at a time\n", 503, head)
                    else:
                        answer = body if isinstance(body, Response) else self._checked(request, body)
                    if answer is None:
                        assert isinstance(body, bytes)
                        if is_stream:
                            patience.reschedule(None)
                        await self.pages(request.scope, _replayed(body, request.receive), sending)
                        return
        except _AnswerTooLarge:
            answer = self._refuse(request, 503, "the answer is too large: choose less")
        except TimeoutError:
            answer = self._refuse(request, 503, f"the answer took longer than {REQUEST_SECONDS:g} s")
        except Exception:
            # Without the request: what it carries is no business of a log.
            _log.exception("a page of the monitor failed: %s", request.scope["path"][:100].encode("unicode_escape"))
            answer = self._refuse(request, 500, "this page failed; the log says why")
        if not sent:
            await answer(request.scope, request.receive, send)

    def _checked(self, request: Request, body: bytes) -> Response | None:
        """Return the refusal of a request; ``None``: it may pass."""
        method, path = request.method, request.scope["path"]
        host = request.headers.getlist("host")
        if len(host) != 1 or host_name_of(host[0]) not in self.address.names:
            return self._refuse(request, 421, "this monitor is not reached by that host name")
        if method not in ("GET", "HEAD", "POST"):
            return self._refuse(request, 405, "use GET, HEAD or POST")
        origin = request.headers.get("origin")
        own = f"{'https' if self.address.is_tls else 'http'}://{host[0]}"
        if origin is not None and origin != own:
            return self._refuse(request, 403, "the request comes from another page")
        if path in OPEN_PATHS:
            if method == "POST" and origin is None:
                return self._refuse(request, 403, "the request does not say which page it comes from")
            request.scope["state"]["body"] = body
            return None
        session = self._session_of(request)
        if isinstance(session, Response):
            return session
        if method == "POST":
            if session.is_browser:
                if origin is None:
                    return self._refuse(request, 403, "the request does not say which page it comes from")
                given = fields_of(body).get(FORM_FIELD, [""])[-1]
                if not hmac.compare_digest(given.encode(errors="replace"), session.form.encode()):
                    return self._refuse(request, 403, "the form is not of this session: load the page again")
            if session.scope < Scope.ACT and path != "/logout":
                return self._refuse(request, 403, "this token may look, and change nothing")
        request.scope["state"].update(session=session, body=body, client=self.client_of(request))
        return None

    def _session_of(self, request: Request) -> Session | Response:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme:
            if scheme.lower() != "bearer":
                return self._unknown(request, "use Authorization: Bearer TOKEN")
            token = self.token_of(request, text.strip())
            if isinstance(token, Response):
                return token
            return Session(token.name, token.scope, token.expires or math.inf, is_browser=False)
        session = self.sessions.find(request.cookies.get(self.address.cookie, ""))
        return self._unknown(request, "a token is needed") if session is None else session

    def client_of(self, request: Request) -> str:
        """Return the address that a request comes from. Behind a proxy that is the one which the proxy has added last:
        what stands before it in the header may be of the client's making."""
        direct = request.client.host if request.client else "an unknown address"
        if not self.address.is_proxied:
            return direct
        given = ",".join(request.headers.getlist("x-forwarded-for")).rpartition(",")[2].strip()
        try:
            return str(ipaddress.ip_address(given))
        except ValueError:
            return direct

    def token_of(self, request: Request, text: str) -> Token | Response:
        """Return the token of this text, or its refusal."""
        address = self.client_of(request)
        wait = self.back_off.wait_seconds(address)
        if wait > 0:
            refusal = self._refuse(request, 429, "too many wrong tokens: wait")
            refusal.headers["Retry-After"] = str(int(wait) + 1)
            return refusal
        token = self.tokens.find(text)
        if token is None:
            self.back_off.wrong(address)
            _log.warning("a wrong token, from %s", address)
            return self._unknown(request, "the token is wrong, or its time is over")
        self.back_off.right(address)
        return token

    def _unknown(self, request: Request, text: str) -> Response:
        is_page = "text/html" in request.headers.get("accept", "") and "authorization" not in request.headers
        if is_page and request.method in ("GET", "HEAD"):
            return RedirectResponse("/login", 303)
        refusal = self._refuse(request, 401, text)
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal


def fields_of(body: bytes) -> dict[str, list[str]]:
    """Return the fields of a form; none if it is no form."""
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:  # not UTF-8, or too many
        return {}


def host_name_of(host: str) -> str:
    """Return the name in a ``Host`` header, without its port, in small letters."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    return (name if name and port.isdecimal() else host).lower().strip("[]").rstrip(".")


def refused(status: int, text: str) -> Response:
    """Return a refusal as JSON."""
    return JSONResponse({"error": text}, status)


async def _body_of(request: Request) -> bytes | Response:
    declared = request.headers.get("content-length", "0")
    too_large = PlainTextResponse(f"a body has {MOST_BODY} bytes at most\n", 413)
    if declared.isdecimal() and int(declared) > MOST_BODY:
        return too_large
    parts, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return PlainTextResponse("", 400)
        size += len(message.get("body", b""))
        if size > MOST_BODY:
            return too_large
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def replay() -> Messages:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _with_headers(send: Send, request: Request) -> Send:
    async def sending(message: Messages) -> None:
        if message["type"] == "http.response.start":
            added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            if request.scope["path"].startswith("/static/"):
                added = [pair for pair in added if pair[0] != b"cache-control"]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return sending
