"""What the toolkit itself writes into a changelog, beside the changes of the store (protocol, sections 6 and 8).

Keys of these records begin with ``RESERVED_KEY_PREFIX``, so they are never taken for a change, and compaction keeps the
last one of each kind.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import OffsetError
from streams.records import IncomingRecord

OFFSET_KEY = RESERVED_KEY_PREFIX + b"offset"
"""Key of the one record per changelog partition and transaction that carries the input offset (protocol, section 6)."""
RELEASE_KEY = RESERVED_KEY_PREFIX + b"release"
"""Key of the release marker, the last record of a partition's last transaction on its donor (protocol, section 8)."""


class OffsetRecord(msgspec.Struct, frozen=True):
    """The input offset in the changelog: ``offset`` is the next one to read. ``writer`` and ``serial`` name the
    transaction, ``generation`` the group's at the time of sealing, ``source_id`` the topic id of the source."""

    offset: int
    writer: str
    serial: int
    generation: int
    source_id: str = ""


class ReleaseMarker(msgspec.Struct, frozen=True):
    """The donor's last word: the partition goes to the member ``to`` (a member id), as ordered in ``generation``."""

    to: str
    generation: int


T = TypeVar("T")


def decode_offset(record: IncomingRecord) -> OffsetRecord:
    """The offset record in this changelog record. Raises ``OffsetError`` if it is not one."""
    return _decode(record, OffsetRecord, "offset record")


def decode_release(record: IncomingRecord) -> ReleaseMarker:
    """The release marker in this changelog record. Raises ``OffsetError`` if it is not one."""
    return _decode(record, ReleaseMarker, "release marker")


def _decode(record: IncomingRecord, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(record.value or b"", type=kind)
    except msgspec.DecodeError as error:
        raise OffsetError(
            f"{record.where}: the {name} cannot be read ({error}): something else writes to the changelog, or a newer "
            "version of this package does"
        ) from error
