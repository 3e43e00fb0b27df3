"""Engines that one thread writes to while all threads read: of one partition, of a whole topic, and as of a moment."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NoReturn, Protocol

from streams.errors import StoreError
from streams.stores.engines import OrderedKeyValueEngine, ReadEngine
from streams.stores.memory import HashEngine
from streams.stores.ordered import OrderedEngine

_CHUNK: Final = 512
"""Number of keys of one chunk of a scan: so long the lock of an engine is held at most."""

ABSENT: Final = b"".join((b"not", b" there"))  # joined, so that no literal of the same text is this object
"""Value of a key that was not there, in a ``Frozen``. It is compared by identity: any bytes may be a real value."""


class SharedHashEngine(HashEngine):
    """A ``HashEngine`` that one thread writes to while others read. ``clear``, at the end of its table, leaves
    everything to the last reader: a ``get`` that is under way then does not miss what is there."""

    def clear(self) -> None:
        """Do nothing."""


class SharedOrderedEngine(OrderedEngine):
    """An ``OrderedEngine`` that one thread writes to while others read: the list of keys has a lock, held for one
    change or one chunk of a scan."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # the dict needs none: ``get`` is one operation under the GIL

    def put(self, key: bytes, value: bytes, /) -> None:
        """Set the value of a key."""
        with self._lock:
            super().put(key, value)

    def delete(self, key: bytes, /) -> None:
        """Delete a key."""
        with self._lock:
            super().delete(key)

    def clear(self) -> None:
        """Do nothing: see ``SharedHashEngine``."""

    def _chunk(
        self, low: bytes | None, high: bytes | None, inclusive: tuple[bool, bool], reverse: bool, size: int
    ) -> list[bytes]:
        with self._lock:
            return super()._chunk(low, high, inclusive, reverse, size)


class Scanned(Protocol):
    """An ordered engine whose keys are read by chunks, on any thread."""

    def get(self, key: bytes, /) -> bytes | None:
        """Return the value of a key."""
        ...

    def _chunk(
        self, low: bytes | None, high: bytes | None, inclusive: tuple[bool, bool], reverse: bool, size: int
    ) -> list[bytes]: ...


class Frozen:
    """An engine as it was at one moment: the live one, and what was replaced in it since then. The writer calls
    ``note`` before it changes the live engine."""

    def __init__(self, live: SharedHashEngine) -> None:
        self._live: SharedHashEngine | Scanned = live
        self._replaced: SharedHashEngine | SharedOrderedEngine = SharedHashEngine()

    def note(self, key: bytes, old: bytes | None) -> None:
        """Keep the value that a write is about to replace; the first one of each key counts."""
        if self._replaced.get(key) is None:
            self._replaced.put(key, ABSENT if old is None else old)

    def get(self, key: bytes, /) -> bytes | None:
        """Return the value of then."""
        # The live one first, then what was replaced, which the writer fills first. So a reader that finds a later value
        # finds the earlier one, too, without a lock.
        value = self._live.get(key)
        replaced = self._replaced.get(key)
        return value if replaced is None else None if replaced is ABSENT else replaced

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return everything of then. Takes the list of keys at the start."""
        assert isinstance(self._live, SharedHashEngine)
        assert isinstance(self._replaced, SharedHashEngine)
        keys = list(self._live.data)
        gone = self._replaced.data.copy()  # after the keys: what was deleted before is in it
        for key, value in gone.items():
            if value is not ABSENT:
                yield key, value
        for key in keys:
            if key not in gone:
                found = self.get(key)
                if found is not None:
                    yield key, found

    def clear(self) -> None:
        """Do nothing: see ``SharedHashEngine``."""

    def __len__(self) -> int:
        return sum(1 for _ in self.items())


class FrozenInOrder(Frozen):
    """A ``Frozen`` of an ordered engine, with its scans."""

    def __init__(self, live: Scanned) -> None:
        self._live, self._replaced = live, SharedOrderedEngine()

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return everything of then, in order."""
        return self.range(None, None)

    def range(
        self,
        low: bytes | None,
        high: bytes | None,
        /,
        *,
        reverse: bool = False,
        inclusive: tuple[bool, bool] = (True, False),
    ) -> Iterator[tuple[bytes, bytes]]:
        """Scan what was between two keys; see ``OrderedKeyValueEngine``."""
        live, replaced = self._live, self._replaced
        assert not isinstance(live, SharedHashEngine)
        assert isinstance(replaced, SharedOrderedEngine)
        while True:
            here = live._chunk(low, high, inclusive, reverse, _CHUNK)
            gone = replaced._chunk(low, high, inclusive, reverse, _CHUNK)  # later: what was deleted before is in it
            keys = sorted({*here, *gone}, reverse=reverse)[:_CHUNK]
            for key in keys:
                value = self.get(key)
                if value is not None:
                    yield key, value
            if len(keys) < _CHUNK:
                return
            if reverse:
                high, inclusive = keys[-1], (inclusive[0], False)
            else:
                low, inclusive = keys[-1], (False, inclusive[1])


class AllPartitions:
    """``ReadEngine`` over one engine for each partition."""

    def __init__(self, topic: str, engines: Iterable[tuple[int, Any]] = ()) -> None:
        self._topic = topic
        self._take(engines)

    def add(self, number: int, engine: ReadEngine) -> None:
        """Add a partition. One thread at a time; readers see all of it or nothing."""
        self._take((*self._engines, (number, engine)))

    @property
    def engines(self) -> tuple[tuple[int, Any], ...]:
        """Return number and engine of each partition."""
        return self._engines

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key. Raises ``StoreError`` for a key of two partitions."""
        found: bytes | None = None
        for get in self._gets:
            value = get(key)
            if value is not None:
                if found is not None:
                    self._refuse(key)
                found = value
        return found

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return everything, by partition."""
        return chain.from_iterable(engine.items() for _, engine in self._engines)

    def clear(self) -> None:
        """Do nothing: see ``SharedHashEngine``."""

    def __len__(self) -> int:
        return sum(len(engine) for _, engine in self._engines)

    def _take(self, engines: Iterable[tuple[int, Any]]) -> None:
        self._engines: tuple[tuple[int, Any], ...] = tuple(sorted(engines, key=itemgetter(0)))
        self._gets: tuple[Callable[[bytes], bytes | None], ...] = tuple(engine.get for _, engine in self._engines)

    def _refuse(self, key: bytes) -> NoReturn:
        where = [number for number, engine in self._engines if engine.get(key) is not None]
        raise StoreError(
            f"{self._topic}: the key {key[:80]!r} is in partitions {', '.join(map(str, where))}, so it has no one "
            "value: choose one with of_partition(n); if the topic got more partitions, or was written to with two "
            "partitioners, delete the old one by a tombstone in its partition"
        )


class AllPartitionsInOrder(AllPartitions):
    """An ordered ``AllPartitions``, over one ordered engine for each partition."""

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return everything, in order."""
        return self.range(None, None)

    def range(
        self,
        low: bytes | None,
        high: bytes | None,
        /,
        *,
        reverse: bool = False,
        inclusive: tuple[bool, bool] = (True, False),
    ) -> Iterator[tuple[bytes, bytes]]:
        """Scan all partitions as one; see ``OrderedKeyValueEngine``."""
        engines: list[OrderedKeyValueEngine] = [engine for _, engine in self._engines]
        found = [engine.range(low, high, reverse=reverse, inclusive=inclusive) for engine in engines]
        return found[0] if len(found) == 1 else heapq.merge(*found, key=itemgetter(0), reverse=reverse)
