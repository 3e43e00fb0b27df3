"""Facts of one member: its statistics, its commit times, or why there are none."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

import msgspec

from streams.metrics import Measurement, TransactionSettled
from streams.observability.health import SourceHealth
from streams.source.event_source import EventSource
from streams.statistics import SourceStatistics

COMMITS: Final = 512
"""The last transactions, of which commit times are shown."""
READ_SECONDS: Final = 0.7
"""The wait for a member's own loop."""


class CommitTimes(msgspec.Struct, frozen=True):
    """The last transactions of a member: how many, how many of them were aborted, and the seconds from the seal to the
    end of half of them, of 99 of 100, and of the slowest."""

    transactions: int = 0
    aborted: int = 0
    half_seconds: float = 0.0
    most_seconds: float = 0.0
    longest_seconds: float = 0.0


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One member's own facts. Without ``statistics`` it does not answer, and ``problem`` says why. ``starts``: of a
    worker of ``kes run``; 0 for a member that runs in this process."""

    name: str
    problem: str = ""
    starts: int = 0
    statistics: SourceStatistics | None = None
    commits: CommitTimes = CommitTimes()


class Members(Protocol):
    """The members whose own facts are within reach."""

    async def read(self) -> tuple[MemberFacts, ...]:
        """Return the facts of this moment, in a second at most."""
        ...


class SourceFacts:
    """Facts of a source in this process. Make it before the source starts; ``read`` from any thread but its loop's."""

    def __init__(self, source: EventSource[Any]) -> None:
        self._source = source
        self._health = SourceHealth(source)
        self._commits: deque[tuple[bool, float]] = deque(maxlen=COMMITS)  # written on the loop, copied by readers
        source.add_metrics_handler(self._measured)

    def read(self) -> MemberFacts:
        """Return the facts of this moment; waits for the loop of the source for ``READ_SECONDS`` at most."""
        statistics = self._health.statistics(READ_SECONDS)
        name = self._source.config.instance_id or "this process"
        if statistics is None:
            return MemberFacts(name=name, problem="its event loop does not answer", commits=self._times())
        return MemberFacts(name=statistics.instance_id or name, statistics=statistics, commits=self._times())

    def _measured(self, measurement: Measurement) -> None:
        if type(measurement) is TransactionSettled:
            self._commits.append((measurement.committed, measurement.commit_seconds))

    def _times(self) -> CommitTimes:
        commits = self._commits.copy()
        if not commits:
            return CommitTimes()
        seconds = sorted(each for _, each in commits)
        count = len(seconds)
        aborted = sum(not committed for committed, _ in commits)
        return CommitTimes(count, aborted, seconds[count // 2], seconds[count * 99 // 100], seconds[-1])
