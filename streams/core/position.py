"""The position of a partition: the next offset to read in each input of its source.

With one input it is that offset, an ``int``: nothing is added to what a source with one topic does. With several it is
a tuple of offsets, one for each input in the order of declaration, and always complete: compaction keeps the last
offset record only, so each one names all of them, touched or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from streams.core.origin import Origin, input_and_offset

Position: TypeAlias = int | tuple[int, ...]


def offsets_of(position: Position) -> tuple[int, ...]:
    """Return the offsets, in the order of the inputs."""
    return position if isinstance(position, tuple) else (position,)


def position_of(offsets: Sequence[int]) -> Position:
    """Return the position that has these offsets, in the order of the inputs."""
    return tuple(offsets) if len(offsets) > 1 else offsets[0]


def behind(position: Position, origin: Origin) -> Position:
    """Return the position right behind an event of an entry that ends at ``position``: its other inputs stand still."""
    if not isinstance(position, tuple):
        return origin + 1
    input_number, offset = input_and_offset(origin)
    return (*position[:input_number], offset + 1, *position[input_number + 1 :])
