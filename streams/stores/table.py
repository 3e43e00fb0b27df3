"""``Table``: keys and values of given types, over an engine that holds bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from streams.codecs import checked_codec, codec_for
from streams.errors import ConfigError
from streams.protocols import Codec, DiskEngine
from streams.records import TopicPartition
from streams.stores import table_access
from streams.stores.engines import KeyValueEngine
from streams.stores.layered import LayeredEngine
from streams.stores.layered_bytes import DiskStoreFactory, LayeredBytes
from streams.stores.memory import HashEngine
from streams.stores.ordered import OrderedEngine
from streams.stores.read_table import ReadTable
from streams.stores.table_fields import JournalledFields, OnUnreadable, TableFields, mended_by

K = TypeVar("K")
V = TypeVar("V")
Key = TypeVar("Key")  # of `factory`, which is called on the bare class: pyright wants variables of its own there
Value = TypeVar("Value")


class Table(ReadTable[K, V], JournalledFields, Generic[K, V]):
    """The state of one partition: a value for each key.

    ``get`` decodes, ``put`` encodes: a value that was read is the handler's own copy, and changing it changes nothing
    here until it is put again. Reads are allowed at any time; writes inside of an event only. All methods raise
    ``StoreError`` after the partition was revoked, and for a null key; ``EncodeError`` and ``DecodeError`` come from
    the codecs. Not thread-safe: the event loop's thread only.

    Scans (``items``, ``range`` ...) may go on while the handler writes: keys that are there all the time are seen
    exactly once, with the value that they have when they are reached; keys put or deleted meanwhile may be seen or
    not.
    """

    def __init__(
        self, partition: TopicPartition, engine: KeyValueEngine, key_codec: Codec[K], value_codec: Codec[V]
    ) -> None:
        super().__init__(partition, engine, key_codec, value_codec)

    @staticmethod
    def factory(
        *,
        key: type[Key],
        value: type[Value],
        ordered: bool = False,
        engine: DiskEngine | None = None,
        key_codec: Codec[Key] | None = None,
        value_codec: Codec[Value] | None = None,
        checked: bool = False,
        on_unreadable: Callable[[Key, bytes], Value | None] | None = None,
    ) -> Callable[[TopicPartition], Table[Key, Value]]:
        """Return a factory for ``EventSource(store=...)``: it makes an empty table for each partition.

        ``ordered=True`` keeps the keys sorted, for ``range``, ``prefix``, ``first`` and ``last``; the key's codec
        must preserve order (``str``, ``bytes``, ``int``, tuples of them; own codecs set ``order_preserving = True``).
        Without codecs ``codec_for`` chooses. Raises ``ConfigError``.

        ``checked=True`` reads back every value that is put, also where nothing is to be seen of a loss (its price:
        ``docs/reference/events.md``). ``on_unreadable`` is called with the key and the bytes of a stored value that
        cannot be read, at each read; it returns a value in its place, or ``None``: the read goes on as if the key were
        not there. Without it such a read raises ``StateUnreadable``.

        ``engine`` (``SQLite()``, ``RocksDB()``) keeps the state on disk, for more of it than memory takes; the table is
        ordered then, if the key's codec preserves order. It needs ``StateConfig.folder``.
        """
        keys: Codec[Key] = codec_for(key) if key_codec is None else key_codec
        values = values_codec(value, value_codec, checked=checked, on_unreadable=on_unreadable)
        if ordered and not getattr(keys, "order_preserving", False):
            raise ConfigError(f"Table(ordered=True): {type(keys).__name__} of {key!r} does not keep keys in order")

        if engine is not None:
            return DiskStoreFactory(
                engine, lambda partition: _mending(DiskTable(partition, engine, keys, values), on_unreadable)
            )

        def make(partition: TopicPartition) -> Table[Key, Value]:
            engine = OrderedEngine() if ordered else HashEngine()
            return _mending(Table(partition, engine, keys, values), on_unreadable)

        return make

    if TYPE_CHECKING:  # the leaf's function, with the types of keys and values

        def put(self, key: K, value: V) -> None:
            """Set the value of ``key``: its bytes at this moment are what is kept and what goes into the changelog."""

    else:
        put = table_access.put

    def delete(self, key: K) -> bool:
        """Remove ``key``; return whether it was there. Nothing is recorded if it was not."""
        if key is None:
            self._refuse_null_key()
        return self._delete(self._encode_key(key)) is not None


def values_codec(type_: type[V], given: Codec[V] | None, *, checked: bool, on_unreadable: object) -> Codec[V]:
    """Return the codec of a table's values. Raises ``ConfigError``."""
    if on_unreadable is not None and not callable(on_unreadable):
        raise ConfigError(f"on_unreadable is {on_unreadable!r}; give a function of a key and the bytes of its value")
    codec: Codec[V] = codec_for(type_) if given is None else given
    return checked_codec(codec) if checked else codec


T = TypeVar("T", bound=TableFields)


def _mending(table: T, on_unreadable: OnUnreadable | None) -> T:
    table._mended = mended_by(table.partition, on_unreadable)
    return table


class DiskTable(LayeredBytes, Table[K, V]):
    """A ``Table`` on disk (a ``DiskStore``): the same calls. ``len`` counts by reading everything; ``estimated_len`` is
    at once."""

    def __init__(self, partition: TopicPartition, disk: DiskEngine, key_codec: Codec[K], value_codec: Codec[V]) -> None:
        self._layers = LayeredEngine()
        super().__init__(partition, self._layers, key_codec, value_codec)
        self.disk = disk
