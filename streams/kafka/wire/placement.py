"""The partitions of keys, remembered, and the room that a partition's batch has."""

from __future__ import annotations

from typing import Final

from streams.model.partitioners import NullKeys, PlaceOf, is_partition, name_of
from streams.model.reasons import reason
from streams.records import shown_key
from streams.sak.murmur2 import partition_of

BATCH_HEAD: Final = 61
"""Bytes of a record batch (format 2) before its first record."""
MOST_PLACES: Final = 100_000
"""Keys of one topic whose partitions are remembered; then it begins anew. murmur2 in plain Python takes 2 us, a look-up
0.05."""


class Placement:
    """The partitions of one topic, as far as encoding needs them. ``limit``: bytes of the largest batch that it is
    thought to take; a batch of one record may be larger."""

    __slots__ = ("count", "limit", "null_keys", "places", "topic", "turn")

    def __init__(self, topic: str, count: int, limit: int, null_keys: NullKeys = "sticky") -> None:
        self.topic = topic
        self.null_keys = null_keys
        self.count = count
        self.limit = limit
        self.places: dict[bytes, int] = {}
        self.turn = 0

    def place(self, key: bytes) -> int:
        """Return the partition of a key that is not remembered yet, and remember it."""
        if len(self.places) >= MOST_PLACES:
            self.places.clear()
        partition = self.places[key] = partition_of(key, self.count)
        return partition

    def next_without_key(self) -> int:
        """Return the partition for the next record without a key, or for those of one transaction: each in turn."""
        self.turn = (self.turn + 1) % self.count
        return self.turn


class NotPlaced(LookupError):
    """A partitioner has raised, or returned no partition. The message names topic and key."""


class DeclaredPlacement(Placement):
    """The same of a topic whose keys are placed by another function than murmur2, which may be a user's."""

    __slots__ = ("_place_of",)

    def __init__(self, topic: str, count: int, limit: int, place_of: PlaceOf, null_keys: NullKeys = "sticky") -> None:
        super().__init__(topic, count, limit, null_keys)
        self._place_of = place_of

    def place(self, key: bytes) -> int:
        """Return the partition of a key, and remember it. Raises ``NotPlaced``."""
        if len(self.places) >= MOST_PLACES:
            self.places.clear()
        try:
            found = self._place_of(key, self.count)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a cancellation, too, which would end the task that encodes without a word
            raise self._not_placed(key, f"has failed: {reason(error)}") from error
        if not is_partition(found, self.count):
            raise self._not_placed(key, f"returned {found!r}: partitions are 0 to {self.count - 1}")
        self.places[key] = found
        return found

    def _not_placed(self, key: bytes, what: str) -> NotPlaced:
        return NotPlaced(f"{self.topic}, key {shown_key(key)}: its partitioner {name_of(self._place_of)} {what}")
