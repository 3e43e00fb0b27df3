"""The reading methods of a view."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from streams.stores.read_table import ReadTable
from streams.views.table import ViewSnapshot, ViewTable

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class ViewReads(ABC, Generic[K, V]):
    """Reads of what is here now, on any thread: those of ``ReadTable``. Values are decoded at each call, so they are
    the caller's own.

    Raises ``NotCaughtUp`` while the view is not complete, and ``StoreError`` while it is not running, after a failure,
    for a null key, and for a key of two partitions (``of_partition`` reads one of them). A scan sees changes that come
    while it runs; that of a ``snapshot`` does not.
    """

    @abstractmethod
    def _current(self) -> ViewTable[K, V]: ...

    @abstractmethod
    def _passed(self) -> Mapping[int, int]: ...

    @overload
    def get(self, key: K) -> V | None: ...

    @overload
    def get(self, key: K, default: D) -> V | D: ...

    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default``."""
        return self._current().get(key, default)

    def __contains__(self, key: K) -> bool:
        return key in self._current()

    def __len__(self) -> int:
        return len(self._current())

    def __bool__(self) -> bool:
        return True  # also while it cannot be counted

    def items(self) -> Iterator[tuple[K, V]]:
        """Scan all keys and values; in order if the view is ordered."""
        return self._current().items()

    def keys(self) -> Iterator[K]:
        """Scan all keys."""
        return self._current().keys()

    def values(self) -> Iterator[V]:
        """Scan all values."""
        return self._current().values()

    def range(
        self, low: K | None = None, high: K | None = None, *, reverse: bool = False, include_high: bool = False
    ) -> Iterator[tuple[K, V]]:
        """Scan keys from ``low`` up to and without ``high``, of an ordered view; see ``Table.range``."""
        return self._current().range(low, high, reverse=reverse, include_high=include_high)

    def prefix(self, prefix: K | tuple[Any, ...], *, reverse: bool = False) -> Iterator[tuple[K, V]]:
        """Scan the keys that start with ``prefix``, of an ordered view; see ``Table.prefix``."""
        return self._current().prefix(prefix, reverse=reverse)

    def by(self, index: str, value: Any, *, reverse: bool = False) -> Iterator[tuple[K, V]]:
        """Scan the entries for which an index of the view has ``value``, in the order of their keys' bytes."""
        return self._current().by_range(index, value, value, reverse=reverse, include_high=True)

    def by_range(
        self, index: str, low: Any = None, high: Any = None, *, reverse: bool = False, include_high: bool = False
    ) -> Iterator[tuple[K, V]]:
        """Scan the entries in the order of what an index has, from ``low`` up to and without ``high``; see
        ``NamedTable.by_range``. Holds the places of all of them from the start."""
        return self._current().by_range(index, low, high, reverse=reverse, include_high=include_high)

    def first(self) -> tuple[K, V] | None:
        """Return the lowest key with its value, of an ordered view, or ``None``."""
        return self._current().first()

    def last(self) -> tuple[K, V] | None:
        """Return the highest key with its value, of an ordered view, or ``None``."""
        return self._current().last()

    def of_partition(self, number: int) -> ReadTable[K, V]:
        """Return the table of one partition alone, for keys that several of them have."""
        return self._current().of_partition(number)

    def snapshot(self) -> ViewSnapshot[K, V]:
        """Return everything as it is now, at once, as a ``ReadTable`` that stays so; see ``ViewSnapshot``."""
        return self._current().freeze(self._passed)
