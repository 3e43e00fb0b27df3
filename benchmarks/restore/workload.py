"""What is restored: so many changes of about 150 bytes to so many keys, and what must come out of them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator

import msgspec

KEY_BYTES, VALUE_BYTES = 12, 138
DISTINCT = 200_000
"""Keys; with more changes than that, keys come again, as in a changelog that was not compacted yet."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be restored by a process, as the only member of a group."""

    bootstrap_servers: str
    group: str
    source: str
    changelog: str
    partitions: int


class Restored(msgspec.Struct, frozen=True):
    """Seconds from the plan (the loop: from the building of the consumer) until the last partition was complete, and
    since the process began to work; what was read, what is there."""

    seconds: float
    wall_seconds: float
    records: int
    keys: int
    digest: int


def changes(records: int, seed: int) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of each change; the first one of each key comes before any second one."""
    rng = random.Random(seed)
    distinct = min(records, DISTINCT)
    padding = b"." * (VALUE_BYTES - 16)
    for number in range(records):
        key = number if number < distinct else rng.randrange(distinct)
        yield b"%012d" % key, b"%016x" % rng.getrandbits(64) + padding


def partition_of(key: bytes, partitions: int) -> int:
    """Where a key's changes are."""
    return int(key) % partitions


def digest(items: Iterable[tuple[bytes, bytes]]) -> tuple[int, int]:
    """How many items, and a sum over them that does not depend on their order."""
    count = total = 0
    for key, value in items:
        count += 1
        total += zlib.crc32(value, zlib.crc32(key))
    return count, total
