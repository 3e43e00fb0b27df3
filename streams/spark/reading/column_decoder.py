"""The records of a record batch (format 2) as columns of numbers, in one pass. A leaf (``sak/leaves.py``).

A row says where key and value of its record stand, so nothing is copied here, and no object is made for a record.
Otherwise as ``kafka/reading/record_decoder.py``, whose ``varint`` stands here once more: compiled leaves share no
functions of C.
"""

from __future__ import annotations

from typing import Any, Final

from streams.sak import leaves

CLASSES: Final = ()
NO_KEY: Final = 1
NO_VALUE: Final = 2
APPENDED: Final = 4
"""The time is the broker's."""


def decode_columns(
    data: bytes,
    at: int,
    end: int,
    count: int,
    base_offset: int,
    first_ms: int,
    append_ms: int,
    position: int,
    limit: int,
    shift: int,
    row: int,
    edges: Any,
    offsets: Any,
    times: Any,
    lists: Any,
    kinds: Any,
    known: dict[bytes, int],
) -> int:
    """Put the ``count`` records in ``data[at:end]``, those from offset ``position`` up to ``limit``, into columns, from
    ``row`` on; return the row behind the last one.

    ``edges``: four of a row, where its key begins and ends, then its value, each with ``shift`` added. ``lists``: the
    place of its headers' bytes in ``known``, which gets new ones. ``kinds``: ``NO_KEY``, ``NO_VALUE`` and ``APPENDED``,
    added up. Otherwise as ``decode_records``.
    """
    text = data
    ordinal = delta_ms = key_at = value_at = first = kind = place = 0
    previous = -1
    headers: Any = None
    for ordinal in range(count):
        size, at = varint(text, at, end)
        if size < 0 or size > end - at:
            raise ValueError(f"record {ordinal} of {count} goes beyond its batch")
        stop = at + size
        at += 1  # attributes, which nothing uses
        delta_ms, at = varint(text, at, stop)
        delta, at = varint(text, at, stop)
        size, at = varint(text, at, stop)
        kind = 0 if append_ms < 0 else APPENDED
        if size < 0:
            kind += NO_KEY
            size = 0
        if size > stop - at:
            raise ValueError(f"the key of record {ordinal} of {count} goes beyond it")
        key_at = at
        at += size
        first = at
        size, at = varint(text, at, stop)
        if size < 0:
            kind += NO_VALUE
            size = 0
        if size > stop - at:
            raise ValueError(f"the value of record {ordinal} of {count} goes beyond it")
        value_at = at
        at += size
        if at >= stop:
            raise ValueError(f"record {ordinal} of {count} ends before its headers")
        if delta <= previous:
            raise ValueError(f"the offset of record {ordinal} of {count} is not behind the one before")
        previous = delta
        if base_offset + delta >= limit:
            return row
        if base_offset + delta >= position:
            found = text[at:stop]
            if headers is None or found != headers:
                headers = found
                place = known.setdefault(found, len(known))
            edges[4 * row] = shift + key_at
            edges[4 * row + 1] = shift + first
            edges[4 * row + 2] = shift + value_at
            edges[4 * row + 3] = shift + at
            offsets[row] = base_offset + delta
            times[row] = first_ms + delta_ms if append_ms < 0 else append_ms
            lists[row] = place
            kinds[row] = kind
            row += 1
        at = stop
    if at != end:
        raise ValueError(f"{end - at} bytes follow the last of {count} records")
    return row


def varint(text: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it; a place behind ``stop``: it does not end there."""
    number = bits = byte = 0
    while at < stop:
        byte = text[at]
        at += 1
        if bits == 63 and byte > 1:  # more than 64 bits
            break
        number |= (byte & 127) << bits
        if byte < 128:
            return (number >> 1) ^ -(number & 1), at
        bits += 7
    return 0, stop + 1


leaves.use(globals())
