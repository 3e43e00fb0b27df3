"""The codecs of record batches: gzip of the standard library, and cramjam's, imported when they are needed."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

from streams.errors import ConfigError


class Compression(NamedTuple):
    """One codec. ``attribute``: its number in the attributes of a batch."""

    attribute: int
    compress: Callable[[bytes], bytes]


ATTRIBUTES: Final = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_DEFAULT_LEVELS: Final = {"gzip": 6, "lz4": 1, "zstd": 3}  # those of librdkafka
_LZ4_HEAD: Final = bytes.fromhex("04224d18607073")  # independent blocks of at most 4 MiB, no checksums but the head's
_LZ4_BLOCK: Final = 4 * 1024 * 1024  # bytes of a block, as the head says
_SNAPPY_JAVA: Final = b"\x82SNAPPY\0"
_SNAPPY_HEAD: Final = 16  # the magic, its version, and the oldest version that reads it
_NAMES: Final = ("compression.type", "compression.codec")


def codec_of(settings: Mapping[str, object], default: str = "none") -> tuple[str, int]:
    """Read the codec of a producer's settings (``compression.type``, ``compression.level``): ``none`` or one of
    Kafka's, and its level. Raises ``ConfigError`` for one that is not known."""
    name = next((str(settings[setting]) for setting in _NAMES if setting in settings), default)
    if name == "inherit":
        name = "none"
    if name != "none" and name not in ATTRIBUTES:
        raise ConfigError(f"compression.type must be none, gzip, snappy, lz4 or zstd, not {name!r}")
    level = int(str(settings.get("compression.level", -1)))
    return name, _DEFAULT_LEVELS.get(name, 0) if level < 0 else level


def compression_of(settings: Mapping[str, object]) -> Compression | None:
    """Choose the codec of a producer's settings; ``None``: none. Raises ``ConfigError``."""
    name, level = codec_of(settings)
    if name == "none":
        return None
    if name == "gzip":
        # mtime=0: the same records are the same bytes, also a second later.
        return Compression(ATTRIBUTES[name], lambda data: gzip.compress(data, compresslevel=level, mtime=0))
    codec = getattr(_cramjam(), name)
    if name == "snappy":
        # Raw: Kafka does not read snappy's own framing format.
        return Compression(ATTRIBUTES[name], lambda data: bytes(codec.compress_raw(data)))
    if name == "lz4":
        return Compression(
            ATTRIBUTES[name], lambda data: lz4_frame(data, lambda block: codec.compress_block(block, store_size=False))
        )
    return Compression(ATTRIBUTES[name], lambda data: bytes(codec.compress(data, level)))


def lz4_frame(data: Any, compress_block: Callable[[Any], Any]) -> bytes:
    """Make a frame whose blocks do not depend on each other: Kafka's brokers read no others."""
    pieces = [_LZ4_HEAD]
    for start in range(0, len(data), _LZ4_BLOCK):
        block = data[start : start + _LZ4_BLOCK]
        packed = bytes(compress_block(block))
        is_smaller = len(packed) < len(block)
        pieces.append(struct.pack("<I", len(packed) if is_smaller else len(block) | 1 << 31))  # the bit: not compressed
        pieces.append(packed if is_smaller else bytes(block))
    return b"".join([*pieces, struct.pack("<I", 0)])


@cache
def _cramjam() -> Any:
    return import_module("cramjam")


def decompressed(attribute: int, data: bytes) -> bytes:
    """Return what a batch holds, by the codec's number in its attributes. Any thread.

    Raises ``ValueError``: the bytes are not what the codec writes, or no codec has this number.
    """
    name = next((name for name, number in ATTRIBUTES.items() if number == attribute), None)
    if name is None:
        raise ValueError(f"its codec has the number {attribute}, which this release does not know")
    try:
        if name == "gzip":
            return gzip.decompress(data)
        codec = _cramjam()
        if name == "snappy":
            return _from_snappy(data, codec.snappy.decompress_raw)
        return bytes(codec.lz4.decompress(data) if name == "lz4" else codec.zstd.decompress(data))
    except Exception as error:  # of the library's own classes, and those of zlib, gzip and struct
        raise ValueError(f"its {name} cannot be decompressed: {error}") from error


def _from_snappy(data: bytes, decompress: Callable[[bytes], Any]) -> bytes:
    """Java's clients write blocks behind a head of their own (snappy-java's), others one block."""
    if not data.startswith(_SNAPPY_JAVA):
        return bytes(decompress(data))
    pieces, at = [], _SNAPPY_HEAD
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        if not 0 <= size <= len(data) - at - 4:
            raise ValueError(f"a block of {size} bytes is announced at {at} of {len(data)}")
        pieces.append(bytes(decompress(data[at + 4 : at + 4 + size])))
        at += 4 + size
    return b"".join(pieces)
