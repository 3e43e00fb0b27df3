"""``Stores.factory(engine=...)``: several structures of one partition in one database on disk.

All keys are in one engine in layers, and each structure sees its span of them. What is derived from the entries (the
places of indexes, heaps, windows and expiry) stays in memory, and is made anew from the entries when a database is
attached: it holds the key and the place of each entry, so the values are what may be larger than memory there. A
structure without any of that takes no memory but its part of the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar, cast

from streams.protocols import DiskDatabase, DiskEngine
from streams.records import UNREAD, Change, TopicPartition
from streams.stores.derived import DerivingEngine
from streams.stores.engines import KeyValueEngine, after_prefix
from streams.stores.framed import OWN
from streams.stores.journalled import JournalledBytes
from streams.stores.layered import LayeredEngine
from streams.stores.layered_bytes import LayeredBytes
from streams.stores.structured import StructuredBytes

_log = logging.getLogger(__name__)

_LOGGED: Final = 100_000
"""Number of entries from which something is derived at a start, above which the log says so: it takes time."""

StoresT = TypeVar("StoresT", bound=StructuredBytes)
End = bytes | None
Span = tuple[End, End]

_OWN: Final = OWN + b"\x00"
_BARE: Final[list[Span]] = [(None, OWN), (after_prefix(OWN), None)]
"""Where the keys are that have no name in front."""


class SpanEngine:
    """A part of an engine in layers: the keys between certain ends. One thread, as that."""

    def __init__(self, layers: LayeredEngine, spans: Callable[[], Sequence[Span]]) -> None:
        """``spans``: pairs of a low end and a high one (without it), in order; of all other keys it shows nothing."""
        self._layers, self._spans = layers, spans
        self.get: Callable[[bytes], bytes | None] = layers.get
        self.put: Callable[[bytes, bytes], None] = layers.put
        self.delete = layers.delete
        self.peek = layers.peek

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return self.range(None, None)

    def range(
        self, low: End, high: End, /, *, reverse: bool = False, inclusive: tuple[bool, bool] = (True, False)
    ) -> Iterator[tuple[bytes, bytes]]:
        spans = self._spans()
        for first, last in reversed(spans) if reverse else spans:
            begin, end, ends = low, high, inclusive
            if begin is None or (first is not None and begin < first):
                begin, ends = first, (True, ends[1])
            if end is None or (last is not None and end >= last):
                end, ends = last, (ends[0], False)
            yield from self._layers.range(begin, end, reverse=reverse, inclusive=ends)

    def clear(self) -> None:
        """Do nothing: the store clears all of it."""

    def __len__(self) -> int:
        """Count by a scan of everything."""
        return sum(1 for _ in self.items())


class OwnEngine(SpanEngine):
    """The entries of no structure. Those of the store itself, which are few, are in memory, too: they are read at each
    event."""

    def __init__(self, layers: LayeredEngine, spans: Callable[[], Sequence[Span]]) -> None:
        super().__init__(layers, spans)
        self._own: dict[bytes, bytes] = {}
        self.get = self._own.get
        self.put, self.delete = self._put, self._delete

    def note(self, key: bytes, value: bytes | None) -> None:
        """Note an entry of the store itself."""
        if value is None:
            self._own.pop(key, None)
        else:
            self._own[key] = value

    def _put(self, key: bytes, value: bytes, /) -> None:
        self._layers.put(key, value)
        self.note(key, value)

    def _delete(self, key: bytes, /) -> None:
        self._layers.delete(key)
        self.note(key, None)


class LayeredStores(LayeredBytes, StructuredBytes):
    """A ``Stores`` on disk (a ``DiskStore``). ``on_disk`` makes a class of it and the user's."""

    def __init__(self, partition: TopicPartition) -> None:
        self._layers = LayeredEngine()  # both before the base class, which makes the structures, over their engines
        self._own_engine = OwnEngine(self._layers, self._own_spans)
        super().__init__(partition)
        self._derived = {part: engine for part in self._parts.values() if (engine := _derived(part.table)) is not None}

    def engine_of(self, prefix: bytes | None, *, ordered: bool) -> KeyValueEngine:
        """See ``Stores``."""
        if prefix is None:
            return self._own_engine
        spans: list[Span] = [(prefix, after_prefix(prefix))] if prefix else _BARE
        return SpanEngine(self._layers, lambda: spans)

    def _own_spans(self) -> list[Span]:
        """Return what is between the spans of the structures."""
        taken: list[Span] = [(prefix, after_prefix(prefix)) for prefix in sorted(self._at)]
        if self._bare is not None:
            taken = [_BARE[0], *taken, _BARE[1]]
        spans: list[Span] = []
        low: End = None
        for first, last in taken:
            if first is not None:
                spans.append((low, first))
            low = last
            if last is None:
                return spans
        return [*spans, (low, None)]

    # -- as the engine of the source sees it ---------------------------------------------------------------------------

    def attach(self, database: DiskDatabase, unreadable: Callable[[Exception], None], /) -> None:
        """See ``DiskStore``. Reads the structures of which something is derived, and builds that."""
        super().attach(database, unreadable)
        for key, value in self._layers.range(_OWN, after_prefix(_OWN)):
            self._own_engine.note(key, value)
        entries = 0
        for engine in self._derived.values():
            for key, value in engine.items():
                engine.entered(key, value)
                entries += 1
        if entries >= _LOGGED:
            _log.info("%s: the indexes of %d entries are built", self.partition, entries)
        self._note_carried()

    def _note_carried(self) -> None:
        """Warn of structures on disk that have no name here."""
        spans, at = self._own_spans(), 0
        while at < len(spans):
            low, high = spans[at]
            found = next(self._layers.range(low, high), None)
            if found is None:
                at += 1
                continue
            key = found[0]
            name = key[: key.find(0) + 1] if key.startswith(OWN) else b""
            if name != _OWN:
                self._note_unknown(key)
            behind = after_prefix(name) if name else (OWN if key < OWN else None)
            if behind is None:
                return
            spans[at] = behind, high

    def undo(self, journal: list[Change], /) -> None:
        """Take these changes back; see ``JournalledStore``."""
        super().undo(journal)
        # The layers do not go through the engines that derive: these have to follow by themselves.
        for change in reversed(journal):
            self._derive(change.key, change.previous)

    def receive_change(self, change: Change, /) -> None:
        """Apply one record of the changelog; see ``StateStore``. Raises ``StoreError`` for keys of the toolkit."""
        super().receive_change(change)
        self._derive(change.key, change.value)

    def _derive(self, key: bytes, value: bytes | None) -> None:
        if key.startswith(_OWN):
            self._own_engine.note(key, value)
            return
        part = self._part_of(key)
        if part is None:
            self._note_unknown(key)
            return
        engine = self._derived.get(part)
        if engine is not None:
            assert value is not UNREAD, "a structure with an index reads what it replaces"
            if value is None:
                engine.left(key)
            else:
                engine.entered(key, value)

    def revoked(self) -> None:
        """Free everything. A caller that kept a structure gets ``StoreError`` from now on."""
        super().revoked()
        self._layers.clear()


def _derived(table: JournalledBytes) -> DerivingEngine | None:
    return table._engine if isinstance(table._engine, DerivingEngine) else None


def on_disk(cls: type[StoresT], disk: DiskEngine) -> type[StoresT]:
    """Make the class of stores that are on disk; it is their factory, too."""
    namespace = {name: getattr(cls, name) for name in ("declared", "__module__", "__qualname__", "__doc__")}
    return cast(type[StoresT], type(cls.__name__, (LayeredStores, cls), namespace | {"disk": disk}))
