"""State of one partition, as encoded bytes that can be undone: tables, and the engines under them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.sak.lazy_names import LazyNames

if TYPE_CHECKING:
    from streams.model.commands import Versioned
    from streams.stores.aggregate import Aggregate
    from streams.stores.engines import KeyValueEngine, OrderedKeyValueEngine
    from streams.stores.foreign import ForeignRow
    from streams.stores.heap import Heap
    from streams.stores.indexes import Index
    from streams.stores.joined import Joined
    from streams.stores.joined_table import JoinedTable, Update
    from streams.stores.memory import HashEngine
    from streams.stores.named_table import NamedTable
    from streams.stores.ordered import OrderedEngine
    from streams.stores.read_table import ReadTable
    from streams.stores.several import Stores
    from streams.stores.simple import SimpleStore
    from streams.stores.table import Table
    from streams.stores.windows import LateItem, Window, Windows

__all__ = [
    "Aggregate",
    "ForeignRow",
    "HashEngine",
    "Heap",
    "Index",
    "Joined",
    "JoinedTable",
    "KeyValueEngine",
    "LateItem",
    "NamedTable",
    "OrderedEngine",
    "OrderedKeyValueEngine",
    "ReadTable",
    "SimpleStore",
    "Stores",
    "Table",
    "Update",
    "Versioned",
    "Window",
    "Windows",
]

if not TYPE_CHECKING:
    __getattr__ = LazyNames(
        __name__,
        {
            "aggregate": "Aggregate",
            "streams.model.commands": "Versioned",
            "engines": "KeyValueEngine OrderedKeyValueEngine",
            "foreign": "ForeignRow",
            "heap": "Heap",
            "indexes": "Index",
            "joined": "Joined",
            "joined_table": "JoinedTable Update",
            "memory": "HashEngine",
            "named_table": "NamedTable",
            "ordered": "OrderedEngine",
            "read_table": "ReadTable",
            "several": "Stores",
            "simple": "SimpleStore",
            "table": "Table",
            "windows": "LateItem Window Windows",
        },
    )
