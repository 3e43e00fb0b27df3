"""Protocols of the engine under a table. Engines hold bytes, and know nothing of events, journals or types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable


class ReadEngine(Protocol):
    """Keys and values as bytes, to be read. An empty value is a value. One thread.

    Iterators may be used while the engine is written to: a key that is there all the time is seen exactly once, with
    the value that it has when it is reached; a key put or deleted meanwhile may be seen or not, never twice.
    """

    @property
    def get(self) -> Callable[[bytes], bytes | None]:
        """A method, or a function kept as attribute: the value of a key, or ``None``."""
        ...

    def items(self) -> Iterator[tuple[bytes, bytes]]: ...

    def clear(self) -> None:
        """Free everything: the end of its table."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class KeyValueEngine(ReadEngine, Protocol):
    """An engine that is written to, too."""

    @property
    def put(self) -> Callable[[bytes, bytes], None]:
        """A method, or a function kept as attribute: sets the value of a key."""
        ...

    def delete(self, key: bytes, /) -> None:
        """Delete a key; without effect if it is not there."""
        ...


@runtime_checkable
class OrderedKeyValueEngine(KeyValueEngine, Protocol):
    """An engine that keeps its keys in the order of their bytes; ``items`` follows it too."""

    def range(
        self,
        low: bytes | None,
        high: bytes | None,
        /,
        *,
        reverse: bool = False,
        inclusive: tuple[bool, bool] = (True, False),
    ) -> Iterator[tuple[bytes, bytes]]:
        """Scan the keys and values between two keys (``None``: no end there). ``inclusive``: whether each end belongs
        to it.

        ``reverse`` starts from the high end. Nothing if ``low`` is above ``high``.
        """
        ...


def after_prefix(prefix: bytes) -> bytes | None:
    """The first key after all keys that start with ``prefix``; ``None`` if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
