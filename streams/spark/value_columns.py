"""Keys and values of a store as Spark columns: the bytes of ``streams.codecs``, read in the JVM where it can."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as f

from streams.codecs import (
    BytesCodec,
    FixedIntCodec,
    IntCodec,
    JsonCodec,
    PydanticCodec,
    StrCodec,
    codec_for,
)
from streams.protocols import Codec
from streams.spark import json_decoding, python_codec
from streams.spark.shapes import value_shape

_SIGN: Final = -(2**63)


class ValueColumns:
    """Expressions for one column of bytes, called ``name``. Each of ``converted``, ``parsed`` and then ``problem`` and
    ``value`` uses the columns of the step before it.

    Without a codec, ``codec_for`` chooses, as the stores do. Raises ``ConfigError`` for a type without a column type,
    and for a class that workers would have to import and cannot.
    """

    def __init__(self, type_: Any, codec: Codec[Any] | None, name: str) -> None:
        self._codec: Codec[Any] = codec_for(type_) if codec is None else codec
        self._bytes = f.col(name)
        self._is_json = isinstance(self._codec, JsonCodec | PydanticCodec)
        self._plain = isinstance(self._codec, BytesCodec | StrCodec | IntCodec | FixedIntCodec)
        self.shape = value_shape(type_)
        self._text, self._parsed = f"__{name}_text__", f"__{name}_parsed__"
        self._converted = f"__{name}_converted__"
        self._size = 8 if isinstance(self._codec, IntCodec) else getattr(self._codec, "_bits", 0) // 8

    def converted(self) -> list[Column]:
        """What Python is needed for: tuples, and codecs that the JVM does not know."""
        if self._is_json or self._plain:
            return []
        return [python_codec.decode_value(self._codec, self.shape, self._bytes).alias(self._converted)]

    def parsed(self) -> list[Column]:
        """The JSON, parsed; numbers, read."""
        if self._is_json:
            text = self._bytes.cast("string")
            return [text.alias(self._text), json_decoding.from_json(text, self.shape).alias(self._parsed)]
        if isinstance(self._codec, IntCodec):
            return [_big_endian(self._bytes, self._size).bitwiseXOR(f.lit(_SIGN)).alias(self._parsed)]
        if isinstance(self._codec, FixedIntCodec):
            return [_big_endian(self._bytes, self._size).alias(self._parsed)]
        return []

    def problem(self) -> Column:
        """Why these bytes are no such value, or null."""
        match self._codec:
            case BytesCodec():
                return f.lit(None).cast("string")
            case StrCodec():
                return f.when(~f.is_valid_utf8(self._bytes.cast("string")), f.lit("not UTF-8"))
            case IntCodec() | FixedIntCodec():
                found = f.octet_length(self._bytes)
                return f.when(found != self._size, f.concat(f.lit(f"{self._size} bytes expected, got "), found))
            case JsonCodec() | PydanticCodec():
                return json_decoding.unreadable(f.col(self._parsed), f.col(self._text), self.shape)
            case _:
                return f.col(f"{self._converted}.error")

    def value(self) -> Column:
        """The value; of no use where it has a problem."""
        match self._codec:
            case BytesCodec():
                return self._bytes
            case StrCodec():
                return self._bytes.cast("string")
            case IntCodec() | FixedIntCodec():
                return f.col(self._parsed)
            case JsonCodec() | PydanticCodec():
                return json_decoding.decoded(f.col(self._parsed), f.col(self._text), self.shape)
            case _:
                return f.col(f"{self._converted}.value")


def _big_endian(data: Column, size: int) -> Column:
    """The signed integer in ``size`` bytes; null for another length."""
    number = f.conv(f.hex(data), 16, -10).cast("bigint")  # of 8 bytes it is signed, of fewer it is not yet
    if size < 8:
        number = number - f.when(number >= 1 << (8 * size - 1), f.lit(1 << (8 * size))).otherwise(f.lit(0))
    return f.when(f.octet_length(data) == size, number)
