"""Base of the stores on disk: what the engine of the source needs of them, over an engine in layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from streams.codecs import RESERVED_KEY_PREFIX
from streams.protocols import DiskDatabase, DiskEngine
from streams.records import Change, TopicPartition
from streams.stores.journalled import JournalledBytes
from streams.stores.layered import LayeredEngine

Made_co = TypeVar("Made_co", covariant=True)


class LayeredBytes(JournalledBytes):
    """A ``DiskStore`` in bytes; not for use by itself. Without a database, as in ``TestDriver``, everything stays in
    memory.

    Reading raises ``DiskDamaged`` for a disk that does not hold what was written; the partition starts anew then.
    """

    __slots__ = ()
    _layers: LayeredEngine
    disk: DiskEngine

    @property
    def layout(self) -> str:
        """Name what its bytes are made by, and the engine; see ``JournalledBytes``."""
        return f"{super().layout} on {self.disk.name}"

    def estimated_len(self) -> int:
        """Estimate the number of keys, without reading them: keys that were just written may count twice,
        and timers and rows of joined tables count, too."""
        self._check_open()
        return self._layers.estimated_len()

    def keep_rows(self, prefix: bytes) -> LayeredEngine:
        """Keep the rows of a joined table, or ids, as well, whose keys begin with ``prefix``. Returns the engine for
        them."""
        self._layers.row_prefixes.add(prefix)
        return self._layers

    @property
    def row_prefixes(self) -> Collection[bytes]:
        """Return the prefixes of the keys of rows that are read in the database: no start loads those."""
        return self._layers.row_prefixes

    def attach(self, database: DiskDatabase, unreadable: Callable[[Exception], None], /) -> None:
        """See ``DiskStore``, as the next three."""
        self._layers.attach(database, unreadable)

    def written(self, changes: Sequence[Change], /) -> None:
        self._layers.written(changes)

    def relieve(self) -> None:
        if self._journal is None:  # not within an event
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


class DiskStoreFactory(Generic[Made_co]):
    """Makes an empty store for each partition. ``disk`` says before the first one what they need."""

    def __init__(self, disk: DiskEngine, make: Callable[[TopicPartition], Made_co]) -> None:
        self.disk, self._make = disk, make

    def __call__(self, partition: TopicPartition) -> Made_co:
        return self._make(partition)
