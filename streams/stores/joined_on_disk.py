"""``source.join(engine=...)``: the rows of a joined table on disk, in the database of the partition's store.

The database has them under their keys of the changelog anyway, as it has everything that is kept of a partition. So
they go through the layers of the store, which see to what is not written yet, to the cache, to damage and to memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from streams.errors import ConfigError
from streams.protocols import DiskEngine
from streams.records import Change
from streams.stores.engines import after_prefix
from streams.stores.joined_table import JoinedTable, RowTopic
from streams.stores.layered import LayeredEngine
from streams.stores.layered_bytes import LayeredBytes

K = TypeVar("K")
V = TypeVar("V")


class RowEngine:
    """The rows of one table in an engine in layers: the keys that begin with ``prefix``, without it. One thread."""

    def __init__(self, layers: LayeredEngine, prefix: bytes) -> None:
        self.layers, self._prefix = layers, prefix
        self._end = after_prefix(prefix)

    def get(self, key: bytes, /) -> bytes | None:
        return self.layers.get(self._prefix + key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return self.range(None, None)

    def range(
        self,
        low: bytes | None,
        high: bytes | None,
        /,
        *,
        reverse: bool = False,
        inclusive: tuple[bool, bool] = (True, False),
    ) -> Iterator[tuple[bytes, bytes]]:
        """See ``OrderedKeyValueEngine``."""
        prefix, size = self._prefix, len(self._prefix)
        first = prefix if low is None else prefix + low
        last, with_last = (self._end, False) if high is None else (prefix + high, inclusive[1])
        inside = low is None or inclusive[0], with_last
        for key, value in self.layers.range(first, last, reverse=reverse, inclusive=inside, reserved=True):
            yield key[size:], value

    def put(self, key: bytes, value: bytes, /) -> None:
        """Do nothing: rows change by ``layers``."""

    def delete(self, key: bytes, /) -> None:
        """Do nothing, as ``put``."""

    def clear(self) -> None:
        """Do nothing: the store clears all of it."""

    def __len__(self) -> int:
        """Count by a scan of everything."""
        return sum(1 for _ in self.items())


class JoinedTableOnDisk(JoinedTable[K, V], Generic[K, V]):
    """A ``JoinedTable`` in the database of a store. ``len`` counts by reading everything."""

    def __init__(self, joined: RowTopic[K, V], partition: int, engine: RowEngine) -> None:
        super().__init__(joined, partition, engine)
        self._layers = engine.layers

    def set_row(self, key: bytes, change: Change) -> None:
        """See ``JoinedTable``, as the next two."""
        self._check_open()
        self._layers.receive(change)

    def exchange_row(self, key: bytes, change: Change) -> Change | None:
        self._check_open()
        return self._layers.exchange(change)

    def put_back_row(self, key: bytes, change: Change, before: Change | None) -> None:
        self._layers.put_back(change, before)


def rows_in(
    store: object, engine: DiskEngine, joined: RowTopic[K, V], partition: int, prefix: bytes
) -> JoinedTable[K, V]:
    """Make the table of a partition whose rows are in this store's database, their keys beginning with ``prefix``.
    Raises ``ConfigError`` for a store that has none of this kind."""
    if not isinstance(store, LayeredBytes) or store.disk.name != engine.name:
        name = type(engine).__name__
        raise ConfigError(
            f"source.join({joined.topic!r}, engine={name}()): rows on disk are in the database of the source's store, "
            f"and {type(store).__name__} has none of this kind: give the store the same engine, as in "
            f"Table.factory(..., engine={name}())"
        )
    return JoinedTableOnDisk(joined, partition, RowEngine(store.keep_rows(prefix), prefix))
