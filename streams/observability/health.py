"""Health of a source: live (its event loop goes on) and ready (joined, restored, not far behind). From any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from streams.errors import Stopped
from streams.source.event_source import EventSource
from streams.statistics import SourceState, SourceStatistics

PROBE_SECONDS: Final = 0.5
"""The wait of a probe for the loop's answer: Kubernetes waits for one second."""
SCRAPE_SECONDS: Final = 2.0
"""The wait of a scrape, which has ten."""
_AT_WORK: Final = (SourceState.STARTING, SourceState.RUNNING, SourceState.STOPPING)


class Verdict(NamedTuple):
    """The answer of a probe: status 200 or 503, with its reasons as text."""

    is_good: bool
    text: str

    @classmethod
    def of(cls, verdicts: list[Verdict]) -> Verdict:
        """Join the verdicts: good when all are."""
        return cls(all(verdict.is_good for verdict in verdicts), "\n".join(verdict.text for verdict in verdicts))


class SourceHealth:
    """Health of one source. Any thread; all wait for one call at a time, so a loop that stands still has one call
    waiting, however many ask."""

    def __init__(self, source: EventSource[Any], now: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._now = now
        self._lock = threading.Lock()
        self._looking: concurrent.futures.Future[SourceStatistics] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of that call: one that was closed before never answers
        self._since = 0.0

    def statistics(self, patience_seconds: float = PROBE_SECONDS) -> SourceStatistics | None:
        """Return the statistics of this moment; ``None`` when the event loop does not answer in time."""
        if self._source.state not in _AT_WORK or self._is_on_its_loop():
            return self._source.statistics()
        with self._lock:
            looking = self._looking
            loop = self._source._run.loop
            if looking is None or looking.done() or self._loop is not loop:
                try:
                    looking = self._source.statistics_threadsafe()
                except Stopped:
                    return self._source.statistics()  # no partition is there yet, or any more
                self._looking, self._loop, self._since = looking, loop, self._now()
        try:
            return looking.result(patience_seconds)
        except (TimeoutError, concurrent.futures.CancelledError):
            return None
        except Stopped:
            return self._source.statistics()

    def live(self) -> Verdict:
        """Not live: the source has failed, or its loop has stood still for longer than ``rebalance_timeout_seconds``,
        after which the member leaves its group, and nothing but a restart brings the process back."""
        group, limit = self._source.config.group_id, self._source.config.timeouts.rebalance_timeout_seconds
        if self.statistics() is None and (still := self._now() - self._since) > limit:
            return Verdict(False, f"{group}: the event loop has stood still for {still:.0f} s")
        if self._source.state is SourceState.FAILED:
            return Verdict(False, f"{group}: the source has failed")
        return Verdict(True, f"{group}: live")

    def ready(self, max_lag: int | None, max_lag_seconds: float | None = None) -> Verdict:
        """Not ready: it is not running, not in its group, its state is being restored, or a partition is more than
        ``max_lag`` records, or ``max_lag_seconds``, behind."""
        statistics = self.statistics()
        group = self._source.config.group_id
        reason = (
            "the event loop does not answer" if statistics is None else _unready(statistics, max_lag, max_lag_seconds)
        )
        return Verdict(not reason, f"{group}: {reason or 'ready'}")

    def _is_on_its_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._source._run.loop
        except RuntimeError:
            return False


def _unready(statistics: SourceStatistics, max_lag: int | None, max_lag_seconds: float | None) -> str:
    """Return the reason why a source is not ready; empty: it is."""
    if statistics.state is not SourceState.RUNNING:
        return f"the source is {statistics.state.value}"
    if statistics.generation < 0:
        return "it is not in its group yet"
    restoring = {copy.partition for copy in statistics.copies if copy.state == "restoring"}
    restoring |= {each.partition for each in statistics.partitions if each.state in ("restoring", "restarting")}
    if restoring:
        return f"the state of partitions {', '.join(map(str, sorted(restoring)))} is being restored"
    if statistics.registry_waiting:
        return f"partitions {', '.join(map(str, statistics.registry_waiting))} wait for the schema registry"
    behind = [f"{each.partition} ({each.lag})" for each in statistics.partitions
              if max_lag is not None and (each.lag or 0) > max_lag]  # fmt: skip
    if behind:
        return f"partitions are more than {max_lag} records behind: {', '.join(behind)}"
    late = [
        f"{each.partition} ({seconds:.1f} in {topic})"
        for each in statistics.partitions
        for topic, seconds in each.lag_seconds.items()
        if max_lag_seconds is not None and seconds > max_lag_seconds
    ]
    return f"partitions are more than {max_lag_seconds:g} s behind: {', '.join(late)}" if late else ""
