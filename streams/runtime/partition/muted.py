"""The parts of a muted partition, which follows the partition of another source and sends nothing.

Its input waits for the other one's committed positions, and its timers go by the time of its records, never by the
clock. What it sends is dropped by ``transactions.muted_pool``. ``core/following.py`` has the rules.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from streams.core import parking
from streams.core.following import Followed, TimerMark
from streams.core.timers import Timer
from streams.records import IncomingRecord
from streams.runtime.partition.delivery import DeliveredRecords
from streams.runtime.partition.inbox import Inbox
from streams.runtime.partition.timers import PartitionTimers, TimerHost, is_own
from streams.runtime.ports import Input
from streams.runtime.signal import Signal
from streams.settings.config import EventSourceConfig

_OFFSET: Final = attrgetter("offset")
_NOTHING: Final = Followed({})


class FollowingInbox(Inbox):
    """An inbox whose records are here when the other source is behind them; they count as queued before."""

    def __init__(self, config: EventSourceConfig, source: Input, partition: int, wake: Signal) -> None:
        super().__init__(config, source, partition, wake)
        self._cap = 0
        self._waiting: deque[list[IncomingRecord]] = deque()

    def add(self, records: list[IncomingRecord], size: int, short: int = 0) -> None:
        """See ``Inbox.add``; no batch takes in others."""
        super().add(records, size)
        self._waiting.append(self._batches.pop())
        self.open_to(self._cap)

    def open_to(self, cap: int) -> None:
        """Let the records below an offset in."""
        self._cap, waiting = cap, self._waiting
        while waiting and waiting[0][0].offset < cap:
            records = waiting.popleft()
            stop = bisect_left(records, cap, key=_OFFSET)
            if stop < len(records):
                waiting.appendleft(records[stop:])
            self._batches.append(records[:stop])
        self.wake()

    def oldest(self, offset: int) -> IncomingRecord | None:
        """See ``Inbox.oldest``."""
        return super().oldest(offset) or (self._waiting[0][0] if self._waiting else None)


class QueuedRecords(DeliveredRecords):
    """Deliveries that are always queued: nothing is handled before the inbox lets it in."""

    def take(self, records: list[IncomingRecord], size: int, most: int) -> int:
        self._inbox.add(records, size)
        return 0


class TimerIsDue(Exception):
    """A timer is due in front of this event: the slice ends before it. No failure of it."""


class MutedTimers(PartitionTimers):
    """The timers of a muted partition. Plain ones are aside, so none is due by the clock; ``due`` finds them."""

    is_muted = True

    def __init__(self, host: TimerHost) -> None:
        super().__init__(host)
        self.followed = _NOTHING
        self._by_due: list[tuple[int, str]] = []
        self._theirs: set[str] = set()  # due here, and not fired by the other source yet
        self._queued: set[str] = set()  # behind a parked key, whose queue has them
        self._time_ms: int | None = None
        self.ends_slice = False
        """A slice is under way: it ends in front of an event that a timer comes before."""

    def now_ms(self) -> int:
        """The time of the event that is handled: what it sets is due as far behind it as in the other source."""
        wall_ms = super().now_ms()
        return wall_ms if self._time_ms is None else min(self._time_ms, wall_ms)

    def by_clock(self) -> None:
        """Go by the clock until the next event: for what is between two."""
        self._time_ms = None

    def at(self, inner: Callable[[Any], None] | None) -> Callable[[Any], None]:
        """Return the ``before_event`` that tells the time of events; ``inner``: that of the store."""

        def before_event(ctx: Any) -> None:
            records = ctx._records
            times = [records[-1].timestamp_ms] if records else [] if ctx.timer is None else [ctx.timer.due_ms]
            self._time_ms = next((time_ms for time_ms in times if time_ms > 0), None)
            if self.ends_slice and self._by_due and ctx.input is not None and self._by_due[0][0] <= times[0]:
                raise TimerIsDue
            if inner is not None:
                inner(ctx)

        return before_event

    def due(self, time_ms: int) -> Timer | None:
        """Return the first plain timer that a record of this time has reached, if the other source has it no more."""
        while self._by_due and self._by_due[0][0] <= time_ms:
            due_ms, name = self._by_due[0]
            timer = self.get(name)
            if timer is not None and timer.due_ms == due_ms and name not in self._queued:
                if not self.followed.has(name, TimerMark(due_ms, timer.by)):
                    return timer
                self._theirs.add(name)
            heapq.heappop(self._by_due)
        return None

    def learned(self, names: Iterable[str]) -> None:
        """Look at these timers again: the other source has set them anew, or has them no more."""
        for name in self._theirs.intersection(names):
            self._theirs.remove(name)
            if (timer := self.get(name)) is not None:
                heapq.heappush(self._by_due, (timer.due_ms, name))

    def restore(self, timers: Iterable[Timer]) -> None:
        """See ``PartitionTimers.restore``."""
        self._by_due, self._queued = [], set()
        super().restore(timers)
        self._keep_aside(self)

    def _apply(self, changes: Mapping[str, Timer | None]) -> None:
        self._queued.difference_update(changes)
        super()._apply(changes)
        self._keep_aside(timer for timer in changes.values() if timer is not None)

    def _keep_aside(self, timers: Iterable[Timer]) -> None:
        for timer in timers:
            if not is_own(timer.name):
                self.set_aside(timer.name)
                if timer.name not in self._queued:
                    heapq.heappush(self._by_due, (timer.due_ms, timer.name))

    def _keep_from_firing(self, queued: parking.Queued) -> None:
        super()._keep_from_firing(queued)
        if queued.is_timer:
            self._queued.add(queued.topic)
