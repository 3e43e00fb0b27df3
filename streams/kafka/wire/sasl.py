"""SASL mechanisms of Kafka: PLAIN, SCRAM-SHA-256 and -512, OAUTHBEARER and GSSAPI. Bytes in, bytes out; no I/O.

Passwords and tokens are in the messages to the broker only, never in a ``repr`` or an error.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, TypeAlias

MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")
_LEAST_ITERATIONS: Final = 4096
"""Iterations of SCRAM's hash, at least (RFC 7677). With fewer, a false broker could find the password out sooner."""
_MOST_ITERATIONS: Final = 1_000_000
"""Iterations of SCRAM's hash, at most: about a second of computing. Kafka's own limit is 16,384."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750
_EXTENSION_NAME, _EXTENSION_VALUE = re.compile(r"[A-Za-z]+"), re.compile(r"[\x21-\x7e \t\r\n]+")  # RFC 7628
_NO_LAYER: Final = 1  # of GSSAPI's security layers (RFC 4752): authentication only, the one that Kafka has

Messages: TypeAlias = Generator[bytes, bytes, None]
"""A dialogue: yields the messages to the broker, is sent the answers, and ends when the broker has proven itself."""


class SaslFailure(Exception):
    """A login that failed, by what the broker answered or by credentials that cannot be sent. Its text has no secret
    in it."""


@dataclass(frozen=True, slots=True)
class OAuthToken:
    """An OAuth token with the extensions that are sent along."""

    value: str = field(repr=False)
    extensions: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Name and password, token function or service of a mechanism. ``fetch_token`` may block; it is called for each
    login. ``service``: the first part of the broker's Kerberos principal."""

    mechanism: str
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    fetch_token: Callable[[], OAuthToken] | None = field(default=None, repr=False)
    service: str = "kafka"

    def login_at(self, host: str) -> Login:
        """Begin a login to the broker on ``host``."""
        if self.mechanism == "PLAIN":
            return Login(plain(self.username, self.password))
        if self.mechanism == "OAUTHBEARER" and self.fetch_token is not None:
            return Login(oauthbearer(self.fetch_token))
        if self.mechanism == "GSSAPI":
            return Login(gssapi(self.service, host))
        return Login(scram(self.mechanism, self.username, self.password, secrets.token_urlsafe(24)))


class Login:
    """One login. On one thread at a time; a step may compute for milliseconds, or fetch a token."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def first(self) -> bytes:
        """Return the first message. Raises ``SaslFailure``, and whatever a token function raises."""
        return next(self._messages)

    def next(self, answer: bytes) -> bytes | None:
        """Return the message after the broker's answer to the one before; ``None``: the login is complete.

        Raises ``SaslFailure``."""
        # Not by its StopIteration, which no future of another thread can hold.
        try:
            return self._messages.send(answer)
        except StopIteration:
            return None


def plain(username: str, password: str) -> Messages:
    """PLAIN (RFC 4616)."""
    if "\0" in username + password:
        raise SaslFailure("sasl.username and sasl.password must not have a zero character in them")
    if (yield "\0".join((username, username, password)).encode()):
        raise SaslFailure("the broker's answer to PLAIN is not empty")


def scram(mechanism: str, username: str, password: str, nonce: str) -> Messages:
    """SCRAM (RFC 5802 and 7677) without channel binding, which Kafka does not have. ``nonce``: printable characters
    without a comma, new for each login."""
    # No SASLprep: Kafka's broker and its tools hash the plain UTF-8 (`ScramFormatter.normalize`), and so does
    # librdkafka. A password that was prepared here, and not there, would be refused.
    digest = mechanism.removeprefix("SCRAM-").replace("-", "").lower()
    bare = f"n={username.replace('=', '=3D').replace(',', '=2C')},r={nonce}".encode()
    first = yield b"n,," + bare
    whole_nonce, salt, iterations = _server_first(first, nonce)
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations)
    unproven = b"c=biws,r=" + whole_nonce
    signed = b",".join((bare, first, unproven))
    client_key = hmac.digest(salted, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, client_key).digest(), signed, digest)
    proof = bytes(left ^ right for left, right in zip(client_key, signature, strict=True))
    final = yield unproven + b",p=" + base64.b64encode(proof)
    expected = hmac.digest(hmac.digest(salted, b"Server Key", digest), signed, digest)
    # Only who knows the password, or its hash, can sign: a broker that cannot is not the one that is meant.
    if not hmac.compare_digest(_server_final(final), expected):
        raise SaslFailure("the broker's signature is wrong: it does not know the password")


def _server_first(message: bytes, nonce: str) -> tuple[bytes, bytes, int]:
    """Return the nonce of both sides, the salt, and how often to hash."""
    parts = message.split(b",")
    if len(parts) < 3 or [part[:2] for part in parts[:3]] != [b"r=", b"s=", b"i="]:
        raise SaslFailure("the broker's answer is no message of SCRAM")
    whole_nonce, salt, iterations = (part[2:] for part in parts[:3])
    # The start is ours: else this may be the answer to another login, recorded before.
    if not whole_nonce.startswith(nonce.encode()) or len(whole_nonce) == len(nonce):
        raise SaslFailure("the broker's SCRAM nonce does not continue ours")
    if not (iterations.isdigit() and len(iterations) <= 10):
        raise SaslFailure("the broker's SCRAM iterations are no number")
    if not _LEAST_ITERATIONS <= int(iterations) <= _MOST_ITERATIONS:
        raise SaslFailure(
            f"the broker wants {int(iterations)} SCRAM iterations; {_LEAST_ITERATIONS} to {_MOST_ITERATIONS} are taken"
        )
    return whole_nonce, _decoded(salt), int(iterations)


def _server_final(message: bytes) -> bytes:
    """Return the broker's signature."""
    value = message.split(b",")[0]
    if value[:2] == b"e=":
        raise SaslFailure("the broker refuses the credentials; check the sasl.* settings")
    if value[:2] != b"v=":
        raise SaslFailure("the broker's answer is no message of SCRAM")
    return _decoded(value[2:])


def _decoded(text: bytes) -> bytes:
    try:
        decoded = base64.b64decode(text, validate=True)
    except binascii.Error:
        decoded = b""
    if not decoded:
        raise SaslFailure("the broker's answer is no message of SCRAM")
    return decoded


def oauthbearer(fetch_token: Callable[[], OAuthToken]) -> Messages:
    """OAUTHBEARER (RFC 7628)."""
    token = fetch_token()
    if not _TOKEN.fullmatch(token.value):
        raise SaslFailure("the token of oauth_cb has characters that no token may have (RFC 6750)")
    for name, value in token.extensions.items():
        # "auth" is the token itself; a character that separates would begin another extension.
        if name == "auth" or not (_EXTENSION_NAME.fullmatch(name) and _EXTENSION_VALUE.fullmatch(value)):
            raise SaslFailure("an extension of oauth_cb has a name or a value that none may have (RFC 7628)")
    fields = [f"auth=Bearer {token.value}", *(f"{name}={value}" for name, value in token.extensions.items())]
    if (yield "\x01".join(["n,,", *fields, "", ""]).encode()):
        # A refusal comes as an answer with the reason, and is the broker's to end once this has been sent.
        yield b"\x01"
        raise SaslFailure("the broker refuses the token of oauth_cb")


def gssapi(service: str, host: str) -> Messages:
    """GSSAPI with Kerberos (RFC 4752), by the ``gssapi`` package. Not tried on a real domain."""
    library = _gssapi_library()
    name = library.Name(f"{service}@{host}", name_type=library.NameType.hostbased_service)
    context = library.SecurityContext(name=name.canonicalize(library.MechType.kerberos), usage="initiate")
    answer = None
    while not context.complete:
        answer = yield context.step(answer) or b""
    offer = bytes(context.unwrap(answer).message)
    if len(offer) != 4 or not offer[0] & _NO_LAYER:
        raise SaslFailure("the broker does not offer GSSAPI without a security layer, the only kind that Kafka has")
    accepted = bytes([_NO_LAYER]) + offer[1:] + f"{service}@{host}".encode()
    if (yield context.wrap(accepted, False).message):
        raise SaslFailure("the broker's last answer to GSSAPI is not empty")


def _gssapi_library() -> Any:
    try:
        return import_module("gssapi")
    except (ImportError, OSError):  # OSError: the package is there, and the Kerberos library is not
        raise SaslFailure("sasl.mechanism=GSSAPI needs the gssapi package and a Kerberos library") from None
