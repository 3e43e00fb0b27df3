"""The fastest engine: a dict, without any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator


class HashEngine:
    """A dict of bytes. ``get`` and ``put`` are the dict's own, so they cost no Python call; the dict itself costs even
    less (``Table`` takes it)."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.get: Callable[[bytes], bytes | None] = self.data.get
        self.put: Callable[[bytes, bytes], None] = self.data.__setitem__

    def delete(self, key: bytes, /) -> None:
        self.data.pop(key, None)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return all keys and values, in no promised order. Takes the list of keys at the start: 8 bytes a key."""
        for key in list(self.data):  # a dict that is written to meanwhile ends the loop by an error
            value = self.data.get(key)
            if value is not None:
                yield key, value

    def clear(self) -> None:
        self.data.clear()

    def __len__(self) -> int:
        return len(self.data)
