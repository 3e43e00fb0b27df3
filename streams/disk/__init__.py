"""Databases for state that is larger than memory (``Table.factory(engine=...)``): one per partition, in its folder. And
``blobs``, the places for snapshots.
"""

from __future__ import annotations

from streams.disk.rocksdb import RocksDB
from streams.disk.sqlite import SQLite

__all__ = ["RocksDB", "SQLite"]
