"""Protocols of the structures of a store, and of the time of its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from streams.outcomes import ErrorPolicy
from streams.protocols import Codec
from streams.stores.derived import Ranking
from streams.stores.journalled import JournalledBytes


class StorePart(Protocol):
    """One structure of a ``Stores``."""

    @property
    def table(self) -> JournalledBytes:
        """Its entries."""
        ...

    @property
    def is_timed(self) -> bool:
        """Check for work at certain times: ``sweep``."""
        ...

    def sweep(self, time_ms: int) -> None:
        """Do what is due, within an event: ``MOST_AT_ONCE`` of it, or a little more."""
        ...

    def mark_back(self, mark: bytes, time_ms: int, /) -> bytes:
        """Return its mark for a time that is set back."""
        ...

    def put_back(self, value: bytes, time_ms: int, /) -> bytes:
        """Return a value for a time that is set back."""
        ...

    def merged_mark(self, marks: Sequence[bytes | None], first_open: bytes | None, /) -> bytes | None:
        """Return the mark of entries that were under several, the first of which that is not reported yet is at
        ``first_open`` (``None``: there is none). ``None``: they have no mark."""
        ...

    def closing_place(self, key: bytes, /) -> bytes | None:
        """Return the place of an entry that is reported, at which it is above its mark or not; ``None``: it is none."""
        ...

    def row_key(self, key: bytes, /) -> Any:
        """Return the part of an entry's key that its handler has named: without the span of a window."""
        ...

    def upgraded(self, value: bytes, /) -> bytes | None:
        """Return a value in the present version; ``None``: it has that already, or there are none."""
        ...

    @property
    def codecs(self) -> tuple[Codec[Any], Codec[Any]]:
        """Its codecs for readers outside: keys with the prefix (of windows: key, start, end), and values."""
        ...

    def places(self, index: str, low: Any, high: Any, /, *, include_high: bool) -> PlaceSpan:
        """Return the places of entries in an index, from ``low`` up to and without ``high``. Raises ``StoreError``, and
        ``EncodeError`` for bounds of another type."""
        ...

    def is_due(self, key: bytes, value: bytes, /) -> bool:
        """Check for an entry that has expired by the partition's time, and is not deleted yet."""
        ...

    def decode_key(self, key: bytes, /) -> Any: ...
    def decode_value(self, value: bytes, /) -> Any: ...


class PlaceSpan(NamedTuple):
    """A part of a ranking: sort keys from ``low`` up to and without ``high``; ``None``: no end there."""

    ranking: Ranking
    low: bytes | None
    high: bytes | None


class Reported(NamedTuple):
    """Entries of a structure that are reported in their order: the place of the last one that was (``closed``), and of
    the first one that was not (``first_open``). ``None``: there is none."""

    closed: bytes | None = None
    first_open: bytes | None = None


class MergedOwn(NamedTuple):
    """Own entries of a store whose rows come from several, and the marks in them by structure."""

    entries: dict[bytes, bytes]
    marks: dict[str, bytes | None]


class HostTime(Protocol):
    """The time of a store's host; ``runtime.partition.timekeeping.Timekeeper`` documents the methods."""

    @property
    def max_jump_ms(self) -> int: ...
    def now_ms(self) -> int: ...
    def out_of_time(self, ctx: Any, kind: str, store: str, part: str, items: int, last: str) -> None: ...
    def close(
        self,
        ctx: Any,
        report: Callable[[Any], None],
        on_close: Callable[..., Any],
        window: tuple[str, str, bytes, int, int, bytes],
        policy: ErrorPolicy | None,
    ) -> None: ...
