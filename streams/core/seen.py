"""Ids that were handled in one partition: which they are, what is kept beside them, and when they go. Pure.

An id is known by a digest of 16 bytes of its scope and itself: of 10^9 ids two have the same one with a probability of
less than 10^-20. Its record has the second at which it may go, and behind that what is kept beside the id, or nothing.

In memory the ids that go at about the same time are in one *bucket*: an id costs a place in a dict and one in a list,
and not a time of its own. It goes with its bucket, so up to ``width`` seconds after its time, and never before.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from hashlib import blake2b
from typing import Final

DIGEST: Final = 16
"""Bytes of a digest."""
HEAD: Final = 4
"""Bytes of the time in an id's record: seconds since the epoch, big-endian, up to the year 2106."""
LATEST_S: Final = (1 << 8 * HEAD) - 1
BYTES_PER_ID: Final = 128
"""So many bytes that are kept beside ids count as one id more."""
PARTS: Final = 64
"""Buckets in the shortest time that ids are kept."""


class Digests:
    """The digests of the ids within one scope, which has no zero byte."""

    def __init__(self, scope: str) -> None:
        prefix = scope.encode() + b"\0"
        # The state behind the prefix is copied for each id: half the price of a new one.
        self._text = blake2b(prefix + b"t", digest_size=DIGEST).copy
        self._number = blake2b(prefix + b"n", digest_size=DIGEST).copy

    def of(self, id: str | bytes | int) -> bytes:
        """Return the digest of an id. Raises as ``digest_of``."""
        given: object = id  # whatever it is
        if isinstance(given, str):
            state, data = self._text(), given.encode(errors="surrogatepass")
        elif isinstance(given, bytes):
            state, data = self._text(), given
        elif isinstance(given, int) and not isinstance(given, bool):
            state, data = self._number(), b"%x" % given  # of any length: Python refuses thousands of decimal digits
        else:
            raise ValueError(f"the id is a {type(given).__name__}; it must be a text, bytes or a whole number, or None")
        if not data:
            raise ValueError("the id is empty: all events without one would be duplicates of the first; None is no id")
        state.update(data)
        return state.digest()


def digest_of(scope: str, id: str | bytes | int) -> bytes:
    """Return the digest of an id within a scope. A text and its UTF-8 are the same id, a number and its digits are two.
    Raises ``ValueError`` for what is no id, and for an empty one."""
    return Digests(scope).of(id)


def encode(due_s: int, kept: bytes = b"") -> bytes:
    """Encode the record of an id: the second from which on it may go, and what is kept beside it."""
    return max(0, min(due_s, LATEST_S)).to_bytes(HEAD, "big") + kept


def due_of(value: bytes) -> int:
    """Return the second from which on an id may go. Raises ``ValueError`` for what is no record of one."""
    if len(value) < HEAD:
        raise ValueError(f"the record of an id has {len(value)} bytes, fewer than {HEAD}")
    return int.from_bytes(value[:HEAD], "big")


def width_of(within_s: int) -> int:
    """Return the seconds of a bucket where the shortest time that ids are kept is this."""
    return max(1, within_s // PARTS)


class SeenTable:
    """The ids of one partition in memory. ``width``: seconds of a bucket; ``kept_bytes``: beside ids."""

    def __init__(self, width: int = 1) -> None:
        self.width = width
        self.kept_bytes = 0
        self._by_digest: dict[bytes, int | bytes] = {}  # its bucket; or its record, if something is kept beside it
        self.has = self._by_digest.__contains__
        """Check for an id: quicker than ``find``."""
        self._buckets: dict[int, list[bytes]] = {}
        self._order: list[int] = []  # a heap of the numbers of buckets
        self._last = -1  # the bucket that was used last: one number for all ids of it

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def weight(self) -> int:
        """Return how many ids it counts for, with what is kept beside them."""
        return len(self._by_digest) + self.kept_bytes // BYTES_PER_ID

    @property
    def next_s(self) -> int | None:
        """Return the second from which on the first ids go; ``None``: there are none."""
        return (self._order[0] + 1) * self.width if self._order else None

    def find(self, digest: bytes) -> bytes | None:
        """Return what is kept beside an id, ``b""`` if that is nothing; ``None``: the id is not there."""
        found = self._by_digest.get(digest)
        if found is None:
            return None
        return found[HEAD:] if isinstance(found, bytes) else b""

    def put(self, digest: bytes, value: bytes) -> None:
        """Set the record of an id. Raises ``ValueError`` for what is none."""
        bucket = self._bucket(value)
        if self.kept_bytes:
            self._forget_kept(digest)
        if len(value) > HEAD:
            self._by_digest[digest] = value
            self.kept_bytes += len(value)
        else:
            self._by_digest[digest] = bucket
        self._digests(bucket).append(digest)

    def put_new(self, digests: Collection[bytes], value: bytes) -> None:
        """Set the record of ids that are not there, beside which nothing is kept: one for all. Raises ``ValueError``
        for what is none."""
        bucket = self._bucket(value)
        self._by_digest.update(dict.fromkeys(digests, bucket))
        self._digests(bucket).extend(digests)

    def remove(self, digest: bytes) -> None:
        """Remove an id, if it is there."""
        self._forget_kept(digest)
        self._by_digest.pop(digest, None)

    def take(self, most: int, now_s: int | None = None) -> list[bytes]:
        """Remove ids whose time is over, those that go first before others; ``None``: whatever their time. Returns
        them, at most so many."""
        taken: list[bytes] = []
        while self._order and len(taken) < most:
            bucket = self._order[0]
            if now_s is not None and now_s < (bucket + 1) * self.width:
                break
            digests = self._buckets[bucket]
            while digests and len(taken) < most:
                digest = digests.pop()
                # Otherwise it was removed, or handled again later: its place here is outdated.
                if self._bucket_of(digest) == bucket:
                    self.remove(digest)
                    taken.append(digest)
            if not digests:
                heapq.heappop(self._order)
                del self._buckets[bucket]
        return taken

    def _bucket(self, value: bytes) -> int:
        bucket = due_of(value) // self.width
        if bucket != self._last:
            self._last = bucket
        return self._last

    def _digests(self, bucket: int) -> list[bytes]:
        digests = self._buckets.get(bucket)
        if digests is None:
            digests = self._buckets[bucket] = []
            heapq.heappush(self._order, bucket)
        return digests

    def _bucket_of(self, digest: bytes) -> int | None:
        found = self._by_digest.get(digest)
        return due_of(found) // self.width if isinstance(found, bytes) else found

    def _forget_kept(self, digest: bytes) -> None:
        before = self._by_digest.get(digest)
        if isinstance(before, bytes):
            self.kept_bytes -= len(before)
