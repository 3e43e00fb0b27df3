"""Joined tables: the rows of another topic, beside the state of a partition, for its handlers to read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, NoReturn, TypeVar

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import DecodeError, StoreError, TopicError
from streams.model.reasons import reason
from streams.model.shortcuts import encoder_of
from streams.protocols import Codec, DiskEngine
from streams.records import Change, IncomingRecord, Record, TopicPartition
from streams.sak.murmur2 import partition_of
from streams.stores import table_access
from streams.stores.engines import KeyValueEngine
from streams.stores.memory import HashEngine
from streams.stores.ordered import OrderedEngine
from streams.stores.table import Table

K = TypeVar("K")
V = TypeVar("V")

Partitioner = Literal["murmur2", "crc32", "fnv1a"]
CHECKED_KEYS: Final = 100
"""Keys of each partition that are compared with the partitioner, after each start of a partition."""
_MISSING: Final[Any] = object()


def _crc32(key: bytes, partitions: int) -> int:
    return zlib.crc32(key) % partitions


def _fnv1a(key: bytes, partitions: int) -> int:
    """Place as the hashing of Go's clients does (sarama, and so goka): FNV-1a, as a signed number."""
    number = 0x811C9DC5
    for byte in key:
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return abs(number - (1 << 32) if number >> 31 else number) % partitions


PARTITIONERS: Final[Mapping[str, Callable[[bytes, int], int]]] = {
    "murmur2": partition_of,
    "crc32": _crc32,
    "fnv1a": _fnv1a,
}


class Update(msgspec.Struct, Generic[K, V], frozen=True):
    """A row of a joined table that is another one now: ``new`` in the place of ``old`` (``None``: it was, or is, not
    there)."""

    key: K
    old: V | None
    new: V | None


class JoinedRow(NamedTuple):
    """A row as its record has it, read and decoded. ``value`` and ``new`` are ``None`` for one that is deleted."""

    key: bytes
    value: bytes | None
    name: Any
    new: Any


class Joined(Generic[K, V]):
    """A joined table, as ``source.join`` declares it. Its rows are in ``ctx.joined(table)``."""

    def __init__(
        self,
        topic: str,
        codecs: tuple[Codec[K], Codec[V]],
        *,
        partitions: int,
        ordered: bool = False,
        partitioner: Partitioner | None = "murmur2",
        engine: DiskEngine | None = None,
    ) -> None:
        self.topic = topic
        self.codecs = codecs
        self.partitions = partitions
        self.ordered = ordered
        self.partitioner = partitioner
        self.engine = engine
        self._place = None if partitioner is None else PARTITIONERS[partitioner]

    def __repr__(self) -> str:
        return f"Joined({self.topic!r})"

    def rows(self, partition: int, store: object, prefix: bytes) -> JoinedTable[K, V]:
        """Make an empty table for a partition; with an engine in the database of its ``store``, where the keys of rows
        begin with ``prefix``. Raises ``ConfigError`` for a store without a database of this kind."""
        if self.engine is None:
            return JoinedTable(self, partition, OrderedEngine() if self.ordered else HashEngine())
        from streams.stores.joined_on_disk import rows_in  # which derives from this module's classes

        return rows_in(store, self.engine, self, partition, prefix)

    def partition_of(self, key: bytes) -> int | None:
        """Return the partition of a key; ``None``: it is not known, or not checked."""
        return None if self._place is None else self._place(key, self.partitions)

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

    def check_placed(self, record: IncomingRecord, others: Sequence[bytes]) -> None:
        """Check that a row is in its partition. ``others``: keys of the same partition. Raises ``TopicError``, which
        names the partitioner that fits all of them."""
        key, place = record.key, self._place
        if place is None or key is None:
            return
        due = place(key, self.partitions)
        if due == record.partition:
            return
        known = {key, *others}
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


class JoinedTable(Table[K, V], Generic[K, V]):
    """The rows of a joined table in one partition: a read-only ``Table``. They stand still during an event.

    A key that is not here, and belongs to another partition, is a ``StoreError`` (``get``, ``in``): there are no rows
    of it in this one, whether it exists or not.
    """

    def __init__(self, joined: Joined[K, V], partition: int, engine: KeyValueEngine) -> None:
        super().__init__(TopicPartition(joined.topic, partition), engine, *joined.codecs)
        self.joined = joined
        self._to_check = CHECKED_KEYS
        self._checked: list[bytes] = []

    if not TYPE_CHECKING:  # with the types of ``Table``

        def get(self, key: Any, default: Any = None) -> Any:
            """The value of ``key``, decoded anew at each call, or ``default``."""
            found = table_access.get(self, key, _MISSING)
            if found is _MISSING:
                self._check_place(key)
                return default
            return found

    def __contains__(self, key: K) -> bool:
        found = super().__contains__(key)
        if not found:
            self._check_place(key)
        return found

    def begin(self, journal: list[Change], /) -> None:
        """Refuse to journal: handlers read rows, and never write them."""
        self._refuse_write()

    def receive_change(self, change: Change, /) -> None:
        """Refuse a change, as ``begin``."""
        self._refuse_write()

    # -- as the engine sees it -----------------------------------------------------------------------------------------

    def row(self, key: bytes) -> bytes | None:
        """Return a row as bytes."""
        return self._get(key)

    def row_keys(self) -> set[bytes]:
        """Return the keys of all rows."""
        return {key for key, _ in self._engine.items()}

    def set_row(self, key: bytes, change: Change) -> None:
        """Set a row, or delete it. ``change``: as it is in the changelog, the very object that is committed."""
        self._apply(key, change.value)

    def exchange_row(self, key: bytes, change: Change) -> Any:
        """Set a row for an event that may fail. Returns what ``put_back_row`` needs."""
        before = self._get(key)
        self._apply(key, change.value)
        return before

    def put_back_row(self, key: bytes, change: Change, before: Any) -> None:
        """Undo ``exchange_row``."""
        self._apply(key, before)

    def read(self, record: IncomingRecord, size_limit: int) -> JoinedRow | None:
        """Read a row of the topic; the first ones are checked to be in their partition. Raises as ``Joined.read``, and
        ``TopicError``."""
        row = self.joined.read(record, size_limit)
        if self._to_check and row is not None:
            self.joined.check_placed(record, self._checked)
            self._checked.append(row.key)
            self._to_check -= 1
            if not self._to_check:
                self._checked = []
        return row

    def update(self, row: JoinedRow, old: bytes | None) -> Update[K, V]:
        """Make the argument of an update handler: ``old`` is the row before, in bytes."""
        return Update(row.name, None if old is None else self.decode_value(old), row.new)

    def _check_place(self, key: K) -> None:
        due = self.joined.partition_of(self._encode_key(key))
        if due is not None and due != self.partition.partition:
            raise StoreError(
                f"the key {str(key)[:80]!r} of the joined table {self.joined.topic} belongs to partition {due}, and "
                f"this is partition {self.partition.partition}: its row is not here, whether there is one or not. "
                "Forward the event under this key, so that it is handled where the row is"
            )

    def revoked(self) -> None:
        """Free everything: the partition is no longer here."""
        self._close(f"the rows of {self.partition} were revoked: the partition is no longer here")

    def _refuse_write(self) -> NoReturn:
        self._check_open()
        raise StoreError(
            f"a row of the joined table {self.joined.topic} was written: rows change with their topic only, so send a "
            "record there"
        )
