"""Ids on disk (``Once(engine=...)``): in the database of the partition's store, under their keys of the changelog.

Which of them are the oldest is not known there, so ids go by rounds: all are read in the order of their keys, some
between two turns. A round finds those whose time is over; the next one begins when the first of the others is due, and
a part of the shortest ``within`` has passed, so that each round finds many. The first round counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, Protocol

from streams.core.seen import HEAD, LATEST_S, due_of
from streams.errors import ConfigError
from streams.records import Change
from streams.runtime.changelog import SEEN_PREFIX
from streams.settings.once import OnceBounds

ROUNDS: Final = 4
"""Rounds in the shortest time that ids are remembered, at most."""
_BEHIND: Final = SEEN_PREFIX[:-1] + bytes([SEEN_PREFIX[-1] + 1])


class Layers(Protocol):
    """The database of a store, and what is newer (``stores.layered.LayeredEngine``)."""

    def get(self, key: bytes, /) -> bytes | None: ...
    def receive(self, change: Change) -> None: ...
    def range(self, low: bytes | None, high: bytes | None, /, *, reserved: bool) -> Iterator[tuple[bytes, bytes]]: ...


class RowsOnDisk:
    """``seen_ids.SeenRows`` in a database. ``len`` is what the last round has counted, with what has changed since."""

    def __init__(self, layers: Layers, shortest_s: int) -> None:
        self._layers = layers
        self._pause_s = max(1, shortest_s // ROUNDS)
        self._count = self._read = 0
        self._place = SEEN_PREFIX  # of the round
        self._earliest = LATEST_S
        self.next_s: int | None = 0

    def __len__(self) -> int:
        return self._count

    @property
    def weight(self) -> int:
        """See ``SeenRows``. What is kept beside ids does not count: it is on disk."""
        return self._count

    def find(self, digest: bytes) -> bytes | None:
        """See ``SeenRows``."""
        found = self._layers.get(SEEN_PREFIX + digest)
        return None if found is None else found[HEAD:]

    def has(self, digest: bytes, /) -> bool:
        """See ``SeenRows``."""
        return self._layers.get(SEEN_PREFIX + digest) is not None

    def set_new(self, changes: Mapping[bytes, Change], value: bytes) -> None:
        """See ``SeenRows``."""
        for digest, change in changes.items():
            self.set(digest, change)

    def set(self, digest: bytes, change: Change) -> None:
        """See ``SeenRows``."""
        if change.value is not None:
            due_of(change.value)  # refused before it is there
        more = 1 if change.value is not None else -1
        self._count = max(0, self._count + more)
        if change.key < self._place:  # the round has passed it
            self._read += more
        self._layers.receive(change)

    def take(self, most: int, now_s: int | None = None) -> list[bytes]:
        """Read on in the round. Returns the ids among these whose time is over."""
        if now_s is None:
            return []  # which are the oldest is not known
        gone, last, read = [], b"", 0
        for key, value in islice(self._layers.range(self._place, _BEHIND, reserved=True), most):
            last, read, due_s = key, read + 1, due_of(value)
            if due_s <= now_s:
                gone.append(key[len(SEEN_PREFIX) :])
            else:
                self._earliest = min(self._earliest, due_s)
        self._read += read
        if read == most:
            self._place, self.next_s = last + b"\0", 0
        else:  # the round has ended
            self._count = self._read
            self._place, self.next_s = SEEN_PREFIX, max(now_s + self._pause_s, self._earliest)
            self._read, self._earliest = 0, LATEST_S
        return gone


def rows_on_disk(bounds: OnceBounds, store: Any) -> RowsOnDisk:
    """Make the table of ids in the database of a store. Raises ``ConfigError`` for one that has none of this kind."""
    assert bounds.engine is not None
    keep, disk = getattr(store, "keep_rows", None), getattr(store, "disk", None)
    if keep is None or getattr(disk, "name", "") != bounds.engine.name:
        name = type(bounds.engine).__name__
        raise ConfigError(
            f"Once(engine={name}()): ids on disk are in the database of the source's store, and "
            f"{type(store).__name__} has none of this kind: give the store the same engine, as in "
            f"Table.factory(..., engine={name}())"
        )
    return RowsOnDisk(keep(SEEN_PREFIX), bounds.shortest_s)
