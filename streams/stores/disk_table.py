"""``Table.factory(engine=...)``: a table whose state is on disk, over an engine in layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import StoreError
from streams.protocols import Codec, DiskDatabase, DiskEngine
from streams.records import Change, TopicPartition
from streams.stores.engines import OrderedKeyValueEngine
from streams.stores.layered import LayeredEngine
from streams.stores.table import Table

K = TypeVar("K")
V = TypeVar("V")


class DiskTable(Table[K, V]):
    """A ``Table`` on disk (a ``DiskStore``): the same calls. ``len`` counts by reading everything; ``estimated_len`` is
    at once. Without a database, as in ``TestDriver``, everything stays in memory.

    Reading raises ``DiskDamaged`` for a disk that does not hold what was written; the partition starts anew then.
    """

    def __init__(self, partition: TopicPartition, disk: DiskEngine, key_codec: Codec[K], value_codec: Codec[V]) -> None:
        self._layers = LayeredEngine()
        super().__init__(partition, self._layers, key_codec, value_codec)
        self.disk = disk

    @property
    def layout(self) -> str:
        """Name class, codecs and engine; see ``JournalledBytes``."""
        return f"{super().layout} on {self.disk.name}"

    def estimated_len(self) -> int:
        """Estimate the number of keys, without reading them: keys that were just written may count twice."""
        self._check_open()
        return self._layers.estimated_len()

    # -- as the engine of the source sees it ---------------------------------------------------------------------------

    def attach(self, database: DiskDatabase, damaged: Callable[[str], None], /) -> None:
        """See ``DiskStore``, as the next three."""
        self._layers.attach(database, damaged)

    def written(self, changes: Sequence[Change], /) -> None:
        self._layers.written(changes)

    def relieve(self) -> None:
        if self._journal is None:
            self._layers.let_go()

    def limit_cache(self, size_bytes: int, /) -> None:
        self._layers.cache_bytes = size_bytes

    def begin(self, journal: list[Change], /) -> None:
        """Start journalling into this list; see ``JournalledStore``."""
        super().begin(journal)
        self._layers.begin(journal)

    def undo(self, journal: list[Change], /) -> None:
        """Take these changes back; see ``JournalledStore``."""
        self._check_open()
        for change in reversed(journal):
            self._layers.take_back(change)

    def receive_change(self, change: Change, /) -> None:
        """Apply one record of the changelog; see ``StateStore``. Raises ``StoreError`` for keys of the toolkit."""
        self._check_open()
        if change.key >= RESERVED_KEY_PREFIX:
            self._refuse_reserved(change.key)
        self._layers.receive(change)

    def _ordered(self) -> OrderedKeyValueEngine:
        if not getattr(self._key_codec, "order_preserving", False):
            raise StoreError(f"this table has no order: {type(self._key_codec).__name__} does not keep keys in order")
        return cast(OrderedKeyValueEngine, self._engine)


class DiskTableFactory(Generic[K, V]):
    """Makes an empty table for each partition. ``disk`` says before the first one what they need."""

    def __init__(self, disk: DiskEngine, key_codec: Codec[K], value_codec: Codec[V]) -> None:
        self.disk = disk
        self._codecs = key_codec, value_codec

    def __call__(self, partition: TopicPartition) -> Table[K, V]:
        return DiskTable(partition, self.disk, *self._codecs)
