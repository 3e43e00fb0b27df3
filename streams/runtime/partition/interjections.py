"""Work without an input record that takes a place in a partition's order and transaction: scheduled, or requested."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from streams.core.cron import AnySchedule
from streams.core.router import Route
from streams.core.schedule import Schedule
from streams.core.transaction import Waiter
from streams.model.tracing import Carrier
from streams.outcomes import Retry


class Proof(enum.Enum):
    """The proof that an interjection without changes needs that its state was current: the group's answer
    to a later heartbeat, to an earlier one that still holds, or a commit that is fenced. A later fenced commit that is
    waited for anyway serves all of them."""

    HEARTBEAT = enum.auto()
    LEASE = enum.auto()
    FENCE = enum.auto()


class Interjection:
    """One run of an interjection. ``waiter`` is called when it is committed, or with the reason why not; scheduled runs
    have none. ``result``: the handler's answer. ``is_unwanted``: its waiter is gone, so it need not begin.
    ``trace``: of its caller. ``proof``: what it needs if it changes nothing."""

    __slots__ = ("is_unwanted", "proof", "result", "route", "trace", "waiter")

    def __init__(
        self, route: Route, waiter: Waiter | None = None, trace: Carrier = (), proof: Proof = Proof.HEARTBEAT
    ) -> None:
        self.route = route
        self.proof = proof
        self.waiter = waiter
        self.trace = trace
        self.result: Any = None
        self.is_unwanted = False

    def done(self, error: BaseException | None) -> None:
        """Call the waiter, if there is one."""
        if self.waiter is not None:
            self.waiter(error)


class StoreRead(Interjection):
    """A turn in which the toolkit itself reads the store. It writes nothing, so it needs neither a unit nor a context.
    The code that makes it obtains the proof. ``waiter``: called with the reason if there is no turn."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], None], waiter: Waiter) -> None:
        super().__init__(_READ, waiter)
        self.read = read


_READ: Final = Route("look", None, lambda: None, blocking=False, policy=Retry())


class Timetable:
    """The due times of the scheduled interjections of one partition that come by an interval."""

    def __init__(self, schedules: Sequence[tuple[AnySchedule, Route]], rng: random.Random) -> None:
        self._schedules = [(each, route) for each, route in schedules if isinstance(each, Schedule)]
        self._rng = rng
        self._beats: list[float] = []
        self._due: list[float] = []
        self._next: float | None = None

    def start(self, now: float) -> None:
        """Begin the schedules: the partition is active from now on."""
        self._beats = [schedule.first(now) for schedule, _ in self._schedules]
        self._due = [
            schedule.due(beat, self._rng) for (schedule, _), beat in zip(self._schedules, self._beats, strict=True)
        ]
        self._next = min(self._due, default=None)

    @property
    def is_empty(self) -> bool:
        """Check for an empty timetable."""
        return self._next is None

    def due(self, now: float) -> Interjection | None:
        """Take the interjection that is due longest, if any; its next run is set."""
        if self._next is None or now < self._next:
            return None
        # The one that is due longest, or a short schedule would keep a long one from its turn.
        number = self._due.index(self._next)
        schedule, route = self._schedules[number]
        self._beats[number] = schedule.following(self._beats[number], now)
        self._due[number] = max(schedule.due(self._beats[number], self._rng), now)
        self._next = min(self._due)
        return Interjection(route)

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until an interjection is due; ``None``: none is scheduled."""
        return None if self._next is None else max(0.0, self._next - now)
