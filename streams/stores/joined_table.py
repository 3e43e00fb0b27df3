"""The rows of a joined table in one partition: those of another topic, beside its state, for its handlers to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from streams.errors import StoreError
from streams.protocols import Codec
from streams.records import Change, IncomingRecord, TopicPartition
from streams.stores import table_access
from streams.stores.engines import KeyValueEngine
from streams.stores.read_table import ReadTable

K = TypeVar("K")
V = TypeVar("V")

CHECKED_KEYS: Final = 100
"""Number of keys that are compared with the partitioner after each start of a partition. A wrong one is found by few of
them, and a check of every row would cost."""
_MISSING: Final[Any] = object()


class Update(msgspec.Struct, Generic[K, V], frozen=True):
    """A change of a row of a joined table, from ``old`` to ``new`` (``None``: there was, or is, no row)."""

    key: K
    old: V | None
    new: V | None


class JoinedRow(NamedTuple):
    """A row as its record has it, read and decoded. ``value`` and ``new`` are ``None`` for one that is deleted."""

    key: bytes
    value: bytes | None
    name: Any
    new: Any


class RowTopic(Protocol[K, V]):
    """A joined table as it is declared; ``joined.Joined`` documents the methods."""

    @property
    def topic(self) -> str: ...
    @property
    def codecs(self) -> tuple[Codec[K], Codec[V]]: ...
    def partition_of(self, key: bytes) -> int | None: ...
    def read(self, record: IncomingRecord, size_limit: int) -> JoinedRow | None: ...
    def check_partition(self, record: IncomingRecord, others: Sequence[bytes]) -> None: ...


class JoinedTable(ReadTable[K, V], Generic[K, V]):
    """The rows of a joined table in one partition: a ``ReadTable``. They stand still during an event.

    A key that is not here, and belongs to another partition, is a ``StoreError`` (``get``, ``in``): there are no rows
    of it in this one, whether it exists or not.
    """

    _engine: KeyValueEngine

    def __init__(self, joined: RowTopic[K, V], partition: int, engine: KeyValueEngine) -> None:
        super().__init__(TopicPartition(joined.topic, partition), engine, *joined.codecs)
        self.joined = joined
        self._to_check = CHECKED_KEYS
        self._checked: list[bytes] = []

    if not TYPE_CHECKING:  # with the types of ``ReadTable``

        def get(self, key: Any, default: Any = None) -> Any:
            """The value of ``key``, decoded anew at each call, or ``default``."""
            found = table_access.get(self, key, _MISSING)
            if found is _MISSING:
                self._check_key(key)
                return default
            return found

    def __contains__(self, key: K) -> bool:
        found = super().__contains__(key)
        if not found:
            self._check_key(key)
        return found

    # -- as the engine sees it -----------------------------------------------------------------------------------------

    def row(self, key: bytes) -> bytes | None:
        """Return a row as bytes."""
        return self._get(key)

    def row_keys(self) -> set[bytes]:
        """Return the keys of all rows."""
        return {key for key, _ in self._engine.items()}

    def set_row(self, key: bytes, change: Change) -> None:
        """Set a row, or delete it. ``change``: as it is in the changelog, the very object that is committed."""
        self._set(key, change.value)

    def exchange_row(self, key: bytes, change: Change) -> Any:
        """Set a row for an event that may fail. Returns what ``put_back_row`` needs."""
        before = self._get(key)
        self._set(key, change.value)
        return before

    def put_back_row(self, key: bytes, change: Change, before: Any) -> None:
        """Undo ``exchange_row``."""
        self._set(key, before)

    def read(self, record: IncomingRecord, size_limit: int) -> JoinedRow | None:
        """Read a row of the topic; the first ones are checked to be in their partition. Raises as ``Joined.read``, and
        ``TopicError``."""
        row = self.joined.read(record, size_limit)
        if self._to_check and row is not None:
            self.joined.check_partition(record, self._checked)
            self._checked.append(row.key)
            self._to_check -= 1
            if not self._to_check:
                self._checked = []  # they were kept to find the partitioner that fits all of them
        return row

    def update(self, row: JoinedRow, old: bytes | None) -> Update[K, V]:
        """Make the argument of an update handler: ``old`` is the row before, in bytes."""
        return Update(row.name, None if old is None else self.decode_value(old), row.new)

    def _check_key(self, key: K) -> None:
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

    def _set(self, key: bytes, row: bytes | None) -> None:
        if row is None:
            self._engine.delete(key)
        else:
            self._engine.put(key, row)
