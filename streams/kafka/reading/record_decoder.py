"""Record batches (format 2) made into records, or into columns of numbers, in one pass. A leaf (``sak/leaves.py``).

A row of columns says where key and value of its record stand, so nothing is copied, and no object is made for a record.
Numbers in records are varints: seven bits a byte, zigzag. A number that goes beyond its record puts the place behind
the record's end, so one comparison behind the numbers finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from streams.records import IncomingRecord
from streams.sak import leaves

CLASSES: Final = (IncomingRecord,)
"""Made by allocating and filling in when this is compiled."""
LAST_OFFSET: Final = (1 << 63) - 1
NO_KEY: Final = 1
NO_VALUE: Final = 2
APPENDED: Final = 4
"""The time is the broker's."""


def scan_batches(data: bytes, position: int, unpack: Callable[[bytes, int], Any]) -> tuple[int, int, int, str]:
    """Walk over the heads of the whole batches in an answer that was fetched from ``position``.

    Returns where they end, the offset behind the last one (``position``: there is none), the leader epoch of that, and
    what is wrong with the next one (``""``: it is cut off, or there is none). ``unpack``: of a head's first numbers.
    """
    at, leader_epoch = 0, -1
    size = len(data)
    following = position
    while at + 61 <= size and data[at + 16] == 2:
        base, length, epoch, _, _, _, delta = unpack(data, at)
        if length < 49 or delta < 0:
            return at, following, leader_epoch, "its head makes no sense"
        if length > size - at - 12:  # where the fetch ends
            return at, following, leader_epoch, ""
        # The first one may begin before the fetch does.
        if base + delta < following or (at and base < following):
            return at, following, leader_epoch, f"it stands where offset {following} is to follow"
        following = base + delta + 1
        leader_epoch = epoch
        at += length + 12
    if at + 17 <= size and data[at + 16] != 2:
        return at, following, leader_epoch, f"its format is {data[at + 16]}"
    return at, following, leader_epoch, ""


def decode_batches(
    data: bytes,
    end: int,
    place: list[int],
    most: int,
    topic: str,
    partition: Any,
    unpack: Callable[[bytes, int], Any],
    checksum_of: Callable[[bytes], int],
    decompressed: Callable[[int, bytes], bytes],
    headers_of: Callable[[bytes], Any],
    aborted: set[int] | None,
    to_come: list[tuple[int, int]],
    records: list[IncomingRecord] | None,
    columns: Any = None,
    limit: int = LAST_OFFSET,
) -> None:
    """Append the records of the whole batches in ``data``, up to ``end``, until there are ``most``, which a batch may
    exceed, to ``records``; without a list (``None``) those below offset ``limit`` to ``columns``, which decodes them by
    itself and has their number as ``rows``.

    ``place``: where the next batch begins, the offset up to which all was read, and how many records there are from
    whole batches; it is moved on. A batch that reaches beyond ``limit`` stays the next one. ``unpack``: of a whole
    head. ``aborted``: the producers whose transaction is aborted at the place; ``to_come``: producer and first offset
    of further ones, the first one last. ``None``: all records are wanted, aborted ones, too. Markers are left out.
    Raises ``ValueError`` for a batch that is damaged.
    """
    at, position = place[0], place[1]
    taken = columns.rows if records is None else len(records)
    while at < end and taken < most:
        base, length, _, _, checksum, attributes, delta, first_ms, latest_ms, producer, _, _, count = unpack(data, at)
        if base >= limit:
            place[1] = limit
            break
        stop = at + length + 12
        if checksum_of(data[at + 21 : stop]) != checksum:
            raise ValueError("its checksum is wrong")
        following = base + delta + 1
        is_hidden = attributes & 0x20 != 0  # the marker of a transaction's end
        if aborted is not None:
            while to_come and to_come[-1][1] < following:
                aborted.add(to_come.pop()[0])
            if is_hidden:
                aborted.discard(producer)
            elif attributes & 0x10:
                is_hidden = producer in aborted
        if count < 0 or count > delta + 1:
            raise ValueError(f"its head has {count} records")
        if count and not is_hidden:
            append_ms = latest_ms if attributes & 0x08 else -1
            body, first, last = data, at + 61, stop
            if attributes & 0x07:
                body = decompressed(attributes & 0x07, data[first:last])
                first, last = 0, len(body)
            if records is None:
                columns.decode(body, first, last, count, base, first_ms, append_ms, position, limit)
            else:
                decode_records(
                    body, first, last, count, topic, partition, base, first_ms, append_ms, position, headers_of, records
                )
        taken = columns.rows if records is None else len(records)
        if following > limit:
            place[1], place[2] = limit, taken
            break
        at, position = stop, following
        place[0], place[1], place[2] = at, position, taken


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
