"""Messages of the Kafka protocol to bytes and back, by the table of fields that each class carries.

``streams/kafka/wire/schemas`` has the classes; they are generated from Kafka's own message definitions. Lengths in
answers come from outside: whatever the bytes are, decoding raises ``MalformedAnswer`` or returns a message, and it
allocates no more than a small multiple of the bytes that are there. Any thread; nothing here waits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Final, cast
from uuid import UUID

from streams.kafka.wire.message import AnswerT, Message, MessageT, Request, WireField, is_flexible

Writer = Callable[[bytearray, object], None]
Reader = Callable[["WireBytes"], object]
_API_VERSIONS: Final = 18
_NULL_STRUCT, _STRUCT = -1, 1


class MalformedAnswer(Exception):
    """An answer that is not what its version promises."""


def encode(message: Message, version: int) -> bytes:
    """Encode the body of a message. Fields that the version does not have are left out.

    Raises ``ValueError`` or ``TypeError`` for a value that its field cannot have; the words name the field.
    """
    out = bytearray()
    _writer(type(message), version, is_flexible(type(message), version))(out, message)
    return bytes(out)


def decode(kind: type[MessageT], data: bytes, version: int, at: int = 0) -> MessageT:
    """Decode the body of a message that begins at ``at``. Bytes behind it are left alone; fields that the version does
    not have keep their default; unknown tagged fields are skipped. Raises ``MalformedAnswer``."""
    return cast(MessageT, _reader(kind, version, is_flexible(kind, version))(WireBytes(data, at)))


def decode_answer(request: Request[AnswerT], version: int, frame: bytes) -> AnswerT:
    """Decode the answer to a request from its frame: the correlation id, which is not looked at, and the body. Raises
    ``MalformedAnswer``."""
    answer = cast("type[AnswerT]", request.ANSWER)
    source = WireBytes(frame, 0)
    source.skip(4)
    if request.API_KEY == _API_VERSIONS:
        # It must be readable before the versions are known (KIP-511): the head has no tagged fields, and a broker that
        # refuses the version of the request answers in version 0.
        version = 0 if frame[4:6] != b"\0\0" else version
    elif is_flexible(type(request), version):
        source.tags()
    return decode(answer, frame, version, source.at)


def encode_versioned(message: Message, version: int) -> bytes:
    """Encode a message of the consumer protocol: its version, then its body."""
    return struct.pack(">h", version) + encode(message, version)


def decode_versioned(kind: type[MessageT], data: bytes, newest: int) -> MessageT:
    """Decode a message of the consumer protocol, which begins with its version. Bytes of a version above ``newest``
    are read as of that one: newer versions only add fields at the end. Raises ``MalformedAnswer``."""
    (version,) = WireBytes(data, 0).take(_INT16)
    if version < 0:
        raise MalformedAnswer(f"{kind.__name__} of version {version}")
    return decode(kind, data, min(version, newest), 2)


class WireBytes:
    """Bytes that are read from front to back. Raises ``MalformedAnswer`` where they end too early."""

    __slots__ = ("at", "data", "end")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at, self.end = data, at, len(data)

    def take(self, shape: struct.Struct) -> tuple[int, ...]:
        at = self.at
        self.skip(shape.size)
        return shape.unpack_from(self.data, at)

    def skip(self, size: int) -> None:
        if not 0 <= size <= self.end - self.at:
            raise MalformedAnswer(f"{size} bytes are announced at {self.at} of {self.end}")
        self.at += size

    def cut(self, size: int) -> bytes:
        start = self.at
        self.skip(size)
        return bytes(self.data[start : self.at])  # of a large frame it is a view

    def unsigned(self) -> int:
        at = self.at
        if at < self.end and (byte := self.data[at]) < 128:  # almost all
            self.at = at + 1
            return byte
        number = shift = 0
        while shift <= 28:  # 32 bits are five bytes of seven
            if self.at >= self.end:
                raise MalformedAnswer(f"a length at {self.at} of {self.end} ends too early")
            byte = self.data[self.at]
            self.at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
        raise MalformedAnswer(f"a length at {self.at} of {self.end} is none")

    def tags(self) -> None:
        for _ in range(self.unsigned()):  # each takes two bytes at least, so this ends soon
            self.unsigned()
            self.skip(self.unsigned())


_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_NUMBERS: Final = {
    "int8": struct.Struct(">b"),
    "int16": _INT16,
    "uint16": struct.Struct(">H"),
    "int32": _INT32,
    "int64": struct.Struct(">q"),
    "float64": struct.Struct(">d"),
}


def put_unsigned(out: bytearray, number: int) -> None:
    """Append an unsigned varint."""
    while number > 127:
        out.append((number & 127) | 128)
        number >>= 7
    out.append(number)


# ------------------------------------------------------------------------------------------------------------ encode


@cache
def _writer(kind: type[Message], version: int, flexible: bool) -> Writer:
    plain, tagged = _fields_of(kind, version)
    plan = [(field.name, _field_writer(kind, field, version, flexible)) for field in plain]
    tags = [(field, _field_writer(kind, field, version, flexible)) for field in tagged]
    defaults = kind()

    def write(out: bytearray, value: object) -> None:
        if type(value) is not kind:
            raise TypeError(f"{kind.__name__} is needed, not {type(value).__name__}")
        for name, write_field in plan:
            try:
                write_field(out, getattr(value, name))
            except (struct.error, ValueError, TypeError) as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from error
        if flexible:
            _put_tags(out, value, tags, defaults)

    return write


def _put_tags(out: bytearray, value: object, tags: list[tuple[WireField, Writer]], defaults: Message) -> None:
    # A tagged field that has its default is left out, as Kafka's own clients do it.
    given = [(field, put) for field, put in tags if getattr(value, field.name) != getattr(defaults, field.name)]
    put_unsigned(out, len(given))
    for field, put in given:
        body = bytearray()
        put(body, getattr(value, field.name))
        put_unsigned(out, field.tag)
        put_unsigned(out, len(body))
        out += body


def _field_writer(kind: type[Message], field: WireField, version: int, flexible: bool) -> Writer:
    is_nullable = version >= field.nullable_from
    if field.type.startswith("[]"):
        return _array_writer(_value_writer(kind, field.type[2:], version, flexible, False), flexible, is_nullable)
    return _value_writer(kind, field.type, version, flexible, is_nullable)


def _value_writer(kind: type[Message], name: str, version: int, flexible: bool, is_nullable: bool) -> Writer:
    if name in _NUMBERS:
        pack = _NUMBERS[name].pack
        return lambda out, value: out.extend(pack(value))
    match name:
        case "bool":
            return lambda out, value: out.append(1 if value else 0)
        case "uuid":
            return _put_uuid
        case "string":
            return _text_writer(flexible, is_nullable)
        case "bytes" | "records":
            return _bytes_writer(flexible, is_nullable)
    inner = _writer(_struct(kind, name), version, flexible)
    if not is_nullable:
        return inner

    def write(out: bytearray, value: object) -> None:
        out += _NUMBERS["int8"].pack(_NULL_STRUCT if value is None else _STRUCT)
        if value is not None:
            inner(out, value)

    return write


def _put_uuid(out: bytearray, value: object) -> None:
    if not isinstance(value, UUID):
        raise TypeError(f"a UUID is needed, not {type(value).__name__}")
    out += value.bytes


def _text_writer(flexible: bool, is_nullable: bool) -> Writer:
    put_size = _size_writer(_INT16, flexible, is_nullable)

    def write(out: bytearray, value: object) -> None:
        if value is None:
            return put_size(out, None)
        if not isinstance(value, str):
            raise TypeError(f"a text is needed, not {type(value).__name__}")
        raw = value.encode()
        put_size(out, len(raw))
        out += raw

    return write


def _bytes_writer(flexible: bool, is_nullable: bool) -> Writer:
    put_size = _size_writer(_INT32, flexible, is_nullable)

    def write(out: bytearray, value: object) -> None:
        if value is None:
            return put_size(out, None)
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"bytes are needed, not {type(value).__name__}")
        put_size(out, len(value))
        out += value

    return write


def _array_writer(put_item: Writer, flexible: bool, is_nullable: bool) -> Writer:
    put_size = _size_writer(_INT32, flexible, is_nullable)

    def write(out: bytearray, value: object) -> None:
        if value is None:
            return put_size(out, None)
        if not isinstance(value, list | tuple):
            raise TypeError(f"a list is needed, not {type(value).__name__}")
        put_size(out, len(value))
        for item in value:
            put_item(out, item)

    return write


def _size_writer(shape: struct.Struct, flexible: bool, is_nullable: bool) -> Callable[[bytearray, int | None], None]:
    def write(out: bytearray, size: int | None) -> None:
        if size is None and not is_nullable:
            raise ValueError("this version has no null here")
        if flexible:
            put_unsigned(out, 0 if size is None else size + 1)
        else:
            out += shape.pack(-1 if size is None else size)

    return write


# ------------------------------------------------------------------------------------------------------------ decode


@cache
def _reader(kind: type[Message], version: int, flexible: bool) -> Reader:
    plain, tagged = _fields_of(kind, version)
    plan = [(field.name, _field_reader(kind, field, version, flexible)) for field in plain]
    tags = {field.tag: (field.name, _field_reader(kind, field, version, flexible)) for field in tagged}

    def read(source: WireBytes) -> object:
        values = {name: read_field(source) for name, read_field in plan}
        if flexible:
            _take_tags(source, tags, values)
        return kind(**values)

    return read


def _take_tags(source: WireBytes, tags: dict[int, tuple[str, Reader]], values: dict[str, object]) -> None:
    for _ in range(source.unsigned()):
        tag, size = source.unsigned(), source.unsigned()
        start = source.at
        source.skip(size)
        if tag in tags:
            name, read = tags[tag]
            # Within its own bytes: a length in it must not reach into what follows.
            inner = WireBytes(source.data[start : start + size], 0)
            values[name] = read(inner)
            if inner.at != size:
                raise MalformedAnswer(f"the tagged field {name} has {size} bytes, and uses {inner.at}")


def _field_reader(kind: type[Message], field: WireField, version: int, flexible: bool) -> Reader:
    is_nullable = version >= field.nullable_from
    if field.type.startswith("[]"):
        return _array_reader(_value_reader(kind, field.type[2:], version, flexible, False), flexible, is_nullable)
    return _value_reader(kind, field.type, version, flexible, is_nullable)


def _value_reader(kind: type[Message], name: str, version: int, flexible: bool, is_nullable: bool) -> Reader:
    if name in _NUMBERS:
        shape = _NUMBERS[name]
        return lambda source: source.take(shape)[0]
    match name:
        case "bool":
            return lambda source: source.take(_NUMBERS["int8"])[0] != 0
        case "uuid":
            return lambda source: UUID(bytes=source.cut(16))
        case "string":
            return _text_reader(flexible, is_nullable)
        case "bytes" | "records":
            return _bytes_reader(flexible, is_nullable)
    inner = _reader(_struct(kind, name), version, flexible)
    if not is_nullable:
        return inner
    return lambda source: None if source.take(_NUMBERS["int8"])[0] < 0 else inner(source)


def _text_reader(flexible: bool, is_nullable: bool) -> Reader:
    take_size = _size_reader(_INT16, flexible, is_nullable)

    def read(source: WireBytes) -> object:
        size = take_size(source)
        if size is None:
            return None
        try:
            return source.cut(size).decode()
        except UnicodeDecodeError as error:
            raise MalformedAnswer(f"a text before {source.at} of {source.end} is not UTF-8") from error

    return read


def _bytes_reader(flexible: bool, is_nullable: bool) -> Reader:
    take_size = _size_reader(_INT32, flexible, is_nullable)

    def read(source: WireBytes) -> object:
        size = take_size(source)
        return None if size is None else source.cut(size)

    return read


def _array_reader(read_item: Reader, flexible: bool, is_nullable: bool) -> Reader:
    take_size = _size_reader(_INT32, flexible, is_nullable)

    def read(source: WireBytes) -> object:
        size = take_size(source)
        if size is None:
            return None
        # Each item takes a byte at least: a count that cannot be true ends here, before anything is made for it.
        if size > source.end - source.at:
            raise MalformedAnswer(f"{size} items are announced at {source.at} of {source.end}")
        return [read_item(source) for _ in range(size)]

    return read


def _size_reader(shape: struct.Struct, flexible: bool, is_nullable: bool) -> Callable[[WireBytes], int | None]:
    def read(source: WireBytes) -> int | None:
        size = source.unsigned() - 1 if flexible else source.take(shape)[0]
        if size >= 0:
            return size
        if size < -1 or not is_nullable:
            raise MalformedAnswer(f"a length of {size} before {source.at} of {source.end}")
        return None

    return read


# ------------------------------------------------------------------------------------------------------------ tables


def _fields_of(kind: type[Message], version: int) -> tuple[list[WireField], list[WireField]]:
    """Return the fields of a version: those in the order of the bytes, and the tagged ones, in the order of tags."""
    present = [field for field in kind.FIELDS if field.first <= version <= field.last]
    plain = [field for field in present if version < field.tagged_from]
    return plain, sorted((field for field in present if version >= field.tagged_from), key=lambda field: field.tag)


def _struct(owner: type[Message], name: str) -> type[Message]:
    return cast("type[Message]", getattr(owner, name))
