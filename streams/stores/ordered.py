"""The ordered engine in memory: a dict for the values, a sorted list for the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from sortedcontainers import SortedList

_FIRST_CHUNK: Final = 8
_LARGEST_CHUNK: Final = 512
"""Number of keys of the first chunk of a scan, and of the largest: many scans end early (``first`` takes one key)."""


class OrderedEngine:
    """Keys in the order of their bytes."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self._keys: SortedList[bytes] = SortedList()
        self._new_keys: set[bytes] = set()
        self.get: Callable[[bytes], bytes | None] = self._data.get

    def put(self, key: bytes, value: bytes, /) -> None:
        # A new key waits in a set until order is needed: a restored changelog is one sort, instead of one insertion per
        # record, and a handler that only gets and puts never pays for the order.
        if key not in self._data:
            self._new_keys.add(key)
        self._data[key] = value

    def delete(self, key: bytes, /) -> None:
        if self._data.pop(key, None) is None:
            return
        if key in self._new_keys:
            self._new_keys.remove(key)
        else:
            self._keys.remove(key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
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
        # By chunks, each looked up anew behind the last key: entries may change while the scan goes on.
        size = _FIRST_CHUNK
        while True:
            chunk = self._chunk(low, high, inclusive, reverse, size)
            for key in chunk:
                value = self._data.get(key)
                if value is not None:
                    yield key, value
            if len(chunk) < size:
                return
            if reverse:
                high, inclusive = chunk[-1], (inclusive[0], False)
            else:
                low, inclusive = chunk[-1], (False, inclusive[1])
            size = min(size * 8, _LARGEST_CHUNK)

    def clear(self) -> None:
        self._data.clear()
        self._keys.clear()
        self._new_keys.clear()

    def __len__(self) -> int:
        return len(self._data)

    def _chunk(
        self, low: bytes | None, high: bytes | None, inclusive: tuple[bool, bool], reverse: bool, size: int
    ) -> list[bytes]:
        return list(islice(self._sorted_keys().irange(low, high, inclusive, reverse), size))

    def _sorted_keys(self) -> SortedList[bytes]:
        if self._new_keys:
            self._keys.update(self._new_keys)
            self._new_keys.clear()
        return self._keys
