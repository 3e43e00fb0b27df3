"""``engine=`` of a factory: tables and simple stores whose state is on disk, over an engine in layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from streams.protocols import Codec, DiskEngine
from streams.records import TopicPartition
from streams.stores.layered import LayeredEngine
from streams.stores.layered_bytes import LayeredBytes
from streams.stores.simple import SimpleStore
from streams.stores.table import Table

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
Made_co = TypeVar("Made_co", covariant=True)


class DiskTable(LayeredBytes, Table[K, V]):
    """A ``Table`` on disk (a ``DiskStore``): the same calls. ``len`` counts by reading everything; ``estimated_len`` is
    at once."""

    def __init__(self, partition: TopicPartition, disk: DiskEngine, key_codec: Codec[K], value_codec: Codec[V]) -> None:
        self._layers = LayeredEngine()
        super().__init__(partition, self._layers, key_codec, value_codec)
        self.disk = disk


class DiskSimpleStore(LayeredBytes, SimpleStore[T]):
    """A ``SimpleStore`` on disk (a ``DiskStore``): the same calls. A ``put`` does not read what it replaces, so
    ``previous`` of its ``Change`` is ``UNREAD``."""

    def __init__(
        self, partition: TopicPartition, disk: DiskEngine, codec: Codec[T], key_of: Callable[[T], str]
    ) -> None:
        self._layers = LayeredEngine()
        super().__init__(partition, codec, key_of, self._layers)
        self.disk = disk


class DiskStoreFactory(Generic[Made_co]):
    """Makes an empty store for each partition. ``disk`` says before the first one what they need."""

    def __init__(self, disk: DiskEngine, make: Callable[[TopicPartition], Made_co]) -> None:
        self.disk, self._make = disk, make

    def __call__(self, partition: TopicPartition) -> Made_co:
        return self._make(partition)
