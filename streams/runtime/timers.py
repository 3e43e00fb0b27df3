"""The durable timers of one partition at work: kept in its changelog, fired between two turns.

A timer is set, replaced and removed by a record of the changelog in the transaction of the event that does it, and the
event that it fires as removes it in its own. So whatever is restored from the changelog has exactly the timers that
have not fired, and a timer's effects are there if and only if it is not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from streams.core.router import Route, Router
from streams.core.timers import Timer, Timers
from streams.records import TYPE_HEADER, VERSION_HEADER, Change, Headers, IncomingRecord
from streams.runtime.changelog import encode_timer, timer_key

if TYPE_CHECKING:
    from streams.runtime.attempts import Handle
    from streams.runtime.host import Host
    from streams.runtime.partition_worker import PartitionWorker

_log = logging.getLogger(__name__)

AT_ONCE: Final = 32
"""Timers that fire between two turns, at most: events have their turns, too."""
LONGEST_SECONDS: Final = 0.005
"""No further one fires between two turns after so long."""
LONGEST_WAIT_SECONDS: Final = 1.0
"""Between two looks at the time of day while timers are set: somebody may set the clock."""


class PartitionTimers:
    """The timers of one worker's partition: those of all events that were admitted. On the loop; ``now_ms`` and
    ``name in timers`` also on the thread of a handler that runs."""

    def __init__(self, worker: PartitionWorker) -> None:
        self._worker = worker
        self._host: Host = worker.engine
        self._timers = Timers()

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, name: str) -> bool:
        return name in self._timers

    def __iter__(self) -> Iterator[Timer]:
        return iter(self._timers)

    def restore(self, timers: Iterable[Timer]) -> None:
        """Begin with these."""
        self._timers = Timers(timers)

    def contents(self) -> dict[str, Timer]:
        """All of them, by name."""
        return {timer.name: timer for timer in self._timers}

    @property
    def next_due_ms(self) -> int | None:
        """When the first one is due, in milliseconds since the epoch."""
        first = self._timers.first()
        return None if first is None else first.due_ms

    def now_ms(self) -> int:
        """The time of day, in milliseconds since the epoch."""
        return self._host.wall_ms()

    @property
    def router(self) -> Router:
        """Who handles what."""
        return self._host.router

    def admitted(self, changes: dict[str, Timer | None], origin: int) -> list[Change]:
        """The event ``origin``, which sets and removes these, is complete. Returns what belongs into its
        transaction."""
        self._timers.apply(changes)
        return [
            Change(timer_key(name), None if timer is None else encode_timer(timer), origin=origin)
            for name, timer in changes.items()
        ]

    # -- firing --------------------------------------------------------------------------------------------------------

    def seconds_to_next(self) -> float | None:
        """How long until the time should be looked at again; ``None``: nothing is set."""
        due_ms = self.next_due_ms
        if due_ms is None or not self._host.fires_timers:
            return None
        return min(max(0.0, (due_ms - self.now_ms()) / 1000), LONGEST_WAIT_SECONDS)

    async def run_due(self) -> bool:
        """Fire those that are due, the oldest first, as many as there is time for between two turns. Tells whether
        there was any. Raises as ``PartitionWorker.run``."""
        first = self._timers.first()
        if first is None or first.due_ms > self.now_ms() or not self._host.fires_timers:
            return False
        now, began = self._host.now, self._host.now()
        for _ in range(AT_ONCE):
            await self._fire(first)
            if self._worker.is_closing or now() - began > LONGEST_SECONDS:
                break
            first = self._timers.first()
            if first is None or first.due_ms > self.now_ms():
                break
        return True

    async def _fire(self, timer: Timer) -> None:
        worker, attempts = self._worker, self._worker.attempts
        where = f"timer {timer.name!r} of {worker.topic_partition}"
        record = as_record(timer, worker)
        route, event, unreadable = attempts.read(record, where)
        if unreadable is None:
            assert route is not None
            await attempts.persist(record, route, self._handle(route, event, record), 0, None, timer=timer)
        else:
            attempts.is_known(timer.origin)
            await attempts.last_word(record, None, self._host.config.decode_policy, unreadable, 1, timer)

    def _handle(self, route: Route, event: Any, record: IncomingRecord) -> Handle:
        """What a timer's event does with its context: all of it in its turn, also what could run ahead."""
        handler, ahead = route.handler, route.ahead
        if ahead is None:
            return lambda ctx: handler(ctx, event)
        in_turn = getattr(self._host.stages.get(ahead.stage), "in_turn", None)
        if in_turn is None:  # a concurrent handler, for which it is the turn already
            return lambda ctx: handler(ctx, event)
        return lambda ctx: in_turn(ctx, ahead.plan(record, event))


def as_record(timer: Timer, worker: PartitionWorker) -> IncomingRecord:
    """The timer's event as a record of its partition, without an offset (-1); its time is when it is due."""
    headers: Headers = [(TYPE_HEADER, timer.type.encode())]
    if timer.version > 1:
        headers.append((VERSION_HEADER, b"%d" % timer.version))
    topic, partition = worker.topic_partition
    return IncomingRecord(topic, partition, -1, timer.key, timer.value, headers, timer.due_ms)
