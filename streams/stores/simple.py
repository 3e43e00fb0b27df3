"""``SimpleStore``: items that know their key, ordered by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from streams.codecs import str_codec
from streams.errors import DecodeError, StoreError
from streams.model.shortcuts import encoder_of
from streams.protocols import Codec, DiskEngine
from streams.records import Change, TopicPartition
from streams.stores.engines import OrderedKeyValueEngine, after_prefix
from streams.stores.journalled import JournalledBytes
from streams.stores.layered import LayeredEngine
from streams.stores.layered_bytes import DiskStoreFactory, LayeredBytes
from streams.stores.ordered import OrderedEngine
from streams.stores.table import values_codec
from streams.stores.table_fields import OnUnreadable, mended_by

T = TypeVar("T")
Item = TypeVar("Item")  # of `factory`, which is called on the bare class


class SimpleStore(JournalledBytes, Generic[T]):
    """Items of one type, each under a text key that is taken from the item, in the order of the keys.

    ``put`` and ``delete`` journal their changes, so a failed event leaves no trace; they also return the ``Change``,
    and handing that on to ``ctx.record_change`` at once, as the ancestor's stores needed it, does no harm. Errors and
    threads as in ``Table``.
    """

    def __init__(
        self,
        partition: TopicPartition,
        codec: Codec[T],
        key_of: Callable[[T], str],
        engine: OrderedKeyValueEngine | None = None,
        on_unreadable: OnUnreadable | None = None,
    ) -> None:
        super().__init__(partition, OrderedEngine() if engine is None else engine)
        self._codec, self._encode = codec, encoder_of(codec)
        self._mended = mended_by(partition, on_unreadable)
        self._key_of = key_of

    @staticmethod
    def factory(
        item: type[Item],
        *,
        key: Callable[[Item], str],
        codec: Codec[Item] | None = None,
        engine: DiskEngine | None = None,
        checked: bool = False,
        on_unreadable: Callable[[str, bytes], Item | None] | None = None,
    ) -> Callable[[TopicPartition], SimpleStore[Item]]:
        """Return a factory of empty stores, one per partition. ``key`` takes the key from an item; ``engine`` keeps the
        state on disk, ``checked`` and ``on_unreadable`` are about items that do not come back, as in ``Table.factory``.
        Raises ``ConfigError``."""
        chosen: Codec[Item] = values_codec(item, codec, checked=checked, on_unreadable=on_unreadable)
        if engine is not None:
            return DiskStoreFactory(
                engine, lambda partition: DiskSimpleStore(partition, engine, chosen, key, on_unreadable)
            )
        return lambda partition: SimpleStore(partition, chosen, key, on_unreadable=on_unreadable)

    def get(self, key: str) -> T | None:
        """The item under ``key``, decoded anew, or ``None``."""
        data = self._get(self._encode_key(key))
        return None if data is None else self._decoded(key.encode(), data)

    def decode_key(self, key: bytes) -> str:
        """Decode a key in the changelog, for tools. Raises ``DecodeError``."""
        return str_codec.decode(key)

    def decode_value(self, value: bytes) -> T:
        """Decode a value in the changelog, for tools. Raises ``DecodeError``."""
        return self._codec.decode(value)

    def put(self, item: T) -> Change:
        """Keep an item under its key."""
        journal = self._journal
        if journal is None:
            self._refuse_write()
        change = self.to_change(item)
        assert change.value is not None
        journal.append(change)  # first: an engine on disk takes the journal's last change
        self._put(change.key, change.value)
        return change

    def delete(self, key: str) -> Change | None:
        """Remove the item under ``key``; ``None`` if there is none."""
        return self._delete(self._encode_key(key))

    def to_change(self, item: T) -> Change:
        """Return the change that ``put(item)`` would make; nothing is kept."""
        if item is None:
            raise StoreError(f"None was put into the store of {self.partition}; delete(key) removes an item")
        key = self._encode_key(self._key_of(item))
        return Change(key, self._encode(item), self._peek(key))

    def __contains__(self, key: str) -> bool:
        return self._get(self._encode_key(key)) is not None

    def __iter__(self) -> Iterator[T]:
        """All items in the order of their keys; the store may be written to meanwhile, as ``Table`` describes."""
        for key, data in self._scan(self._engine.items()):
            if (item := self._decoded(key, data)) is not None:
                yield item

    def prefix(self, prefix: str, *, reverse: bool = False) -> Iterator[T]:
        """The items whose keys start with ``prefix``, in order."""
        low = self._encode_key(prefix)
        engine = cast(OrderedKeyValueEngine, self._engine)
        for key, data in self._scan(engine.range(low, after_prefix(low), reverse=reverse)):
            if (item := self._decoded(key, data)) is not None:
                yield item

    def _decoded(self, key: bytes, data: bytes) -> T | None:
        """Decode an item, or return what stands in its place; ``None``: nothing does."""
        try:
            return self._codec.decode(data)
        except DecodeError as error:
            name = key.decode(errors="replace")
            if self._mended is None:
                raise self._unreadable(name, error) from error
            return cast("T | None", self._mended.value(name, data, error, name))

    def _encode_key(self, key: str) -> bytes:
        if key is None:
            raise StoreError(f"the store of {self.partition} was used with a null key")
        return str_codec.encode(key)


class DiskSimpleStore(LayeredBytes, SimpleStore[T]):
    """A ``SimpleStore`` on disk (a ``DiskStore``): the same calls. A ``put`` does not read what it replaces, so
    ``previous`` of its ``Change`` is ``UNREAD``."""

    def __init__(
        self,
        partition: TopicPartition,
        disk: DiskEngine,
        codec: Codec[T],
        key_of: Callable[[T], str],
        on_unreadable: OnUnreadable | None = None,
    ) -> None:
        self._layers = LayeredEngine()
        super().__init__(partition, codec, key_of, self._layers, on_unreadable)
        self.disk = disk
