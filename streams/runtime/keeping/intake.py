"""Holding the intake while the state of tables on an engine cannot be written: it is too large to wait in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from streams.errors import StreamsError
from streams.runtime.keeping.figures import room_at

if TYPE_CHECKING:
    from streams.runtime.keeping.keeper import KeptPartition

LOOKS: Final = 16
"""At what waits, while as much is gathered as may wait: so not after each transaction."""
HOLD_SECONDS: Final = 60.0
"""For which the intake is held for a disk that takes nothing; then the source stops."""


class KeeperHost(Protocol):
    """The engine of the source, as its keeper uses it. On the loop."""

    def renew_offset(self, partition: int) -> None: ...  # send the offset record again: tombstones will be gone
    def at_work(self, partition: int) -> KeptPartition | None: ...  # None: not worked on here
    def hold_intake(self, is_held: bool) -> None: ...  # take no more events meanwhile
    def begin_anew(self, kept: KeptPartition) -> None: ...  # its folder cannot be used any more
    def fail(self, error: BaseException) -> None: ...  # stop the source


class Intake:
    """Holds the intake above ``most`` bytes, until half of them are left. On the loop."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most, self._now = most, now
        self._held_since: float | None = None
        self._grown = 0  # since the last look

    def grew(self, size: int, kept: KeptPartition) -> bool:
        """Count what was gathered for a partition; ``True``: it is time for a look."""
        self._grown += size if kept.needs_disk else 0
        return self._grown > self._most // LOOKS

    def look(self, host: KeeperHost, waiting: Sequence[KeptPartition]) -> None:
        """Hold it, let it go, or stop the source, by what waits to be written for these partitions."""
        self._grown = 0
        unwritten = sum([kept.size for kept in waiting])
        if self._held_since is None:
            if unwritten > self._most:
                self._held_since = self._now()
                host.hold_intake(True)
        elif unwritten <= self._most // 2:
            self._held_since = None
            host.hold_intake(False)
        elif self._now() - self._held_since > HOLD_SECONDS:
            folder = max(waiting, key=lambda kept: kept.size).folder
            how = f"{unwritten} bytes wait to be written, for more than {HOLD_SECONDS:g} s"
            advice = "give StateConfig.folder a disk with room; nothing that is committed is lost"
            host.fail(StreamsError(f"{folder.path}: {how} ({room_at(folder.path)}): {advice}"))
