"""The fields of ``ReadTable`` and ``Table``: what ``table_access`` reads at each call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NoReturn

from streams.errors import DecodeError, StoreError
from streams.model.shortcuts import bare_decoder, bare_encoder, encoder_of, shortcut_of
from streams.protocols import Codec
from streams.records import TopicPartition
from streams.sak.harmless import harmless
from streams.stores.engines import KeyValueEngine, ReadEngine
from streams.stores.journalled import JournalledBytes, StoredBytes

_log = logging.getLogger(__name__)

ABSENT: Final = object()
"""The value of an entry that cannot be read, and that ``on_unreadable`` leaves out."""

OnUnreadable = Callable[[Any, bytes], Any]
"""Called with a key and the bytes of its value, which cannot be read; returns a value in its place, or ``None``: the
read goes on as if the key were not there."""


class Mended:
    """The values of one store that cannot be read, and ``function``, which gives others in their place. Counts and logs
    them."""

    def __init__(self, partition: TopicPartition, function: OnUnreadable) -> None:
        self.function = function
        self._partition, self._count = partition, 0

    def value(self, key: object, data: bytes, error: DecodeError, name: object) -> Any:
        """Return the value in place of this one, or ``None``. ``name``: the key, as the whole store has it."""
        found = self.function(key, data)
        self._count += 1
        if not self._count & (self._count - 1):  # the 1st, 2nd, 4th, 8th ...
            _log.warning(
                "the state of %s: %d values could not be read, on_unreadable has got them; the last: key %s: %s",
                self._partition,
                self._count,
                harmless(repr(name))[:80],
                error,
            )
        return found


def mended_by(partition: TopicPartition, function: OnUnreadable | None) -> Mended | None:
    """Return what stands in for values of this partition; ``None``: nothing does, a read fails."""
    return None if function is None else Mended(partition, function)


class TableFields(StoredBytes):
    """The base of ``ReadTable``, beneath the leaf that has ``get`` and ``put``."""

    __slots__ = (
        "_bare_decode_value",
        "_bare_encode_key",
        "_bare_encode_value",
        "_decode_key",
        "_decode_value",
        "_encode_key",
        "_encode_value",
        "_key_codec",
        "_kinds",
        "_mended",
        "_value_class",
    )

    def __init__(
        self, partition: TopicPartition, engine: ReadEngine, key_codec: Codec[Any], value_codec: Codec[Any]
    ) -> None:
        super().__init__(partition, engine)
        self._key_codec = key_codec
        self._encode_key = encoder_of(key_codec)
        self._decode_key = key_codec.decode
        self._encode_value = encoder_of(value_codec)
        self._decode_value = value_codec.decode
        self._bare_encode_key = bare_encoder(key_codec)
        self._bare_decode_value = bare_decoder(value_codec)
        self._bare_encode_value, self._value_class, self._kinds = shortcut_of(value_codec)
        self._mended: Mended | None = None

    @property
    def layout(self) -> str:
        """Name class and codecs; see ``JournalledBytes``."""
        value_codec = getattr(self._decode_value, "__self__", self._decode_value)
        return f"{type(self).__qualname__}({_named(self._key_codec)}, {_named(value_codec)})"

    def _decoded_value(self, data: bytes, key: object, default: Any = ABSENT) -> Any:
        """Decode a value, or return what stands in its place; ``default`` if that is nothing."""
        try:
            return self._decode_value(data)
        except DecodeError as error:
            if self._mended is None:
                raise self._unreadable(self._key_in_store(key), error) from error
            found = self._mended.value(key, data, error, self._key_in_store(key))
            return default if found is None else found

    def _key_in_store(self, key: Any) -> Any:
        """Return a key as ``decode_key`` of the whole store has it."""
        return key

    def _refuse_null_key(self) -> NoReturn:
        raise StoreError(f"the table of {self.partition} was used with a null key (an event without key, perhaps)")


class JournalledFields(TableFields, JournalledBytes):
    """The base of ``Table``, which is written to, too."""

    __slots__ = ()
    _engine: KeyValueEngine


def _named(codec: object) -> str:
    return f"{type(codec).__qualname__} {getattr(codec, '_name', '')}".rstrip()
