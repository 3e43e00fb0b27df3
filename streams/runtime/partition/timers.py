"""The durable timers of one partition: kept in its changelog, as part of its state. ``due_timers`` fires them.

A timer is set, replaced and removed by a record of the changelog in the transaction of the event that does it, and the
event that it fires as removes it in its own. So any state that is restored from the changelog has exactly the timers
that have not fired, and a timer's effects are there if and only if it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from streams.core.origin import Origin
from streams.core.router import Router
from streams.core.timers import Timer, Timers
from streams.core.visits import TIMER_PREFIX as VISIT_PREFIX
from streams.records import Change
from streams.runtime.changelog import encode_timer, timer_key
from streams.runtime.partition.joined_rows import JoinedRows
from streams.runtime.ports import LookupTables
from streams.settings.config import EventSourceConfig


class TimerHost(Protocol):
    """The part of ``host.Host`` that timers need."""

    @property
    def config(self) -> EventSourceConfig: ...
    @property
    def router(self) -> Router: ...
    @property
    def lookups(self) -> LookupTables: ...
    def wall_ms(self) -> int: ...


class PartitionTimers:
    """The timers that the complete events of one partition have set. On the loop; ``now_ms`` and ``name in timers``
    also on the thread of a handler that runs."""

    def __init__(self, host: TimerHost) -> None:
        self._host = host
        self._timers = Timers()
        self.joined = JoinedRows()
        """The rows of the partition's joined tables: what an event has of its partition from its turn on, as timers."""
        self.timeless: frozenset[str] = frozenset()
        """The inputs whose events move no time (``InputSpec.moves_time``)."""
        self.visits: dict[str, Timer] = {}
        """The states of visits, by the names of their timers (``core.visits``): kept as timers, and never due."""

    def __bool__(self) -> bool:
        return bool(self.visits) or len(self._timers) > 0

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, name: str) -> bool:
        return name in self._timers

    def __iter__(self) -> Iterator[Timer]:
        return iter(self._timers)

    def restore(self, timers: Iterable[Timer]) -> None:
        """Begin with the timers of a restored state."""
        found = list(timers)
        self.visits = {timer.name: timer for timer in found if timer.name.startswith(VISIT_PREFIX)}
        # In place of all that is here, which may have timers of events that were never committed.
        self._timers = Timers(timer for timer in found if timer.name not in self.visits)

    def contents(self) -> dict[str, Timer]:
        """Return all of them, by name, and the states of visits."""
        return {timer.name: timer for timer in self._timers} | self.visits

    def first(self) -> Timer | None:
        """Return the one that is due first."""
        return self._timers.first()

    @property
    def next_due_ms(self) -> int | None:
        """The due time of the first timer, in milliseconds since the epoch."""
        first = self._timers.first()
        return None if first is None else first.due_ms

    def now_ms(self) -> int:
        """The time of day, in milliseconds since the epoch."""
        return self._host.wall_ms()

    @property
    def config(self) -> EventSourceConfig:
        """The source's settings."""
        return self._host.config

    @property
    def source_topic(self) -> str:
        """The topic of the source's first input."""
        return self._host.config.topic

    @property
    def lookups(self) -> LookupTables:
        """The tables of the source's lookups."""
        return self._host.lookups

    @property
    def router(self) -> Router:
        """The routes of the event types that a timer may carry."""
        return self._host.router

    def admitted(self, changes: dict[str, Timer | None], origin: Origin) -> list[Change]:
        """Set and remove the timers of an event that is complete. Returns the changes for its transaction."""
        others = changes
        if self._host.config.visits:
            visits = {name: timer for name, timer in changes.items() if timer and name.startswith(VISIT_PREFIX)}
            self.visits |= visits
            others = {name: timer for name, timer in changes.items() if name not in visits}
        self._timers.apply(others)
        # Removals as well, in the event's own transaction: without them a restored state would fire a timer again.
        return [
            Change(timer_key(name), None if timer is None else encode_timer(timer), origin=origin)
            for name, timer in changes.items()
        ]
