"""``Table``: keys and values of given types, over an engine that holds bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from streams.codecs import codec_for
from streams.errors import ConfigError, StoreError
from streams.protocols import Codec, DiskEngine
from streams.records import TopicPartition
from streams.stores import table_access
from streams.stores.engines import KeyValueEngine, OrderedKeyValueEngine, after_prefix
from streams.stores.layered import LayeredEngine
from streams.stores.layered_bytes import DiskStoreFactory, LayeredBytes
from streams.stores.memory import HashEngine
from streams.stores.ordered import OrderedEngine
from streams.stores.table_fields import TableFields

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
Key = TypeVar("Key")  # of `factory`, which is called on the bare class: pyright wants variables of its own there
Value = TypeVar("Value")


class Table(TableFields, Generic[K, V]):
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
    ) -> Callable[[TopicPartition], Table[Key, Value]]:
        """Return a factory for ``EventSource(store=...)``: it makes an empty table for each partition.

        ``ordered=True`` keeps the keys sorted, for ``range``, ``prefix``, ``first`` and ``last``; the key's codec
        must preserve order (``str``, ``bytes``, ``int``, tuples of them; own codecs set ``order_preserving = True``).
        Without codecs ``codec_for`` chooses. Raises ``ConfigError``.

        ``engine`` (``SQLite()``, ``RocksDB()``) keeps the state on disk, for more of it than memory takes; the table is
        ordered then, if the key's codec preserves order. It needs ``StateConfig.folder``.
        """
        keys: Codec[Key] = codec_for(key) if key_codec is None else key_codec
        values: Codec[Value] = codec_for(value) if value_codec is None else value_codec
        if ordered and not getattr(keys, "order_preserving", False):
            raise ConfigError(f"Table(ordered=True): {type(keys).__name__} of {key!r} does not keep keys in order")

        if engine is not None:
            return DiskStoreFactory(engine, lambda partition: DiskTable(partition, engine, keys, values))

        def make(partition: TopicPartition) -> Table[Key, Value]:
            return Table(partition, OrderedEngine() if ordered else HashEngine(), keys, values)

        return make

    if TYPE_CHECKING:  # the leaf's functions, with the types of keys and values

        @overload
        def get(self, key: K) -> V | None: ...

        @overload
        def get(self, key: K, default: D) -> V | D: ...

        def get(self, key: K, default: Any = None) -> Any:
            """The value of ``key``, decoded anew at each call, or ``default``."""

        def put(self, key: K, value: V) -> None:
            """Set the value of ``key``: its bytes at this moment are what is kept and what goes into the changelog."""

    else:
        get, put = table_access.get, table_access.put

    def delete(self, key: K) -> bool:
        """Remove ``key``; return whether it was there. Nothing is recorded if it was not."""
        if key is None:
            self._refuse_null_key()
        return self._delete(self._encode_key(key)) is not None

    def __contains__(self, key: K) -> bool:
        if key is None:
            self._refuse_null_key()
        return self._get(self._encode_key(key)) is not None

    def items(self) -> Iterator[tuple[K, V]]:
        """Every key with its value, decoded one by one; in order if the table is ordered."""
        return self._decoded(self._engine.items())

    def keys(self) -> Iterator[K]:
        """Every key."""
        return (self._decode_key(key) for key, _ in self._scan(self._engine.items()))

    def values(self) -> Iterator[V]:
        """Every value."""
        return (value for _, value in self.items())

    def range(
        self, low: K | None = None, high: K | None = None, *, reverse: bool = False, include_high: bool = False
    ) -> Iterator[tuple[K, V]]:
        """Keys from ``low`` up to and without ``high`` (``None``: no end there), from the high end if ``reverse``."""
        low_bytes = None if low is None else self._encode_key(low)
        high_bytes = None if high is None else self._encode_key(high)
        found = self._ordered().range(low_bytes, high_bytes, reverse=reverse, inclusive=(True, include_high))
        return self._decoded(found)

    def prefix(self, prefix: K | tuple[Any, ...], *, reverse: bool = False) -> Iterator[tuple[K, V]]:
        """Keys that start with ``prefix``: text, bytes, or the first elements of a tuple key."""
        encode_prefix = getattr(self._key_codec, "encode_prefix", None)
        if encode_prefix is None:
            raise StoreError(f"keys of {type(self._key_codec).__name__} have no prefixes; use range(low, high)")
        low: bytes = encode_prefix(prefix)
        return self._decoded(self._ordered().range(low, after_prefix(low), reverse=reverse))

    def first(self) -> tuple[K, V] | None:
        """The lowest key with its value, or ``None`` if the table is empty."""
        return next(self.range(), None)

    def last(self) -> tuple[K, V] | None:
        """The highest key with its value, or ``None`` if the table is empty."""
        return next(self.range(reverse=True), None)

    @property
    def codecs(self) -> tuple[Codec[K], Codec[V]]:
        """Return the codecs of keys and values, for readers of the changelog."""
        return self._key_codec, TableValues(self)

    @property
    def is_ordered(self) -> bool:
        """Check whether it has ``range``, ``prefix``, ``first`` and ``last``."""
        return hasattr(self._engine, "range") and bool(getattr(self._key_codec, "order_preserving", False))

    def decode_key(self, key: bytes) -> K:
        """Decode a key in the changelog, for tools. Raises ``DecodeError``."""
        decoded: K = self._decode_key(key)
        return decoded

    def decode_value(self, value: bytes) -> V:
        """Decode a value in the changelog, for tools. Raises ``DecodeError``."""
        decoded: V = self._decode_value(value)
        return decoded

    def keys_after(self, key: bytes | None) -> Iterator[bytes]:
        """Scan the encoded keys behind this one (``None``: from the first on) in the order of their bytes, for visits.
        Raises ``StoreError`` for a table without order."""
        if not self.has_order:
            raise StoreError("this table has no order; make it with Table.factory(..., ordered=True)")
        engine = cast(OrderedKeyValueEngine, self._engine)
        return (found for found, _ in self._scan(engine.range(key, None, inclusive=(False, False))))

    def entry(self, key: bytes) -> tuple[K, V] | None:
        """Return key and value of an encoded key; ``None``: it is not there. Raises ``DecodeError``."""
        value = self._get(key)
        if value is None:
            return None
        decoded = self._decode_key(key)
        return decoded, self._decoded_value(value, decoded)

    @property
    def has_order(self) -> bool:
        """Check whether its engine keeps the order of the keys' bytes, whatever the codec makes of it."""
        return hasattr(self._engine, "range")

    def estimated_len(self) -> int:
        """Return the number of keys at once: ``len``, and on disk an estimate, where ``len`` reads everything."""
        return len(self)

    def _ordered(self) -> OrderedKeyValueEngine:
        engine = self._engine
        if not hasattr(engine, "range"):
            raise StoreError("this table has no order; make it with Table.factory(..., ordered=True)")
        if not getattr(self._key_codec, "order_preserving", False):  # on disk
            raise StoreError(f"this table has no order: {type(self._key_codec).__name__} does not keep keys in order")
        return cast(OrderedKeyValueEngine, engine)

    def _decoded(self, found: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[K, V]]:
        for key_bytes, value_bytes in self._scan(found):
            key = self._decode_key(key_bytes)
            yield key, self._decoded_value(value_bytes, key)


class DiskTable(LayeredBytes, Table[K, V]):
    """A ``Table`` on disk (a ``DiskStore``): the same calls. ``len`` counts by reading everything; ``estimated_len`` is
    at once."""

    def __init__(self, partition: TopicPartition, disk: DiskEngine, key_codec: Codec[K], value_codec: Codec[V]) -> None:
        self._layers = LayeredEngine()
        super().__init__(partition, self._layers, key_codec, value_codec)
        self.disk = disk


class TableValues(Generic[V]):
    """The values of a table, as codec."""

    def __init__(self, table: Table[Any, V]) -> None:
        self.encode: Callable[[V], bytes] = table._encode_value
        self.decode: Callable[[bytes], V] = table._decode_value
