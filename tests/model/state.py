"""The state of the small world: immutable, hashable, and free of history that cannot matter any more.

Three habits keep it small. Epochs are not numbers: when a producer epoch is bumped, the slot that held the old one is
marked fenced and requests in flight under it are dropped (they could only be refused). A log keeps what is below the
last stable offset as one folded pair (offset, count), and as entries only what a read_committed reader cannot see yet;
aborted entries vanish. The state of a store is a count, so that "equal to the fold of the input up to offset n" is
"count == n".
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .rules import Config, Fault
from .search import put

NAMES = "ABC"
GROUP = 1 << 7
"""Bit of the group's offsets among the targets of transaction markers; bit p is the changelog of partition p."""


class Status:
    """Of a transaction at its coordinator."""

    EMPTY, ONGOING, PREPARE_COMMIT, PREPARE_ABORT = range(4)


class Slot:
    """A transactional producer as its process sees it. FENCED: another process initialised our id, we shall find out.
    ABORT: all its requests are answered, its transaction is being aborted. INIT: it is being opened again."""

    READY, FENCED, ABORT, INIT = range(4)


class Phase:
    """Of a transaction in a member's pipeline. SENDING: records and offsets are under way. LANDED: the records are
    there, ACCEPTED: the offsets are, FLUSHED: both. REFUSED: the offsets are not, and the records are under way.
    ENDING: the end is under way; AGAIN: without an answer, and is requested again. FOUND: unclear to its member, but
    readable in the changelog by now. ABORTING: its slot is being aborted, or opened again."""

    FILLED, SENDING, LANDED, ACCEPTED, REFUSED, FLUSHED, ENDING, AGAIN, UNCLEAR, FOUND, ABORTING = range(11)


UNDER_WAY = (Phase.SENDING, Phase.LANDED, Phase.ACCEPTED, Phase.REFUSED, Phase.ENDING)
"""Phases in which a request has no answer yet."""


class Kind:
    """Of a member's role in a partition."""

    NONE, ACTIVE, INCOMING, RELEASING, RELEASED, REVOKING, FENCING, END, READING, STANDBY, KEPT, GONE = range(12)


TAKE_OVER = (Kind.FENCING, Kind.END, Kind.READING)


class Join:
    """Where a member stands in the group protocol."""

    OUT, JOINING, JOINED, BARRIER, IN = range(5)


class Says:
    """What the plan says to one member about one partition. NOTHING revokes what the member owns."""

    NOTHING, OWN, RELEASE, AWAIT = range(4)


class Done:
    """What the engine tells the membership, later than it happened."""

    HANDED_OVER, TOOK = range(2)


THIS_GENERATION = 0


class Mark(NamedTuple):
    """An order to hand over, and the release marker that it leaves in the changelog: to whom, and of which
    generation."""

    instance: int
    member_id: int
    generation: int


NO_MARK = Mark(-1, 0, 0)


class Role(NamedTuple):
    """A partition at a member's engine. For ACTIVE ``a`` is the position and ``b`` the store's count; FENCING: ``a`` is
    the next id; END: ``b`` is the group's offset; READING: ``a`` is the number of entries still below the high
    watermark, ``b`` the group's offset. ``mark`` is the order to hand over (also one to be done after the take-over;
    GONE: the one that was done), ``since`` the generation from which on a marker starts us."""

    kind: int = Kind.NONE
    a: int = 0
    b: int = 0
    mark: Mark = NO_MARK
    since: int = -1


class Held(NamedTuple):
    """A partition in a member's holdings, which is what it claims: a move under way is named on both sides."""

    owned: bool = False
    releasing: Mark = NO_MARK
    since: int = -1


NOT_HELD = Held()


class Said(NamedTuple):
    """What the plan says to one member about one partition. RELEASE: to whom. AWAIT: since which generation.
    ``known``: its claim named the same move, or for NOTHING: it claimed to own it (it knows what it claimed)."""

    kind: int = Says.NOTHING
    instance: int = -1
    member_id: int = 0
    known: bool = False
    since: int = -1


NOT_SAID = Said()


class Note(NamedTuple):
    """From the engine to the membership, on its way."""

    kind: int
    part: int
    mark: Mark
    member_id: int


class Event(NamedTuple):
    """From the membership to the engine, on its way: an assignment (what is held), a revoke, or a loss (neither)."""

    member_id: int
    members: int = 0
    held: tuple[Held, ...] = ()
    revoked: tuple[bool, ...] = ()


class Txn(NamedTuple):
    """One open transaction of a member: input [start, end) of one partition, ``count`` the changelog value after it.
    ``slot`` is -1 while no producer has it."""

    slot: int
    phase: int
    part: int
    start: int
    end: int
    count: int
    generation: int = -2
    """Of the snapshot the offsets were sent with; after a refusal: the generation that was refused."""
    mark: Mark = NO_MARK


class Member(NamedTuple):
    """One process. ``member_id`` is its incarnation; 0 when it is in no group."""

    alive: bool
    member_id: int
    last_id: int
    generation: int
    join: int
    rejoin: bool
    applied: int
    """Generation of the last plan that was applied."""
    plan_members: int
    held: tuple[Held, ...]
    notes: tuple[Note, ...]
    engine_id: int
    """The incarnation that the engine is in."""
    inbox: tuple[Event, ...]
    roles: tuple[Role, ...]
    pipe: tuple[Txn, ...]
    slots: tuple[int, ...]


class Group(NamedTuple):
    """The group coordinator: membership, the plan of its generation, committed and pending offsets."""

    generation: int
    preparing: bool
    ids: tuple[int, ...]
    joined: int
    claims: tuple[tuple[int, tuple[Held, ...]], ...]
    """Per member: the generation it was in last, and its holdings."""
    plan: tuple[tuple[Said, ...], ...]
    committed: tuple[int, ...]
    pending: tuple[tuple[tuple[int, int], ...], ...]
    """Per partition: (transactional id, offset) of transactions that are not settled."""


class Entry(NamedTuple):
    """Records of one transaction in a changelog (outputs land with them), above the last stable offset."""

    tid: int
    done: bool
    start: int
    end: int
    count: int
    mark: Mark


class Log(NamedTuple):
    """The changelog of one partition: the fold of what is readable, then what is held up by an open transaction."""

    offset: int
    count: int
    writer: int
    mark: Mark
    entries: tuple[Entry, ...]
    buried: Mark = NO_MARK
    """The last marker with records after it; kept only where such a marker is obeyed."""


NO_TXN = Txn(-1, Phase.FILLED, -1, 0, 0, 0)


class Request:
    """Of a transaction."""

    RECORDS, OFFSETS, COMMIT, ABORT = range(4)


class Late(NamedTuple):
    """A request whose sender does not wait for it any more. ``txn``: what records and offsets are of."""

    tid: int
    request: int
    txn: Txn = NO_TXN
    member_id: int = 0


class World(NamedTuple):
    """Everything."""

    tids: tuple[tuple[int, int], ...]
    """Per transactional id: (status, targets that take part and have no marker yet)."""
    group: Group
    logs: tuple[Log, ...]
    members: tuple[Member, ...]
    late: tuple[Late, ...]
    faults: int
    moves: int
    restarts: int
    forgot: bool
    bumps_epoch: bool
    """Transactions v2: each end gives the next epoch."""
    earlier: tuple[Group, ...]
    """The group after its last rebalance but one, and after its last; kept only where a stale memory is searched."""


def changed(world: World, instance: int, **changes: Any) -> World:
    """``world`` with this of a member changed."""
    return remember(world, instance, world.members[instance]._replace(**changes))


def remember(world: World, instance: int, member: Member) -> World:
    """``world`` with this member changed."""
    return world._replace(members=put(world.members, instance, member))


def no_claims(config: Config) -> tuple[tuple[int, tuple[Held, ...]], ...]:
    """Nobody claims anything."""
    return ((-1, (NOT_HELD,) * config.partitions),) * config.members


def outsider(config: Config, last_id: int = 0, *, alive: bool = True, slot: int = Slot.READY) -> Member:
    """A member that is in no group and holds nothing."""
    nothing = (Role(),) * config.partitions
    held = (NOT_HELD,) * config.partitions
    return Member(alive, 0, last_id, -1, Join.OUT, False, -1, 0, held, (), 0, (), nothing, (), (slot,) * config.pool)


def initial(config: Config) -> World:
    """A is in generation 1 and owns everything; the others run, and are in the group (``together``) or in none yet."""
    parts, others = config.partitions, config.members - 1
    everybody = (1 << config.members) - 1 if config.together else 1
    in_group = Member(
        True, 1, 1, 1, Join.IN, False, 1, everybody,
        (NOT_HELD,) * parts, (), 1, (), (Role(),) * parts, (), (Slot.READY,) * config.pool,
    )  # fmt: skip
    a = in_group._replace(held=(Held(True),) * parts, roles=(Role(Kind.ACTIVE),) * parts)
    other = in_group if config.together else outsider(config)
    group = Group(
        1, False, (1, *(int(config.together),) * others), 0, no_claims(config),
        ((NOT_SAID,) * parts,) * config.members, (0,) * parts, ((),) * parts,
    )  # fmt: skip
    return World(
        ((Status.EMPTY, 0),) * (config.members * config.pool),
        group,
        (Log(0, 0, -1, NO_MARK, ()),) * parts,
        (a, *(other,) * others),
        (),
        config.faults,
        config.moves,
        config.restarts,
        False,
        config.version == 2,
        (group,) if Fault.STALE_MEMORY in config.kinds else (),
    )
