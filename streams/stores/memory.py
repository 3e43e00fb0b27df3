"""The fastest engine: a dict, without any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator


class HashEngine:
    """A dict of bytes. ``get`` and ``put`` are the dict's own, so they cost no Python call."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self.get: Callable[[bytes], bytes | None] = self._data.get
        self.put: Callable[[bytes, bytes], None] = self._data.__setitem__

    def delete(self, key: bytes, /) -> None:
        self._data.pop(key, None)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return all keys and values, in no promised order. Takes the list of keys at the start: 8 bytes a key."""
        for key in list(self._data):
            value = self._data.get(key)
            if value is not None:
                yield key, value

    def clear(self) -> None:
        self._data.clear()

    def __len__(self) -> int:
        return len(self._data)
