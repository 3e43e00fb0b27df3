"""The base of codecs by a schema of a registry: ids, bounds and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from streams.errors import ConfigError, DecodeError, EncodeError
from streams.formats.needs import NotLookedUp
from streams.formats.registry import SchemaRegistry, shown, until_there
from streams.formats.registry_http import Schema
from streams.model.reasons import cause, reason
from streams.protocols import Codec

VERSION_PROPERTY: Final = "kes.version"
"""The property of a schema with the version of an event type; left out for version 1."""


class SchemaCodec:
    """Values that begin with the id of their schema: ``@event_type("bank.Deposited", codec=AvroCodec(registry))``.

    ``subject``: where the schema that is written is registered, of several topics a tuple of them. Without it the codec
    only reads. ``schema``: the text, or a file, of that schema; ``None``: derived from the class. ``bare``: the codec
    of values that do not begin with an id, during a migration.

    A start looks the id up under its subjects, and registers nothing: ``kes schema register`` does. Raises
    ``ConfigError``.
    """

    kind: ClassVar[str]
    is_read_by_schema: ClassVar = True
    """Whether a value cannot be read without the schema that it was written with."""
    title: str = ""
    prefix = b""
    """What values begin with; empty until it is looked up."""

    def __init__(
        self,
        registry: SchemaRegistry,
        *,
        subject: str | tuple[str, ...] = (),
        schema: str | Path | None = None,
        bare: Codec[Any] | None = None,
    ) -> None:
        what = type(self).__name__
        given: object = registry
        if not isinstance(given, SchemaRegistry):
            raise ConfigError(f"{what} takes a SchemaRegistry, not {registry!r}")
        self.registry = registry
        self.subjects = (subject,) if isinstance(subject, str) else tuple(subject)
        named: tuple[object, ...] = self.subjects
        if not all(isinstance(each, str) and each for each in named):
            raise ConfigError(f"subject of {what} is {subject!r}; it is the name of a subject, or a tuple of some")
        self._given, self._bare = schema, bare

    def for_event(self, cls: type, name: str, version: int) -> Self:
        """Return the codec of one event class. Raises ``ConfigError`` for classes that it cannot write."""
        made = copy(self)
        made.title = name
        text = self._given
        if isinstance(text, Path) or (
            text is not None and "\n" not in text and not text.lstrip().startswith(("{", '"'))
        ):
            try:
                text = Path(text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the schema of {name}, {self._given}, cannot be read: {error}") from None
        made._bind(cls, name, version, text)
        return made

    @property
    def schema(self) -> Schema:
        """The schema that is written."""
        return Schema(self.kind, self._text())

    def prepare(self) -> None:
        """Look the id of the schema up that is written, and fetch all versions of the subjects, which are going to be
        read. Blocks. Raises ``RegistryUnavailable``, ``ConfigError``."""
        if self.subjects and not self.prefix:
            number = self.registry.look_up(self.subjects, self.schema, self.title)
            self._ready(self.registry.key(number))
            if self.registry.is_missing(self.registry.key(number)):
                self.registry.fetch_subjects(self.subjects)
            self.registry.known_at(self.registry.key(number), self.schema)

    def encode(self, value: Any, /) -> bytes:
        if not self.prefix:
            self._look_up_late()
        try:
            return self._encode(value)
        except (MemoryError, EncodeError):
            raise
        except Exception as error:
            raise EncodeError(f"{self.title} cannot be encoded: {reason(error)}") from cause(error)

    def _look_up_late(self) -> None:
        """Do without a start what it has not done. Not on an event loop, which must not wait."""
        if not self.subjects:
            raise EncodeError(
                f"{self.title} is not written: {type(self).__name__}(subject=...) says where its schema is registered"
            )
        if asyncio._get_running_loop() is not None and not self.registry.is_local:
            raise NotLookedUp(self)
        self.prepare()

    def decode(self, data: bytes, /) -> Any:
        if self._bare is not None and self._is_bare(data):
            return self._bare.decode(data)
        return self._read(data, self._decode)

    def decode_dict(self, data: bytes, /) -> dict[str, Any]:
        """Decode the bytes by the schema that they were written with, for upcasters."""
        if self._is_bare(data):
            bare: Any = self._bare
            plain: dict[str, Any] = bare.decode_dict(data)
            return plain
        found: dict[str, Any] = self._read(data, self._decode_plain)
        return found

    def from_dict(self, plain: dict[str, Any], /) -> Any:
        """Make a value of the upcasters' result."""
        try:
            return self._convert(plain)
        except Exception as error:
            raise DecodeError(f"upcasters did not make a {self.title}: {reason(error)}") from cause(error)

    def unknown(self, value: bytes | None) -> bytes | None:
        """Return the id of a value whose schema is to be fetched before it is decoded."""
        return self.registry.unknown(value) if self.is_read_by_schema else None

    def _is_bare(self, data: bytes) -> bool:
        return self._bare is not None and data[:1] not in (b"\0", b"\1")

    def _read(self, data: bytes, read: Callable[[bytes, Schema, bytes], Any]) -> Any:
        registry = self.registry
        key = registry.key_of(data)
        schema = registry.find(key)
        try:
            if schema.kind != self.kind:
                raise DecodeError(f"it is of the kind {schema.kind}, not {self.kind}")
            return read(key, schema, data)
        except MemoryError:
            raise
        except Exception as error:
            own = f", read by {shown(self.prefix[: len(key)])}" if self.prefix else ""
            text = str(error) if isinstance(error, DecodeError) else reason(error)
            raise DecodeError(f"{self.title}, written by the schema {shown(key)}{own}: {text}") from cause(error)

    def _ready(self, key: bytes) -> None:
        self.prefix = key

    def _bind(self, cls: type, name: str, version: int, text: str | None) -> None:
        raise NotImplementedError

    def _text(self) -> str:
        raise NotImplementedError

    def _encode(self, value: Any) -> bytes:
        raise NotImplementedError

    def _decode(self, key: bytes, schema: Schema, data: bytes) -> Any:
        raise NotImplementedError

    def _decode_plain(self, key: bytes, schema: Schema, data: bytes) -> Any:
        raise DecodeError("values of this codec have no dict form for upcasters")

    def _convert(self, plain: dict[str, Any]) -> Any:
        raise DecodeError("values of this codec have no dict form for upcasters")


def prepare(needy: Iterable[Any]) -> None:
    """Have codecs and rules ask the registry for what they need, until it answers. Blocks. Raises
    ``RegistryUnavailable``, ``ConfigError``."""
    for each in needy:
        until_there(each.prepare, each.registry)
