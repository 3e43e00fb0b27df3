"""Avro by a schema registry: ``fastavro`` reads and writes, msgspec makes the class.

Bounds: a schema whose arrays hold what takes no bytes is refused (a few bytes would be any number of them), and values
of schemas that refer to themselves are read by fastavro's Python code, which stops at Python's limit of recursion where
its C code ends the process.
"""

from __future__ import annotations

import dataclasses
import enum
import io
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import fastavro
import msgspec
from fastavro import _read_py
from fastavro.validation import ValidationError, validate
from msgspec import inspect

from streams.errors import ConfigError, DecodeError, EncodeError
from streams.formats.registry_http import Schema
from streams.formats.schema_codecs import VERSION_PROPERTY, SchemaCodec
from streams.model.reasons import reason
from streams.model.round_trips import EVERYTHING, Notation, Risk, read_back, risk_of
from streams.sak.type_nodes import type_nodes

MOST_LEVELS: Final = 64
_NATIVE: Final = (bytes, bytearray, datetime, date, time, Decimal, UUID)
_PLAIN: Final[dict[type, Any]] = {
    inspect.NoneType: "null",
    inspect.BoolType: "boolean",
    inspect.IntType: "long",
    inspect.FloatType: "double",
    inspect.StrType: "string",
    inspect.BytesType: "bytes",
    inspect.DateTimeType: {"type": "long", "logicalType": "timestamp-micros"},
    inspect.DateType: {"type": "int", "logicalType": "date"},
    inspect.TimeType: {"type": "long", "logicalType": "time-micros"},
    inspect.UUIDType: {"type": "string", "logicalType": "uuid"},
}
"""What is derived for types without parts. A number of a class is of 64 bits."""


class AvroCodec(SchemaCodec):
    """Values in Avro. Read by Avro's rules of resolution, from the schema of the writer to that of the class: defaults,
    promotions, aliases. The class is a ``msgspec.Struct`` or a dataclass."""

    kind = "AVRO"
    _cls: type
    _own: Any
    _risk: Risk
    _is_checked = _is_strict = False

    def _bind(self, cls: type, name: str, version: int, text: str | None) -> None:
        self._cls, self._readers = cls, dict[bytes, _Writer | DecodeError]()
        given: object = cls
        if not (isinstance(given, type) and (issubclass(given, msgspec.Struct) or dataclasses.is_dataclass(given))):
            raise ConfigError(f"{name}: AvroCodec takes a msgspec.Struct or a dataclass, not {cls!r}")
        root = msgspec.inspect.type_info(cls)
        self._risk = risk_of(root, Notation(b"", (b"", b"")))
        # Of parts within parts no byte tells whether a number was cut.
        self._is_checked = self._risk.always or self._risk.sampled
        times = any(isinstance(node, inspect.DateTimeType) for node in type_nodes(root))
        if text is None:
            plain = derived(root, name, version)
        else:
            try:
                plain = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(f"the schema of {name} is no JSON: {reason(error)}") from None
            try:
                same = _shape(plain) == _shape(derived(root, name, version))
            except ConfigError:
                same = False
            self._is_strict = not same  # int, float, enums, unions: not all of the class may fit
        self._schema, self._needs_zones = plain, times and "local-timestamp" not in (text or "")
        try:
            self._own = fastavro.parse_schema(plain)
        except Exception as error:
            raise ConfigError(f"the schema of {name} is no Avro schema: {reason(error)}") from error

    def _text(self) -> str:
        return msgspec.json.encode(self._schema).decode()

    def _encode(self, value: Any) -> bytes:
        if value.__class__ is not self._cls:
            raise EncodeError(f"{self.title} expected, got {type(value).__name__} (subclasses lose what they add)")
        plain, into = msgspec.to_builtins(value, builtin_types=_NATIVE), io.BytesIO()
        into.write(self.prefix)
        if self._needs_zones and any(isinstance(part, datetime) and part.tzinfo is None for part in _parts(plain)):
            raise EncodeError(f"{self.title} has a time without a zone, which comes back as another one")
        if self._is_strict:  # what is too large for an int is written all the same
            try:
                validate(plain, self._own, strict=True)
            except ValidationError as error:
                raise EncodeError(f"{self.title} does not fit its schema: {str(error)[:300]}") from error
        fastavro.schemaless_writer(into, self._own, plain, strict=True)
        data = into.getvalue()
        if self._is_checked or self._is_strict or EVERYTHING[0] or self._has_other_kinds(value):
            own = len(self.prefix)
            read_back(
                self.title,
                value,
                data,
                lambda data: self._convert(_Writer.own(self._own).read(data, own)),
                (),
                self._risk,
            )
        return data

    def _has_other_kinds(self, value: Any) -> bool:
        return any(type(getattr(value, name)) not in (kind, *others) for name, kind, others in self._risk.kinds)

    def _decode(self, key: bytes, schema: Schema, data: bytes) -> Any:
        writer = self._readers.get(key)
        if writer is None:
            try:
                writer = _Writer(schema, self._own)
            except DecodeError as error:  # kept, too: to parse it for each value would take the loop's time
                writer = error
            self._readers[key] = writer
        if isinstance(writer, DecodeError):
            raise DecodeError(str(writer))
        return self._convert(writer.read(data, len(key)))

    def _decode_plain(self, key: bytes, schema: Schema, data: bytes) -> Any:
        return _Writer(schema, None).read(data, len(key))

    def _convert(self, plain: Any) -> Any:
        return msgspec.convert(plain, self._cls)


def _parts(plain: Any) -> Iterator[Any]:
    if isinstance(plain, dict | list | tuple):
        for part in plain.values() if isinstance(plain, dict) else plain:
            yield from _parts(part)
    else:
        yield plain


class _Writer:
    """Reads the values of one schema, as those of ``own`` if there is one."""

    def __init__(self, schema: Schema, own: Any) -> None:
        names: dict[str, Any] = {}
        for text in schema.references:
            parsed(text, names)
        self._writer = parsed(schema.text, names)
        self._own = None if own == self._writer else own  # of the same schema nothing is resolved
        check = _Check(names)
        check.is_empty(self._writer, ())
        self._read = _read_py.schemaless_reader if check.is_recursive else fastavro.schemaless_reader

    @classmethod
    def own(cls, own: Any) -> _Writer:
        made = cls.__new__(cls)
        made._writer, made._own, made._read = own, None, fastavro.schemaless_reader
        return made

    def read(self, data: bytes, start: int) -> Any:
        stream = io.BytesIO(data)
        stream.seek(start)
        plain = self._read(stream, self._writer, self._own)
        if stream.tell() != len(data):
            raise DecodeError(f"{len(data) - stream.tell()} bytes are left behind the value")
        return plain


class _Check:
    """Looks for what must not be read as it stands: ``is_recursive``."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names, self._known = names, dict[str, bool]()
        self.is_recursive = False

    def is_empty(self, schema: Any, above: tuple[str, ...]) -> bool:
        """Check whether a value may take no bytes. Raises ``DecodeError`` for arrays of such, and for deep schemas."""
        if len(above) > MOST_LEVELS:
            raise DecodeError(f"the schema has more than {MOST_LEVELS} levels")
        if isinstance(schema, list):
            for branch in schema:
                self.is_empty(branch, (*above, ""))
            return False
        if isinstance(schema, str):
            if schema in above:
                self.is_recursive = True
                return False
            found = self._names.get(schema)
            return schema == "null" if found is None else self.is_empty(found, above)
        kind = schema["type"]
        if kind in ("record", "error"):
            name = schema["name"]
            if name not in self._known:  # each once: a schema may name one many times
                within = (*above, name)
                empty = [self.is_empty(field["type"], within) for field in schema["fields"]]  # all are looked at
                self._known[name] = all(empty)
            return self._known[name]
        if kind == "array" and self.is_empty(schema["items"], (*above, "")):
            raise DecodeError("the schema has an array of what takes no bytes")
        if kind == "map":
            self.is_empty(schema["values"], (*above, ""))
        if kind == "fixed":
            return not schema["size"]
        return self.is_empty(kind, (*above, "")) if isinstance(kind, dict | list) else kind == "null"


def parsed(text: str, names: dict[str, Any]) -> Any:
    """Parse a schema, which may refer to these names, and add its own. Raises ``DecodeError``."""
    try:
        return fastavro.parse_schema(msgspec.json.decode(text), named_schemas=names)
    except Exception as error:
        raise DecodeError(f"the schema cannot be read: {reason(error)}") from error


def derived(root: Any, name: str, version: int) -> dict[str, Any]:
    """Return the schema of a class. Raises ``ConfigError`` for what has no form in Avro without one."""
    space, _, last = name.rpartition(".")
    made: dict[str, Any] = _Derived(space).of(root, last)
    return ({"namespace": space} if space else {}) | made | ({} if version == 1 else {VERSION_PROPERTY: version})


class _Derived:
    def __init__(self, space: str) -> None:
        self._space, self._done = space, dict[type, str]()

    def of(self, node: Any, name: str = "") -> Any:
        found = _PLAIN.get(type(node))
        if found is not None:
            return found
        if isinstance(node, inspect.ListType | inspect.VarTupleType | inspect.SetType | inspect.FrozenSetType):
            return {"type": "array", "items": self.of(node.item_type)}
        if isinstance(node, inspect.DictType) and isinstance(node.key_type, inspect.StrType):
            return {"type": "map", "values": self.of(node.value_type)}
        if isinstance(node, inspect.EnumType) and all(isinstance(one.value, str) for one in node.cls):
            return "string"
        if isinstance(node, inspect.LiteralType) and all(isinstance(value, str) for value in node.values):
            return "string"
        if isinstance(node, inspect.UnionType) and len(node.types) == 2 and any(
            isinstance(one, inspect.NoneType) for one in node.types
        ):  # fmt: skip
            return ["null", *(self.of(one) for one in node.types if not isinstance(one, inspect.NoneType))]
        if isinstance(node, inspect.StructType | inspect.DataclassType) and not getattr(node, "array_like", False):
            return self._record(node, name or node.cls.__name__)
        raise ConfigError(
            f"no Avro schema is derived for {getattr(node, 'cls', None) or type(node).__name__}: give "
            "AvroCodec(schema=...)"
        )

    def _record(self, node: Any, name: str) -> Any:
        if node.cls in self._done:
            return self._done[node.cls]
        if name in self._done.values():
            raise ConfigError(f"two classes are called {name}: give AvroCodec(schema=...)")
        self._done[node.cls] = name
        fields = [] if getattr(node, "tag", None) is None else [{"name": node.tag_field, "type": "string"}]
        for field in node.fields:
            kind = self.of(field.type)
            default = _default(field)
            # A default is of the first branch of a union.
            if isinstance(kind, list) and default is not msgspec.NODEFAULT and default is not None:
                kind = kind[::-1]
            made = {"name": field.encode_name, "type": kind}
            fields.append(made if default is msgspec.NODEFAULT else made | {"default": default})
        return {"type": "record", "name": name, "fields": fields}


def _default(field: Any) -> Any:
    """Return a default that is plain in JSON, or ``NODEFAULT``."""
    value = field.default
    if field.default_factory in (list, dict):
        value = field.default_factory()
    if isinstance(value, enum.Enum):
        value = value.value
    return value if value is None or isinstance(value, str | int | float | bool | list | dict) else msgspec.NODEFAULT


def _shape(schema: Any) -> Any:
    """Return what decides about the values that a schema takes, without names and defaults."""
    if isinstance(schema, list):
        return sorted((_shape(branch) for branch in schema), key=str)
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("fields"), list):
        return [(field.get("name"), _shape(field.get("type"))) for field in schema["fields"] if isinstance(field, dict)]
    found = {name: _shape(schema[name]) for name in ("type", "items", "values", "logicalType") if name in schema}
    return found["type"] if len(found) == 1 else found
