"""The ways in which clients of Kafka choose the partition of a key."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeGuard, cast

from streams.errors import ConfigError
from streams.sak import murmur2
from streams.sak.numbers import is_whole

PartitionerName = Literal["murmur2", "crc32", "fnv1a"]
PlaceOf = Callable[[bytes, int], int]
"""Takes a key and the number of partitions, and returns the partition, counted from 0."""
Partitioner = PartitionerName | PlaceOf
NullKeys = Literal["sticky", "spread", "cause"]
"""The partitions of records without a key: one for each transaction in turn; one for each record in turn; that of the
event that sends them, modulo their number."""


def _crc32(key: bytes, partitions: int) -> int:
    return zlib.crc32(key) % partitions


def _fnv1a(key: bytes, partitions: int) -> int:
    """Place as the hashing of Go's clients does (sarama, and so goka): FNV-1a, as a signed number."""
    number = 0x811C9DC5
    for byte in key:
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return abs(number - (1 << 32) if number >> 31 else number) % partitions


PARTITIONERS: Final[Mapping[str, PlaceOf]] = {"murmur2": murmur2.partition_of, "crc32": _crc32, "fnv1a": _fnv1a}

NO_NULL_KEYS: Final[Mapping[str, NullKeys]] = {}
NO_PARTITIONERS: Final[Mapping[str, PlaceOf]] = {}


def partition_of(key: str | bytes, num_partitions: int, partitioner: Partitioner = "murmur2") -> int:
    """Return the partition of a key among ``num_partitions``; texts are taken in UTF-8.

    ``"murmur2"``: as event sources, Java's clients and Spark place it; ``"crc32"``: as librdkafka does by default;
    ``"fnv1a"``: as sarama and goka do; or a function of key and number of partitions. Any thread. Raises
    ``ConfigError`` for another partitioner, a number below 1, and what a function returns that is no partition.
    """
    if not is_whole(num_partitions) or num_partitions < 1:
        raise ConfigError(f"num_partitions is {num_partitions!r}; it must be a whole number, 1 or more")
    place_of = checked(partitioner, "partitioner")
    data = key.encode() if isinstance(key, str) else key
    found = place_of(data, num_partitions)
    if not is_partition(found, num_partitions):
        last = num_partitions - 1
        raise ConfigError(f"partitioner {name_of(place_of)} returned {found!r}; partitions are 0 to {last}")
    return found


def checked(partitioner: Any, what: str) -> PlaceOf:
    """Return the function of a partitioner. Raises ``ConfigError``; ``what`` names the setting."""
    if isinstance(partitioner, str) and partitioner in PARTITIONERS:
        return PARTITIONERS[partitioner]
    if callable(partitioner):
        return cast("PlaceOf", partitioner)
    raise ConfigError(
        f"{what} is {partitioner!r}; it must be one of {', '.join(PARTITIONERS)}, or a function of a key and the "
        "number of partitions"
    )


def is_partition(found: object, partitions: int) -> TypeGuard[int]:
    """Check what a function has returned."""
    return is_whole(found) and 0 <= found < partitions


def name_of(place_of: PlaceOf) -> str:
    """Return how a partitioner is called in messages."""
    return next(
        (name for name, known in PARTITIONERS.items() if known is place_of), getattr(place_of, "__name__", "function")
    )
