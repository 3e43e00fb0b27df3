"""Record batches that are made in one place and sent from another."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import google_crc32c

_CHECKSUM: Final = struct.Struct(">I")
_PRODUCER: Final = struct.Struct(">qhi")  # producer id, epoch, first sequence
_COUNT: Final = struct.Struct(">i")
# Places in the head of a record batch (format 2). The checksum covers all bytes behind it, so the producer's, too.
_CHECKSUM_AT, _CHECKED_FROM, _PRODUCER_AT, _COUNT_AT = 17, 21, 43, 57


class MadeBatch(NamedTuple):
    """A record batch (format 2) without a producer: ``head`` is its first 61 bytes. ``partitions``: how many the topic
    had when its rows were placed."""

    topic: str
    partition: int
    partitions: int
    head: bytes
    body: bytes

    @property
    def records(self) -> int:
        """Return the number of records, as the head says."""
        return int(_COUNT.unpack_from(self.head, _COUNT_AT)[0])

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return len(self.head) + len(self.body)

    @property
    def checksum(self) -> int:
        """Return a checksum of all bytes (CRC-32C)."""
        return int(google_crc32c.extend(google_crc32c.value(self.head), self.body))

    def stamped(self, producer_id: int, epoch: int, sequence: int) -> list[bytes]:
        """Return the batch under a producer, in pieces."""
        head = bytearray(self.head)
        _PRODUCER.pack_into(head, _PRODUCER_AT, producer_id, epoch, sequence)
        checked = google_crc32c.value(bytes(head[_CHECKED_FROM:]))
        _CHECKSUM.pack_into(head, _CHECKSUM_AT, google_crc32c.extend(checked, self.body))
        return [bytes(head), self.body]
