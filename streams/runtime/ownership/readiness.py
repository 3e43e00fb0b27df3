"""Log lines about partitions that come to work: the progress of their restore, its end, and that they are ready."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import Final

from streams.core.partition import PartitionState
from streams.kafka.wire.group_bytes import ranges
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.replicas import Replicas
from streams.settings.config import EventSourceConfig

_log = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 5.0
"""The progress of a restore is logged every so many seconds."""
GATHER_SECONDS: Final = 1.0
"""Partitions that come to work within so many seconds share a line of the log."""


class Readiness:
    """The lines of one run: one for all partitions that are restored together, one when they are at work. On the
    loop."""

    def __init__(
        self, config: EventSourceConfig, partitions: Partitions, replicas: Replicas, now: Callable[[], float]
    ) -> None:
        self._config, self._now = config, now
        self._partitions, self._replicas = partitions, replicas
        self._is_restoring, self._ready = False, frozenset[int]()
        self._began, self._told, self._due = 0.0, 0.0, math.inf

    def report(self) -> None:
        """Log the news since the last call. It is to be called at least once a second."""
        now, config, restoring = self._now(), self._config, self._partitions.restoring
        workers = self._partitions.workers.items()
        working = frozenset(number for number, worker in workers if worker.state is PartitionState.ACTIVE)
        # Some partitions may work already. They are not reported yet: one line names all of them at the end.
        if restoring:
            if not self._is_restoring:
                self._is_restoring, self._began, self._told = True, now, now
            if now - self._told >= PROGRESS_SECONDS:
                self._told = now
                self._log_progress(restoring, now - self._began)
            return
        self._is_restoring, restored = False, dict(self._partitions.restored)
        self._partitions.restored.clear()
        if restored:
            # The longest time counts, and not the sum: they are restored side by side.
            records, seconds = sum(one[0] for one in restored.values()), max(one[1] for one in restored.values())
            text = "restored partitions %s: %s records of %s, %.1f s"
            _log.info(text, ranges(restored.keys()), f"{records:,}", config.changelog, seconds)
            self._due = now
        elif working - self._ready:
            self._due = min(self._due, now + GATHER_SECONDS)  # others may be handed over to here in this second
        self._ready = working
        if now >= self._due and working:
            self._due = math.inf
            text = "ready: partitions %s of %s are at work, of %d"
            _log.info(text, ranges(working), config.topic, config.num_partitions)

    def _log_progress(self, restoring: Collection[int], seconds: float) -> None:
        copies = [copy for copy in self._replicas.statistics() if copy.partition in restoring]
        # These are offsets, and not records: compaction and markers leave holes, so fewer records come.
        read, left = sum(copy.records for copy in copies), sum(copy.records_left for copy in copies)
        loaded, size = sum(copy.folder_loaded for copy in copies), sum(copy.folder_bytes for copy in copies)
        slowest = max((copy.seconds_left for copy in copies if copy.seconds_left is not None), default=None)
        _log.info(
            "restoring partitions %s for %.0f s: %s records of %s read, %s offsets to go%s%s",
            ranges(restoring),
            seconds,
            f"{read:,}",
            self._config.changelog,
            f"{left:,}",
            f", {100 * loaded // size} % of the folders loaded" if loaded < size else "",
            "" if slowest is None else f", about {slowest:.0f} s left",
        )
