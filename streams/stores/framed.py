"""Codecs of a table in a store of several: keys behind the table's prefix, values with their version and time.

A value of version 1 without a time is bare, as a ``Table`` of its own writes it. Any other begins with ``FRAME``, a
byte of flags, and what these name. No JSON, msgpack or UTF-8 text begins like that; other codecs are checked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from streams.codecs import (
    IntCodec,
    JsonCodec,
    MsgpackCodec,
    PydanticCodec,
    StrCodec,
)
from streams.errors import ConfigError, DecodeError, EncodeError
from streams.model.reasons import reason
from streams.model.shortcuts import Shortcut, bare_decoder, bare_encoder, shortcut_of
from streams.protocols import Codec

K = TypeVar("K")
V = TypeVar("V")

FRAME: Final = b"\xff\xfeks"
"""Values that begin like this are framed."""
OWN: Final = b"\xfe"
"""Keys that begin like this have the prefix of a table, or are the store's own. No UTF-8 text begins with 0xfe."""

Upcast = Callable[[dict[str, Any]], dict[str, Any]]
"""A step from one version of a value to the next: it gets the decoded dict, and may change it."""

_VERSION: Final = 1
TIMED: Final = 2
"""Flags of a frame: it has a version; it has the time at which the value was put."""
_VERSION_FIELD: Final = struct.Struct(">H")
_TIME_FIELD: Final = struct.Struct(">q")
LAST_VERSION: Final = (1 << 16) - 1
"""The highest version of values: a frame has two bytes for it."""


def prefix_of(name: str) -> bytes:
    """Return what the keys of a structure begin with."""
    return OWN + name.encode() + b"\x00"


class Framed(NamedTuple):
    """A value's parts. ``time_ms``: when it was put, by the partition's time; ``None``: not known."""

    version: int
    time_ms: int | None
    payload: bytes


def unframe(data: bytes) -> Framed:
    """Take a value apart. Raises ``DecodeError`` for a frame that is cut or of an unknown kind."""
    if not data.startswith(FRAME):
        return Framed(1, None, data)
    at, version, time_ms = len(FRAME) + 1, 1, None
    try:
        flags = data[at - 1]
        if flags & ~(_VERSION | TIMED):  # what follows an unknown flag cannot be passed over
            raise DecodeError(f"a value's frame has the flags {flags:#x}: a newer release of this package wrote it")
        if flags & _VERSION:
            (version,) = _VERSION_FIELD.unpack_from(data, at)
            at += _VERSION_FIELD.size
        if flags & TIMED:
            (time_ms,) = _TIME_FIELD.unpack_from(data, at)
            at += _TIME_FIELD.size
    except (IndexError, struct.error):
        raise DecodeError(f"a value's frame ends at byte {len(data)}") from None
    return Framed(version, time_ms, data[at:])


def put_back(data: bytes, time_ms: int) -> bytes:
    """Return a value as if it had been put at this time, if it was put later. Raises ``DecodeError``."""
    found = unframe(data)
    if found.time_ms is None or found.time_ms <= time_ms:
        return data
    return data[: len(data) - len(found.payload) - _TIME_FIELD.size] + _TIME_FIELD.pack(time_ms) + found.payload


class FramedCodec(Generic[V]):
    """Values of one version, read from any older one. ``time_ms`` returns the time at which a value is put, or ``None``
    while it is not known; without this function values have no time."""

    def __init__(
        self,
        codec: Codec[V],
        version: int = 1,
        upcast: Mapping[int, Upcast] | None = None,
        time_ms: Callable[[], int | None] | None = None,
    ) -> None:
        self._codec = codec
        self._version = version
        self._upcast = upcast or {}
        self._time_ms = time_ms
        self._is_bare = version == 1 and time_ms is None
        kind: type[Any] = type(codec)
        self._is_safe = kind in (
            JsonCodec,
            MsgpackCodec,
            PydanticCodec,
            StrCodec,
            IntCodec,
        )  # their decoders refuse a frame, so a value of another version does not pass for one of this
        self._is_text = kind in (JsonCodec, MsgpackCodec, PydanticCodec, StrCodec)

    def encode(self, value: V, /) -> bytes:
        """Encode a value, framed if it needs to be. Raises ``EncodeError``."""
        return self._framed(value, None if self._time_ms is None else self._time_ms())

    def upgraded(self, data: bytes) -> bytes | None:
        """Return a value in the present version, with its time; ``None``: it has that already. Raises ``DecodeError``
        and ``EncodeError``."""
        version, time_ms, _ = unframe(data)
        return None if version == self._version else self._framed(self.decode(data), time_ms)

    def _framed(self, value: V, time_ms: int | None) -> bytes:
        payload = self._codec.encode(value)
        if self._version == 1 and time_ms is None:
            if payload.startswith(FRAME):
                raise EncodeError(f"values that begin with {FRAME!r} are reserved in a store of several tables")
            return payload
        flags, fields = 0, b""
        if self._version > 1:
            flags, fields = _VERSION, _VERSION_FIELD.pack(self._version)
        if time_ms is not None:
            flags, fields = flags | TIMED, fields + _TIME_FIELD.pack(time_ms)
        return FRAME + bytes([flags]) + fields + payload

    def decode(self, data: bytes, /) -> V:
        """Decode a value, and bring it up to the present version. Raises ``DecodeError``."""
        version, _, payload = unframe(data)
        if version == self._version:
            return self._codec.decode(payload)
        if version > self._version:
            raise DecodeError(
                f"the value has version {version}, this program knows versions up to {self._version}: a newer release "
                "of it wrote the state; roll this member forward"
            )
        if version not in self._upcast:
            raise DecodeError(
                f"the value has version {version}, and there is no upcaster for it: it may be taken out only after "
                "`kes state migrate`"
            )
        plain: dict[str, Any] = cast(Any, self._codec).decode_dict(payload)
        for step in range(version, self._version):
            plain = self._stepped(plain, step)
        return cast(V, cast(Any, self._codec).from_dict(plain))

    def _stepped(self, plain: dict[str, Any], step: int) -> dict[str, Any]:
        try:
            result = self._upcast[step](plain)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a cancellation, too, which would end the partition's task
            raise DecodeError(f"the upcaster from version {step} failed: {reason(error)}") from error
        if not isinstance(result, dict):
            raise DecodeError(f"the upcaster from version {step} returned {type(result).__name__}, not a dict")
        return result

    @property
    def bare_decode(self) -> Callable[[bytes], V]:
        """Return the decoder of ``shortcuts.bare_decoder``. A frame makes it raise, so that ``decode`` sees it."""
        return bare_decoder(self._codec) if self._is_bare and self._is_safe else self.decode

    @property
    def shortcut(self) -> Shortcut:
        """Return the shortcut of ``shortcuts.shortcut_of``."""
        return shortcut_of(self._codec) if self._is_bare and self._is_text else Shortcut(self.encode)


def check_versions(codec: Codec[Any], version: int, upcast: Mapping[int, Upcast]) -> None:
    """Check that older versions can be read, but for the oldest ones, of which no value may be left. Raises
    ``ConfigError``."""
    if type(version) is not int or not 1 <= version <= LAST_VERSION:
        raise ConfigError(f"the version of a table's values is {version!r}; it is a number from 1 to {LAST_VERSION}")
    oldest = max(1, version - len(upcast))
    if set(upcast) != set(range(oldest, version)):
        raise ConfigError(
            f"values of version {version} need upcasters from each version from 1 to {version - 1}, but for the oldest "
            f"ones, not from {sorted(upcast)}"
        )
    if version > 1 and not hasattr(codec, "decode_dict"):
        raise ConfigError(f"{type(codec).__name__} has no dict form that an upcaster could work on")


class PrefixedCodec(Generic[K]):
    """Keys of one table behind its prefix. An empty prefix: bare keys, which must not look like one."""

    def __init__(self, codec: Codec[K], prefix: bytes) -> None:
        self._codec = codec
        self._prefix = prefix
        self._length = len(prefix)
        kind: type[Any] = type(codec)
        self._is_text = kind is StrCodec
        self.order_preserving: bool = getattr(codec, "order_preserving", False)
        if hasattr(codec, "encode_prefix"):
            self.encode_prefix: Callable[[Any], bytes] = self._encode_prefix

    def encode(self, key: K, /) -> bytes:
        """Encode a key. Raises ``EncodeError``."""
        data = self._codec.encode(key)
        if not self._length and data.startswith(OWN):
            raise EncodeError(f"bare keys that begin with {OWN!r} are reserved in a store of several tables")
        return self._prefix + data

    def decode(self, data: bytes, /) -> K:
        """Decode a key. Raises ``DecodeError``."""
        if not data.startswith(self._prefix):
            raise DecodeError(f"the key does not begin with {self._prefix!r}")
        return self._codec.decode(data[self._length :])

    @property
    def bare_encode(self) -> Callable[[K], bytes]:
        """Return the encoder of ``shortcuts.bare_encoder``."""
        bare, prefix = bare_encoder(self._codec), self._prefix
        if prefix:
            return lambda key: prefix + bare(key)
        return bare if self._is_text else self.encode

    def _encode_prefix(self, prefix: Any) -> bytes:
        return self._prefix + cast(bytes, cast(Any, self._codec).encode_prefix(prefix))


class RowKeys(Generic[K]):
    """Keys of windows as (key, start, end), in milliseconds."""

    def __init__(self, keys: Codec[K], rows: PrefixedCodec[tuple[Any, ...]]) -> None:
        self._keys, self._rows = keys, rows
        self.order_preserving: bool = getattr(keys, "order_preserving", False)

    def encode(self, row: tuple[K, int, int], /) -> bytes:
        """Encode key and span. Raises ``EncodeError``."""
        if type(row) is not tuple or len(row) != 3:
            raise EncodeError(f"the key of a window is (key, start_ms, end_ms), not {row!r:.80}")
        return self._rows.encode((self._keys.encode(row[0]), *row[1:]))

    def encode_prefix(self, row: tuple[Any, ...], /) -> bytes:
        """Encode the first elements only: ``(key,)`` has all windows of a key. Raises ``EncodeError``."""
        if type(row) is not tuple or not 1 <= len(row) <= 3:
            raise EncodeError(f"a prefix of windows is (key,) or (key, start_ms), not {row!r:.80}")
        return self._rows.encode_prefix((self._keys.encode(row[0]), *row[1:]))

    def decode(self, data: bytes, /) -> tuple[K, int, int]:
        """Decode key and span. Raises ``DecodeError``."""
        key, start_ms, end_ms = self._rows.decode(data)
        return self._keys.decode(key), start_ms, end_ms
