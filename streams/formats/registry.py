"""Schemas of a registry, by the ids that values begin with; and what codecs and rules need of them.

What is known of an id never changes, so it is kept for good: in the process, and in a folder if there is one. A value
that is decoded finds its schema in memory. Who reads records has the schemas fetched before (``missing`` and
``fetch``): the event source in ``runtime.reading.schema_wait``, on a thread; commands and tests where they decode.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal
from uuid import UUID, uuid4

import msgspec

from streams.errors import ConfigError, DecodeError, RegistryUnavailable
from streams.formats.needs import REPLICA_SECONDS
from streams.formats.registry_http import (
    HttpRegistry,
    NotInRegistry,
    RegistryAddress,
    RegistryClient,
    Schema,
    SchemaRefused,
)

_log = logging.getLogger(__name__)

HEADER: Final = "__value_schema_id"
"""The header of values whose id does not stand in front of them."""
URL_VARIABLE: Final = "KES_REGISTRY_URL"
AUTH_VARIABLE: Final = "KES_REGISTRY_AUTH"
REFUSED_SECONDS: Final = 300.0
"""An id that the registry does not have counts as unknown for so long."""
MOST_REFUSED: Final = 10_000
MOST_AT_ONCE: Final = 3
"""Threads of one registry for values that are read without a wait."""
Wire = Literal["confluent", "apicurio8"]
_SIZES: Final[dict[Wire, int]] = {"confluent": 5, "apicurio8": 9}
_GUID_SIZE: Final = 17
_TOKEN: Final = uuid4().hex


class Knowledge(msgspec.Struct, frozen=True):
    """Schemas and ids that a process has fetched, for another one, which asks nothing. ``process``: its name."""

    url: str
    wire: Wire
    process: str
    known: dict[str, Schema]
    written: list[tuple[str, Schema, int]]


class _Process:
    """Knowledge of a process about one registry, whichever objects use it. ``is_closed``: it was sent, and that is
    all."""

    def __init__(self) -> None:
        self.known: dict[bytes, Schema] = {}
        self.written: dict[tuple[str, Schema], int] = {}
        self.refused: dict[bytes, tuple[str, float]] = {}
        self.is_closed = False
        self.fetching: set[bytes] = set()
        self.lock = threading.Lock()

    def take(self, there: Knowledge) -> None:
        """Add what is known there."""
        self.known |= {bytes.fromhex(key): schema for key, schema in there.known.items()}
        self.written |= {(subject, schema): number for subject, schema, number in there.written}


_processes: Final[dict[str, _Process]] = {}


class SchemaRegistry:
    """A schema registry with Confluent's API: ``SchemaRegistry("http://registry:8081")``; for Apicurio with
    ``/apis/ccompat/v7`` behind it. Made without asking it anything. Any thread.

    ``url`` and ``auth``: else from ``KES_REGISTRY_URL`` and ``KES_REGISTRY_AUTH`` (``user:password``, or a token),
    when they are first needed. ``auth`` is (user, password) or a token. ``ca``: a file of certificates. ``folder``:
    where schemas and ids are kept over restarts, so that a program starts without the registry. ``wire="apicurio8"``:
    ids of eight bytes. ``unavailable_seconds``: after so long without an answer the program stops with
    ``RegistryUnavailable``; 0: it waits. ``client``: what speaks to the registry, in the place of HTTP.
    """

    def __init__(
        self,
        url: str = "",
        *,
        auth: tuple[str, str] | str | None = None,
        ca: str | Path | None = None,
        folder: str | Path | None = None,
        wire: Wire = "confluent",
        unavailable_seconds: float = 0.0,
        client: RegistryClient | None = None,
    ) -> None:
        if wire not in _SIZES:
            raise ConfigError(f"wire of SchemaRegistry is {wire!r}; it must be one of {', '.join(_SIZES)}")
        if not 0 <= unavailable_seconds < 1e9:
            raise ConfigError(f"unavailable_seconds of SchemaRegistry is {unavailable_seconds!r}; it must be 0 or more")
        self._url, self._auth, self._ca, self._client = url, auth, ca, client
        self._wire: Wire = wire
        self._id_size, self._folder = _SIZES[wire], folder
        self.unavailable_seconds = unavailable_seconds
        self._address = None if not url else RegistryAddress.of(url, auth)
        self._found: _Process | None = None
        self._own = _Process() if client is not None and not url else None  # of a test: nothing to share

    def __repr__(self) -> str:
        return f"SchemaRegistry({self.url!r})"

    def __reduce__(self) -> Any:
        return _made_of, (self.sent(),)

    def sent(self) -> str:
        """Return the ``Knowledge`` of this process, for ``receive`` in another one."""
        process = self._process
        known = {key.hex(): schema for key, schema in [*process.known.items()]}
        written = [(*each, number) for each, number in [*process.written.items()]]
        return msgspec.json.encode(Knowledge(self.url, self._wire, _process_name(), known, written)).decode()

    def receive(self, sent: str) -> None:
        """Know what another process has sent, and ask nothing from now on, whatever the address here."""
        there = msgspec.json.decode(sent, type=Knowledge)
        if self._found is None:
            self._found = self._own or _processes.setdefault(there.url, _Process())
        self._found.take(there)
        self._found.is_closed |= there.process != _process_name()

    @property
    def url(self) -> str:
        """The address, without credentials. Raises ``ConfigError`` if there is none."""
        if self._address is None:
            if self._own is not None:
                return "a client of its own"
            url = os.environ.get(URL_VARIABLE, "")
            if not url:
                raise ConfigError(f"no schema registry is named: SchemaRegistry(url), or {URL_VARIABLE}")
            self._address = RegistryAddress.of(url, self._auth)
        return self._address.url

    @property
    def client(self) -> RegistryClient:
        if self._client is None:
            assert self.url
            address = self._address
            assert address is not None
            if address.auth is None and (text := os.environ.get(AUTH_VARIABLE)):
                user, is_pair, password = text.partition(":")
                address = address._replace(auth=(user, password) if is_pair else text)
            self._client = HttpRegistry(address, self._ca)
        return self._client

    @client.setter
    def client(self, client: RegistryClient) -> None:
        """Speak to another one, which shares nothing with what was known: in tests ``FakeRegistry``."""
        self._client, self._own = client, _Process()
        self._found = self._own

    @property
    def is_local(self) -> bool:
        """Check for a client whose calls do not block, or whose schemas were sent."""
        return self._process.is_closed or getattr(self.client, "is_local", False)

    @property
    def _process(self) -> _Process:
        if self._found is None:
            self._found = self._own or _processes.setdefault(self.url, _Process())
            self._load(self._found)
        return self._found

    # -- ids -----------------------------------------------------------------------------------------------------------

    def key_of(self, value: bytes) -> bytes:
        """Return the id at the beginning of a value, as it stands there. Raises ``DecodeError``."""
        size = self._id_size if value[:1] == b"\0" else _GUID_SIZE if value[:1] == b"\1" else 0
        if not size or len(value) < size:
            raise DecodeError(f"the value does not begin with the id of a schema: {value[:20]!r}")
        return value[:size]

    def key(self, number: int) -> bytes:
        """Return an id as values begin with it."""
        return number.to_bytes(self._id_size, "big")

    def find(self, key: bytes) -> Schema:
        """Return the schema of an id. Raises ``DecodeError`` if there is none, and ``RegistryUnavailable`` where it is
        not known yet, and cannot be waited for: on an event loop."""
        found = self._process.known.get(key)
        return found if found is not None else self._find_unknown(key)

    def unknown(self, value: bytes | None) -> bytes | None:
        """Return the id of a value whose schema is to be fetched first."""
        try:
            key = self.key_of(value or b"")
        except DecodeError:
            return None
        return key if self.is_missing(key) else None

    def is_missing(self, key: bytes) -> bool:
        """Check for an id that is to be fetched first."""
        process = self._process
        if key in process.known or process.is_closed:
            return False
        refused = process.refused.get(key)
        return refused is None or refused[1] < time.monotonic()

    def _find_unknown(self, key: bytes) -> Schema:
        process = self._process
        if process.is_closed:
            raise DecodeError(
                f"the schema {shown(key)} was not sent with the job: the driver fetches those of the named subjects, "
                "when a query begins"
            )
        if self.is_missing(key):
            if asyncio._get_running_loop() is not None and not self.is_local:
                self._fetch_soon(key)
                raise RegistryUnavailable(
                    f"the schema {shown(key)} of {self.url} is not here yet; it is being fetched: read the value again"
                )
            if (missing := self.fetch(key)) is not None:
                self.refuse(key, missing)
        if key not in process.known:
            raise DecodeError(process.refused.get(key, (f"the schema {shown(key)} is unknown", 0.0))[0])
        return process.known[key]

    def _fetch_soon(self, key: bytes) -> None:
        """Fetch the schema of a value that is read without a wait: of a view or a lookup, on an event loop."""
        process = self._process
        with process.lock:
            if key in process.fetching or len(process.fetching) >= MOST_AT_ONCE:
                return
            process.fetching.add(key)
        threading.Thread(target=self._fetch_late, args=(key,), name="kes-registry", daemon=True).start()

    def _fetch_late(self, key: bytes) -> None:
        try:
            missing, until = self.fetch(key), time.monotonic() + REPLICA_SECONDS
            while missing is not None and time.monotonic() < until:
                time.sleep(1.0)
                missing = self.fetch(key)
            if missing is not None:
                self.refuse(key, missing)
        except RegistryUnavailable as error:  # the next read begins anew
            _log.warning("the schema %s is not fetched: %s", shown(key), error)
        except ConfigError as error:
            self.refuse(key, str(error))
        finally:
            self._process.fetching.discard(key)

    def fetch(self, key: bytes) -> str | None:
        """Ask for the schema of an id, and keep it, or that it is refused. Blocks. Returns why the registry does not
        have it (yet), or ``None``. Raises ``RegistryUnavailable``, ``ConfigError``."""
        try:
            self._keep(key, self.client.schema(key))
        except NotInRegistry as error:
            return f"the schema {shown(key)} is not in the registry {self.url}: {error}"
        except SchemaRefused as error:
            self.refuse(key, f"the schema {shown(key)} of {self.url} is not taken: {error}")
        return None

    def refuse(self, key: bytes, reason: str) -> None:
        """Note that values with an id cannot be read, for some minutes."""
        refused = self._process.refused
        if len(refused) >= MOST_REFUSED:  # noise: the oldest has been answered
            refused.pop(next(iter(refused)), None)
        refused[key] = reason, time.monotonic() + REFUSED_SECONDS

    def fetch_subjects(self, subjects: Iterable[str]) -> None:
        """Fetch all versions of these subjects. Blocks. One that the registry does not have has none. Raises
        ``RegistryUnavailable``, ``ConfigError``."""
        for subject in () if self._process.is_closed else subjects:
            try:
                for number, schema in self.client.versions(subject).items():
                    self._keep(self.key(number), schema)
            except NotInRegistry:
                _log.info("%s has no subject %s yet", self.url, subject)
            except SchemaRefused as error:
                raise ConfigError(f"a schema of the subject {subject} of {self.url} is not taken: {error}") from None

    def look_up(self, subjects: Iterable[str], schema: Schema, whose: str) -> int:
        """Return the id of a schema that is written, the same in all of these subjects. Blocks, unless it is known.
        Raises ``RegistryUnavailable``, ``ConfigError``."""
        process, ids = self._process, dict[str, int]()
        for subject in subjects:
            number = process.written.get((subject, schema))
            if number is None:
                if process.is_closed:
                    raise ConfigError(
                        f"the id of {whose} under {subject!r} was not sent with the job: the workers need the version "
                        "of its class that the driver has"
                    )
                try:
                    number = self.client.lookup(subject, schema)
                except NotInRegistry as error:
                    raise ConfigError(
                        f"the schema of {whose} is not registered under {subject!r} in {self.url} ({error}); a running "
                        "program registers none: `kes schema register MODULE:SOURCE`"
                    ) from None
                process.written[subject, schema] = number
                self._write({}, [(subject, schema, number)])
            ids[subject] = number
        if len(set(ids.values())) != 1:
            raise ConfigError(f"{whose} is written with one id, and its subjects in {self.url} have several: {ids}")
        return next(iter(ids.values()))

    @property
    def has_schemas(self) -> bool:
        """Check for any schema that is known."""
        return bool(self._process.known)

    def known_at(self, key: bytes, schema: Schema) -> None:
        """Note the schema of an id that was looked up."""
        if key not in self._process.known:  # the registry's own text, with its references, says more
            self._process.known[key] = schema

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _keep(self, key: bytes, schema: Schema) -> None:
        process = self._process
        with process.lock:
            before = process.known.get(key)
            if before is not None and _meaning(before) != _meaning(schema):
                now, then = (_digest(each.text.encode()) for each in (schema, before))
                raise ConfigError(
                    f"{self.url} has another schema {shown(key)} than before (SHA-256 {now}, and {then}): ids never "
                    "change, so it is another registry, or one that was emptied"
                )
            if before is None:
                process.known[key] = schema
                self._write({key.hex(): schema}, [])

    @property
    def _files(self) -> Path | None:
        return None if self._folder is None else Path(self._folder) / f"registry-{_digest(self.url.encode())}"

    def _write(self, known: dict[str, Schema], written: list[tuple[str, Schema, int]]) -> None:
        if self._files is None:
            return
        content = msgspec.json.encode(Knowledge(self.url, self._wire, "", known, written))
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            new = self._files / f".{_digest(content)}-{os.getpid()}"
            new.write_bytes(content)
            new.replace(self._files / f"{_digest(content)}.json")  # whole or not at all, for a process that starts now
        except OSError as error:  # full, read-only: what is known in memory serves
            _log.warning("schemas are not kept for the next start: %s", error)

    def _load(self, process: _Process) -> None:
        """Read what earlier runs have kept. A file that is damaged counts as missing."""
        for path in sorted(self._files.glob("*.json")) if self._files is not None else ():
            try:
                content = path.read_bytes()
                if _digest(content) != path.stem:
                    raise ValueError("its content has another SHA-256")
                process.take(msgspec.json.decode(content, type=Knowledge))
            except (OSError, ValueError, msgspec.DecodeError) as error:
                _log.warning("%s is damaged, and fetched again: %s", path, error)


def shown(key: bytes) -> str:
    """Return an id for messages."""
    return str(UUID(bytes=key[1:])) if key[:1] == b"\1" else str(int.from_bytes(key[1:], "big"))


def until_there(call: Callable[[], None], registry: SchemaRegistry) -> None:
    """Make a call that needs the registry until it answers. Blocks. Raises ``RegistryUnavailable`` after
    ``unavailable_seconds``."""
    began, warned = time.monotonic(), False
    while True:
        try:
            return call()
        except RegistryUnavailable as error:
            if 0 < registry.unavailable_seconds < time.monotonic() - began:
                raise
            if not warned:
                warned = True
                _log.warning("waiting for the schema registry: %s", error)
        time.sleep(1.0)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _meaning(schema: Schema) -> Any:
    """Return what two texts of one schema have in common, whatever white space a server keeps."""
    try:
        return schema.kind, msgspec.json.decode(schema.text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return schema.kind, "".join(schema.text.split())


def _made_of(sent: str) -> SchemaRegistry:
    there = msgspec.json.decode(sent, type=Knowledge)
    own: Any = None if "://" in there.url else object()  # in the place of a client, which is never called
    registry = SchemaRegistry("" if own else there.url, wire=there.wire, client=own)
    registry.receive(sent)
    registry._process.is_closed |= own is not None
    return registry


def _process_name() -> str:
    return f"{_TOKEN}-{os.getpid()}"  # a fork has the same token, and another machine may have the same number
