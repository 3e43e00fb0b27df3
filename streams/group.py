"""The consumer group as the rest of the toolkit sees it: what is said, what is heard, and by whom.

A ``Membership`` (``clients/membership.py``; another one in simulations) speaks the group protocol on a thread of its
own. The runtime hears ``GroupEvent`` values, reads ``snapshot`` before it sends offsets, and answers by the few
methods below. The leader's decision is a pure function from reports to assignments (``core/assignor.py``), given to
the membership when it is built. What a member claims follows from what it was told and what it did since
(``core/holdings.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, Protocol

import msgspec

from streams.topics import TopicIdentity

_MARK: Final = "kes~"
"""Of our transactional ids: no id of another program looks like ours by chance."""


def transactional_id(group_id: str, instance: str, slot: int) -> str:
    """``<group>.<instance>.kes~<slot>``: stable over restarts, so that a successor can end what was left open.

    The group comes first because rights are granted by prefix. The mark is in the slot, so that members of versions
    before it do not take such an id for theirs, and do not fence it in a rolling upgrade.
    """
    return f"{group_id}.{instance}.{_MARK}{slot}"


def instance_of(group_id: str, transactional_id: str) -> str | None:
    """The instance a transactional id belongs to, or ``None`` when it is not one of this group."""
    return _instance(group_id, transactional_id, _MARK)


def instance_of_unmarked(group_id: str, transactional_id: str) -> str | None:
    """The same for ``<group>.<instance>.<slot>``, the ids of versions before the mark. Ids of other programs may have
    that form, too."""
    return _instance(group_id, transactional_id, "")


def _instance(group_id: str, transactional_id: str, mark: str) -> str | None:
    # Read from the right, because a group id may contain dots and may begin with another group's id.
    rest, dot, slot = transactional_id.rpartition(".")
    group, dot_before, instance = rest.rpartition(".")
    number = slot.removeprefix(mark)
    if not (dot and dot_before and instance and slot.startswith(mark) and number.isascii() and number.isdecimal()):
        return None
    return instance if group == group_id else None


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


class Order(msgspec.Struct, frozen=True):
    """A move that was ordered: the owner hands a partition over to the member ``to`` (a member id, never an instance:
    ids are not used twice). ``generation`` is the one in which it was ordered first."""

    to: str
    generation: int


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """The warm copies that one member keeps of partitions that others work on.

    ``ready``: caught up with the changelog. ``preparing``: being restored, with the changelog records that are left.
    ``late``: not ready within the time for it (restoring goes on); moves do not wait for them. ``sizes``: bytes of the
    changelog on disk, of partitions that it works on, as far as it knows. ``asked``: how often it asked for another
    round although nothing of this had changed.
    """

    ready: frozenset[int] = frozenset()
    preparing: dict[int, int] = {}
    late: frozenset[int] = frozenset()
    sizes: dict[int, int] = {}
    asked: int = 0


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one member tells the leader with each JoinGroup.

    ``instance``: the member's stable name, part of its transactional ids. ``owned``: partitions it works on.
    ``generation``: the last generation it was in (-1: none), which decides double claims. ``releasing``: those of the
    owned ones that it was ordered to hand over, and has not handed over yet as far as it knows. ``incoming``: those it
    was told to expect, and has not taken yet. ``copies``: what it keeps warm. ``leaving``: wants to give everything
    up. ``sequence`` grows with each report; the assignment echoes it.
    """

    instance: str
    owned: frozenset[int] = frozenset()
    generation: int = -1
    releasing: dict[int, Order] = {}
    incoming: frozenset[int] = frozenset()
    copies: Copies = Copies()
    leaving: bool = False
    sequence: int = 0


THIS_GENERATION: Final = 0
"""In an assignment: the generation that the assignment itself belongs to."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader tells one member with SyncGroup.

    ``own``: what it shall work on from now on; partitions that it owned and that are in neither ``own`` nor
    ``release`` are revoked. ``standby``: keep a warm copy. ``preparing``: get a copy ready for a move, and say so.
    ``release``: hand over to the member id given, by a marker, whenever the receiver can be heard by it. ``incoming``:
    start when a marker arrives that was ordered in the generation given, or later. ``members``: the instances of all
    members, so that what any other instance left open can be fenced. ``sequence``: echo of the report's. ``quit``: all
    members are leaving, nobody is left to hand over to; told to a member that did not ask to leave, it means that an
    older member has the same instance name.
    """

    own: frozenset[int] = frozenset()
    standby: frozenset[int] = frozenset()
    preparing: frozenset[int] = frozenset()
    release: dict[int, str] = {}
    incoming: dict[int, int] = {}
    members: tuple[str, ...] = ()
    sequence: int = 0
    quit: bool = False


Assignor = Callable[[int, Mapping[str, MemberReport]], dict[str, Assignment]]
"""(number of partitions, member id -> report) -> member id -> assignment. Pure, fast: it runs between heartbeats."""


class Assigned(msgspec.Struct, frozen=True):
    """A rebalance is complete. ``owned`` is everything owned now, ``added`` the part that is new; ``releasing`` are
    those of the owned ones that are to be handed over; ``incoming`` those to be taken when a marker of the generation
    given (or a later one) says so. Whatever was said before about moves is replaced by this. ``copies``: what the plan
    knew about ours."""

    incarnation: int
    generation: int
    owned: frozenset[int]
    added: frozenset[int]
    assignment: Assignment
    releasing: Mapping[int, Order] = {}
    incoming: Mapping[int, int] = {}
    copies: Copies = Copies()


class Revoked(msgspec.Struct, frozen=True):
    """Give these up by a barrier, then call ``Membership.released``. The rebalance waits for that; heartbeats go on."""

    incarnation: int
    generation: int
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

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        """The last transaction on these revoked partitions is settled; nothing will be sent for them any more.
        ``incarnation`` and ``generation`` are those of the ``Revoked`` that it answers: to another one it is no
        answer."""
        ...

    def handed_over(self, partition: int, order: Order) -> None:
        """The release marker of this order is committed: the partition is not ours any more. An order that was
        withdrawn meanwhile has no effect: then it is ours again, to be taken over anew."""
        ...

    def took(self, partition: int, incarnation: int) -> None:
        """The marker of an incoming partition was there: it is ours now. ``incarnation``: of the plan that told us to
        expect it; without effect in another one."""
        ...

    def report(self, copies: Copies, *, announce: bool) -> None:
        """What the next JoinGroup shall tell about copies; ``announce``: join again soon to tell it."""
        ...

    def leave(self) -> None:
        """Ask the group to take everything away: by moves if it can, else ``Revoked`` follows, then ``Assigned`` with
        nothing."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Leave the group if still in it, end the thread. Blocks up to the timeout; call it off the event loop."""
        ...


HANGING_SECONDS: Final = 900.0
"""So long after its last record a transaction that no coordinator lists may be taken for a hanging one: brokers let
none be open for longer (``transaction.max.timeout.ms``, by default). A list lacks what the principal must not see."""


class OpenTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that is open in a partition, from ``start_offset`` on. ``transactional_id`` and ``state`` are those
    of the coordinator that is going to end it; empty: none knows of it, it hangs. ``last_timestamp_ms`` is that of its
    producer's last record."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    start_offset: int
    last_timestamp_ms: int
    transactional_id: str = ""
    state: str = ""

    @property
    def is_hanging(self) -> bool:
        """Whether nobody is going to end it."""
        return not self.transactional_id


class TakeOver(Protocol):
    """The questions to the broker that a take-over asks, in the order of its steps. All block: call them off the
    event loop.

    Each raises ``BrokerUnavailable`` when there is no answer before ``deadline`` (seconds on ``time.monotonic``).
    """

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        """End open transactions of instances of this group that are not in ``members``; returns the transactional ids
        of those that are ended. What a broker that does not answer keeps may stay open: see ``stable_offsets``."""
        ...

    def stable_offsets(self, partitions: Collection[int], deadline: float) -> dict[int, int | None]:
        """The group's committed offsets of the source topic, waiting for pending transactional commits. ``None``:
        none."""
        ...

    def is_member(self, member_id: str, generation: int, deadline: float) -> bool:
        """Whether the group has this member in this generation, and has not begun another one: nobody else owns now
        what it owns. ``False`` also when the group does not say; never about an older moment than the call."""
        ...

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        """(log start, high watermark) of each partition. The latter counts open and aborted records too."""
        ...

    def identity(self, topic: str, deadline: float) -> TopicIdentity:
        """The topic's id, another one after the topic was deleted and created again, and its number of partitions.
        ``TopicError``: it does not exist, and did not begin to until ``deadline``."""
        ...

    def open_transactions(self, topic: str, partitions: Collection[int], deadline: float) -> list[OpenTransaction]:
        """What is open in these partitions, and which coordinator knows of it."""
        ...

    def remove_member(self, member_id: str, instance: str | None, deadline: float) -> bool:
        """Take a member that is known to be dead out of the group, without waiting for its session: a dynamic one by
        its id, a static one by its id and its instance. ``False``: it was not in the group (any more). Whoever joined
        under the same instance since stays: ids are not used twice."""
        ...

    def log_sizes(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, int]:
        """Bytes on disk of each partition, as far as the brokers tell: what they refuse, or do not answer in time, is
        not in it. Never an error."""
        ...
