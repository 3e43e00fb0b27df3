"""The points of a member's work at which a ``TestDriver`` can let something happen, and the traps that wait there.

``x.before``: what it names has not happened yet. ``x.after``: it has happened at the broker (or in the handler), but
the engine does not know yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, get_args

from streams.errors import ConfigError

Point = Literal[
    "init.before",
    "init.after",
    "poll.after",
    "handler.before",
    "handler.after",
    "flush.before",
    "flush.after",
    "send_offsets.before",
    "send_offsets.after",
    "commit.before",
    "commit.after",
    "abort.before",
    "abort.after",
    "ask.before",
    "tail.received",
    "activated",
    "join.before",
    "assigned.before",
    "revoke.before",
    "revoke.after",
    "lost.before",
    "release.told",
    "release.closed",
    "release.produced",
    "release.committed",
    "handed_over.before",
    "handed_over.after",
    "took.before",
    "took.after",
    "purge.before",
    "purge.after",
]
"""Names of points; ``POINTS`` describes them."""

POINTS: Final[Mapping[Point, str]] = {
    "init.before": "a producer is going to take its transactional id, which ends what it left open before",
    "init.after": "the broker has given it the next epoch",
    "poll.after": "a batch of input records arrives at the engine",
    "handler.before": "a handler is going to be called (of events, or an interjection's)",
    "handler.after": "it has returned; nothing of its event is sent yet",
    "flush.before": "a request is sent with all records (outputs, changes, offset, marker) of a transaction",
    "flush.after": "they are in their logs, the transaction is open",
    "send_offsets.before": "the input's offsets are sent into the transaction, right behind its records",
    "send_offsets.after": "they are a part of it",
    "commit.before": "the commit is sent",
    "commit.after": "the broker has decided: everything is committed",
    "abort.before": "the abort is sent",
    "abort.after": "the broker has decided: nothing is visible",
    "ask.before": "a question of a take-over is sent (whom to fence, offsets, ends of logs)",
    "tail.received": "changelog records go into a store that is being restored, or kept warm",
    "activated": "a partition begins to work on a member",
    "join.before": "a member sends JoinGroup",
    "assigned.before": "a member learns what it is assigned",
    "revoke.before": "a member learns what is taken away from it",
    "revoke.after": "the last transaction of these partitions is settled, the group knows",
    "lost.before": "a member learns that the group does not know it any more",
    "release.told": "the owner learns that it is to hand a partition over",
    "release.closed": "a partition takes no more input at its owner",
    "release.produced": "the release marker is in the log, its transaction is open",
    "release.committed": "the release marker is committed",
    "handed_over.before": "the owner reports to the group that it handed a partition over",
    "handed_over.after": "the group knows that",
    "took.before": "the receiver reports to the group that it took a partition",
    "took.after": "the group knows that",
    "purge.before": "the owner deletes what is handled and committed from the source's loop",
    "purge.after": "it is deleted",
}
"""Description of each point."""

_MOVES: Final[Mapping[str, Point]] = {
    "told": "release.told",
    "closed": "release.closed",
    "handing": "handed_over.before",
    "handed": "handed_over.after",
    "taking": "took.before",
    "took": "took.after",
    "active": "activated",
}


class Trap:
    """Waits at a point: ``action(member)`` is called the next time it is passed, after ``skip`` times without.

    ``sprung`` is how often that has happened: a test that relies on it asserts it.
    """

    def __init__(
        self,
        point: Point,
        action: Callable[[int], object],
        *,
        member: int | None = None,
        partition: int | None = None,
        skip: int = 0,
        times: int = 1,
    ) -> None:
        check_point(point)
        if skip < 0 or times < 1:
            raise ConfigError(f"a trap at {point!r}: skip is {skip}, times is {times}; use 0 or more, and 1 or more")
        self.point: Point = point
        self.action = action
        self.member, self.partition = member, partition
        self.sprung = 0
        self._skip, self._times = skip, times

    @property
    def is_armed(self) -> bool:
        """Check whether it still waits."""
        return self.sprung < self._times

    def meets(self, point: str, member: int, partition: int) -> bool:
        """Check whether it springs now."""
        if point != self.point or not self.is_armed:
            return False
        if self.member not in (None, member) or self.partition not in (None, partition):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self.sprung += 1
        return True

    def __repr__(self) -> str:
        state = "armed" if self.is_armed else "sprung"
        return f"Trap({self.point!r}, {getattr(self.action, '__name__', self.action)}, {state})"


def check_point(point: str) -> None:
    """Raises ``ConfigError`` for a name that is none."""
    if point not in POINTS:
        raise ConfigError(f"there is no point {point!r}; the points are {', '.join(get_args(Point))}")


def point_of_move(step: str) -> Point | None:
    """The name here of a step that the simulated clients note."""
    return _MOVES.get(step)
