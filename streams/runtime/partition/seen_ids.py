"""The ids that one partition has handled: kept in its changelog, as part of its state.

An id is noted by its event, at its turn, among the timers and jobs that the event changes. So it is recorded if, and
only if, the event completes: in the same unit, by ``PartitionTimers.admitted``. Nothing is noted of one that failed,
was skipped, or waits in its key's queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from streams.core.origin import INTERJECTION, Origin
from streams.core.seen import DIGEST, LATEST_S, SeenTable, encode, width_of
from streams.core.timers import Timer
from streams.errors import OffsetError, RecordRefused, StoreError
from streams.records import Change
from streams.runtime.changelog import SEEN_PREFIX
from streams.runtime.partition.seen_on_disk import rows_on_disk
from streams.settings.once import OnceBounds

NOTE: Final = "@seen"
"""The name of an event's note among the timers that it changes. No timer of a handler begins with an at sign."""
NOTE_TYPE: Final = "kes.seen"
LONGEST_KEPT: Final = 70 * 1024
"""Bytes that are kept beside an id, at most."""
AT_ONCE: Final = 64
"""Ids that go between two turns, at least, if so many are due; twice as many as have come since, if that is more."""


class SeenRows(Protocol):
    """The ids of one partition, in memory or on disk."""

    def __len__(self) -> int: ...
    @property
    def weight(self) -> int:
        """Return how many ids they count for, with what is kept beside them."""
        ...

    @property
    def next_s(self) -> int | None:
        """Return the second from which on ids may go; ``None``: none."""
        ...

    def find(self, digest: bytes) -> bytes | None:
        """Return what is kept beside an id; ``None``: the id is not there."""
        ...

    def has(self, digest: bytes, /) -> bool:
        """Check for an id."""
        ...

    def set(self, digest: bytes, change: Change) -> None:
        """Set the record of an id, or remove the id. ``change``: the very one that is committed, or was received."""
        ...

    def set_new(self, changes: Mapping[bytes, Change], value: bytes) -> None:
        """Set the records of ids that are not there. Most of them are this very ``value``."""
        ...

    def take(self, most: int, now_s: int | None = None) -> list[bytes]:
        """Return ids whose time is over, or (``None``) those that go first: at most so many, and none twice."""
        ...


class RowsInMemory(SeenTable):
    """``SeenRows`` in memory."""

    def set(self, digest: bytes, change: Change) -> None:
        """See ``SeenRows``."""
        if change.value is None:
            self.remove(digest)
        else:
            self.put(digest, change.value)

    def set_new(self, changes: Mapping[bytes, Change], value: bytes) -> None:
        """See ``SeenRows``."""
        same = [digest for digest, change in changes.items() if change.value is value]
        if same:
            self.put_new(same, value)
        if len(same) < len(changes):
            for digest, change in changes.items():
                if change.value is not value:
                    self.set(digest, change)


def note_of(digests: Sequence[bytes], within_s: int) -> Timer:
    """Return the note of an event, or of a batch: its ids, for how long they are remembered, and nothing beside
    them."""
    return Timer(NOTE, within_s, NOTE_TYPE, b"", key=b"".join(digests))


def keep_reply(ctx: Any, reply: bytes) -> None:
    """Keep these bytes beside the id of the event that is handled, in its transaction; the last ones count. Beside an
    event without an id nothing is kept. In its turn. Raises ``StoreError`` after the handler has ended,
    ``RecordRefused`` for more than ``LONGEST_KEPT`` bytes."""
    if ctx._closed:
        raise StoreError(f"{ctx.where}: nothing can be kept beside its id: its handler has ended")
    if len(reply) > LONGEST_KEPT:
        raise RecordRefused(f"{ctx.where}: {len(reply)} bytes beside an id; at most {LONGEST_KEPT} are kept")
    note = ctx._changes.get(NOTE)
    within_s, digests = (0, None) if note is None else (note.due_ms, note.key)
    ctx._changes[NOTE] = Timer(NOTE, within_s, NOTE_TYPE, bytes(reply), key=digests)


class SeenIds:
    """The ids that one partition has handled. Owned by one thread at a time, as the store. Without ``bounds``: the
    source has no ``once=``, and ids in its changelog are left there.

    ``duplicates`` (by event type), ``missing`` (events without an id, by type) and ``forgotten`` count since the start.
    """

    def __init__(self, bounds: OnceBounds | None = None, rows: SeenRows | None = None) -> None:
        self.bounds = bounds
        self.rows: SeenRows = RowsInMemory(1 if bounds is None else width_of(bounds.shortest_s))
        if rows is not None:
            self.rows = rows
        self.duplicates: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self.forgotten = self.unmeasured = 0
        self._come = 0  # since the last sweep
        self._forgets = bounds is not None and bounds.when_full == "forget"
        self._most = LATEST_S if bounds is None else bounds.max_ids

    @classmethod
    def of(cls, bounds: OnceBounds | None, store: object) -> SeenIds:
        """Make the empty table of a partition with this store. Raises ``ConfigError`` for one that does not fit."""
        return cls(bounds, None if bounds is None or bounds.engine is None else rows_on_disk(bounds, store))

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, digest: bytes) -> bytes | None:
        """Return what is kept beside an id, ``b""`` if that is nothing; ``None``: its event was not handled. Events
        count that are complete and not committed yet."""
        return self.rows.find(digest)

    def receive(self, change: Change) -> None:
        """Take a change of the changelog. Raises ``OffsetError`` for one that is no id's."""
        if self.bounds is None:
            return
        digest = change.key[len(SEEN_PREFIX) :]
        try:
            if len(digest) != DIGEST:
                raise ValueError(f"its key has {len(digest)} bytes behind the prefix, not {DIGEST}")
            self.rows.set(digest, change)
        except ValueError as error:
            raise OffsetError(
                f"the changelog has a record of an id (once=) that cannot be read: {error}. Something else writes to "
                "it, or a newer version of this package does"
            ) from error

    @property
    def is_full(self) -> bool:
        """Check for a bound at which the source stops."""
        return not self._forgets and self.rows.weight >= self._most

    @property
    def room(self) -> int:
        """Return how many ids may come before it ``is_full``."""
        return LATEST_S if self._forgets else self._most - self.rows.weight

    def admitted(self, note: Timer, now_s: int, origin: Origin) -> list[Change]:
        """Record the ids of an event that is complete. Returns the changes for its transaction."""
        value, digests = encode(now_s + 1 + note.due_ms, note.value), note.key or b""
        made = []
        for start in range(0, len(digests), DIGEST):
            digest = digests[start : start + DIGEST]
            change = Change(SEEN_PREFIX + digest, value, origin=origin)
            self.rows.set(digest, change)
            made.append(change)
        return made + self.forget(len(made), origin)

    def forget(self, come: int, origin: Origin) -> list[Change]:
        """Let the oldest ids go behind so many that have come, down to the bound, if that is what ``when_full`` says.
        Returns the changes for their transaction."""
        self._come += come
        if not self._forgets or self.rows.weight <= self._most:
            return []
        gone = self.rows.take(self.rows.weight - self._most)
        self.forgotten += len(gone)
        self.unmeasured += len(gone)  # for a measurement
        return self._tombstones(gone, origin)

    def sweep(self, now_s: int) -> list[Change]:
        """Let some ids go whose time is over. Returns the changes for a transaction."""
        # More than come, or a partition that is always busy would only grow.
        most, self._come = max(AT_ONCE, 2 * self._come), 0
        return self._tombstones(self.rows.take(most, now_s), INTERJECTION)

    def figures(self) -> dict[str, Any]:
        """Return its figures, as ``PartitionStatistics`` names them."""
        return {
            "once_ids": len(self.rows),
            "once_duplicates": self.duplicates.total(),
            "once_missing": self.missing.total(),
            "once_forgotten": self.forgotten,
        }

    def _tombstones(self, digests: Sequence[bytes], origin: Origin) -> list[Change]:
        changes = [Change(SEEN_PREFIX + digest, None, origin=origin) for digest in digests]
        for digest, change in zip(digests, changes, strict=True):
            self.rows.set(digest, change)
        return changes
