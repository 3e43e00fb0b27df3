"""The line of a partition: events whose work runs ahead of their turn, in the order of their offsets.

Work ahead of the turn (*jobs*) knows neither store nor context, so it may end in any order. What touches the store and
sends (*finalizers*, and the handlers of events that came in behind) runs at an event's turn: in the partition's order,
one at a time, like any handler. So what is admitted is always a completed prefix, the store sees events in the order of
their offsets whatever the jobs do, and a replay comes to the same results.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from streams.core.router import Route
from streams.records import IncomingRecord
from streams.runtime.event_context import EventContext

Finish = Callable[[EventContext[Any]], Any]
"""What an event does at its turn. May be asynchronous."""


class Entry:
    """One event in the line.

    A stage gets it with ``work`` (what the stage planned for the event), and ends it by ``settle`` or ``fail``, once.
    ``begun`` tells that its work has side effects by now; ``cancel``, set by the stage, stops what still runs for it.
    """

    __slots__ = (
        "_wake",
        "attempts",
        "begun",
        "cancel",
        "context",
        "error",
        "event",
        "finish",
        "is_settled",
        "lane",
        "record",
        "route",
        "work",
    )

    def __init__(
        self, lane: int, record: IncomingRecord, route: Route | None, event: Any, wake: Callable[[], None]
    ) -> None:
        self.lane = lane
        self.record = record
        self.route = route
        self.event = event
        self.work: Any = None
        self.begun = False
        self.cancel: Callable[[], None] | None = None
        self.is_settled = False
        self.finish: Finish | None = None
        self.context: EventContext[Any] | None = None
        self.error: BaseException | None = None
        self.attempts = 0
        self._wake = wake

    def settle(self, finish: Finish | None, context: EventContext[Any] | None = None, attempts: int = 0) -> None:
        """The work is done (``attempts`` failed before): ``finish`` is called at the event's turn, first with
        ``context`` if there is one. ``None``: run the route's handler, from the bytes on."""
        if not self.is_settled:
            self.is_settled = self.begun = True
            self.finish, self.context, self.attempts = finish, context, attempts
            self._wake()

    def fail(self, error: BaseException, attempts: int) -> None:
        """The work failed for good after so many attempts: at its turn the event goes to its policy's last word."""
        if not self.is_settled:
            self.is_settled = self.begun = True
            self.error, self.attempts = error, attempts
            self._wake()

    def wake(self) -> None:
        """Something that the entry waited for may be there: look again."""
        self._wake()

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but the route's handler to run, from the bytes on."""
        return self.is_settled and self.finish is None and self.error is None

    def drop(self) -> None:
        """Nobody waits for it any more: its turn is over, or its partition is given up."""
        self.is_settled = True
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            cancel()


class Line:
    """The entries of one partition."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_ready(self) -> bool:
        """Whether the first one's turn has come."""
        return bool(self._entries) and self._entries[0].is_settled

    def append(self, entry: Entry) -> None:
        """Behind all others."""
        self._entries.append(entry)

    @property
    def first(self) -> Entry:
        """Whose turn is next."""
        return self._entries[0]

    def leave(self, count: int) -> None:
        """So many had their turn."""
        for _ in range(count):
            self._entries.popleft()

    def plain(self, most: int) -> list[Entry]:
        """The first ones, as long as they are plain; at most ``most``."""
        return list(itertools.takewhile(lambda entry: entry.is_plain, itertools.islice(self._entries, most)))

    def cut(self) -> None:
        """Nothing new begins: drop the first entry whose work has not begun, and all behind it; and what would be the
        last but for a handler that has not begun either."""
        kept: deque[Entry] = deque()
        while self._entries and self._entries[0].begun:
            kept.append(self._entries.popleft())
        self.drop()
        while kept and kept[-1].is_plain:
            kept.pop()
        self._entries = kept

    def drop(self) -> None:
        """Forget all."""
        entries, self._entries = self._entries, deque()
        for entry in entries:
            entry.drop()
