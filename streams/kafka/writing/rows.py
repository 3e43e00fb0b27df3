"""The rows of record batches: records that are encoded, length by length, until their batch gets its head."""

from __future__ import annotations

import struct
from typing import Final

import google_crc32c
import msgspec

from streams.kafka.wire.codec import put_unsigned
from streams.kafka.wire.compression import Compression
from streams.kafka.wire.placement import Placement

LENGTHS: Final = 5
"""Bytes of the longest varint in front of a record."""
_TRANSACTIONAL: Final = 0x10  # in the attributes
_HEAD: Final = struct.Struct(">qiibI")  # base offset, length, leader epoch, format, checksum
# Attributes, position of the last record, first and latest time, producer id, epoch, first sequence, records.
_TAIL: Final = struct.Struct(">hiqqqhii")


def _varint(number: int) -> bytes:
    encoded = bytearray()
    put_unsigned(encoded, number << 1 if number >= 0 else (-number << 1) - 1)
    return bytes(encoded)


SMALL: Final = [_varint(number) for number in range(8192)]
"""Varints by number: lengths, positions and times of almost all records."""
NULL: Final = _varint(-1)


def varint(number: int) -> bytes:
    """Encode a signed number as records have them: zigzag, seven bits a byte."""
    return SMALL[number] if 0 <= number < len(SMALL) else _varint(number)


def row(delta_ms: int, count: int, key: bytes | None, value: bytes | None, headers: bytes) -> bytes:
    """Encode any record. ``row_encoder`` does the usual ones faster."""
    pieces = [b"\0", varint(delta_ms), varint(count)]
    for field in (key, value):
        pieces += [NULL] if field is None else [varint(len(field)), field]
    return b"".join([*pieces, headers])


class Batch(msgspec.Struct, frozen=True):
    """The records of one batch. ``rows``: the length of a record, the record, and so on. ``size``: their bytes."""

    rows: list[bytes]
    records: int
    size: int
    first_ms: int
    last_ms: int

    def encode(self, producer_id: int, epoch: int, sequence: int, compression: Compression | None) -> list[bytes]:
        """Encode the batch in pieces, to be written one after the other."""
        records, attributes = b"".join(self.rows), _TRANSACTIONAL
        if compression is not None:
            records, attributes = compression.compress(records), attributes | compression.attribute
        tail = _TAIL.pack(
            attributes, self.records - 1, self.first_ms, self.last_ms, producer_id, epoch, sequence, self.records
        )
        # The checksum begins behind itself: a broker sets offset and leader epoch without computing it anew.
        checksum = google_crc32c.extend(google_crc32c.value(tail), records)
        # The length counts what follows it: 9 more bytes of the head, leader epoch, format and checksum.
        return [_HEAD.pack(0, len(tail) + len(records) + 9, -1, 2, checksum), tail, records]


class Rows(msgspec.Struct, eq=False):
    """The batches of one partition: those that are full, and the one that is being filled. ``head``: how a record with
    the time ``stamp`` begins."""

    full: list[Batch] = []
    rows: list[bytes] = []
    count: int = 0
    size: int = 0
    first_ms: int = 0
    last_ms: int = 0
    stamp: int | None = None
    head: bytes = b""

    def add(self, stamp: int, key: bytes | None, value: bytes | None, headers: bytes, limit: int) -> None:
        """Add any record; in a new batch if this one would get more than ``limit`` bytes."""
        record = row(stamp - self.first_ms, self.count, key, value, headers)
        if self.count and self.size + len(record) + LENGTHS > limit:
            self.full = self.batches()
            self.rows, self.count, self.size, self.stamp = [], 0, 0, None
        if not self.count:  # time and position count from the first record of a batch: this one is encoded again
            self.first_ms = self.last_ms = stamp
            record = row(0, 0, key, value, headers)
        length = varint(len(record))
        self.rows += (length, record)
        self.count += 1
        self.size += len(length) + len(record)
        self.last_ms = max(self.last_ms, stamp)

    def batches(self) -> list[Batch]:
        """Return all batches, in order."""
        last = [Batch(self.rows, self.count, self.size, self.first_ms, self.last_ms)] if self.count else []
        return [*self.full, *last] if self.full else last


class TopicRows:
    """The rows of one topic in one transaction, by partition. ``places``: the partitions of known keys."""

    __slots__ = ("placement", "places", "rows")

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.places = placement.places
        self.rows: dict[int, Rows] = {}
