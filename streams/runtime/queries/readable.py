"""The codecs of one table of a source, for readers in other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from streams.errors import ConfigError, StoreError
from streams.protocols import Codec
from streams.records import TopicPartition
from streams.runtime.ownership.replicas import make_store
from streams.settings.config import EventSourceConfig
from streams.stores.structured import StructuredBytes
from streams.stores.table import Table


class Readable(NamedTuple):
    """A ``Table``, or a structure of a ``Stores``: then it has a ``name``, and ``row_key`` makes the key that handlers
    name, without the span of a window, from one of the changelog; ``takes`` checks that such a key is its own."""

    keys: Codec[Any]
    values: Codec[Any]
    is_ordered: bool
    name: str = ""
    row_key: Callable[[bytes], Any] | None = None
    takes: Callable[[bytes], bool] | None = None


def read_from(factory: Callable[[TopicPartition], Any], config: EventSourceConfig, name: str) -> Readable:
    """Return what a factory's stores have by this name, which a ``Table`` and a single structure do not need. Raises
    ``ConfigError``."""
    store: Any = make_store(factory, TopicPartition(config.changelog, 0))
    try:
        if isinstance(store, StructuredBytes):
            name, part = store.part_named(name)
            keys, values = part.codecs
            table: Any = part.table
            is_ordered = table.is_ordered and bool(getattr(keys, "order_preserving", False))
            return Readable(keys, values, is_ordered, name, part.row_key, lambda key: store.is_of(key, name))
        if not isinstance(store, Table):
            raise ConfigError(
                f"the store of {config.group_id} is {type(store).__name__}, and only a Table and a Stores are read by "
                f"others: use EventSource.query in its own process, or follow {config.changelog} by "
                "GlobalChangeLog.of(source.config), with a receiver of your own"
            )
        if name:
            raise ConfigError(f"the store of {config.group_id} is one Table: leave the name {name!r} out")
        return Readable(*store.codecs, store.is_ordered)
    except StoreError as error:
        raise ConfigError(f"the store of {config.group_id}: {error}") from error
    finally:
        store.revoked()
