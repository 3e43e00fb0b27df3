"""The fields of ``ReadTable`` and ``Table``: what ``table_access`` reads at each call."""

from __future__ import annotations

from typing import Any, NoReturn

from streams.errors import DecodeError, StoreError
from streams.model.shortcuts import bare_decoder, bare_encoder, encoder_of, shortcut_of
from streams.protocols import Codec
from streams.records import TopicPartition
from streams.stores.engines import KeyValueEngine, ReadEngine
from streams.stores.journalled import JournalledBytes, StoredBytes


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

    @property
    def layout(self) -> str:
        """Name class and codecs; see ``JournalledBytes``."""
        value_codec = getattr(self._decode_value, "__self__", self._decode_value)
        return f"{type(self).__qualname__}({_named(self._key_codec)}, {_named(value_codec)})"

    def _decoded_value(self, data: bytes, key: object) -> Any:
        try:
            return self._decode_value(data)
        except DecodeError as error:
            raise self._unreadable(self._key_in_store(key), error) from error

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
