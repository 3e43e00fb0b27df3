"""``ReadTable``: keys and values of given types, over an engine that holds bytes, to be read only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from streams.errors import StoreError
from streams.protocols import Codec
from streams.stores import table_access
from streams.stores.engines import OrderedKeyValueEngine, after_prefix
from streams.stores.table_fields import ABSENT, TableFields

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class ReadTable(TableFields, Generic[K, V]):
    """The reading methods of ``Table``, and base of the tables that are not written by their readers: ``GlobalTable``,
    ``ViewSnapshot``, ``JoinedTable``. It has no writing methods, so a type checker refuses their use.

    ``get`` decodes, so a value is the caller's own, and changing it changes nothing here. All methods raise
    ``StoreError`` after the end of the table, and for a null key; ``EncodeError`` and ``DecodeError`` come from the
    codecs. Threads as the class says that derives from it.

    Scans (``items``, ``range`` ...) may go on while entries change: keys that are there all the time are seen exactly
    once, with the value that they have when they are reached; keys put or deleted meanwhile may be seen or not.
    """

    if TYPE_CHECKING:  # the leaf's functions, with the types of keys and values

        @overload
        def get(self, key: K) -> V | None: ...

        @overload
        def get(self, key: K, default: D) -> V | D: ...

        def get(self, key: K, default: Any = None) -> Any:
            """The value of ``key``, decoded anew at each call, or ``default``."""

    else:
        get = table_access.get

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
        found = self._decoded_value(value, decoded)
        return None if found is ABSENT else (decoded, found)

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
            value = self._decoded_value(value_bytes, key)
            if value is not ABSENT:
                yield key, value


class TableValues(Generic[V]):
    """The values of a table, as codec."""

    def __init__(self, table: ReadTable[Any, V]) -> None:
        self.encode: Callable[[V], bytes] = table._encode_value
        self.decode: Callable[[bytes], V] = table._decode_value
