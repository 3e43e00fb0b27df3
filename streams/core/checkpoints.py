"""Checkpoints: what a folder of one partition says of itself, and when that may be believed.

A folder holds what was committed in the changelog up to the offset record that its mark names, and nothing else.
Whether that is still the beginning of *this* log is decided in two steps: ``reason_to_distrust`` from the mark alone,
and ``reason_to_refuse`` with the first record that is read behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

FORMAT: Final = 1
"""The layout of the files. Files of another one are not read."""

TOMBSTONES_MS: Final = 86_400_000
"""Milliseconds of ``delete.retention.ms`` for a topic whose settings this principal may not read: Kafka's default, a
day."""

MARGIN_MS: Final = 3_600_000
"""Milliseconds that are taken off the age at which tombstones behind a mark may be gone: clocks differ."""


KEEPS: Final = ("ids of once=",)
"""What a folder has beside what each release has kept in it: ids of ``once=``. One that was filled by a release that
did not keep them would be a state in which these events were not handled."""


class LogIdentity(msgspec.Struct, frozen=True):
    """The log that a folder belongs to, and the layout of its files. ``codec`` names the store and its codecs.
    ``keeps``: which of ``KEEPS`` the folder has, or, where a source asks for one, which it needs."""

    cluster: str
    topic: str
    topic_id: str
    partition: int
    codec: str
    format: int = FORMAT
    keeps: tuple[str, ...] = ()


class FolderMark(msgspec.Struct, frozen=True):
    """The end of a folder. ``offset``: of the last offset record in it; ``record``: the value of that.

    ``as_of_ms``: no later than the moment at which that record was appended: all that the folder lacks is younger.
    ``file``, ``size`` and ``crc`` are the file of the data, how much of it counts, and the CRC-32 of that. ``live``:
    its size when it was rewritten for the last time.
    """

    identity: LogIdentity
    offset: int
    record: bytes
    as_of_ms: int
    file: str
    size: int
    crc: int
    live: int


def reason_to_distrust(mark: FolderMark, identity: LogIdentity, *, now_ms: int, tombstones_ms: int) -> str:
    """Return why a folder with this mark cannot be continued from this log, empty if it can.

    ``tombstones_ms``: how long the log keeps them (``delete.retention.ms``).
    """
    for name in LogIdentity.__struct_fields__:
        is_, wanted = getattr(mark.identity, name), getattr(identity, name)
        if name == "keeps":
            if lacks := set(wanted) - set(is_):
                return f"it was filled without {', '.join(sorted(lacks))}, by an older release or for other code"
        elif is_ != wanted:
            return f"its {name.replace('_', ' ')} is {is_!r}, not {wanted!r}"
    age_ms = now_ms - mark.as_of_ms
    # A tombstone behind the mark may be compacted away: its key would come back from the folder.
    if age_ms > tombstones_ms - MARGIN_MS:
        hours, kept = age_ms / 3_600_000, tombstones_ms / 3_600_000
        return f"it is {hours:.1f} h old; the changelog keeps tombstones for {kept:g} h (delete.retention.ms)"
    if age_ms < -MARGIN_MS:
        return f"it is from {-age_ms / 3_600_000:.1f} h in the future: a clock was set, so its age is not known"
    return ""


def distrust_by(identity: LogIdentity, *, now_ms: int, tombstones_ms: int) -> Callable[[FolderMark], str]:
    """Return ``reason_to_distrust`` as a function of the mark."""
    return lambda mark: reason_to_distrust(mark, identity, now_ms=now_ms, tombstones_ms=tombstones_ms)


def reason_to_refuse(
    mark_offset: int, mark_record: bytes, *, position: int, end: int, first: tuple[int, bytes | None, bool] | None
) -> str:
    """Return why the log is not the one that a folder was filled from, empty if it is, or if that is not known yet.

    ``first``: offset, value, and whether it is an offset record, of the first record at or behind the mark; ``None``:
    there is none below ``position``, up to which the log was read. ``end``: of the log, -1 if it is not known.
    """
    # The last offset record of a log is never compacted away. So the marked one is there, or a younger one is.
    if first is None:
        if position > mark_offset:
            return f"the log has nothing between offset {mark_offset} and {position}"
        return f"the log ends at {end}, before offset {mark_offset} is reached" if 0 <= end <= mark_offset else ""
    offset, value, is_offset_record = first
    if offset == mark_offset and not (is_offset_record and value == mark_record):
        return f"another record is at offset {mark_offset} now: the log was truncated and rewritten"
    return ""
