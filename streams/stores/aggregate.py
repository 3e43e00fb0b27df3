"""``Aggregate``: the store of a source with commands, a table of versioned states.

A value is the version in 8 bytes behind ``MARK``, and the bytes of the state's codec. One without the mark is an entry
of a plain ``Table`` of the same states, which the source had before: it has version 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from streams.codecs import codec_for
from streams.errors import ConfigError, DecodeError, EncodeError
from streams.model.commands import Versioned
from streams.protocols import Codec, DiskEngine
from streams.records import TopicPartition
from streams.stores.table import Table

K = TypeVar("K", str, bytes)
S = TypeVar("S")

MARK: Final = b"\xff\xfekcv"
"""Values that begin like this have a version. No JSON, msgpack or UTF-8 text begins like that."""
_BEHIND: Final = len(MARK) + 8


class VersionedCodec(Generic[S]):
    """Versioned states, over the codec of the states."""

    def __init__(self, codec: Codec[S]) -> None:
        self._codec = codec
        self._name = f"{type(codec).__qualname__} {getattr(codec, '_name', '')}".rstrip()

    def encode(self, value: Versioned[S], /) -> bytes:
        """Encode a state with its version. Raises ``EncodeError``."""
        given: object = value
        if not isinstance(given, Versioned):
            raise EncodeError(f"an Aggregate holds Versioned(version, state), not {type(given).__name__}")
        return MARK + value.version.to_bytes(8, "big") + self._codec.encode(value.state)

    def decode(self, data: bytes, /) -> Versioned[S]:
        """Decode a state; it has version 0 where none was written. Raises ``DecodeError``."""
        if not data.startswith(MARK):
            return Versioned(0, self._codec.decode(data))
        if len(data) < _BEHIND:
            raise DecodeError(f"the version of a state ends at byte {len(data)}")
        return Versioned(int.from_bytes(data[len(MARK) : _BEHIND], "big"), self._codec.decode(data[_BEHIND:]))


class Aggregate:
    """Makes the store of a source with commands: ``Aggregate.factory(key=str, state=Account)``."""

    @staticmethod
    def factory(
        *,
        key: type[K],
        state: type[S],
        ordered: bool = False,
        engine: DiskEngine | None = None,
        state_codec: Codec[S] | None = None,
    ) -> Callable[[TopicPartition], Table[K, Versioned[S]]]:
        """Return a factory for ``EventSource(store=...)``: a ``Table`` of ``Versioned`` states for each partition. The
        keys are those of the commands' records, ``str`` (UTF-8) or ``bytes``; the rest is as of ``Table.factory``.

        Over a changelog of a plain ``Table`` with the same keys and states, its entries have version 0. Raises
        ``ConfigError``.
        """
        given: object = key
        if given not in (str, bytes):
            raise ConfigError(f"the keys of an Aggregate are those of records, str or bytes, not {given!r}")
        codec: Codec[Any] = VersionedCodec(codec_for(state) if state_codec is None else state_codec)
        return Table.factory(key=key, value=Versioned[S], ordered=ordered, engine=engine, value_codec=codec)
