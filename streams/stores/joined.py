"""Joined tables: their declaration, which places and reads rows, and makes the table of each partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import DecodeError, TopicError
from streams.model.partitioners import PARTITIONERS, PartitionerName
from streams.model.reasons import reason
from streams.model.shortcuts import encoder_of
from streams.protocols import Codec, DiskEngine
from streams.records import IncomingRecord, Record
from streams.stores.joined_on_disk import rows_in
from streams.stores.joined_table import JoinedRow, JoinedTable
from streams.stores.memory import HashEngine
from streams.stores.ordered import OrderedEngine

K = TypeVar("K")
V = TypeVar("V")


class Joined(Generic[K, V]):
    """A joined table, as ``source.join`` declares it. Its rows are in ``ctx.joined(table)``."""

    def __init__(
        self,
        topic: str,
        codecs: tuple[Codec[K], Codec[V]],
        *,
        partitions: int,
        ordered: bool = False,
        partitioner: PartitionerName | None = "murmur2",
        engine: DiskEngine | None = None,
    ) -> None:
        self.topic = topic
        self.codecs = codecs
        self.partitions = partitions
        self.ordered = ordered
        self.partitioner = partitioner
        self.engine = engine
        self._placement = None if partitioner is None else PARTITIONERS[partitioner]

    def __repr__(self) -> str:
        return f"Joined({self.topic!r})"

    def rows(self, partition: int, store: object, prefix: bytes) -> JoinedTable[K, V]:
        """Make an empty table for a partition; with an engine in the database of its ``store``, where the keys of rows
        begin with ``prefix``. Raises ``ConfigError`` for a store without a database of this kind."""
        if self.engine is None:
            return JoinedTable(self, partition, OrderedEngine() if self.ordered else HashEngine())
        return rows_in(store, self.engine, self, partition, prefix)

    def partition_of(self, key: bytes) -> int | None:
        """Return the partition of a key; ``None``: it is not known, or not checked."""
        return None if self._placement is None else self._placement(key, self.partitions)

    def record(self, key: K, row: V | None) -> Record:
        """Return the record that puts a row into the table's topic, or deletes it (``None``), for
        ``EventProducer.send``; placed by the table's partitioner. Any thread. Raises ``EncodeError``."""
        data = encoder_of(self.codecs[0])(key)
        value = None if row is None else encoder_of(self.codecs[1])(row)
        return Record(self.topic, value, data, None, self.partition_of(data))

    def read(self, record: IncomingRecord, size_limit: int) -> JoinedRow | None:
        """Read a row; ``None``: the record is one of the toolkit's own, in the changelog of another source. Raises
        ``DecodeError``, also for a row that is larger than ``size_limit`` (bytes)."""
        key, value = record.key, record.value
        if key is None:
            raise DecodeError(f"a row of the joined table {self.topic} has a key, and this record has none")
        if key.startswith(RESERVED_KEY_PREFIX):
            return None
        size = len(key) + len(value or b"")
        if size > size_limit:
            raise DecodeError(
                f"the row has {size} bytes, more than the {size_limit} that this source writes into its changelog "
                "(message.max.bytes in client_settings, and max.message.bytes of the changelog)"
            )
        keys, values = self.codecs
        try:
            return JoinedRow(key, value, keys.decode(key), None if value is None else values.decode(value))
        except DecodeError:
            raise
        except Exception as error:  # of the user's codec
            raise DecodeError(reason(error)) from error

    def check_partition(self, record: IncomingRecord, others: Sequence[bytes]) -> None:
        """Check that a row is in its partition. ``others``: keys of the same partition. Raises ``TopicError``, which
        names the partitioner that fits all of them."""
        key, placement = record.key, self._placement
        if placement is None or key is None:
            return
        due = placement(key, self.partitions)
        if due == record.partition:
            return
        known = {key, *others}  # several: one key alone is by chance where a wrong partitioner has it, too
        fitting = [
            repr(name)
            for name, other in PARTITIONERS.items()
            if all(other(one, self.partitions) == record.partition for one in known)
        ]
        advice = (
            f"partitioner={' or '.join(fitting)} fits {len(known)} keys of this partition"
            if fitting
            else ("none of " + ", ".join(PARTITIONERS) + " fits; partitioner=None takes rows as they are placed")
        )
        raise TopicError(
            f"{record.where}: the key {key[:64]!r} belongs to partition {due} of {self.partitions} by "
            f"{self.partitioner}, so its events would be handled without this row. In "
            f"source.join({self.topic!r}, ...), {advice}"
        )
