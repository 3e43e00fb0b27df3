"""State of one partition, as encoded bytes that can be undone: tables, and the engines under them."""

from __future__ import annotations

from streams.stores.engines import KeyValueEngine, OrderedKeyValueEngine
from streams.stores.memory import HashEngine
from streams.stores.ordered import OrderedEngine
from streams.stores.simple import SimpleStore
from streams.stores.table import Table

__all__ = ["HashEngine", "KeyValueEngine", "OrderedEngine", "OrderedKeyValueEngine", "SimpleStore", "Table"]
