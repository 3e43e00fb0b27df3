"""The state as it was: ``--as-of``, and ``kes state history``.

The records of a changelog below an offset record are the state at its position, but compaction takes some of them. It
takes a record only because there is a later one of its key, and then all earlier ones of that key, too. So a key with a
record below the place has its last one there. In doubt are the keys whose first record is behind the place, where the
log has holes below it: the state is refused then, with the nearest place behind which no key is in doubt. Offset
records are compacted, too: between the last one below the place and the next nothing may be gone, or it could be one
that is at the place as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import OffsetError
from streams.model.places import Places, places_of, shown_place
from streams.records import IncomingRecord, shown_key
from streams.runtime.changelog import KEPT_PREFIXES, OFFSET_KEY, decode_offset

AsOf = Annotated[
    str,
    typer.Option("--as-of", metavar="PLACE", help="As it was: at a time, or at PARTITION@OFFSET of the input."),
]


def place_of(text: str, topic: str) -> Places:
    """Parse the place of ``--as-of``. Raises ``BadParameter``."""
    try:
        found = places_of([text], topic)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--as-of") from None
    if (found.time_ms is not None and found.time_ms < 0) or any(name for name, _ in found.offsets):
        raise typer.BadParameter("name a time, or PARTITION@OFFSET of the source's own topic", param_hint="--as-of")
    return found


class Past:
    """The changelog of one partition up to a place. ``cut``: the offset behind the last record at or below it."""

    def __init__(self, number: int, place: Places, about: Callable[[bytes], bool]) -> None:
        """``about``: whether a key has to be exact."""
        self.cut = 0
        self._number, self._place, self._about = number, place, about
        self._wanted = place.offsets.get(("", number))
        self._below: set[bytes] = set()
        self._behind: set[bytes] = set()  # whose first record is behind the place
        self._section: set[bytes] = set()  # up to the next offset record
        self._at: int | None = None
        self._next: int | None = None  # position of the first offset record behind the place
        self._next_end = 0  # and where that is
        self._nearest: tuple[int, int] | None = None

    def receive(self, records: list[IncomingRecord]) -> None:
        """Take records of the changelog, in their order."""
        for record in records:
            key = record.key or b""
            if key != OFFSET_KEY:
                if key.startswith(KEPT_PREFIXES) or not key.startswith(RESERVED_KEY_PREFIX):
                    self._section.add(key)
                continue
            position = decode_offset(record).offset
            # A time is passed once. A position may come back, by a reset: the last time counts.
            is_below = (
                position <= self._wanted
                if self._wanted is not None
                else self._next is None and record.timestamp_ms <= (self._place.time_ms or 0)
            )
            if is_below:
                self.cut, self._at, self._next = record.offset + 1, position, None
                self._below |= self._section | self._behind
                self._behind.clear()
            else:
                if self._next is None:
                    self._next, self._next_end = position, record.offset
                new = {key for key in self._section - self._below - self._behind if self._about(key)}
                self._behind |= new
                if new:
                    self._nearest = position, record.timestamp_ms
            self._section.clear()

    def check(self, where: str, has_holes: Callable[[int, int], bool]) -> None:
        """Raise ``OffsetError`` if the state at the place is not known exactly. ``has_holes``: looks for records that
        are gone between two offsets."""
        ends = [f"{self._number}@{at}" for at in (self._at, self._next) if at is not None]
        if self._wanted is not None and self._at != self._wanted:
            raise OffsetError(
                f"{where}: no transaction is known to have ended at {self._text}; the nearest exact places are "
                f"{' and '.join(ends) or 'none'}"
            )
        if self._next is not None and has_holes(self.cut, self._next_end):
            raise OffsetError(
                f"{where}: compaction has taken records around {self._text}; the nearest exact places are "
                f"{' and '.join(ends)}"
            )
        if self._behind and has_holes(0, self.cut):
            assert self._nearest is not None
            position, time_ms = self._nearest
            raise OffsetError(
                f"{where}: compaction has taken records below {self._text}, and {len(self._behind):,} keys that were "
                f"written later may have been there, such as {shown_key(min(self._behind))}; the nearest exact place "
                f"is {self._number}@{position} ({shown_place(time_ms)})"
            )

    @property
    def _text(self) -> str:
        return f"{self._number}@{self._wanted}" if self._wanted is not None else shown_place(self._place.time_ms or 0)
