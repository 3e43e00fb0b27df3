"""JSON by a schema registry: the values of ``codec_for``, behind the id of their JSON Schema.

A class says itself what it reads, so a value is decoded without its schema, also while the registry is away.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streams.codecs import codec_for
from streams.errors import ConfigError
from streams.formats.schema_codecs import VERSION_PROPERTY, SchemaCodec


class JsonSchemaCodec(SchemaCodec):
    """Values in JSON. The class is what ``codec_for`` takes, pydantic models included; a schema that is given is not
    compared with it."""

    kind = "JSON"
    is_read_by_schema = False
    _inner: Any
    _schema: str

    def _bind(self, cls: type, name: str, version: int, text: str | None) -> None:
        self._inner = codec_for(cls)
        if not hasattr(self._inner, "json_schema"):
            raise ConfigError(f"{name}: JsonSchemaCodec takes a class with fields, not {cls!r}")
        if text is None:
            found, parts = self._inner.json_schema("#/$defs/")
            while list(found) == ["$ref"]:  # a title beside a reference is not looked at
                found = parts[found["$ref"].rpartition("/")[2]]
            more = {} if version == 1 else {VERSION_PROPERTY: version}
            text = msgspec.json.encode(found | {"title": name} | more | ({"$defs": parts} if parts else {})).decode()
        self._schema = text

    def _text(self) -> str:
        return self._schema

    def _encode(self, value: Any) -> bytes:
        data: bytes = self._inner.encode(value)
        return self.prefix + data

    def decode(self, data: bytes, /) -> Any:
        return self._of(data).decode(self._body(data))

    def decode_dict(self, data: bytes, /) -> dict[str, Any]:
        plain: dict[str, Any] = self._of(data).decode_dict(self._body(data))
        return plain

    def from_dict(self, plain: dict[str, Any], /) -> Any:
        return self._inner.from_dict(plain)

    def _of(self, data: bytes) -> Any:
        return self._bare if self._is_bare(data) else self._inner

    def _body(self, data: bytes) -> bytes:
        return data if self._is_bare(data) else data[len(self.registry.key_of(data)) :]
