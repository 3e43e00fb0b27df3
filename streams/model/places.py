"""Places where a source without a past begins, as text: ``earliest``, ``latest``, a time with its zone, and
``[TOPIC:]PARTITION@OFFSET`` for one partition."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

EARLIEST: Final = -2
LATEST: Final = -1
"""In the place of a time: where the log starts, and its stable end."""
_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}
_ONE: Final = re.compile(r"(?:(?P<topic>[A-Za-z0-9._-]+):)?(?P<partition>\d{1,9})@(?P<offset>\d{1,18})", re.ASCII)


class Places(NamedTuple):
    """Places of partitions. ``offsets``: by topic (empty: the source's own) and partition. ``time_ms``: of all others
    a time, ``EARLIEST`` or ``LATEST``; ``None``: they have no place."""

    offsets: Mapping[tuple[str, int], int]
    time_ms: int | None

    def offset_in(self, topic: str, partition: int, own: str) -> int | None:
        """Return the offset that is named for a partition, if there is one; ``own``: the source's own topic."""
        found = self.offsets.get((topic, partition))
        return self.offsets.get(("", partition)) if found is None and topic == own else found


def places_of(texts: Iterable[str], own: str = "") -> Places:
    """Parse places; ``own``: the source's topic, which need not be named. Raises ``ValueError``, which says what is
    wrong."""
    offsets: dict[tuple[str, int], int] = {}
    times: dict[int, str] = {}
    for text in texts:
        if (one := _ONE.fullmatch(text)) is not None:
            topic = one["topic"] or ""
            where = "" if topic == own else topic, int(one["partition"])
            if where in offsets:
                raise ValueError(f"{text!r} names a partition a second time")
            offsets[where] = int(one["offset"])
        else:
            times[_time_of(text)] = text
    if len(times) > 1:
        raise ValueError(f"{' and '.join(map(repr, times.values()))} are two places for all partitions: give one")
    return Places(offsets, next(iter(times), None))


def shown_place(time_ms: int) -> str:
    """Return a place for all partitions as text that ``places_of`` reads."""
    for word, found in _WORDS.items():
        if found == time_ms:
            return word
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time_of(text: str) -> int:
    if text in _WORDS:
        return _WORDS[text]
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no place: use earliest, latest, a time such as 2026-11-20T00:00Z, or PARTITION@OFFSET"
        ) from None
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: add one, as in 2026-11-20T00:00Z or 2026-11-20T01:00+01:00")
    if found.year < 1971:
        raise ValueError(f"{text!r} is before 1971: no record is that old")
    return int(found.timestamp() * 1000)
