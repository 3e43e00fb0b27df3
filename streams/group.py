"""The consumer group as the rest of the toolkit sees it: what is said, what is heard, and by whom.

A ``Membership`` (``clients/membership.py``; another one in simulations) speaks the group protocol on a thread of its
own. The runtime hears ``GroupEvent`` values, reads ``snapshot`` before it sends offsets, and answers by the few
methods below. The leader's decision is a pure function from reports to assignments (``core/assignor.py``), given to
the membership when it is built. Fields for warm moves (``ready``, ``standby``, ``preparing``, ``release``,
``incoming``) travel already, so that members of this and of later versions understand each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import msgspec


class Snapshot(msgspec.Struct, frozen=True):
    """Membership at one moment: replaced as a whole, never changed; reading the attribute is safe from any thread.

    ``incarnation`` grows whenever what was owned before became void. ``generation`` is the group's, -1 when not a
    member. ``metadata`` are the group metadata bytes for ``send_offsets_to_transaction``; ``None`` when not a member,
    so bytes that the broker would not fence (generation -1) can not be had.
    """

    incarnation: int
    generation: int
    member_id: str
    metadata: bytes | None


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one member tells the leader with each JoinGroup.

    ``instance``: the member's stable name, part of its transactional ids. ``owned``: partitions it works on.
    ``generation``: the last generation it was in (-1: none), which decides double claims. ``ready``: partitions it
    keeps warm and caught up; ``preparing``: being restored, with the records that are left; ``incoming``: told to it,
    not yet taken. ``leaving``: wants to give everything up. ``sequence`` grows with each report; the assignment
    echoes it.
    """

    instance: str
    owned: frozenset[int] = frozenset()
    generation: int = -1
    ready: frozenset[int] = frozenset()
    preparing: dict[int, int] = {}
    incoming: frozenset[int] = frozenset()
    leaving: bool = False
    sequence: int = 0


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader tells one member with SyncGroup.

    ``own``: what it shall work on from now on; partitions that it owned and that are in neither ``own`` nor
    ``release`` are revoked. ``standby``: keep a warm copy. ``preparing``: a copy to be made ready for a move.
    ``release``: hand over to the member id given, by a marker. ``incoming``: start when the marker arrives.
    ``members``: the instances of all members, so that what any other instance left open can be fenced. ``sequence``:
    echo of the report's. ``quit``: all members are leaving, nobody is left to hand over to; told to a member that did
    not ask to leave, it means that an older member has the same instance name.
    """

    own: frozenset[int] = frozenset()
    standby: frozenset[int] = frozenset()
    preparing: frozenset[int] = frozenset()
    release: dict[int, str] = {}
    incoming: frozenset[int] = frozenset()
    members: tuple[str, ...] = ()
    sequence: int = 0
    quit: bool = False


Assignor = Callable[[int, Mapping[str, MemberReport]], dict[str, Assignment]]
"""(number of partitions, member id -> report) -> member id -> assignment. Pure, fast: it runs between heartbeats."""


class Assigned(msgspec.Struct, frozen=True):
    """A rebalance is complete. ``owned`` is everything owned now, ``added`` the part that is new."""

    incarnation: int
    generation: int
    owned: frozenset[int]
    added: frozenset[int]
    assignment: Assignment


class Revoked(msgspec.Struct, frozen=True):
    """Give these up by a barrier, then call ``Membership.released``. The rebalance waits for that; heartbeats go on."""

    incarnation: int
    partitions: frozenset[int]


class Lost(msgspec.Struct, frozen=True):
    """Everything owned is void (session expired, unknown member). ``incarnation`` is the new one. It joins again by
    itself."""

    incarnation: int
    reason: str


class Fatal(msgspec.Struct, frozen=True):
    """The group will not have this member at all; it has stopped trying. ``error`` is for the caller of ``run``."""

    error: Exception


GroupEvent = Assigned | Revoked | Lost | Fatal


class Membership(Protocol):
    """A member of a consumer group. All methods return at once and may be called from any thread, unless they say
    otherwise."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot. Read it once, right before offsets are sent."""
        ...

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        """Join, and keep the membership. ``deliver`` is called on the membership's own thread and must not block."""
        ...

    def released(self, partitions: Collection[int]) -> None:
        """The last transaction on these revoked partitions is settled; nothing will be sent for them any more."""
        ...

    def leave(self) -> None:
        """Ask the group to take everything away (``Revoked`` follows, then ``Assigned`` with nothing)."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Leave the group if still in it, end the thread. Blocks up to the timeout; call it off the event loop."""
        ...


class TakeOver(Protocol):
    """The questions to the broker that a take-over asks, in the order of its steps. All block: call them off the
    event loop.

    Each raises ``BrokerUnavailable`` when there is no answer before ``deadline`` (seconds on ``time.monotonic``).
    """

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        """End open transactions of instances of this group that are not in ``members``; returns their transactional
        ids."""
        ...

    def stable_offsets(self, partitions: Collection[int], deadline: float) -> dict[int, int | None]:
        """The group's committed offsets of the source topic, waiting for pending transactional commits. ``None``:
        none."""
        ...

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        """(log start, high watermark) of each partition. The latter counts open and aborted records too."""
        ...

    def topic_id(self, topic: str, deadline: float) -> str:
        """The topic's id, another one after the topic was deleted and created again."""
        ...
