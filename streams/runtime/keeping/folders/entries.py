"""The entries of a folder's data file, as bytes: changes in their order, the last one of a key wins."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from streams.records import Change

HEAD: Final = b"kes-state 1\n"
"""A data file begins with these bytes."""

_LENGTHS: Final = struct.Struct(">HIi")  # of the kind, of the key, of the value (-1: the key is deleted)


class Damaged(Exception):
    """A folder is not what its mark says. The text completes the sentence "its state is not used, because"."""


class HalfLoaded(Exception):
    """A folder turned out to be damaged when a part of it was in the store already, or when there may be a snapshot in
    its place: the partition begins anew."""


class NotKept(Exception):
    """A partition can have no folder here. The text completes the sentence "it is not kept on disk: "."""


class Point(NamedTuple):
    """A place of the changelog at which a folder may be marked: offset and value of an offset record, and a time that
    is no later than its."""

    offset: int
    record: bytes
    as_of_ms: int


def encode(changes: Iterable[Change]) -> bytes:
    """Encode changes, in their order."""
    parts: list[bytes] = []
    for change in changes:
        kind, key, value = change.type.encode(), change.key, change.value
        parts += (_LENGTHS.pack(len(kind), len(key), -1 if value is None else len(value)), kind, key, value or b"")
    return b"".join(parts)


def decode(data: bytes) -> tuple[list[Change], int]:
    """Decode the changes that are there as a whole. Returns them, and the place behind the last one.

    Raises ``Damaged`` for a length that cannot be.
    """
    found, at, end, head = [], 0, len(data), _LENGTHS.size
    while at + head <= end:
        kinds, keys, values = _LENGTHS.unpack_from(data, at)
        key_at = at + head + kinds
        value_at = key_at + keys
        behind = value_at + max(values, 0)
        if values < -1:
            raise Damaged(f"an entry has the length {values}")
        # The piece ends within this entry. Its rest comes with the next piece.
        if behind > end:
            break
        kind = data[at + head : key_at].decode() if kinds else ""
        found.append(Change(data[key_at:value_at], None if values < 0 else data[value_at:behind], None, kind))
        at = behind
    return found, at


def decode_pieces(pieces: Iterable[bytes], name: str) -> Iterator[list[Change]]:
    """Decode a data file that comes in pieces; yields the changes in each. ``name``: for errors. Raises ``Damaged``."""
    rest, is_first = b"", True
    for piece in pieces:
        data = rest + piece
        if is_first and len(data) >= len(HEAD):
            is_first = False
            if not data.startswith(HEAD):
                raise Damaged(f"{name} does not begin as such a file does")
            data = data[len(HEAD) :]
        # The head is not complete yet.
        if is_first:
            rest = data
            continue
        changes, at = decode(data)
        rest = data[at:]
        yield changes
    if rest:
        raise Damaged(f"{name} ends within an entry")
