"""Holding the intake while the state of tables on an engine cannot be written: it is too large to wait in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from streams.errors import StreamsError
from streams.runtime.keeping.folders.parents import room_at
from streams.runtime.keeping.kept_partition import KeptPartition

CHECKS: Final = 16
"""So many looks at what waits come while as much is gathered as may wait. One for each transaction would cost more."""
HOLD_SECONDS: Final = 60.0
"""The intake is held for so many seconds for a disk that takes nothing. Then the source stops."""


class Intake:
    """Holds the intake above ``most`` bytes, until half of them are left. On the loop."""

    def __init__(
        self, most: int, now: Callable[[], float], hold: Callable[[bool], None], fail: Callable[[BaseException], None]
    ) -> None:
        """``hold(True)``: take no more events meanwhile. ``fail`` stops the source."""
        self._most, self._now, self._hold, self._fail = most, now, hold, fail
        self._held_since: float | None = None
        self._grown = 0  # since the last check

    def grew(self, size: int, kept: KeptPartition) -> bool:
        """Count what was gathered for a partition; ``True``: it is time for a check."""
        self._grown += size if kept.needs_disk else 0
        return self._grown > self._most // CHECKS

    def check(self, waiting: Sequence[KeptPartition]) -> None:
        """Hold it, let it go, or stop the source, by what waits to be written for these partitions."""
        self._grown = 0
        unwritten = sum([kept.size for kept in waiting])
        if self._held_since is None:
            if unwritten > self._most:
                self._held_since = self._now()
                self._hold(True)
        # The intake does not go on at the bound itself: each transaction would turn it off and on there.
        elif unwritten <= self._most // 2:
            self._held_since = None
            self._hold(False)
        elif self._now() - self._held_since > HOLD_SECONDS:
            folder = max(waiting, key=lambda kept: kept.size).folder
            how = f"{unwritten} bytes wait to be written, for more than {HOLD_SECONDS:g} s"
            advice = "give StateConfig.folder a disk with room; nothing that is committed is lost"
            self._fail(StreamsError(f"{folder.path}: {how} ({room_at(folder.path)}): {advice}"))
