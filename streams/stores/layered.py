"""The engine over a database on disk: what is newer than the disk, then a cache, then the database.

* The *overlay* holds the last change of each key that is not known to be on disk.
* A write does not read. Its undo puts the entry back that it displaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from sortedcontainers import SortedSet

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import DiskDamaged
from streams.protocols import PAGE_BYTES, DiskDatabase, more_may_follow
from streams.records import UNREAD, Change

FIRST_PAGE: Final = 16
LARGEST_PAGE: Final = 512
"""Number of keys of the first page of a scan, and of the largest: many scans end early, and the others soon have large
ones."""
LET_GO: Final = 500
"""Number of written changes that are let go at a time, at least: the next event waits for that."""
ENTRY_BYTES: Final = 200
"""Bytes of memory that a cached row takes beside its key and value, about."""
CACHE_BYTES: Final = 1 << 20
"""Bytes of a cache whose size is not set."""
_BEHIND: Final = RESERVED_KEY_PREFIX[:-1] + bytes([RESERVED_KEY_PREFIX[-1] + 1])
"""The first key behind those of the toolkit."""


class Nothing:
    """The database of a table that has none yet, or never as in ``TestDriver``: everything stays in the overlay."""

    def get(self, key: bytes, /) -> bytes | None:
        return None

    def scan(
        self, low: bytes | None, high: bytes | None, /, *, reverse: bool, limit: int, size: int = PAGE_BYTES
    ) -> list[tuple[bytes, bytes]]:
        return []

    def count(self) -> int:
        return 0


class LayeredEngine:
    """Keys and values over a ``DiskDatabase``, in order. One thread, but for ``written``.

    ``put`` and ``delete`` enter the last change of ``journal``, which the store has just written there.
    """

    def __init__(self) -> None:
        self.journal: list[Change] = []
        self.cache_bytes = CACHE_BYTES
        self.row_prefixes: set[bytes] = set()  # see LayeredBytes.keep_rows
        self._disk: DiskDatabase | Nothing = Nothing()
        self._unreadable: Callable[[Exception], None] = lambda _: None
        self._overlay: dict[bytes, Change] = {}
        self._displaced: dict[int, Change | None] = {}  # by the changes of this journal, by their ids
        self._order: SortedSet[bytes] = SortedSet()  # of the keys in the overlay, but for the new ones
        self._new_keys: set[bytes] = set()
        self._written: deque[Sequence[Change]] = deque()
        self._going: Iterator[Change] | None = None  # through the first of them
        self._times = 0  # that something was let go
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}
        self._young_bytes = 0

    def attach(self, disk: DiskDatabase, unreadable: Callable[[Exception], None]) -> None:
        self._disk, self._unreadable = disk, unreadable

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, key: bytes, /) -> bytes | None:
        change = self._overlay.get(key)
        if change is not None:
            return change.value
        value = self._young.get(key)
        if value is None:
            value = self._old.pop(key, None)
            if value is None:
                try:
                    value = self._disk.get(key)
                except (DiskDamaged, OSError) as error:
                    self._unreadable(error)
                    raise
                if value is None:
                    return None
            self._cache(key, value)
        return value

    @staticmethod
    def peek(_: bytes) -> bytes:
        """Return ``UNREAD``: a write does not read what it replaces."""
        return UNREAD

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
        reserved: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Scan; without ``reserved`` what is kept in the database beside the store's own entries is passed over."""
        if reserved or (high is not None and high < RESERVED_KEY_PREFIX):
            return self._scan(low, high, reverse, inclusive)
        is_behind = low is not None and low >= _BEHIND
        # In two parts: what is kept beside the entries lies between them.
        below = self._scan(low, RESERVED_KEY_PREFIX, reverse, (inclusive[0], False))
        above = self._scan(low if is_behind else _BEHIND, high, reverse, (inclusive[0] or not is_behind, inclusive[1]))
        return chain(above, below) if reverse else chain(below, above)

    def _scan(
        self, low: bytes | None, high: bytes | None, reverse: bool, inclusive: tuple[bool, bool]
    ) -> Iterator[tuple[bytes, bytes]]:
        if low is not None and not inclusive[0]:
            low += b"\0"
        if high is not None and inclusive[1]:
            high += b"\0"
        size = FIRST_PAGE
        while True:
            times, (rows, keys, is_last) = self._times, self._page(low, high, reverse, size)
            for key in keys:
                change = self._overlay.get(key)
                if change is not None:
                    value = change.value
                else:  # what was let go since then is newer than the page
                    value = rows.get(key) if times == self._times else self.get(key)
                if value is not None:
                    yield key, value
            if is_last:
                return
            if reverse:
                high = keys[-1]
            else:
                low = keys[-1] + b"\0"
            size = min(size * 4, LARGEST_PAGE)

    def _page(
        self, low: bytes | None, high: bytes | None, reverse: bool, size: int
    ) -> tuple[dict[bytes, bytes], list[bytes], bool]:
        """Return rows of the disk, and the next keys of disk and overlay: ``size`` of them, fewer if rows are large, or
        all that are left; and whether these are all."""
        if low is not None and high is not None and low >= high:
            return {}, [], True
        try:
            page = self._disk.scan(low, high, reverse=reverse, limit=size)
        except (DiskDamaged, OSError) as error:
            self._unreadable(error)
            raise
        if self._new_keys:  # sorted in when a scan needs them: most handlers only get and put
            self._order.update(self._new_keys)
            self._new_keys.clear()
        rows = dict(page)
        newer = islice(self._order.irange(low, high, (True, False), reverse), size)
        keys = sorted(rows.keys() | set(newer), reverse=reverse)[:size]
        if not more_may_follow(page, size):
            return rows, keys, len(keys) < size
        last = page[-1][0]  # behind it there may be rows that are not in the page
        return rows, [key for key in keys if (key >= last if reverse else key <= last)], False

    def __len__(self) -> int:
        """Count by a scan of everything."""
        return sum(1 for _ in self.items())

    def estimated_len(self) -> int:
        return self._disk.count() + len(self._overlay)

    # -- writing -------------------------------------------------------------------------------------------------------

    def enter(self, change: Change) -> None:
        """Make this the newest change of its key."""
        key, overlay = change.key, self._overlay
        before = self._displaced[id(change)] = overlay.get(key)
        overlay[key] = change
        if before is None:
            self._new_keys.add(key)

    def receive(self, change: Change) -> None:
        """Enter a change that is not of an event."""
        if self._written:  # a restore has no events between which it would be let go
            self.let_go()
        if change.key not in self._overlay:
            self._new_keys.add(change.key)
        self._overlay[change.key] = change

    def exchange(self, change: Change) -> Change | None:
        """Enter a change of an event that is not in the store's journal. Returns the entry that it displaces, for
        ``put_back``."""
        before = self._overlay.get(change.key)
        self._overlay[change.key] = change
        if before is None:
            self._new_keys.add(change.key)
        return before

    def put(self, key: bytes, value: bytes, /) -> None:
        self.enter(self.journal[-1])

    def delete(self, key: bytes, /) -> None:
        self.enter(self.journal[-1])

    def take_back(self, change: Change) -> None:
        """Undo ``enter``; the last one first."""
        self.put_back(change, self._displaced.pop(id(change), None))

    def put_back(self, change: Change, before: Change | None) -> None:
        """Undo ``exchange``."""
        if self._overlay.get(change.key) is change:
            if before is None:
                self._drop(change.key)
            else:
                self._overlay[change.key] = before

    def begin(self, journal: list[Change]) -> None:
        """Begin a journal: what the one before has displaced will not be put back any more."""
        self._displaced.clear()
        # Not within an event: what that has displaced would be passed over, and an undo would put it back for good.
        if self._written:
            self.let_go()
        self.journal = journal

    # -- what was written ----------------------------------------------------------------------------------------------

    def written(self, changes: Sequence[Change]) -> None:
        """Note that these changes are on disk. Any thread."""
        self._written.append(changes)

    def let_go(self) -> None:
        """Move some of what is on disk from the overlay to the cache. Not within an event."""
        overlay, left = self._overlay, LET_GO + len(self._overlay) // 8  # a share of it, so that it cannot only grow
        self._times += 1
        while self._written and left > 0:
            for change in self._going or ():
                left -= 1
                # By identity: an equal value may be older or younger than what the disk has by now.
                if overlay.get(change.key) is change:
                    self._drop(change.key)
                    self._young.pop(change.key, None)  # an older value of the key
                    self._old.pop(change.key, None)
                    if change.value is not None:
                        self._cache(change.key, change.value)
                if left <= 0:
                    return
            if self._going is not None:
                self._written.popleft()
            self._going = iter(self._written[0]) if self._written else None

    def _drop(self, key: bytes) -> None:
        del self._overlay[key]
        if key in self._new_keys:
            self._new_keys.remove(key)
        else:
            self._order.discard(key)

    def _cache(self, key: bytes, value: bytes) -> None:
        self._young[key] = value
        self._young_bytes += len(key) + len(value) + ENTRY_BYTES
        # Two generations, of half of the bytes each: what is read again moves to the young one, and the old one goes as
        # a whole.
        if self._young_bytes > self.cache_bytes // 2:
            self._old, self._young, self._young_bytes = self._young, {}, 0

    def clear(self) -> None:
        self._disk = Nothing()
        for held in (self._overlay, self._displaced, self._order, self._new_keys, self._young, self._old):
            held.clear()
        self._written.clear()
        self._going = None
