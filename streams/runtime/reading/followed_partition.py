"""The progress of one partition that is followed: of a replica, or of a view."""

from __future__ import annotations

FROM_START = -1


class FollowedPartition:
    """One partition of a log, read under one epoch. Reading began at ``start``, everything below ``position`` was read
    (-1: nothing yet), and the log ends at ``end`` as far as is known (-1: not yet). ``caught_up``: it has met the end
    once. ``records`` and ``size`` (bytes of keys and values) were received."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.start = self.position = FROM_START
        self.end = -1
        self.caught_up = False
        self.records = 0
        self.size = 0

    @property
    def behind(self) -> int:
        """Offsets that are left, as far as is known (holes and markers count)."""
        return max(0, self.end - max(self.position, 0))

    def begin_at(self, offset: int) -> None:
        """Read from this offset on."""
        self.start = self.position = offset

    def advance(self, position: int, end: int, *, more: bool) -> bool:
        """Take in that everything below ``position`` was read, of a log that ends at ``end`` as far as is known;
        ``more`` records came. Returns whether it has met the end, for the first time."""
        self.position = max(self.position, position)
        self.end = max(self.end, end, self.position)
        first = not self.caught_up and (not more or position >= end >= 0)
        self.caught_up = self.caught_up or first
        return first
