"""``Heap``: entries by priority, with both ends at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

from streams.errors import StoreError
from streams.protocols import Codec
from streams.stores.indexes import Index
from streams.stores.named_table import NamedTable, plan_of
from streams.stores.structured import Declared

K = TypeVar("K")
V = TypeVar("V")
Key = TypeVar("Key")
Value = TypeVar("Value")

_PRIORITY: Final = "priority"


class Heap(NamedTable[K, V], Generic[K, V]):
    """A min-max heap: a ``NamedTable`` whose entries have a priority. Both ends, any key, and the order in between cost
    O(log n). Of equal priorities the lower key is the lower entry.

    ``put`` adds an entry, or changes it and its place; ``delete`` removes it, wherever it is. A value without priority
    (``None``) is refused with ``StoreError``.
    """

    @staticmethod
    def of(  # type: ignore[override]  # a declaration of its own
        key: type[Key],
        value: type[Value],
        *,
        priority: Index[Value],
        expires: timedelta | float | None = None,
        key_codec: Codec[Key] | None = None,
        value_codec: Codec[Value] | None = None,
        checked: bool = False,
        on_unreadable: Callable[[Key, bytes], Value | None] | None = None,
        name: str | None = None,
    ) -> Declared[Heap[Key, Value]]:
        """Declare a heap in the body of a ``Stores`` class. ``priority`` is an index over the values, such as
        ``Index(int, lambda job: job.due_ms)``; the rest as in ``NamedTable.of``. Raises ``ConfigError``."""
        index = {_PRIORITY: Index(priority.type_, _never_none(priority.of), unique=priority.unique)}
        plan = plan_of(
            key,
            value,
            False,
            index,
            expires,
            1,
            None,
            key_codec,
            value_codec,
            checked=checked,
            on_unreadable=on_unreadable,
        )
        return Declared(lambda home, found, prefix: Heap(home, found, prefix, plan), name)

    def min(self) -> tuple[K, V] | None:
        """The lowest entry, or ``None`` if the heap is empty."""
        return next(self.ascending(), None)

    def max(self) -> tuple[K, V] | None:
        """The highest entry, or ``None`` if the heap is empty."""
        return next(self.descending(), None)

    def pop_min(self) -> tuple[K, V] | None:
        """Remove the lowest entry and return it; ``None`` if the heap is empty."""
        return self._pop(self.min())

    def pop_max(self) -> tuple[K, V] | None:
        """Remove the highest entry and return it; ``None`` if the heap is empty."""
        return self._pop(self.max())

    def ascending(self, low: Any = None, high: Any = None) -> Iterator[tuple[K, V]]:
        """Scan from the lowest entry on; by priorities from ``low`` up to and without ``high``."""
        return self.by_range(_PRIORITY, low, high)

    def descending(self, low: Any = None, high: Any = None) -> Iterator[tuple[K, V]]:
        """Scan from the highest entry down, between the same ends."""
        return self.by_range(_PRIORITY, low, high, reverse=True)

    def _pop(self, found: tuple[K, V] | None) -> tuple[K, V] | None:
        if found is not None:
            self.delete(found[0])
        return found


def _never_none(priority: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        found = priority(value)
        if found is None:
            raise StoreError("a value without priority was put into a heap")
        return found

    return checked
