"""Databases for state that is larger than memory (``Table.factory(engine=...)``): one per partition, in its folder. And
``blobs``, the places for snapshots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.disk.rocksdb import RocksDB
    from streams.disk.sqlite import SQLite

__all__ = ["RocksDB", "SQLite"]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {
            "rocksdb": "RocksDB",
            "sqlite": "SQLite",
        },
    )
