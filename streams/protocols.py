"""The contracts that a user may implement, on one page.

Threads: all methods here are called on the event loop's thread, one at a time per partition, unless a method's
docstring names another one (``receive_change``). An object belongs to one partition; nothing needs a lock.

Exceptions: anything raised by a store while an event runs fails that event (its error policy decides); anything raised
while a store is restored or revoked stops the event source, because the state cannot be trusted any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from streams.records import Change, TopicPartition

T = TypeVar("T")


@runtime_checkable
class Codec(Protocol[T]):
    """Turns values of one type into bytes and back. Stateless; may be called from any thread.

    ``decode(encode(x)) == x`` for every ``x`` that ``encode`` takes. Both raise ``EncodeError`` / ``DecodeError`` and
    nothing else. Byte order is fixed by the codec, never the machine's.
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
        handler. What it writes, sends and raises is as if the handler did it. On the event loop's thread.
        """
        ...


StateStoreFactory = Callable[[TopicPartition], Any]
"""Makes an empty store for one partition of the *source* topic. The result must be a ``StateStore``."""
