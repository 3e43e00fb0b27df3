"""The rows that a relay has sent: the ring, its records, and the checks between ring and database.

A *batch* is what one transaction sends. Its ids are written in the same transaction, as a record of the positions
topic, so the record is there if, and only if, the rows are. The last ``RING`` of them are the *ring* of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgspec

from streams.errors import DecodeError, OffsetError

RING: Final = 64
"""Batches that a ring names. After a failover the database may have the rows of so many again: none is sent twice."""
WAY_OUT: Final = (
    "Nothing is sent, since rows could be lost or sent twice: see `kes outbox purge --after-restore`, and the guide, "
    '"After a restored backup"'
)
_FORMAT: Final = 1


class RowId(NamedTuple):
    """A row of an outbox. ``tag`` is random: after a failover the database may use an id again, for another row."""

    id: int
    tag: int


class SentBatch(msgspec.Struct, frozen=True):
    """The rows of one transaction; ``serial`` counts the transactions of a shard, from 1."""

    serial: int
    rows: tuple[RowId, ...]


class _BatchRecord(msgspec.Struct, frozen=True, array_like=True):
    """A batch on the wire: ids in order, each as its distance from the one before."""

    format: int
    outbox: str
    serial: int
    distances: list[int]
    tags: list[int]


def record_key(serial: int) -> bytes:
    """Return the key of a batch's record: that of the batch it replaces when the topic is compacted."""
    return b"%d" % (serial % RING)


def encode_batch(outbox: str, batch: SentBatch) -> bytes:
    """Encode a batch; ``outbox`` is the identity of the table."""
    rows = sorted(batch.rows)  # so that distances are small numbers, which take a byte or two
    distances = [after - before for before, after in pairwise([0, *(row.id for row in rows)])]
    return msgspec.msgpack.encode(_BatchRecord(_FORMAT, outbox, batch.serial, distances, [row.tag for row in rows]))


def decode_batch(outbox: str, value: bytes | None) -> SentBatch:
    """Decode a batch. Raises ``DecodeError`` (it is none), ``OffsetError`` (it is one of another outbox)."""
    try:
        found = msgspec.msgpack.decode(value or b"", type=_BatchRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"no batch of an outbox: {error}") from error
    if found.format != _FORMAT:
        raise DecodeError(f"a batch of format {found.format}: update this program first")
    if found.outbox != outbox:
        raise OffsetError(f"a batch of the outbox {found.outbox}, and this is {outbox}: each needs a name of its own")
    if found.serial < 1 or len(found.distances) != len(found.tags):
        raise DecodeError("a batch with a serial below 1, or without a tag for each id")
    return SentBatch(found.serial, tuple(map(RowId, accumulate(found.distances), found.tags)))


class Ring:
    """The last batches of a shard, as a successor would read them. One thread."""

    def __init__(self, batches: Iterable[SentBatch] = ()) -> None:
        self._batches: dict[int, SentBatch] = {}
        self.serial = 0
        """The serial of the last batch; 0: there is none."""
        for batch in batches:
            self.add(batch)

    def add(self, batch: SentBatch) -> None:
        """Take in a committed batch; the one that it replaces is forgotten, and so is an older one that comes late."""
        slot = batch.serial % RING
        before = self._batches.get(slot)
        if before is None or before.serial <= batch.serial:
            self._batches[slot] = batch
        self.serial = max(self.serial, batch.serial)

    @property
    def rows(self) -> list[RowId]:
        """Return all rows that it names."""
        return [row for batch in self._batches.values() for row in batch.rows]

    @property
    def is_whole(self) -> bool:
        """Check that no batch of the last ``RING`` is missing."""
        return not self.missing(self.serial)

    def missing(self, through: int) -> list[int]:
        """Return the serials of the last ``RING`` batches up to this one that it does not have."""
        return [
            serial
            for serial in range(max(1, through - RING + 1), through + 1)
            if (batch := self._batches.get(serial % RING)) is None or batch.serial != serial
        ]

    def check_against(self, noted: int, where: str) -> None:
        """Compare with the serial that the database has ``noted`` at its last delete. ``where``: topic and partition.

        Raises ``OffsetError`` if one of them was set back, or records of the ring are gone: then the ring does not tell
        which rows were sent.
        """
        if noted > self.serial:
            raise OffsetError(
                f"{where} ends with batch {self.serial}, and the database has noted batch {noted}: the topic was "
                f"deleted, trimmed or restored, or another cluster answers. {WAY_OUT}"
            )
        if self.serial - noted > RING:
            raise OffsetError(
                f"{where} ends with batch {self.serial}, and the database has noted batch {noted}: the database was "
                f"set back by more than {RING} batches. {WAY_OUT}"
            )
        if not self.is_whole:
            raise OffsetError(f"{where} does not have all of the last {RING} batches up to {self.serial}. {WAY_OUT}")
