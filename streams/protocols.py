"""The contracts that a user may implement, on one page.

Threads: all methods here are called on the event loop's thread, one at a time per partition, unless a method's
docstring names another one (``receive_change``). An object belongs to one partition; nothing needs a lock.

Exceptions: anything raised by a store while an event runs fails that event (its error policy decides); anything raised
while a store is restored or revoked stops the event source, because the state cannot be trusted any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from streams.records import Change, TopicPartition

T = TypeVar("T")


@runtime_checkable
class Codec(Protocol[T]):
    """Turns values of one type into bytes and back. Stateless; may be called from any thread.

    ``decode(encode(x)) == x`` for every ``x`` that ``encode`` takes, unless the class says ``lossy = True``. Both raise
    ``EncodeError`` / ``DecodeError`` and nothing else. Byte order is fixed by the codec, never the machine's.
    """

    def encode(self, value: T, /) -> bytes: ...

    def decode(self, data: bytes, /) -> T: ...


@runtime_checkable
class StateStore(Protocol):
    """The smallest store: it is filled from its changelog, and freed.

    Order: the factory is called when the partition is prepared; then ``receive_change`` once per changelog record, in
    the order of the changelog; then events run; at the end ``revoked``, once, after the last transaction of the
    partition is settled or given up. A store of this kind reports its changes to the engine itself, by
    ``EventContext.record_change``. If an event fails that has touched it, the engine cannot undo the store's changes.
    It drops the store, and restores the partition from the changelog before it goes on. Stores that journal
    (``JournalledStore``) are undone in place instead.
    """

    def receive_change(self, change: Change, /) -> None:
        """Apply one record of the changelog (``value is None``: the key was deleted). Once per record, in order.

        Called on another thread than the other methods, but never at the same time as one of them. An object that is
        bound to the thread that made it (``sqlite3`` by default) must allow that.
        """
        ...

    def revoked(self) -> None:
        """Free everything: the partition is gone. Called once; nothing is called afterwards."""
        ...


@runtime_checkable
class JournalledStore(StateStore, Protocol):
    """A store that keeps encoded bytes and journals its own changes, so a failed event leaves no trace in it.

    Order: ``begin``, any number of reads and writes by the handlers of one event or of several, ``end``; then either
    nothing, or (before the next ``begin``) ``undo`` of the changes of the last event, which are the end of the list.
    Writes outside of ``begin`` … ``end`` raise ``StoreError``.
    A store that stays as a warm copy when its partition moves away is given its last changes again by
    ``receive_change``, in order.
    """

    def begin(self, journal: list[Change], /) -> None:
        """Open the journal: from now on every write appends a ``Change`` (with the bytes that it replaced) to
        ``journal``."""
        ...

    def end(self) -> None:
        """Close the journal behind the events; writes are refused until the next ``begin``."""
        ...

    def undo(self, journal: list[Change], /) -> None:
        """Put back the ``previous`` bytes of each change, last one first."""
        ...


@runtime_checkable
class ObservingStore(JournalledStore, Protocol):
    """A journalled store that observes the events of its partition, such as ``Stores`` does for their time."""

    @property
    def before_event(self) -> Callable[[Any], None] | None:
        """A function, or ``None``: there is nothing to observe; looked up when the partition's state is restored.

        It gets the context of each attempt at an event, batch, timer or interjection, in its turn, in front of the
        handler; not that of a row of a joined table without update handler. What it writes, sends and raises is as if
        the handler did it. On the event loop's thread.
        """
        ...


PAGE_BYTES: Final = 4 << 20
"""Keys and values of one page of a scan, but for the last one of them."""


def more_may_follow(page: Sequence[tuple[bytes, bytes]], limit: int) -> bool:
    """Check whether a page of a ``DiskDatabase`` may have ended by its bounds, and not because that was all."""
    return len(page) >= limit or sum([len(key) + len(value) for key, value in page]) >= PAGE_BYTES


class DiskDatabase(Protocol):
    """The state of one partition on disk: keys and values, and a mark that says how far they go.

    ``get`` and ``scan`` are called on the thread that uses the store, one call at a time; ``scan`` on a thread that
    makes a snapshot, too, and the other methods on one thread that writes, at the same time. Keys and values are any
    bytes, empty ones too; keys are ordered by their bytes. What is not as it was written raises ``DiskDamaged``, and is
    never a wrong value, an absent key, or a page that ends early. A read that lacks open files or memory raises
    ``OSError``: the database is opened again. Reads after ``close`` raise ``StoreError``.
    """

    def get(self, key: bytes, /) -> bytes | None:
        """Return the value of a key, as the last ``write`` that has returned left it."""
        ...

    def scan(
        self, low: bytes | None, high: bytes | None, /, *, reverse: bool, limit: int, size: int = PAGE_BYTES
    ) -> list[tuple[bytes, bytes]]:
        """Return up to ``limit`` keys and values from ``low`` up to and without ``high`` (``None``: no end there), in
        order, or from the high end; none any more once they have ``size`` bytes together. Fewer than ``limit``, of
        fewer bytes, are all that there are."""
        ...

    def mark(self) -> bytes | None:
        """Return the mark that was written last."""
        ...

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], mark: bytes | None, /) -> None:
        """Set and delete (``None``) keys, in their order; each at most once. Then set the mark, if there is one.

        When it returns it survives kill -9. Killed within it, or without power any time later, the database is as
        after one of its calls of ``write``, or as in one that has not got to its mark. Raises ``OSError`` for a disk
        that is full, or busy: nothing has changed for readers, and it may be called again. Any other error says that
        the database is not to be used any more.
        """
        ...

    def count(self) -> int:
        """Estimate the number of keys, at once."""
        ...

    def close(self) -> None:
        """Free files and memory. Safe to repeat."""
        ...


class DiskEngine(Protocol):
    """A kind of database under tables that are larger than memory: ``Table.factory(engine=...)``. Any thread."""

    @property
    def name(self) -> str:
        """Its name and the format of its files: a folder of another one is not read. Letters and digits."""
        ...

    def open(self, folder: str, /, *, memory_bytes: int, partitions: int) -> DiskDatabase:
        """Open the database in a folder of its own, which is made if it is not there. The folder belongs to this
        process alone.

        ``memory_bytes``: for the caches and buffers of all databases of the process together; ``partitions``: as many
        of them there may be. Raises ``DiskDamaged``, and ``OSError``; ``ConfigError`` if the engine lacks something.
        """
        ...


@runtime_checkable
class DiskStore(JournalledStore, Protocol):
    """A store that keeps the most part of its state in a database of its own on disk, as ``Table`` on an engine."""

    @property
    def disk(self) -> DiskEngine:
        """The kind of its database."""
        ...

    def attach(self, database: DiskDatabase, unreadable: Callable[[Exception], None], /) -> None:
        """Read from this database from now on; once, before anything else. ``unreadable`` is called with the error when
        reading raises ``DiskDamaged`` or ``OSError``, on the reader's thread."""
        ...

    def written(self, changes: Sequence[Change], /) -> None:
        """Note that these changes, which the store has journalled or received, are in the database now. Called on the
        thread that writes, at any time."""
        ...

    def relieve(self) -> None:
        """Let go of what was written; without effect while an event is under way. On the store's own thread."""
        ...

    def limit_cache(self, size_bytes: int, /) -> None:
        """Set the size of the store's own cache. Any thread."""
        ...


StateStoreFactory = Callable[[TopicPartition], Any]
"""Makes an empty store for one partition of the *source* topic. The result must be a ``StateStore``."""
