"""Rankings: a table's entries in the order of something else than the key. Derived, and not in the changelog.

It follows each byte that enters or leaves the engine: by a handler, an undo, a restore or a standby. So it is always
that of the entries, and one that is declared later is there when the state is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from streams.codecs import TupleCodec
from streams.stores.engines import KeyValueEngine, OrderedKeyValueEngine, after_prefix
from streams.stores.ordered import OrderedEngine

Rank = Callable[[bytes, bytes], bytes | None]
"""The rank of an entry (key, value) as bytes that sort; ``None``: it has none."""

_placed: Final = TupleCodec(bytes, bytes)


class Derived(Protocol):
    """One thing that is derived from the entries of an engine."""

    def entered(self, key: bytes, value: bytes, /) -> None: ...
    def left(self, key: bytes, /) -> None: ...
    def clear(self) -> None: ...


class DerivingEngine:
    """An engine with what is derived from it; ordered if the engine beneath is."""

    def __init__(self, engine: KeyValueEngine, derived: Sequence[Derived]) -> None:
        self._engine = engine
        self._derived = derived
        self.get: Callable[[bytes], bytes | None] = engine.get
        self.items = engine.items
        if isinstance(engine, OrderedKeyValueEngine):
            self.range = engine.range

    def put(self, key: bytes, value: bytes, /) -> None:
        self._engine.put(key, value)
        self.entered(key, value)

    def delete(self, key: bytes, /) -> None:
        self._engine.delete(key)
        self.left(key)

    def entered(self, key: bytes, value: bytes) -> None:
        """Derive from an entry that is in the engine."""
        for derived in self._derived:
            derived.entered(key, value)

    def left(self, key: bytes) -> None:
        """Derive nothing any more from an entry that has left the engine."""
        for derived in self._derived:
            derived.left(key)

    def clear(self) -> None:
        self._engine.clear()
        for derived in self._derived:
            derived.clear()

    def __len__(self) -> int:
        return len(self._engine)


class Ranking:
    """The keys of a table by the rank of their entries; of one rank in the order of the keys.

    Sort keys are bytes that sort like that: ``start_of`` a rank is at or below all sort keys of it, and above all lower
    ones. Scans may go on while entries change, as in an ordered table.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._sort_key_of: dict[bytes, bytes] = {}  # without it the old sort_key of a key would be a scan
        self._sorted = OrderedEngine()

    def entered(self, key: bytes, value: bytes, /) -> None:
        self.enter(key, self._rank(key, value))

    def enter(self, key: bytes, rank: bytes | None) -> None:
        """Enter a key with its rank; ``None``: it has none."""
        sort_key = None if rank is None else sort_key_of(rank, key)
        before = self._sort_key_of.get(key)
        if sort_key == before:
            return
        if before is not None:
            self._sorted.delete(before)
        if sort_key is None:
            del self._sort_key_of[key]
        else:
            self._sort_key_of[key] = sort_key
            self._sorted.put(sort_key, key)

    def left(self, key: bytes, /) -> None:
        sort_key = self._sort_key_of.pop(key, None)
        if sort_key is not None:
            self._sorted.delete(sort_key)

    def clear(self) -> None:
        self._sort_key_of.clear()
        self._sorted.clear()

    def scan(
        self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Scan (sort key, key) from the sort key ``low`` up to and without ``high``."""
        return self._sorted.range(low, high, reverse=reverse)

    def first(self) -> tuple[bytes, bytes] | None:
        """Return the lowest sort key with its key."""
        return next(self.scan(), None)

    def has_sort_key(self, key: bytes, sort_key: bytes) -> bool:
        """Check that a key is still where a scan found it."""
        return self._sort_key_of.get(key) == sort_key  # it may have been put anew while the scan goes on

    def others(self, rank: bytes, key: bytes) -> Iterator[bytes]:
        """Scan the other keys of a rank."""
        low = start_of(rank)
        return (found for _, found in self.scan(low, after_prefix(low)) if found != key)

    def __len__(self) -> int:
        return len(self._sort_key_of)


def start_of(rank: bytes) -> bytes:
    """Return what all sort keys of a rank begin with."""
    return _placed.encode_prefix((rank,))  # escaped and ended by 0: no rank is the beginning of another one


def sort_key_of(rank: bytes, key: bytes) -> bytes:
    """Return the sort key of a key."""
    return start_of(rank) + key
