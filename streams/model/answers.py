"""Answers of queries: a value of the state, and what it is as of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from streams.records import TopicPartition

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Row(tuple[K, V], Generic[K, V]):
    """Key and value of an entry, in a scan. ``due``: as that of an ``Answer``."""

    due = False


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """One answer from the state of a partition. It is committed. A key that is not in it may be in another partition,
    unless the source's ``routed_by`` says otherwise.

    ``positions``: of each input of the partition, the offset below which all events are in it; the ``at_least`` of a
    later query, also together with those of other partitions. ``as_of``: everything that was committed before this
    moment (seconds since the epoch, by the clock of the caller) is in it. ``served_by``: the instance that answered.
    ``parked``: events of the key wait in its queue (``PARK``): the position has passed them, and what they would change
    is not in the answer. It is ``False`` for a query that names a partition and no key. ``due``: the entry of a
    ``Stores`` has expired by the partition's time, and is not deleted yet; as ``StateReader`` says it.
    """

    value: T
    partition: int
    positions: Mapping[TopicPartition, int]
    as_of: float
    served_by: str
    parked: bool = False
    due: bool = False
