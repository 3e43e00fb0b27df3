"""Figures of the folders of a member."""

from __future__ import annotations

from typing import Final

from streams.runtime.keeping.kept_partition import KeptPartition
from streams.statistics import FolderStatistics

READ_PER_SECOND: Final = 250_000
"""Estimates assume that a restore reads so many records of the changelog in a second."""
LEAST_MEASURED: Final = 1 << 22
"""The loading time of a folder with fewer bytes says nothing about larger ones."""


class LoadRate:
    """Bytes that are loaded in a second, measured with the last large folder. Set on one thread, for any."""

    def __init__(self) -> None:
        # An assumption, which holds until a large folder has been loaded.
        self.per_second = 80e6

    def loaded(self, size: int, seconds: float) -> None:
        """Note the time in which a folder was loaded."""
        if size >= LEAST_MEASURED and seconds > 0:
            self.per_second = size / seconds


def figures_of(kept: KeptPartition, wall_ms: int, load: LoadRate) -> FolderStatistics:
    """Return the figures of one folder at this moment. On the loop."""
    mark, point, made_at_ms = kept.folder.mark, kept.point, kept.snapshot_at_ms  # each is replaced as a whole
    end = -1 if point is None else point.offset
    offset, size, as_of_ms = (-1, 0, wall_ms) if mark is None else (mark.offset, mark.size, mark.as_of_ms)
    return FolderStatistics(
        partition=kept.partition,
        state=kept.state,
        offset=offset,
        size_bytes=size,
        gathered_changes=kept.gathered_changes,
        unwritten_bytes=kept.size,
        mark_age_seconds=max(0.0, (wall_ms - as_of_ms) / 1000),
        checkpoint_seconds=kept.checkpoint_seconds,
        snapshot_age_seconds=None if made_at_ms < 0 else max(0.0, (wall_ms - made_at_ms) / 1000),
        recover_seconds=size / load.per_second + max(0, end - offset) / READ_PER_SECOND,
    )
