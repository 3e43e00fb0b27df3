"""A schema registry over HTTP, by Confluent's API, which Karapace and Apicurio (``/apis/ccompat/v7``) speak, too.

The standard library's client: it follows no redirect (credentials must not go to another host), and what it reads is
bounded. Calls block, and are for threads that may.
"""

from __future__ import annotations

import base64
import http.client
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, unquote, urlsplit
from uuid import UUID

import msgspec

from streams.errors import ConfigError, RegistryUnavailable

MOST_BYTES: Final = 1 << 20
"""Bytes of a schema, at most; escaped in an answer, twice as many."""
MOST_REFERENCES: Final = 100
CALL_SECONDS: Final = 10.0
"""Seconds of one call, at most; it waits 3 for a connection, and for each part of an answer."""
_PART_SECONDS: Final = 3.0


class Schema(msgspec.Struct, frozen=True):
    """A schema: its ``kind`` (``AVRO``, ``JSON`` or ``PROTOBUF``), its text, and those of the schemas that it refers
    to, each behind those that it needs itself."""

    kind: str
    text: str
    references: tuple[str, ...] = ()


class NotInRegistry(Exception):
    """The registry has no such schema, subject or version. The message says what it lacks."""


class SchemaRefused(Exception):
    """A schema of the registry is not taken, and never will be: it is too large, or refers to itself."""


class RegistryClient(Protocol):
    """The calls of a registry. They block, unless the class has ``is_local = True``. ``key``: the beginning of a value,
    with the schema's id (``registry.key_size``). All raise ``RegistryUnavailable`` and ``ConfigError``."""

    def schema(self, key: bytes, /) -> Schema:
        """Return the schema of an id. Raises ``NotInRegistry``, ``SchemaRefused``."""
        ...

    def lookup(self, subject: str, schema: Schema, /) -> int:
        """Return the id under which a subject has a schema. Raises ``NotInRegistry``."""
        ...

    def register(self, subject: str, schema: Schema, /) -> int:
        """Register a schema. Returns its id. Raises ``NotInRegistry`` with the reason if it is incompatible."""
        ...

    def versions(self, subject: str, /) -> dict[int, Schema]:
        """Return all schemas of a subject by their ids, the newest last. Raises ``NotInRegistry``."""
        ...

    def incompatible(self, subject: str, schema: Schema, /) -> str:
        """Say why the newest schema of a subject and this one are not compatible; ``""``: they are."""
        ...


class RegistryAddress(NamedTuple):
    """Address of a registry, without credentials, and those that stood in it."""

    url: str
    auth: tuple[str, str] | str | None

    @classmethod
    def of(cls, url: str, auth: tuple[str, str] | str | None) -> RegistryAddress:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = parts = None  # not shown: there may be a password in it
        if parts is None or not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise ConfigError("the address of a schema registry is http://HOST:PORT, or https://; this one is none")
        if parts.username and auth is None:
            auth = unquote(parts.username), unquote(parts.password or "")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}", auth)


class HttpRegistry:
    """``RegistryClient`` over HTTP. Any thread, each call with a connection of its own: ids are kept, so calls are
    few."""

    def __init__(self, address: RegistryAddress, ca: str | Path | None = None) -> None:
        self._url, self._ca = address.url, ca
        parts = urlsplit(address.url)
        self._is_tls, self._path, self._host, self._port = (
            parts.scheme == "https", parts.path, parts.hostname or "", parts.port)  # fmt: skip
        self._headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if isinstance(address.auth, tuple):
            pair = base64.b64encode(":".join(address.auth).encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        elif address.auth:
            self._headers["Authorization"] = f"Bearer {address.auth}"

    def schema(self, key: bytes, /) -> Schema:
        path = f"/schemas/guids/{UUID(bytes=key[1:])}" if key[0] else f"/schemas/ids/{int.from_bytes(key[1:])}"
        return self._complete(self._ask("GET", path))

    def lookup(self, subject: str, schema: Schema, /) -> int:
        return _number(self._ask("POST", f"/subjects/{quote(subject, '')}", _posted(schema)), "id")

    def register(self, subject: str, schema: Schema, /) -> int:
        return _number(self._ask("POST", f"/subjects/{quote(subject, '')}/versions", _posted(schema)), "id")

    def versions(self, subject: str, /) -> dict[int, Schema]:
        path = f"/subjects/{quote(subject, '')}/versions"
        listed = self._ask("GET", path)
        if not isinstance(listed, list):
            raise RegistryUnavailable(f"{self._url} answered GET {path} with something else than versions")
        found = dict[int, Schema]()
        for number in listed:
            answer = self._ask("GET", f"{path}/{int(number)}")
            found[_number(answer, "id")] = self._complete(answer)
        return found

    def incompatible(self, subject: str, schema: Schema, /) -> str:
        path = f"/compatibility/subjects/{quote(subject, '')}/versions/latest?verbose=true"
        try:
            answer = self._ask("POST", path, _posted(schema))
        except NotInRegistry:
            return ""  # the first of its subject
        text = "; ".join(map(str, answer.get("messages") or ()))
        return "" if answer.get("is_compatible") is True else text[:2_000] or "the registry does not say why"

    def _complete(self, answer: Any) -> Schema:
        texts = dict[tuple[str, int], str]()
        self._refer(answer, texts, (), 0)
        return Schema(_kind(answer), _text(answer), tuple(texts.values()))

    def _refer(self, answer: Any, texts: dict[tuple[str, int], str], above: tuple[Any, ...], levels: int) -> None:
        for reference in answer.get("references") or ():
            name = str(reference.get("subject")), _number(reference, "version")
            if name in above:
                raise SchemaRefused(f"its references go in a circle, by {name[0]} version {name[1]}")
            if name in texts:
                continue
            if len(texts) + len(above) >= MOST_REFERENCES:
                raise SchemaRefused(f"it refers to more than {MOST_REFERENCES} schemas")
            found = self._ask("GET", f"/subjects/{quote(name[0], '')}/versions/{name[1]}")
            self._refer(found, texts, (*above, name), levels + 1)
            texts[name] = _text(found)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Make one request. Raises ``NotInRegistry`` for 404 and 409, ``ConfigError`` for what is refused, else
        ``RegistryUnavailable``: it may be answered later."""
        what = f"{self._url} answered {method} {path.partition('?')[0]} with"
        try:
            status, content, location = self._answer(method, path, body)
        except (OSError, http.client.HTTPException, TimeoutError) as error:
            text = error.strerror or str(error) if isinstance(error, OSError) else type(error).__name__
            raise RegistryUnavailable(f"the schema registry {self._url} does not answer: {text[:200]}") from None
        if status == 200 and len(content) > 2 * MOST_BYTES:
            raise SchemaRefused(f"it has more than {MOST_BYTES} bytes")
        if status in (401, 403):
            raise ConfigError(f"{what} {status}: give SchemaRegistry(auth=...) what may read these schemas")
        try:
            answer = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = None
        text = str(answer.get("message", ""))[:500] if isinstance(answer, dict) else ""
        if status in (404, 409) and answer is not None:  # without a body it is another server, or a proxy
            raise NotInRegistry(text or f"{what} {status}")
        if status in (400, 422):
            raise ConfigError(f"{what} {status}: {text}")
        if status != 200 or not isinstance(answer, dict | list):
            where = "" if location is None else f", to {urlsplit(location).hostname}: redirects are not followed"
            raise RegistryUnavailable(f"{what} {status}{where}{': ' + text if text else ''}")
        return answer

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes, str | None]:
        deadline = time.monotonic() + CALL_SECONDS
        line: http.client.HTTPConnection
        if self._is_tls:
            context = ssl.create_default_context(cafile=None if self._ca is None else os.fspath(self._ca))
            line = http.client.HTTPSConnection(self._host, self._port, timeout=_PART_SECONDS, context=context)
        else:
            line = http.client.HTTPConnection(self._host, self._port, timeout=_PART_SECONDS)
        try:
            headers = self._headers if body is None else self._headers | {"Content-Type": "application/json"}
            line.request(method, self._path + path, None if body is None else msgspec.json.encode(body), headers)
            content = b""
            with line.getresponse() as response:
                while len(content) <= 2 * MOST_BYTES and (part := response.read1(1 << 16)):
                    content += part
                    if time.monotonic() > deadline:  # a byte now and then would keep each single wait short
                        raise TimeoutError(f"not all of it came within {CALL_SECONDS:g} s")
                if response.length and len(content) <= 2 * MOST_BYTES:
                    raise http.client.IncompleteRead(b"")
                return response.status, content, response.getheader("Location")
        finally:
            line.close()


def _posted(schema: Schema) -> dict[str, Any]:
    return {"schema": schema.text} | ({} if schema.kind == "AVRO" else {"schemaType": schema.kind})


def _number(answer: Any, name: str) -> int:
    number = answer.get(name) if isinstance(answer, dict) else None
    if type(number) is not int or number < 0:
        raise RegistryUnavailable(f"the schema registry answered without the field {name!r}")
    return number


def _text(answer: Any) -> str:
    text = answer.get("schema") if isinstance(answer, dict) else None
    if not isinstance(text, str):
        raise RegistryUnavailable("the schema registry answered without the field 'schema'")
    if len(text) > MOST_BYTES:
        raise SchemaRefused(f"it has more than {MOST_BYTES} bytes")
    return text


def _kind(answer: Any) -> str:
    return str(answer.get("schemaType") or "AVRO")
