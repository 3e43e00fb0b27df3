"""Codecs: values of one type to bytes and back.

Rules that hold for all of them:

* ``encode`` raises ``EncodeError``, ``decode`` raises ``DecodeError``, and nothing else (``MemoryError`` excepted: it
  is no fault of the data). Texts of errors are cut at 300 characters, because foreign data is in them.
* Byte order is big-endian, always. Nothing is imported, looked up or executed by what is in the data.
* What a codec cannot give back it refuses: types that lose fields when they are declared (``ConfigError``), other
  values when they are written (``round_trips``).

JSON refuses NaN and infinities on both sides; integers of up to 4,300 digits (Python's limit) pass exactly, msgpack
stops at 64 bits. ``docs/reference/events.md`` has the table of all that the formats leave to choice.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeVar, cast, get_args, get_origin

import msgspec

from streams.errors import ConfigError, DecodeError, EncodeError
from streams.model.losses import PydanticSchema, losses_of, refuse
from streams.model.reasons import cause, reason
from streams.model.round_trips import Notation, Risk, Sample, quick_encoder, read_back, risk_of
from streams.model.shortcuts import Shortcut, encoder_of
from streams.protocols import Codec
from streams.sak import plain_json
from streams.sak.type_nodes import type_nodes

T = TypeVar("T")

RESERVED_KEY_PREFIX: Final = b"\xff\xffkes."
"""Keys of a changelog that start like this belong to the toolkit (offset records). No UTF-8 text starts with 0xff."""

_SIGN: Final = 1 << 63
_DECIMAL: Final = re.compile(rb"[+-]?[0-9]{1,40}")
"""As Go's ``strconv.ParseInt`` reads it; no number of 64 bits needs more digits."""


JsonSchema = tuple[dict[str, Any], dict[str, dict[str, Any]]]


class BytesCodec:
    """Bytes as they are. ``bytearray`` and ``memoryview`` are refused: they could change after they were stored."""

    order_preserving: Final = True

    def encode(self, value: bytes, /) -> bytes:
        if type(value) is not bytes:
            raise EncodeError(f"bytes expected, got {type(value).__name__}")
        return value

    def decode(self, data: bytes, /) -> bytes:
        return data

    def encode_prefix(self, prefix: bytes, /) -> bytes:
        return self.encode(prefix)


class StrCodec:
    """Text as UTF-8. The order of the bytes is the order of the code points, which is Python's order of ``str``."""

    order_preserving: Final = True
    bare_encode = staticmethod(str.encode)
    bare_decode = staticmethod(bytes.decode)

    def encode(self, value: str, /) -> bytes:
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"text that is not valid Unicode (a lone surrogate): {error.reason}") from error
        except AttributeError as error:
            raise EncodeError(f"str expected, got {type(value).__name__}") from error

    def decode(self, data: bytes, /) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"not UTF-8: {error.reason} at byte {error.start}") from error

    def encode_prefix(self, prefix: str, /) -> bytes:
        return self.encode(prefix)


class IntCodec:
    """Integers from -2**63 to 2**63 - 1 in 8 bytes that sort like the numbers (the sign bit is flipped)."""

    order_preserving: Final = True
    _struct = struct.Struct(">Q")

    def encode(self, value: int, /) -> bytes:
        try:
            return self._struct.pack(value + _SIGN)
        except (struct.error, TypeError) as error:
            _refuse_int(value, 64, error)

    def decode(self, data: bytes, /) -> int:
        try:
            return cast(int, self._struct.unpack(data)[0]) - _SIGN
        except struct.error as error:
            raise DecodeError(f"8 bytes expected, got {len(data)}") from error


class FixedIntCodec:
    """Two's complement, big-endian: what Java's ``IntegerSerializer`` (32) and ``LongSerializer`` (64) write.

    Negative numbers sort after positive ones; where order matters take ``int_codec``.
    """

    order_preserving: Final = False

    def __init__(self, bits: int) -> None:
        if bits not in (32, 64):
            raise ConfigError(f"FixedIntCodec(bits={bits}): 32 or 64")
        self._bits = bits
        self._struct = struct.Struct(">i" if bits == 32 else ">q")

    def encode(self, value: int, /) -> bytes:
        try:
            return self._struct.pack(value)
        except (struct.error, TypeError) as error:
            _refuse_int(value, self._bits, error)

    def decode(self, data: bytes, /) -> int:
        try:
            return cast(int, self._struct.unpack(data)[0])
        except struct.error as error:
            raise DecodeError(f"{self._struct.size} bytes expected, got {len(data)}") from error


class DecimalIntCodec:
    """Integers of 64 bits as decimal text: what goka's ``codec.Int64`` writes. Not in the order of the numbers."""

    order_preserving: Final = False

    def encode(self, value: int, /) -> bytes:
        int64_codec.encode(value)  # it refuses what is no integer of 64 bits
        return b"%d" % value

    def decode(self, data: bytes, /) -> int:
        value = int(data) if _DECIMAL.fullmatch(data) else None
        if value is None or not -_SIGN <= value < _SIGN:
            raise DecodeError(f"an integer of 64 bits in decimal digits expected, got {len(data)} other bytes")
        return value


def _refuse_int(value: object, bits: int, error: Exception) -> NoReturn:
    if isinstance(value, int):
        raise EncodeError(f"integer outside of the signed {bits}-bit range") from error
    raise EncodeError(f"int expected, got {type(value).__name__}") from error


bytes_codec: Final = BytesCodec()
str_codec: Final = StrCodec()
int_codec: Final = IntCodec()
int32_codec: Final = FixedIntCodec(32)
int64_codec: Final = FixedIntCodec(64)
decimal_int_codec: Final = DecimalIntCodec()


class TupleCodec:
    """Tuples of a fixed shape of ``str``, ``bytes`` and ``int``; the order of the bytes is the order of the tuples.

    Text and bytes end with 0x00; inside of them 0x00 is written as 0x01 0x01, and 0x01 as 0x01 0x02, so that the end
    sorts below all that may follow. Integers are 8 bytes, as ``int_codec`` has them.
    """

    order_preserving: Final = True

    def __init__(self, *elements: type) -> None:
        wrong = [element for element in elements if element not in (str, bytes, int)]
        if wrong or not elements:
            raise ConfigError(f"a tuple key is made of str, bytes and int, not of {wrong or 'nothing'}")
        self._elements = elements

    def encode(self, value: tuple[Any, ...], /) -> bytes:
        if type(value) is not tuple or len(value) != len(self._elements):
            raise EncodeError(f"a tuple of {len(self._elements)} elements expected, got {type(value).__name__}")
        return self.encode_prefix(value)

    def encode_prefix(self, prefix: tuple[Any, ...], /) -> bytes:
        """Encode the first elements only: the prefix of all keys that begin with them."""
        if type(prefix) is not tuple or len(prefix) > len(self._elements):
            raise EncodeError(f"a tuple of at most {len(self._elements)} elements expected")
        parts: list[bytes] = []
        for kind, element in zip(self._elements, prefix, strict=False):
            if kind is int:
                parts.append(int_codec.encode(element))
            else:
                raw = str_codec.encode(element) if kind is str else bytes_codec.encode(element)
                parts.append(_escape(raw) + b"\x00")
        return b"".join(parts)

    def decode(self, data: bytes, /) -> tuple[Any, ...]:
        values: list[Any] = []
        at = 0
        for kind in self._elements:
            if kind is int:
                values.append(int_codec.decode(data[at : at + 8]))
                at += 8
                continue
            end = data.find(b"\x00", at)
            if end < 0:
                raise DecodeError(f"element {len(values)} of a tuple has no end")
            raw = data[at:end].replace(b"\x01\x01", b"\x00").replace(b"\x01\x02", b"\x01")
            if _escape(raw) != data[at:end]:
                raise DecodeError(f"element {len(values)} of a tuple holds a wrong escape")
            values.append(str_codec.decode(raw) if kind is str else raw)
            at = end + 1
        if at != len(data):
            raise DecodeError(f"a tuple of {len(self._elements)} elements ends at byte {at} of {len(data)}")
        return tuple(values)


def _escape(raw: bytes) -> bytes:
    return raw.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01")


NULL: Final = b"null"
"""JSON's replacement for a number that it cannot carry, and for ``None``."""
_NO_TEXT: Final = "\ufffd".encode()
"""pydantic's replacement for what is no text in the key of a dict."""
_IN_JSON: Final = Notation(NULL, (b"true", b"false"), in_minutes=True, keys_as_text=True)
_IN_MSGPACK: Final = Notation(b"\xc0", (b"\xc2", b"\xc3"), time=(b"\xff",))


class _TypedCodec(Generic[T]):
    """Base of the codecs for JSON, msgpack and pydantic: an exact class on the way in, wrapped errors, plain dicts."""

    order_preserving: Final = False
    _null_is_suspect = False  # a null that was written may be a NaN
    _encode: Callable[[T], bytes]
    _decode: Callable[[bytes], T]
    _to_plain: Callable[[T], object] = staticmethod(msgspec.to_builtins)
    _encode_plain: Callable[[object], bytes]
    _decode_plain: Callable[[bytes], dict[str, Any]]
    _risk: Risk

    def __init__(self, type_: type[T], *, allow_lossy: Collection[str] = ()) -> None:
        self._type = type_
        self._name = getattr(type_, "__name__", str(type_))
        self._allowed = frozenset(allow_lossy)
        self._sample = Sample()
        given: object = type_  # or list[int], which is none
        is_record = isinstance(given, type) and (issubclass(given, msgspec.Struct) or dataclasses.is_dataclass(given))
        self._class = type_ if is_record else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the type only: msgspec's and pydantic's parts do not travel, so each process builds its own."""
        return partial(type(self), allow_lossy=self._allowed) if self._allowed else type(self), (self._type,)

    def encode(self, value: T, /) -> bytes:
        expected = self._class
        if expected is not None and value.__class__ is not expected:
            raise EncodeError(f"{self._name} expected, got {type(value).__name__} (subclasses lose what they add)")
        try:
            data = self._encode(value)
        except MemoryError:
            raise
        except Exception as error:
            raise EncodeError(f"{self._name} cannot be encoded: {reason(error)}") from cause(error)
        if self._null_is_suspect and data.partition(NULL)[1]:  # 0.6 of the price of `find`
            found = plain_json.non_finite(self._to_plain(value))
            if found is not None:
                raise EncodeError(f"{self._name} holds {found!r}, which JSON cannot carry; use None, or MsgpackCodec")
        risk, sample = self._risk, self._sample
        if (risk.sampled and sample.is_due) or risk.is_seen(value, data):
            read_back(self._name, value, data, self._decode, self._allowed, risk)
        sample.count += 1
        return data

    def decode(self, data: bytes, /) -> T:
        return _decoded(self._decode, data, "not a", self._name)

    @property
    def shortcut(self) -> Shortcut:
        """Return the ``Shortcut`` of this codec."""
        risk = self._risk
        if self._null_is_suspect and risk.anything:
            risk = risk._replace(needles=(*risk.needles, NULL))
        encode = quick_encoder(risk, self._sample, self._encode, self._decode, self.encode)
        return Shortcut(encode, self._class, risk.kinds)

    @property
    def bare_decode(self) -> Callable[[bytes], T]:
        """Return the decoder of ``bare_decoder``."""
        return self._decode

    def decode_dict(self, data: bytes, /) -> dict[str, Any]:
        """Decode the bytes without the type, for upcasters."""
        return _decoded(self._decode_plain, data, "not an older", self._name)

    def json_schema(self, before: str, /) -> JsonSchema:
        """Return the JSON Schema of the values, and those that it refers to, by name; references are ``before`` and the
        name. Raises what msgspec or pydantic do for a type that has none."""
        (schema,), further = msgspec.json.schema_components([self._type], ref_template=before + "{name}")
        return schema, further

    def from_dict(self, plain: dict[str, Any], /) -> T:
        """Make a value of the upcasters' result."""
        return _decoded(lambda it: self._decode(self._encode_plain(it)), plain, "upcasters did not make a", self._name)


def _decoded(decode: Callable[[Any], T], data: object, complaint: str, name: str) -> T:
    try:
        return decode(data)
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"{complaint} {name}: {reason(error)}") from cause(error)


class JsonCodec(_TypedCodec[T]):
    """JSON of one type: ``msgspec.Struct``, dataclass, or whatever else msgspec can decode (``list[int]``).

    ``encode`` takes exactly that class. Fields are not checked against their annotations when an object is built; a
    type checker does that. What type checkers let through and readers do not (a ``bool`` in an ``int`` field, a broken
    rule) is refused here. ``allow_lossy`` names fields that need not come back. Raises ``ConfigError`` for types that
    cannot be decoded.
    """

    def __init__(self, type_: type[T], *, allow_lossy: Collection[str] = ()) -> None:
        super().__init__(type_, allow_lossy=allow_lossy)
        self._risk, self._null_is_suspect = _examine(type_, self._name, self._allowed, _IN_JSON)
        self._encode = plain_json.encode if plain_json.is_plain_dict(type_) else msgspec.json.Encoder().encode
        self._encode_plain = plain_json.encode
        self._decode = msgspec.json.Decoder(type_).decode
        self._decode_plain = msgspec.json.Decoder(dict[str, Any]).decode


class MsgpackCodec(_TypedCodec[T]):
    """MessagePack of one type, as ``JsonCodec``. NaN and infinities pass; integers need 64 bits at most."""

    def __init__(self, type_: type[T], *, allow_lossy: Collection[str] = ()) -> None:
        super().__init__(type_, allow_lossy=allow_lossy)
        self._risk, _ = _examine(type_, self._name, self._allowed, _IN_MSGPACK)
        self._encode = self._encode_plain = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(type_).decode
        self._decode_plain = msgspec.msgpack.Decoder(dict[str, Any]).decode


class PydanticCodec(_TypedCodec[T]):
    """JSON of a pydantic model or pydantic dataclass, by field aliases where there are some. ``allow_lossy`` names
    fields that need not come back.

    Texts of errors name fields and rules, never the input.
    """

    _null_is_suspect = True

    def __init__(self, type_: type[T], *, allow_lossy: Collection[str] = ()) -> None:
        from pydantic import TypeAdapter  # optional; a program that has a model has it installed

        super().__init__(type_, allow_lossy=allow_lossy)
        self._class = type_
        try:
            adapter: TypeAdapter[T] = TypeAdapter(type_)
            schema = PydanticSchema(adapter.core_schema)
        except Exception as error:
            raise ConfigError(f"{type_!r} cannot be encoded and decoded: {reason(error)}") from error
        refuse(type_, self._name, schema.losses, self._allowed)
        self._risk = Risk(
            needles=(NULL, _NO_TEXT),  # of no optional field; of a key that was no text
            classes=tuple(schema.classes),
            always=schema.has_rules,
            sampled=True,
            anything=schema.has_anything,
            unions=tuple(schema.unions),
        )
        self._encode = partial(adapter.dump_json, by_alias=True, warnings="error")
        self._decode = adapter.validate_json
        self._to_plain = adapter.dump_python
        self._encode_plain = plain_json.encode
        self._decode_plain = msgspec.json.Decoder(dict[str, Any]).decode
        self._schema = adapter.json_schema

    def json_schema(self, before: str, /) -> JsonSchema:
        schema = self._schema(ref_template=before + "{model}")
        return schema, schema.pop("$defs", {})


class _Checked(Generic[T]):
    """A user's codec, each of whose values is read back."""

    def __init__(self, codec: Codec[T]) -> None:
        self._codec = codec
        self.encode = encoder_of(codec, always=True)
        self.decode = codec.decode

    def __getattr__(self, name: str) -> Any:
        if name in ("shortcut", "bare_encode") or name.startswith("_"):  # which go past it
            raise AttributeError(name)
        return getattr(self._codec, name)


def checked_codec(codec: Codec[T]) -> Codec[T]:
    """Return a codec that reads back every value that it writes. ``bytes``, ``str``, ``int`` and tuples of them come
    back in any case."""
    if isinstance(codec, _TypedCodec):
        made = copy(codec)
        made._risk = codec._risk._replace(always=True)
        return made
    return codec if type(codec).__module__ == __name__ else cast("Codec[T]", _Checked(codec))


def is_pydantic(type_: object) -> bool:
    """Check whether this is a pydantic model or dataclass; found without importing pydantic."""
    return isinstance(type_, type) and "__pydantic_validator__" in vars(type_)


def codec_for(type_: type[T], *, allow_lossy: Collection[str] = ()) -> Codec[T]:
    """The codec that fits a type: ``bytes``, ``str`` and ``int`` plain, tuples of them too, JSON for the rest.

    ``allow_lossy`` names fields that may be written without coming back: ``("password", "owner.note")``. Raises
    ``ConfigError`` for a type that cannot be decoded again, or whose fields cannot.
    """
    plain: dict[Any, Codec[Any]] = {bytes: bytes_codec, str: str_codec, int: int_codec}
    if type_ in plain:
        return plain[type_]
    if get_origin(type_) is tuple and all(element in plain for element in get_args(type_)):
        return cast("Codec[T]", TupleCodec(*get_args(type_)))
    if is_pydantic(type_):
        return PydanticCodec(type_, allow_lossy=allow_lossy)
    return JsonCodec(type_, allow_lossy=allow_lossy)


def _examine(type_: Any, name: str, allowed: Collection[str], written: Notation) -> tuple[Risk, bool]:
    """Return the risk of a type, and whether a float can be somewhere inside; refuses types that msgspec could write
    but not read."""
    try:
        root = msgspec.inspect.type_info(type_)
    except Exception as error:
        raise ConfigError(f"{type_!r} cannot be encoded and decoded: {reason(error)}") from error
    nodes = list(type_nodes(root))
    for node in nodes:
        if isinstance(node, msgspec.inspect.CustomType):
            raise ConfigError(f"{type_!r} holds a {node.cls!r}, which cannot be decoded; give a codec of your own")
    refuse(type_, name, losses_of(root), allowed)
    has_floats = any(isinstance(node, msgspec.inspect.AnyType | msgspec.inspect.FloatType) for node in nodes)
    return risk_of(root, written), has_floats
