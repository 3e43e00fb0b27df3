"""The interface of the consumer group to the rest of the toolkit: reports, assignments, events and calls.

A ``Membership`` (``kafka/group/membership.py``; another one in simulations) runs the group protocol on a thread of its
own. The runtime gets ``GroupEvent``s, reads ``group_metadata`` before it sends offsets, and answers through the few
methods below. The leader's decision is a pure function from reports to assignments (``core/assignor.py``), given to the
membership when it is built. A member's claims follow from its last assignment and its steps since (``Holdings`` in
``core/group_member.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from streams.model.topics import TopicIdentity

_MARK: Final = "kes~"
"""Marks our transactional ids, so that no id of another program looks like ours by chance."""


def transactional_id(group_id: str, instance: str, slot: int) -> str:
    """Return ``<group>.<instance>.kes~<slot>``: stable over restarts, so that a successor can end transactions left
    open.

    The group comes first because rights are granted by prefix.
    """
    return f"{group_id}.{instance}.{_MARK}{slot}"


def instance_of(group_id: str, transactional_id: str) -> str | None:
    """Return the instance that a transactional id belongs to, or ``None`` when it is not one of this group."""
    # Read from the right, because a group id may contain dots and may begin with another group's id.
    rest, dot, slot = transactional_id.rpartition(".")
    group, dot_before, instance = rest.rpartition(".")
    number = slot.removeprefix(_MARK)
    if not (dot and dot_before and instance and slot.startswith(_MARK) and number.isascii() and number.isdecimal()):
        return None
    return instance if group == group_id else None


class GroupMetadata(msgspec.Struct, frozen=True):
    """A member in its group at one moment, as Kafka's ``ConsumerGroupMetadata``. It is replaced as a whole, never
    changed, and may be read from any thread.

    ``incarnation`` grows whenever everything owned so far becomes void. ``generation`` is the group's, -1 when not a
    member: no offsets are sent under that, since the broker would not fence them. ``instance_id``: of a static member.
    """

    incarnation: int
    generation: int
    member_id: str
    instance_id: str | None = None


class Order(msgspec.Struct, frozen=True):
    """An ordered move: the owner hands a partition over to the member ``to`` (a member id, never an instance: ids are
    not used twice). ``generation`` is the one of the first order."""

    to: str
    generation: int


class Shelf(msgspec.Struct, frozen=True):
    """State on disk that a member can go on from. ``name``: of the folder, which members of one machine may share.
    ``offsets``: of the changelog, up to which a partition is in it; also of partitions that a neighbour works on, whose
    folders are free as soon as it is dead. No member knows the end of the log here: what is farthest lacks least."""

    name: str
    offsets: dict[int, int] = {}


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """The warm copies that one member keeps of partitions that others work on.

    ``ready``: caught up with the changelog. ``preparing``: being restored, with the changelog records that are left.
    ``late``: not ready within the time for it (restoring goes on); moves do not wait for them. ``sizes``: bytes of the
    changelog on disk, of partitions that it works on, as far as it knows. ``asked``: how often it requested another
    round although none of these had changed. ``shelf``: its state on disk; a member without any has no such field.
    """

    ready: frozenset[int] = frozenset()
    preparing: dict[int, int] = {}
    late: frozenset[int] = frozenset()
    sizes: dict[int, int] = {}
    asked: int = 0
    shelf: Shelf | UnsetType = UNSET


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one member to the leader, in each JoinGroup.

    ``instance``: the member's stable name, part of its transactional ids. ``owned``: the partitions that it works on.
    ``generation``: its last generation (-1: none), which decides double claims. ``releasing``: owned ones that it was
    ordered to hand over, and has not handed over yet as far as it knows. ``incoming``: partitions that it expects by
    order of the leader, and has not taken yet. ``copies``: its warm copies. ``leaving``: it gives everything up.
    ``sequence`` grows with each report; the assignment echoes it.
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
    """The leader's orders for one member, in SyncGroup.

    ``own``: its partitions from now on; owned ones that are in neither ``own`` nor ``release`` are revoked.
    ``standby``: keep a warm copy. ``preparing``: get a copy ready for a move, and report it. ``release``: hand over to
    the member id given, by a marker. ``incoming``: start when a marker arrives that was ordered in the generation
    given, or later. ``members``: the instances of all members, so that open transactions of any other instance can be
    fenced. ``sequence``: echo of the report's. ``quit``: all members are leaving, and none is left as a receiver; for a
    member that is not leaving, it means that an older member has the same instance name.
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
    """A rebalance is complete. ``owned`` is everything owned now, ``added`` the new part of it. ``releasing``: owned
    ones that are to be handed over. ``incoming``: partitions to be taken when a marker of the generation given (or a
    later one) arrives. This replaces all earlier orders about moves. ``copies``: this member's copies in the report
    that the plan was made from."""

    incarnation: int
    generation: int
    owned: frozenset[int]
    added: frozenset[int]
    assignment: Assignment
    releasing: Mapping[int, Order] = {}
    incoming: Mapping[int, int] = {}
    copies: Copies = Copies()


class Revoked(msgspec.Struct, frozen=True):
    """Partitions to be given up by a barrier, which ends with a call of ``Membership.released``. The rebalance waits
    for it; heartbeats go on."""

    incarnation: int
    generation: int
    partitions: frozenset[int]


class Lost(msgspec.Struct, frozen=True):
    """The membership is lost (session expired, unknown member): everything owned is void. ``incarnation`` is the new
    one. The membership joins again by itself."""

    incarnation: int
    reason: str


class Fatal(msgspec.Struct, frozen=True):
    """The group refuses this member for good, and the membership has stopped trying. ``error`` is for the caller of
    ``run``."""

    error: Exception


GroupEvent = Assigned | Revoked | Lost | Fatal


class Membership(Protocol):
    """A member of a consumer group. All methods return at once and may be called from any thread, unless noted
    otherwise."""

    @property
    def group_metadata(self) -> GroupMetadata:
        """The newest metadata. Read it once, right before offsets are sent."""
        ...

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        """Join, and keep the membership. ``deliver`` is called on the membership's own thread and must not block."""
        ...

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        """Report that the last transaction on these revoked partitions is settled; nothing will be sent for them any
        more. ``incarnation`` and ``generation`` are those of the ``Revoked`` that this call answers."""
        ...

    def handed_over(self, partition: int, order: Order) -> None:
        """Report that the release marker of this order is committed: the partition is not ours any more. If the order
        was withdrawn meanwhile the call has no effect: the partition is ours again, to be taken over anew."""
        ...

    def took(self, partition: int, incarnation: int) -> None:
        """Report that the marker of an incoming partition was read: the partition is ours now. ``incarnation``: of the
        plan that ordered the move; without effect in another one."""
        ...

    def report(self, copies: Copies, *, announce: bool) -> None:
        """Set the copies for the report of the next JoinGroup; ``announce``: join again soon to report them."""
        ...

    def leave(self) -> None:
        """Request that the group takes all partitions away: by moves if possible, else ``Revoked`` follows, then an
        empty ``Assigned``."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Leave the group if still in it, end the thread; no event is delivered any more. Blocks up to the timeout;
        call it off the event loop."""
        ...


HANGING_SECONDS: Final = 900.0
"""A transaction that no coordinator lists counts as hanging this long after its last record: brokers let none be open
for longer (``transaction.max.timeout.ms``, by default). A list lacks the transactions that the principal may not
see."""


class OpenTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that is open in a partition, from ``start_offset`` on. ``transactional_id`` and ``state`` come from
    the coordinator that will end it; empty: no coordinator has it, it hangs. ``last_timestamp_ms`` is the time of its
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
        """Check whether no coordinator is going to end it."""
        return not self.transactional_id

    @property
    def identity(self) -> tuple[str, int, int, int, int]:
        """Return topic, partition, producer id and epoch, first offset."""
        return self.topic, self.partition, self.producer_id, self.producer_epoch, self.start_offset


class HangingEnd(NamedTuple):
    """The end that a hanging transaction is to have, and what proves it."""

    txn: OpenTransaction
    commit: bool
    proof: str


class ListedTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that its coordinator is going to end. ``started_ms``: since 1970; ``timeout_ms`` after that it is
    aborted at the latest. ``partitions``: (topic, partition) of those that it writes to, offsets of groups among them
    (``__consumer_offsets``)."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    coordinator: int
    started_ms: int
    timeout_ms: int
    partitions: tuple[tuple[str, int], ...]


class TakeOver(Protocol):
    """The broker requests of a take-over, in the order of its steps. All block: call them off the event loop.

    Each raises ``BrokerUnavailable`` when there is no answer before ``deadline`` (seconds on ``time.monotonic``).
    """

    def fence_departed(self, members: Collection[str], deadline: float) -> list[str]:
        """End open transactions of instances of this group that are not in ``members``; returns the transactional ids
        of those that are ended. Transactions of a broker that does not answer may stay open: see ``stable_offsets``."""
        ...

    def stable_offsets(self, partitions: Collection[int], deadline: float, topic: str = "") -> dict[int, int | None]:
        """Return the group's committed offsets of a topic (the source's own, if none is named), waiting for pending
        transactional commits. ``None``: none."""
        ...

    def committed_offsets(self, partitions: Collection[int], deadline: float, topic: str) -> dict[int, int | None]:
        """Return the group's committed offsets of a topic as they are, whatever is pending. ``None``: none."""
        ...

    def notes(self, partitions: Collection[int], deadline: float) -> dict[int, str]:
        """Return what was noted about these partitions by ``note``, and not taken back."""
        ...

    def note(self, partition: int, text: str, member: GroupMetadata, deadline: float) -> bool:
        """Note something about a partition for its owners, in place of the note before; empty: take it back. It is the
        metadata of an offset of the changelog, for which the group commits nothing else. ``False``: the group does not
        have this member in this generation, or is about to change it."""
        ...

    def is_member(self, member_id: str, generation: int, deadline: float, settled: bool = False) -> bool:
        """Check that the group has this member in this generation, and has not begun another one: no other member owns
        its partitions now. ``settled``: and it does not prepare another one. ``False`` also if the group cannot answer.
        The answer is never about a moment before the call."""
        ...

    def log_range(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, tuple[int, int]]:
        """Return (log start, high watermark) of each partition. The latter counts open and aborted records, too. Raises
        ``TopicError`` for a partition that does not exist until ``deadline``."""
        ...

    def stable_end(self, topic: str, partition: int, deadline: float) -> int:
        """Return the last stable offset of a partition: its end as readers of committed records see it."""
        ...

    def offset_of_time(self, topic: str, partition: int, timestamp_ms: int, deadline: float) -> int | None:
        """Return the offset of a partition's first record of this time or later. ``None``: there is none."""
        ...

    def identity(self, topic: str, deadline: float) -> TopicIdentity:
        """Return the topic's id, another one after the topic was deleted and created again, and its number of
        partitions. Raises ``TopicError`` if it does not exist until ``deadline``."""
        ...

    def open_transactions(self, topic: str, partitions: Collection[int], deadline: float) -> list[OpenTransaction]:
        """Return the open transactions in these partitions, each with its coordinator's state."""
        ...

    def judge_hanging(self, txn: OpenTransaction, deadline: float) -> HangingEnd:
        """Find out how a hanging transaction is to be ended. ``OffsetError``: nothing proves it."""
        ...

    def end_hanging(self, end: HangingEnd, deadline: float) -> None:
        """End it, if it still hangs. Raises ``ConfigError`` without the right to act as the cluster."""
        ...

    def remove_member(self, member_id: str, instance: str | None, deadline: float) -> bool:
        """Take a member that is known to be dead out of the group, without waiting for its session: a dynamic one by
        its id, a static one by its id and its instance. ``False``: it was not in the group (any more). A member that
        joined under the same instance since stays: ids are not used twice. Raises ``ValueError`` without an id."""
        ...

    def delete_records(self, topic: str, before: Mapping[int, int], deadline: float) -> None:
        """Delete what is below these offsets, by partition. It cannot be taken back. Raises ``ConfigError`` without the
        right to."""
        ...

    def log_sizes(self, topic: str, partitions: Collection[int], deadline: float) -> dict[int, int]:
        """Return the bytes on disk of each partition, without those that brokers refuse or do not answer in time. Never
        an error."""
        ...
