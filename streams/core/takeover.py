"""Decide the next step of a take-over: section 7 of the protocol as one pure function.

One attempt takes several partitions over together. First come the requests of ``BARRIER``, for all of them. Then come
rounds: each looks once at every partition that still waits, and brings up those whose state is complete. Between two
rounds the attempt waits for news of the copies. An attempt that does not get on is ended, and the next one begins at
the fence again.

Rules of this file
* No partition is brought up before every request of the barrier is answered.
* ``is_restoring`` and ``is_current`` are of this moment, because anything may have happened during an await. Other
  facts are of this round; a copy is checked once more when it is taken.
* A partition that cannot be brought up yet holds up no other one of its round.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec


class Step(enum.Enum):
    """The next step of an attempt."""

    SETTLE = "settle"
    """Wait until our own open transactions are settled."""
    FENCE = "fence"
    """End the open transactions of members that are gone."""
    SETTLE_LOOKUPS = "settle lookups"
    """Wait until the lookups have everything that is committed now."""
    GROUP_OFFSETS = "group offsets"
    """Request the group's offsets of all inputs, which waits for pending commits."""
    CHANGELOG_RANGES = "changelog ranges"
    """Request start and end of the changelog's partitions."""
    INPUT_RANGES = "input ranges"
    """Request start and end of the partitions of all inputs."""

    CHECK = "check"
    """Check whether the copy of the partition has everything up to the requested end, and whether it looks lost."""
    CHECK_END = "check end"
    """Request the end of its changelog once more: a member that worked on while we stood still may be why it looks
    lost."""
    AWAIT_LOOKUPS = "await lookups"
    """Wait for lookups that are not as far as its handlers have looked."""
    FIND_MISSED = "find missed"
    """Find rows of its joined tables that were deleted while no member read."""
    BRING_UP = "bring up"
    """Let it work."""
    PASS_ON = "pass on"
    """Its state is not complete: look at the next partition of the round."""
    LEAVE = "leave"
    """It was taken away meanwhile: wait for it no longer."""

    WAIT = "wait"
    """Wait for news of the copies, then begin the next round."""
    DONE = "done"
    """End the attempt: no partition waits."""
    GIVE_WAY = "give way"
    """End the attempt: another member works on the partition, or may do so."""
    GIVE_UP = "give up"
    """End the attempt: a request about one partition was not answered in this round."""
    CHECK_STALL = "check stall"
    """Check the transactions that hold the copies up, and end the attempt: the next fence meets a transaction that a
    member which is gone has begun since this one."""


BARRIER: Final = (
    Step.SETTLE,  # the fence leaves our own ids out, and what they hold open would hold up all that follows
    Step.FENCE,  # before the offsets: these wait for pending commits, which only a fence ends before their time-out
    Step.SETTLE_LOOKUPS,  # behind the fence: members that are gone cannot look into more
    Step.GROUP_OFFSETS,  # before the changelog's end: a commit that was pending until now has its records below it
    # A member that was frozen may make these requests while another one works in its place. What is looked up later
    # has only gone further, so an offset of the group is not ahead of the state, nor one of the state of its input.
    # Two things look lost all the same (``looks_lost``): an offset record that compaction has taken for a newer one,
    # and records of the loop, or of an input with a retention, that are deleted up to a newer position.
    Step.CHANGELOG_RANGES,
    Step.INPUT_RANGES,
)
"""The requests that come first. Their order is the protocol."""

ENDS: Final = (Step.DONE, Step.GIVE_WAY, Step.GIVE_UP, Step.CHECK_STALL)
"""The last steps of an attempt."""


class PartitionStand(msgspec.Struct):
    """The partition at hand, as far as this round knows it. ``None``: not known yet."""

    number: int
    is_restoring: bool = True
    """It was not taken away meanwhile."""
    is_complete: bool | None = None
    """Its copy has everything up to the end of the changelog that the barrier found."""
    looks_lost: bool = False
    """Its copy has no offset although the group has one, or an offset whose records are deleted."""
    is_alone: bool | None = None
    """Its changelog ends where the barrier found: no other member writes."""
    has_lookups: bool = False
    """The lookups are as far as its handlers have looked."""


class Stand:
    """The facts of one attempt. The loop that carries the steps out notes the answers here."""

    def __init__(self, partitions: Iterable[int]) -> None:
        self.waiting = list(partitions)
        self.answered = 0
        """Requests of the barrier that are answered."""
        self.at_hand: PartitionStand | None = None
        """The partition that the round looks at. ``None`` behind the last one."""
        self.searched: set[int] = set()
        """Partitions whose missed deletions are known. That is found once in an attempt, since it reads a whole
        topic."""
        self.is_current = True
        """This member belongs to the group, as far as it knows."""
        self.is_unanswered = False
        """A request about one partition was not answered."""
        self.unmoved_seconds = 0.0
        """For which no copy has made any progress."""
        self._round: deque[int] = deque()

    def answer(self) -> None:
        """Note the answer to the next request of the barrier. The first round begins behind the last one."""
        self.answered += 1
        if self.answered == len(BARRIER):
            self.begin_round()

    def begin_round(self) -> None:
        """Look at all partitions that wait, one after the other."""
        self._round = deque(self.waiting)
        self.pass_on()

    def pass_on(self) -> None:
        """Look at the next partition of the round."""
        self.at_hand = PartitionStand(self._round.popleft()) if self._round else None

    def leave(self) -> None:
        """Wait no longer for the partition at hand."""
        assert self.at_hand is not None
        self.waiting.remove(self.at_hand.number)
        self.pass_on()


def next_step(stand: Stand, stalled_seconds: float) -> Step:
    """Decide the next step of an attempt. ``stalled_seconds``: an attempt without progress for longer is ended."""
    if stand.answered < len(BARRIER):
        return BARRIER[stand.answered]
    if stand.at_hand is not None:
        return _next_of(stand.at_hand, stand)
    if stand.is_unanswered:  # only at the end of the round: the others do not wait for that
        return Step.GIVE_UP
    if not stand.waiting:
        return Step.DONE
    return Step.CHECK_STALL if stand.unmoved_seconds > stalled_seconds else Step.WAIT


def _next_of(one: PartitionStand, stand: Stand) -> Step:
    if not one.is_restoring:
        return Step.LEAVE
    if one.is_complete is None:
        return Step.CHECK
    if not one.is_complete:
        return Step.PASS_ON
    if one.looks_lost and one.is_alone is None:
        return Step.CHECK_END
    if not one.has_lookups:
        return Step.AWAIT_LOOKUPS
    if one.number not in stand.searched:
        return Step.FIND_MISSED
    # Last, because the start follows without an await. Another member that works on makes the state look lost, and a
    # member that was evicted must not start what its successor has.
    if one.is_alone is False or not stand.is_current:
        return Step.GIVE_WAY
    return Step.BRING_UP
