"""Protobuf by a schema registry. The event class is the message's own class, made by ``protoc``; nothing is built from
the registry's text, of which only the names of its messages are looked at.

    Placed = event_type("shop.Placed", codec=ProtobufCodec(registry))(placed_pb2.Placed)
"""

from __future__ import annotations

import base64
import functools
import re
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Error as MessageError
from google.protobuf.message import Message

from streams.errors import ConfigError, DecodeError, EncodeError
from streams.formats.registry_http import Schema
from streams.formats.schema_codecs import SchemaCodec

MOST_LEVELS: Final = 64
_TOKENS: Final = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|[\w.]+|[{};]|\S""", re.DOTALL
)
_Messages = list[tuple[str, list[Any]]]


class ProtobufCodec(SchemaCodec):
    """Values in Protobuf. Without ``schema=`` its text is the file of the message, as ``protoc`` has read it."""

    kind = "PROTOBUF"
    _cls: type[Message]
    _given_text: str | None
    _indexes = b"\0"

    def _bind(self, cls: type, name: str, version: int, text: str | None) -> None:
        given: object = cls
        if not (isinstance(given, type) and issubclass(given, Message)) or version != 1:
            raise ConfigError(f"{name}: ProtobufCodec takes the class of a message, of version 1, not {cls!r}")
        self._cls, self._given_text = given, text
        descriptor: Any = given.DESCRIPTOR
        self._name, self._known = descriptor.full_name, dict[tuple[bytes, tuple[int, ...]], str]()
        self._file = FileDescriptorProto()
        descriptor.file.CopyToProto(self._file)
        further = [one for one in self._file.dependency if not one.startswith("google/")]
        if self.subjects and further:
            raise ConfigError(f"{name}: its file imports {', '.join(further)}; a schema with imports is not written")
        path, names = list[int](), self._name.removeprefix(f"{self._file.package}.").split(".")
        messages: Any = self._file.message_type
        for one in names:
            path.append(next(at for at, message in enumerate(messages) if message.name == one))
            messages = messages[path[-1]].nested_type
        self._indexes = b"\0" if path == [0] else b"".join(map(_varint, [len(path), *path]))

    def _text(self) -> str:
        return self._given_text or base64.b64encode(self._file.SerializeToString(deterministic=True)).decode()

    def _ready(self, key: bytes) -> None:
        self.prefix = key + self._indexes

    def _encode(self, value: Any) -> bytes:
        if value.__class__ is not self._cls:
            raise EncodeError(f"{self.title} expected, got {type(value).__name__}")
        data: bytes = value.SerializeToString(deterministic=True)
        return self.prefix + data

    def _decode(self, key: bytes, schema: Schema, data: bytes) -> Any:
        path, size = indexes(data[len(key) :])
        start = len(key) + size
        # Fields have numbers only: another message of the file would be read as this one, without a word.
        which = key, path  # not its bytes: numbers can be written in any length, and what is known is kept
        found = self._known.get(which)
        if found is None:
            found = self._known[which] = message_name(schema, data[len(key) :])
        if found != self._name:
            raise DecodeError(f"it is a {found}, not a {self._name}")
        return self._cls.FromString(data[start:])


def indexes(rest: bytes) -> tuple[tuple[int, ...], int]:
    """Return the indexes of a message in its file, from the outermost to the innermost, and how many bytes they take.
    Raises ``DecodeError``."""
    if rest[:1] == b"\0":
        return (0,), 1
    found, at, number, shift = list[int](), 0, 0, 0
    for at, byte in enumerate(rest[:400]):
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append((number >> 1) ^ -(number & 1))
            number = shift = 0
            if not 0 < found[0] <= MOST_LEVELS:
                break
            if len(found) == found[0] + 1:
                return tuple(found[1:]), at + 1
    raise DecodeError(f"the indexes of the message are cut off, or too many: {rest[:20]!r}")


def _varint(number: int) -> bytes:
    number <<= 1  # zig-zag, of a number that is not negative
    parts = list[int]()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def message_name(schema: Schema, rest: bytes) -> str:
    """Return the full name of the message that a value is of; ``rest``: behind its id. Raises ``DecodeError``."""
    package, messages = _parsed(schema.text)
    names = [package] if package else []
    for index in indexes(rest)[0]:
        if not 0 <= index < len(messages):
            raise DecodeError(f"the schema has no message {index} there: it has {len(messages)}")
        name, messages = messages[index]
        names.append(name)
    return ".".join(names)


@functools.lru_cache(1024)
def _parsed(text: str) -> tuple[str, _Messages]:
    """Return the package and the messages of a file, each with those within it. Servers return its text, or its
    descriptor in base64."""
    try:
        file = FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (ValueError, MessageError):
        return _from_text(text)
    return file.package, [_tree(message) for message in file.message_type]


def _tree(message: Any) -> tuple[str, list[Any]]:
    return message.name, [_tree(one) for one in message.nested_type]


def _from_text(text: str) -> tuple[str, _Messages]:
    package, top = "", list[Any]()
    stack: list[list[Any]] = [top]
    words: list[str] = []
    for match in _TOKENS.finditer(text):
        token = match[0]
        if token.startswith(("//", "/*")):
            continue
        if token == "{":
            within = list[Any]()
            if len(words) == 2 and words[0] == "message":
                stack[-1].append((words[1], within))
            stack.append(within)
        elif token == "}" and len(stack) > 1:
            stack.pop()
        elif token == ";" and len(words) == 2 and words[0] == "package":
            package = words[1]
        words = [] if token in "{};" else [*words[:2], token]
    return package, top
