"""Which dimensions of the account workload grow, and how far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.workload import USUAL, Shape


class Dimension(msgspec.Struct, frozen=True):
    """One field of ``Shape`` that takes other values than the usual one. ``some``: those of a shorter run."""

    name: str
    field: str
    told: str
    sizes: tuple[int, ...]
    some: tuple[int, ...]


DIMENSIONS = (
    Dimension("partitions", "partitions", "partitions of input, output and changelog", (1, 100, 400), (1, 400)),
    Dimension("keys", "keys", "keys that events are drawn from", (1_000, 100_000, 1_000_000), (1_000, 1_000_000)),
    Dimension("state", "stored", "further keys that lie in the store", (100_000, 1_000_000), (100_000,)),
    Dimension("bytes", "value_bytes", "bytes of an event's value", (100, 1_000, 10_000, 100_000), (1_000, 100_000)),
    Dimension("types", "types", "types of events", (10, 100), (100,)),
)
"""The usual value of each is measured once, with the usual shape."""
NAMES = tuple(dimension.name for dimension in DIMENSIONS)

MOST_BYTES = 400_000_000
"""An input has no more than that."""


class Place(msgspec.Struct, frozen=True):
    """One value of one dimension; ``usual`` stands for all of them."""

    dimension: str
    size: int
    shape: Shape


def places(names: Sequence[str], *, all_sizes: bool) -> Iterator[Place]:
    """The usual shape, then each value of each dimension."""
    yield Place("usual", 0, USUAL)
    for dimension in DIMENSIONS:
        if dimension.name in names:
            for size in dimension.sizes if all_sizes else dimension.some:
                shape = msgspec.structs.replace(USUAL, **{dimension.field: size})
                yield Place(dimension.name, size, shape)


def usual_size(dimension: str) -> int:
    """The value that the dimension has when another one grows."""
    return int(getattr(USUAL, field_of(dimension)))


def field_of(dimension: str) -> str:
    """Its field in ``Shape``."""
    return next(one.field for one in DIMENSIONS if one.name == dimension)


def records_of(shape: Shape, records: int) -> int:
    """So many as are wanted, or as fit into the largest input."""
    return min(records, MOST_BYTES // shape.value_bytes)
