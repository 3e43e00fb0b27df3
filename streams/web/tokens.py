"""Tokens and sessions: who may look, query and act. Tokens are kept as digests, and compared in constant time."""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import time
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from streams.errors import ConfigError
from streams.sak.private_files import read_private

SHORTEST: Final = 16
"""Characters of a token: fewer can be guessed."""
SESSION_SECONDS: Final = 12 * 3600.0
MOST_SESSIONS: Final = 256
FREE_TRIES: Final = 5
LONGEST_WAIT_SECONDS: Final = 30.0
_MOST_ADDRESSES: Final = 1024
_EXAMPLE: Final = '[ops]\ntoken = "..."\nscope = "act"'


class Scope(enum.IntEnum):
    """The rights of a token; each has those before it."""

    LOOK = 1
    QUERY = 2
    ACT = 3


class Token(msgspec.Struct, frozen=True):
    """A token that is accepted until ``expires`` (seconds since the epoch; ``None``: always)."""

    name: str
    scope: Scope
    digest: bytes
    expires: float | None = None


class Tokens:
    """The tokens of a monitor."""

    def __init__(self, tokens: Iterable[Token], now: Callable[[], float] = time.time) -> None:
        self._tokens = tuple(tokens)
        self._now = now

    @classmethod
    def made(cls) -> tuple[Self, str]:
        """Make a token with all rights; returns its text too."""
        text = secrets.token_urlsafe(32)
        return cls([Token("the token of this start", Scope.ACT, _digest(text))]), text

    @classmethod
    def of_file(cls, path: str | Path) -> Self:
        """Read a file: a table per name with ``token``, ``scope`` (``look``, ``query``, ``act``) and perhaps
        ``expires`` (a time with its zone); or nothing but one token, which has all rights. Raises ``ConfigError``,
        also for a file that other users can read or change; it never quotes the file."""
        try:
            text = read_private(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"the token file {path} cannot be read: {reason}") from None
        if len(words := text.split()) == 1 and "=" not in words[0].rstrip("="):
            return cls([_token(path, Path(path).name, {"token": words[0], "scope": "act"})])
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError:  # its message may quote the token
            tables = {}
        if not tables:
            raise ConfigError(f"the token file {path} is neither one token nor TOML like: {_EXAMPLE}")
        return cls([_token(path, name, table) for name, table in tables.items()])

    def find(self, text: str) -> Token | None:
        """Return the token of this text. ``None``: there is none, or its time is over."""
        digest, found = _digest(text), None
        for token in self._tokens:  # all of them: the time says nothing about which
            if hmac.compare_digest(token.digest, digest):
                found = token
        return None if found is None or (found.expires is not None and found.expires <= self._now()) else found


def _token(path: str | Path, name: str, table: Any) -> Token:
    where = f"the token file {path}, [{name}]"
    if not isinstance(table, dict) or not isinstance(text := table.get("token"), str) or len(text) < SHORTEST:
        raise ConfigError(f"{where}: token must be a text of {SHORTEST} characters or more")
    scopes = {scope.name.lower(): scope for scope in Scope}
    if table.get("scope") not in scopes:
        raise ConfigError(f"{where}: scope must be one of {', '.join(scopes)}")
    expires = table.get("expires")
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise ConfigError(f"{where}: expires must be a time with its zone, as in 2030-01-01T00:00:00Z")
    return Token(name, scopes[table["scope"]], _digest(text), None if expires is None else expires.timestamp())


class Session(msgspec.Struct, frozen=True):
    """A browser that has shown a token. ``form``: what its forms have to carry. ``is_browser`` is ``False`` for a
    request that carries the token itself."""

    name: str
    scope: Scope
    expires: float
    form: str = ""
    is_browser: bool = True


class Sessions:
    """The browsers that have shown a token, the oldest forgotten first beyond ``MOST_SESSIONS``."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def begin(self, token: Token) -> str:
        """Begin a session; returns the value of its cookie."""
        value, now = secrets.token_urlsafe(32), self._now()
        expires = min(now + SESSION_SECONDS, token.expires or now + SESSION_SECONDS)
        self._sessions[_digest(value)] = Session(token.name, token.scope, expires, secrets.token_urlsafe(32))
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return value

    def find(self, value: str) -> Session | None:
        """Return the session of a cookie. ``None``: there is none, or its time is over."""
        session = self._sessions.get(_digest(value))
        if session is not None and session.expires <= self._now():
            self.end(value)
            return None
        return session

    def end(self, value: str) -> None:
        """End a session, if there is one."""
        self._sessions.pop(_digest(value), None)


class BackOff:
    """Waits after wrong tokens, by the address they come from: ``FREE_TRIES`` cost nothing, each further one doubles
    the wait, during which no token from there is looked at."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait_seconds(self, address: str) -> float:
        """Return how long tokens from this address are refused; 0: they are looked at."""
        return max(0.0, self._wrong.get(address, (0, 0.0))[1] - self._now())

    def wrong(self, address: str) -> None:
        """Note a wrong token."""
        count = self._wrong.pop(address, (0, 0.0))[0] + 1
        wait = min(LONGEST_WAIT_SECONDS, 2.0 ** min(count - FREE_TRIES, 10)) if count > FREE_TRIES else 0.0
        self._wrong[address] = count, self._now() + wait
        while len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)

    def right(self, address: str) -> None:
        """Note a right one: the count begins again."""
        self._wrong.pop(address, None)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
