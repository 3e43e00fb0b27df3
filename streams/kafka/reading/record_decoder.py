"""Records of a batch (format 2, decompressed) made into objects, in one pass. A leaf (``sak/leaves.py``).

Numbers are varints: seven bits a byte, zigzag. A number that goes beyond its record puts the place behind the record's
end, so one comparison behind the numbers finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from streams.records import IncomingRecord
from streams.sak import leaves

CLASSES: Final = (IncomingRecord,)
"""Made by allocating and filling in when this is compiled."""


def decode_records(
    data: bytes,
    at: int,
    end: int,
    count: int,
    topic: str,
    partition: Any,
    base_offset: int,
    first_ms: int,
    append_ms: int,
    position: int,
    headers_of: Callable[[bytes], Any],
    records: list[IncomingRecord],
) -> None:
    """Append the ``count`` records in ``data[at:end]``, those from offset ``position`` on, to ``records``.

    ``base_offset`` and ``first_ms`` are the batch's, which records count from; ``append_ms``: the time of all of them
    (-1: each has its own). ``headers_of`` gets the bytes of headers that differ from those of the record before. Raises
    ``ValueError`` for what is no such batch; a part of it is in ``records`` then.
    """
    text = data
    ordinal = delta_ms = known_ms = 0
    previous = -1
    key: Any = None
    value: Any = None
    stamp: Any = None if append_ms < 0 else append_ms
    known = b"\0"  # the number of headers: none
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
        key = None
        if size >= 0:
            if size > stop - at:
                raise ValueError(f"the key of record {ordinal} of {count} goes beyond it")
            key = text[at : at + size]
            at += size
        size, at = varint(text, at, stop)
        value = None
        if size >= 0:
            if size > stop - at:
                raise ValueError(f"the value of record {ordinal} of {count} goes beyond it")
            value = text[at : at + size]
            at += size
        if at >= stop:
            raise ValueError(f"record {ordinal} of {count} ends before its headers")
        if delta <= previous:
            raise ValueError(f"the offset of record {ordinal} of {count} is not behind the one before")
        previous = delta
        if base_offset + delta >= position:
            found = text[at:stop]
            if found != known:
                headers = headers_of(found)
                known = found
            if append_ms < 0 and (stamp is None or delta_ms != known_ms):
                known_ms = delta_ms
                stamp = first_ms + delta_ms
            records.append(IncomingRecord(topic, partition, base_offset + delta, key, value, headers, stamp))
        at = stop
    if at != end:
        raise ValueError(f"{end - at} bytes follow the last of {count} records")


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
