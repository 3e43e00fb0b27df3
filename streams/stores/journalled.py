"""Base of all stores over an engine: reading, the journal, the undo, the restore, the end.

An event's writes go into the engine at once, and into the journal with the bytes that they replaced. If the event
fails, the journal is walked backwards. The store keeps bytes, so nothing that a handler still holds can change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import DecodeError, StateUnreadable, StoreError
from streams.records import Change, TopicPartition
from streams.sak.harmless import harmless
from streams.stores.engines import KeyValueEngine, ReadEngine
from streams.stores.memory import HashEngine


class StoredBytes:
    """The entries of an engine, in bytes, to be read; not for use by itself."""

    # Those of ``JournalledBytes``, too: ``Table`` is of both lines, and only one of them may bring slots of its own.
    __slots__ = ("_data", "_engine", "_get", "_journal", "_peek", "_put", "partition")

    def __init__(self, partition: TopicPartition, engine: ReadEngine) -> None:
        self.partition = partition
        self._engine = engine
        self._get = engine.get
        self._data = engine.data if type(engine) is HashEngine else None  # in place of the engine, on the hot path

    def dump(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and value as bytes, for checks and tools. In the order of the keys if the engine has one."""
        return self._scan(self._engine.items())

    def __len__(self) -> int:
        return len(self._engine)

    def _scan(self, found: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        yield from found
        self._check_open()  # a scan that a revocation cut short must not look complete

    def _close(self, why: str) -> None:
        engine = self._engine
        self._engine = gone = _Closed(why)  # first: a scan that goes on beside it must not end as if it were complete
        self._data = None
        self._get = gone.get
        engine.clear()

    def _check_open(self) -> None:
        engine = self._engine
        if type(engine) is _Closed:
            engine.get()

    def _unreadable(self, key: Any, error: DecodeError) -> StateUnreadable:
        """Make the error of a value that cannot be read. ``key``: as ``decode_key`` of the whole store has it."""
        plain = msgspec.to_builtins(key, str_keys=True, enc_hook=str)
        name = plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
        found = StateUnreadable(
            f"state of {self.partition}, key {name[:80]!r}: {error} (`kes state get` shows what is stored, `kes state "
            "repair` mends it)"
        )
        found.partition, found.key = self.partition.partition, harmless(name)
        return found


class JournalledBytes(StoredBytes):
    """A ``JournalledStore`` over an engine, in bytes. Base of ``Table`` and ``SimpleStore``; not for use by itself."""

    __slots__ = ()
    _engine: KeyValueEngine

    def __init__(self, partition: TopicPartition, engine: KeyValueEngine) -> None:
        super().__init__(partition, engine)
        self._journal: list[Change] | None = None
        self._put = engine.put
        self._peek = getattr(engine, "peek", engine.get)  # of what a write replaces

    @property
    def layout(self) -> str:
        """Name what its bytes are made by. State that another one has kept on disk is not taken over."""
        return type(self).__qualname__

    def begin(self, journal: list[Change], /) -> None:
        """Start journalling into this list; see ``JournalledStore``."""
        if self._journal is not None:
            raise StoreError(f"the store of {self.partition} is in an event already")
        self._check_open()
        self._journal = journal

    def end(self) -> None:
        """Stop journalling; see ``JournalledStore``."""
        self._journal = None

    def undo(self, journal: list[Change], /) -> None:
        """Put back what these changes replaced; see ``JournalledStore``."""
        for change in reversed(journal):  # of a key that was written twice, the first one has the bytes of before
            self._apply(change.key, change.previous)

    def receive_change(self, change: Change, /) -> None:
        """Apply one record of the changelog; see ``StateStore``. Raises ``StoreError`` for keys of the toolkit."""
        if change.key >= RESERVED_KEY_PREFIX:  # cheap, and false for all text: it is only looked at closely above
            self._refuse_reserved(change.key)
        self._apply(change.key, change.value)

    def revoked(self) -> None:
        """Free everything. A caller that kept the store gets ``StoreError`` from now on."""
        self._close(f"the store of {self.partition} was revoked: the partition is no longer here")

    def _close(self, why: str) -> None:
        self._journal = None
        super()._close(why)
        self._put, self._peek = self._engine.put, self._engine.get

    def _apply(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._engine.delete(key)
        else:
            self._put(key, value)

    def _delete(self, key: bytes) -> Change | None:
        journal = self._journal
        if journal is None:
            self._refuse_write()
        previous = self._get(key)
        if previous is None:
            return None
        change = Change(key, None, previous)
        journal.append(change)  # first: an engine on disk takes the journal's last change
        self._engine.delete(key)
        return change

    def _refuse_write(self) -> NoReturn:
        self._check_open()
        raise StoreError(
            f"the store of {self.partition} was written to outside of an event (a handler or interjection)"
        )

    def _refuse_reserved(self, key: bytes) -> None:
        if key.startswith(RESERVED_KEY_PREFIX):
            raise StoreError(f"keys that start with {RESERVED_KEY_PREFIX!r} are reserved (store of {self.partition})")


class _Closed:
    """The engine of a store whose partition is gone: every use is refused."""

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StoreError(self._why)

    get = put = delete = items = range = clear = __len__ = _refuse
