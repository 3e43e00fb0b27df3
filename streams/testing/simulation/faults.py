"""Faults drawn from the seed: the delays of things, and the calls that are struck."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping

import msgspec


class Strike(enum.Enum):
    """A fault of one request."""

    REPLY_LOST = "the effect happens, its answer does not come"
    REQUEST_LOST = "neither"
    HANGS = "the call never returns, whatever its timeout"
    LATE = "the effect happens when no caller waits for it any more"
    ABORTABLE = "the broker answers that the transaction has to be aborted"
    FORGOTTEN = "the group coordinator does not know the member, for this once"
    CUT = "the answer comes; then the connection is cut"
    MOVED = "the leader or the coordinator is another broker by now; no effect"
    MOVED_AFTER = "the leader has it in its log, and is another broker by now"
    NOT_YET = "the broker cannot do it now; no effect"
    UNSURE = "it is in the log of the leader, and perhaps in no other"
    TORN = "the answer comes in two pieces, with time between"
    DOUBLED = "the answer comes twice"
    THROTTLED = "the answer says that the client is to be silent for an hour"


_LOST = (Strike.REPLY_LOST, Strike.REQUEST_LOST, Strike.HANGS, Strike.CUT)
_MOVED = (*_LOST, Strike.LATE, Strike.MOVED)
_STRANGE = (Strike.TORN, Strike.DOUBLED, Strike.THROTTLED)
POSSIBLE: Mapping[str, tuple[Strike, ...]] = {
    "init": _MOVED,
    "flush": (*_MOVED, Strike.ABORTABLE, Strike.NOT_YET, Strike.MOVED_AFTER, Strike.UNSURE),
    "send": (*_MOVED, Strike.ABORTABLE, Strike.NOT_YET, Strike.FORGOTTEN),
    "commit": (*_MOVED, Strike.ABORTABLE),
    "abort": _MOVED,
    "member": (*_MOVED, Strike.NOT_YET, Strike.FORGOTTEN, *_STRANGE),
    "leader": (*_MOVED, Strike.NOT_YET, *_STRANGE),
    "ask": _LOST,
    "tail": (Strike.REQUEST_LOST,),
}
"""Faults of one request, by its kind. ``flush``: what brings records to their leaders; ``send``: offsets to the group's
coordinator; ``member``: to the coordinator of a group, ``leader``: about partitions; ``ask``: everything else that
changes nothing."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Delays of things, and the share of calls that are struck. Times are in seconds."""

    strikes: Mapping[str, float] = {}
    """Share of ``POSSIBLE``'s calls that is struck, until ``calm_at``."""
    calm_at: float = 30.0
    one_way: float = 0.002
    grid: float = 0.0
    """Delays are multiples of this: things happen at the very same moment."""
    queue_limit: int = 1_000
    slow_markers: float = 0.02
    """Time of the broker for the markers of a transaction, at most."""
    tail_batch: int = 200
    """Offsets that are restored at a time; ``tail_pause``: seconds that each time takes, besides."""
    tail_pause: float = 0.0
    hear: tuple[float, ...] = (0.0, 0.0, 0.001, 0.001, 0.02, 0.02, 1.0)
    """Delays of group events to the engine; ``post``: of calls to the membership."""
    post: tuple[float, ...] = (0.0, 0.0, 0.0001, 0.001, 0.02, 0.5)
    polls: tuple[float, ...] = (0.0, 0.0001, 0.001, 0.001, 0.001, 0.2)
    """Delays of batches from a poll thread; now and then others are served before one."""
    marker_strikes: Mapping[str, float] = {}
    """The same as ``strikes``, for transactions with a release marker."""


class Faults:
    """Draws from the seed's generator; off after ``calm_at``."""

    def __init__(self, plan: Conditions, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        self.queue_limit = plan.queue_limit
        self.struck: list[tuple[float, str, str]] = []

    def one_way(self) -> float:
        """Draw the delay of a message."""
        return self._on_grid(self.plan.one_way * self.rng.choice((0.2, 0.5, 1.0, 1.0, 1.5, 4.0)))

    def switch(self) -> float:
        """Draw the delay from one thread to another."""
        return self._on_grid(self.rng.choice((0.0, 0.0001, 0.001)))

    def poll(self) -> float:
        """Draw the delay of a batch from a poll thread."""
        return self._on_grid(self.rng.choice(self.plan.polls))

    def hear(self) -> float:
        """Draw the delay of a group event to the engine."""
        return self._on_grid(self.rng.choice(self.plan.hear))

    def post(self) -> float:
        """Draw the delay of a call to the membership."""
        return self._on_grid(self.rng.choice(self.plan.post))

    def strike(self, call: str, now: float, at_least: float = 0.0) -> Strike | None:
        """Draw the fault of this call; ``None``: it is not struck."""
        share = max(self.plan.strikes.get(call, 0.0), at_least)
        if now > self.plan.calm_at or self.rng.random() >= share:
            return None
        strike = self.rng.choice(POSSIBLE[call])
        self.struck.append((now, call, strike.name))
        return strike

    def _on_grid(self, seconds: float) -> float:
        grid = self.plan.grid
        return seconds if not grid else round(seconds / grid) * grid
