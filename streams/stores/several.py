"""``Stores``: several tables and other structures of one partition; its factory chooses between memory and disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from streams.errors import ConfigError
from streams.protocols import DiskEngine
from streams.records import TopicPartition
from streams.stores.layered_stores import on_disk
from streams.stores.structured import StructuredBytes

StoresT = TypeVar("StoresT", bound="Stores")


class Stores(StructuredBytes):
    """The state of one partition, in several structures: subclass it, and name them.

        class Shop(Stores):
            orders = NamedTable.of(str, Order, index={"customer": Index(str, lambda order: order.customer)})
            jobs = Heap.of(str, Job, priority=Index(int, lambda job: job.due_ms))

        source = EventSource(config, store=Shop.factory())

    All of them are one store: an event's writes are undone together, one transaction commits them. Not thread-safe: the
    event loop's thread only.
    """

    @classmethod
    def factory(cls: type[StoresT], *, engine: DiskEngine | None = None) -> Callable[[TopicPartition], StoresT]:
        """Return a factory for ``EventSource(store=...)``.

        ``engine`` (``SQLite()``, ``RocksDB()``) keeps the entries on disk, in one database of each partition; the
        places of indexes, heaps, windows and expiry stay in memory. It needs ``StateConfig.folder``. Raises
        ``ConfigError`` for a class without structures, or with two of one name."""
        names = [declared.name for declared in cls.declared.values()]
        if not names:
            raise ConfigError(f"{cls.__name__} names no structure: orders = NamedTable.of(str, Order), for example")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{cls.__name__} has two structures of the name {twice[0]!r}")
        bare = sorted(declared.name for declared in cls.declared.values() if declared.bare)
        if len(bare) > 1:
            raise ConfigError(f"{cls.__name__}: {' and '.join(bare)} have bare keys; one structure may")
        if engine is not None:
            return on_disk(cls, engine)
        return cls
