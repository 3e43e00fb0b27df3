"""The reorder buffer of a partition: events whose work runs ahead of their turn, in the order of their offsets.

Work ahead of the turn (*jobs*) knows neither store nor context, so it may end in any order. Code that touches the store
and sends (*finalizers*, and the handlers of events that came in behind) runs at an event's turn: in the partition's
order, one at a time, like any handler. So the admitted events are always a completed prefix, the store sees events in
the order of their offsets whatever the jobs do, and a replay comes to the same results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Any, Protocol

from streams.core.origin import Origin
from streams.core.router import Route
from streams.model.tracing import EventSpan
from streams.records import IncomingRecord
from streams.runtime.partition.event_context import EventContext

Finish = Callable[[EventContext[Any]], Any]
"""The function of an event at its turn. May be asynchronous."""


class Work(Protocol):
    """The work of a stage for an entry."""

    def withdraw(self) -> None:
        """Stop the running work of an entry that is not wanted any more, or whose turn is over."""
        ...


class WaitingContext(EventContext[Any]):
    """The context of a handler that runs in a task of its own."""

    _task: asyncio.Task[Any] | None = None
    _has_turn: bool = False
    _at: Origin | None = None
    """The origin of the first event in a parked key's queue; ``None``: it is that of its record."""

    @property
    def _origin(self) -> Origin:
        return super()._origin if self._at is None else self._at


class Waiting(Work, Protocol):
    """A handler that runs already, and has come to the point where it waits for its turn, or to its end."""

    @property
    def context(self) -> WaitingContext: ...

    @property
    def error(self) -> BaseException | None:
        """The error of a handler that has ended; ``None``: it has completed."""
        ...

    def arrive(self, ended: Callable[[BaseException | None], None]) -> bool:
        """Give the handler its turn. ``True``: the handler has ended already. Else it goes on as soon as the loop runs
        it, and ``ended`` is called when it has ended, by its own task."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Check that the handler waits for its turn, and has not been roused."""
        ...

    def rouse(self) -> None:
        """Wake the handler ahead of its turn, which may come at once. It is no turn yet."""
        ...


class Entry:
    """One event in the reorder buffer.

    A stage gets it with ``plan`` (of the event's planner), and ends it by ``settle`` or ``fail``, once. ``begun``: its
    work has side effects by now; ``work``, set by the stage, is withdrawn when the entry is not wanted any more.
    """

    __slots__ = (
        "attempts",
        "begun",
        "buffer",
        "digest",
        "error",
        "event",
        "finish",
        "is_given_up",
        "is_settled",
        "lane",
        "plan",
        "record",
        "route",
        "trace",
        "waiting",
        "work",
    )

    def __init__(
        self, lane: Hashable, record: IncomingRecord, route: Route | None, event: Any, buffer: ReorderBuffer
    ) -> None:
        self.lane = lane
        self.record = record
        self.route = route
        self.event = event
        self.buffer = buffer
        self.plan: Any = None
        self.digest: bytes | None = None  # of its id, if its events are handled once
        self.begun = False
        self.work: Work | None = None
        self.trace: EventSpan | None = None  # ends with the entry
        self.is_settled = self.is_given_up = False
        self.finish: Finish | None = None
        self.waiting: Waiting | None = None
        self.error: BaseException | None = None
        self.attempts = 0

    def settle(self, finish: Finish | None, waiting: Waiting | None = None, attempts: int = 0) -> None:
        """Settle the entry: its work is done (``attempts`` failed before), ``finish`` is called at the event's turn.
        With a handler that is ``waiting``, it goes on, and ``finish`` is for the attempts after it. ``None``: run the
        route's handler, from the bytes on."""
        if not self.is_settled:
            self.is_settled = self.begun = True
            self.finish, self.waiting, self.attempts = finish, waiting, attempts
            self._settled()

    def fail(self, error: BaseException, attempts: int) -> None:
        """Fail the entry: its work failed for good after so many attempts. At its turn the event goes to its error
        policy."""
        if not self.is_settled:
            self.is_settled = self.begun = True
            self.error, self.attempts = error, attempts
            self._settled()

    def _settled(self) -> None:
        entries = self.buffer.entries
        # All others wait for the first one anyway: their partition need not be woken.
        if entries and entries[0] is self:
            self.buffer.wake()

    @property
    def is_plain(self) -> bool:
        """Check that only the route's handler is to run, from the bytes on."""
        return self.is_settled and self.finish is None and self.error is None and not self.is_given_up

    def give_up(self) -> None:
        """Give up the work of an event whose key is parked: it is done again when the event is the first in its key's
        queue. At its turn the event goes there."""
        self.drop()
        self.begun = self.is_given_up = True  # ``begun``: what stands behind it may have begun
        self.finish = self.waiting = self.error = self.trace = None

    def drop(self) -> None:
        """Withdraw the work: the entry's turn is over, or its partition is given up."""
        self.is_settled = True  # first: what the withdrawal ends must not settle it any more
        self.withdraw()
        if self.trace is not None:
            self.trace.end()

    def withdraw(self) -> None:
        """Withdraw the work: if anything of it still runs, that is cancelled."""
        work, self.work = self.work, None
        if work is not None:
            work.withdraw()


class AsideEntry(Entry):
    """An entry that stands in no partition's line: no event waits behind it. Its lane is no partition's either: in that
    of the events it might wait for a key that waits for this turn."""

    __slots__ = ()


class ReorderBuffer:
    """The ``entries`` of one partition, in their order. ``wake`` is called when the first one's turn has come, and when
    there may be room for one that found none."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def is_ready(self) -> bool:
        """Check whether the first entry's turn has come."""
        return bool(self.entries) and self.entries[0].is_settled

    @property
    def first(self) -> Entry:
        """Return the entry whose turn is next."""
        return self.entries[0]

    def leave(self, count: int = 1) -> None:
        """Remove the first ``count`` entries: they had their turn."""
        for _ in range(count):
            self.entries.popleft()

    def give_up(self, key: bytes | None) -> None:
        """Give up the work of all events of a key that is parked now."""
        # From the end: an earlier one may hold the key, and the work of the next would begin.
        for entry in reversed(self.entries):
            if entry.record.key == key and not entry.is_plain:
                entry.give_up()

    def plain(self, most: int) -> list[Entry]:
        """Return the first entries, as long as they are plain; at most ``most``."""
        found = []
        for entry in islice(self.entries, most):
            if not entry.is_plain:
                break
            found.append(entry)
        return found

    def waiting(self, most: int) -> list[Waiting]:
        """Return the handlers behind the first one that wait for their turn, without a gap; at most ``most``."""
        found = []
        for entry in islice(self.entries, 1, most + 1):
            if entry.waiting is None:
                break
            found.append(entry.waiting)
        return found

    def cut(self) -> None:
        """Begin no new work: drop the first entry whose work has not begun, and all behind it; then also entries at the
        end whose handler has not begun either."""
        kept: deque[Entry] = deque()
        # What has begun may have effects outside: left to the next owner, it would be done twice without need.
        while self.entries and self.entries[0].begun:
            kept.append(self.entries.popleft())
        self.drop()
        # Nothing of these has run: the next owner handles them.
        while kept and kept[-1].is_plain:
            kept.pop()
        self.entries = kept

    def drop(self) -> None:
        """Drop all entries."""
        entries, self.entries = self.entries, deque()
        for entry in entries:
            entry.drop()
