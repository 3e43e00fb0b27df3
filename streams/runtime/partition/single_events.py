"""Events that are handled one at a time: each to its end, or held until it finds room in its key's queue."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from streams.errors import EventFailure
from streams.records import IncomingRecord
from streams.runtime.partition.execution import Execution
from streams.runtime.partition.host import Host
from streams.runtime.partition.parked_events import NoRoom
from streams.runtime.partition.state import Partition

_log = logging.getLogger(__name__)


class SingleEvents:
    """The events of one partition that are not plain, or whose first attempt has failed. On its task. ``between`` runs
    what has its place between two events, and returns whether there was any; ``wait`` waits for more.

    ``full``: the setting of ``ParkingConfig`` whose bound holds up the partition now.
    """

    def __init__(
        self,
        partition: Partition,
        host: Host,
        execution: Execution,
        between: Callable[[], Awaitable[bool]],
        wait: Callable[[], Awaitable[None]],
    ) -> None:
        self._partition = partition
        self._host = host
        self._execution = execution
        self._between = between
        self._wait = wait
        self.full = ""

    async def one(self, record: IncomingRecord, failure: BaseException | None, full: NoRoom | None = None) -> int:
        """Handle an event, and return 1; ``failure``: of its first attempt, if that was made, ``full``: if it ended for
        lack of room. 0: it finds none, and the partition is closing, so the next owner handles it. Raises as
        ``PartitionWorker.run``."""
        while full is None or await self._until_room(full):
            try:
                await self._attempt(record, failure)
                self._partition.last_handled = record, self._host.now()
                return 1
            except NoRoom as error:
                full, failure = error, None
        return 0

    async def _attempt(self, record: IncomingRecord, failure: BaseException | None) -> None:
        if self._host.router.tracer is None:
            await self._execution.one(record, failure)
        else:
            with self._execution.traced(record):
                await self._execution.one(record, failure)

    async def _until_room(self, full: NoRoom) -> bool:
        """Hold the line: the partition's heads, timers and interjections go on, its events wait. ``False``: the
        partition is closing."""
        partition, events = self._partition, self._execution.parked_events
        where = f"{partition.topic_partition}@{full.queued.offset}"
        if self._host.config.parking.when_full == "stop":
            raise EventFailure(f"{where}: {full}; the source stops (when_full), and the next start meets it again")
        if full.failure is not None:  # it is not attempted again when there is room, but parked
            partition.failures.expect_again(full.queued.offset, full.failure)
        _log.warning("%s: %s; the partition waits until there is room", where, full)
        self.full = full.setting
        while not partition.is_closing and events.setting_without_room(full.queued):
            if not await self._between():
                await self._wait()
        self.full = ""
        return not partition.is_closing
