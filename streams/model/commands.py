"""Commands and their answers: what travels with a command, the versioned state of its key, and what an answer says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from streams.records import TopicPartition

S = TypeVar("S")

EXPECTED_HEADER: Final = "kes-expected"
"""The version that the state of the key must have, as decimal digits."""
VERSION_HEADER: Final = "kes-version"
"""Of an event in the output: its number among the events of its key, 1, 2, 3 ..., as decimal digits."""
LONGEST_ID: Final = 100
"""Characters of a command's id, at most; it is in ``records.ID_HEADER``."""
SCOPE: Final = "kes.commands"
"""The ids of a source's commands are one scope, whatever their types."""


class Versioned(msgspec.Struct, Generic[S], frozen=True):
    """The state of a key and its version: the number of events that have led to it. Version 0 is that of an entry that
    was there before the source had commands."""

    version: int
    state: S


class CommandDone(msgspec.Struct, frozen=True):
    """A command that took effect, committed. ``version``: of the state behind it; ``count``: of its events. ``events``:
    these; ``None``: they are too large for an answer, and in the output only. ``positions``: for ``at_least`` of a
    query that must see its effect. ``served_by``: the instance that answered."""

    version: int
    count: int
    events: tuple[Any, ...] | None
    positions: Mapping[TopicPartition, int]
    served_by: str
