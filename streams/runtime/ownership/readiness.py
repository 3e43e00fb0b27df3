"""Log lines about partitions that come to work: the progress of their restore, its end, and that they are ready."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Final

from streams.clients.group_wire import ranges
from streams.core.partition import PartitionState
from streams.runtime.member import Member
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.replicas import Replicas

_log = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 5.0
GATHER_SECONDS: Final = 1.0


class Readiness:
    """The lines of one run. On the loop. ``records`` of the changelog are in the states that were taken over."""

    def __init__(self, member: Member, partitions: Partitions, replicas: Replicas) -> None:
        self._member, self._config = member, member.config
        self._partitions, self._replicas = partitions, replicas
        self.records = 0

    async def run(self) -> None:
        """Log until cancelled: a line for all partitions that are restored together, and one when they are at work."""
        member, config = self._member, self._config
        begun = set[int]()  # those that are restored, or were a moment ago
        ready = frozenset[int]()
        began, told, records, due = 0.0, 0.0, 0, math.inf
        while True:
            now, restoring = member.now(), self._partitions.restoring
            working = frozenset(n for n, worker in member.workers.items() if worker.state is PartitionState.ACTIVE)
            if restoring and not begun:
                began = told = now
            begun |= restoring
            if restoring and now - told >= PROGRESS_SECONDS:
                told = now
                self._log_progress(restoring, now - began)
            if not restoring and begun & working:
                read, records = self.records - records, self.records
                text = "restored partitions %s: %s records of %s, %.1f s"
                _log.info(text, ranges(begun & working), f"{read:,}", config.changelog, now - began)
                due = now
            elif working - ready:
                due = min(due, now + GATHER_SECONDS)  # others may be handed over to here in this second
            if not restoring:
                begun.clear()
                ready = working
                if now >= due and working:
                    text = "ready: partitions %s of %s are at work, of %d"
                    _log.info(text, ranges(working), config.topic, config.num_partitions)
                due = due if now < due else math.inf
            next_line = told + PROGRESS_SECONDS if restoring else due
            await self._partitions.changed.wait(None if next_line == math.inf else max(next_line - now, 0.0))

    def _log_progress(self, restoring: Collection[int], seconds: float) -> None:
        copies = [copy for copy in self._replicas.statistics() if copy.partition in restoring]
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
