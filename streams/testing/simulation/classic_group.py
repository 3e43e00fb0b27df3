"""One group of a simulated coordinator, by the rules of Kafka's classic groups, in the bytes that members hand in.

The rules are those of Kafka 4.1's ``ClassicGroup`` and ``GroupMetadataManager``. Left out are the limit on a group's
size, and the extension of the initial delay by members that join during it.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

NEW_MEMBER_SECONDS: Final = 300.0
"""Seconds after which a member that has never got an answer to its join is removed."""
NONE, NOT_COORDINATOR, ILLEGAL_GENERATION, INCONSISTENT_PROTOCOL = 0, 16, 22, 23
UNKNOWN_MEMBER, REBALANCE, ID_REQUIRED, FENCED_INSTANCE = 25, 27, 79, 82

T = TypeVar("T")


class State(enum.Enum):
    """A group's state, by the name that DescribeGroups has for it."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


@dataclass(frozen=True)
class Joining:
    """A JoinGroup request. ``session`` and ``rebalance`` are in seconds. ``protocols``: the preferred one first."""

    member: str
    protocols: Mapping[str, bytes]
    session: float
    rebalance: float
    instance: str | None = None
    protocol_type: str = "consumer"
    needs_id: bool = True
    """Whether a new member is given its id first (from version 4 of the request on)."""

    def says_the_same(self, known: Mapping[str, bytes]) -> bool:
        """Check whether the protocols are these, in this order."""
        return list(self.protocols.items()) == list(known.items())


@dataclass(frozen=True)
class Joined:
    """The answer to a JoinGroup. ``members`` is for the leader: member id, instance and metadata of each."""

    code: int
    member: str = ""
    generation: int = -1
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skips_assignment: bool = False


@dataclass(frozen=True)
class Synced:
    """The answer to a SyncGroup."""

    code: int
    assignment: bytes = b""
    protocol: str | None = None


@dataclass(eq=False)
class _Member:
    id: str
    instance: str | None
    session: float
    rebalance: float
    protocols: Mapping[str, bytes]
    assignment: bytes = b""
    is_new: bool = True
    join: asyncio.Future[Joined] | None = None
    sync: asyncio.Future[Synced] | None = None
    expiry: asyncio.TimerHandle | None = None
    has_synced: bool = False

    def quiet(self) -> None:
        """Stop the timer of its session."""
        if self.expiry is not None:
            self.expiry.cancel()

    def answer(self, code: int) -> None:
        """Answer what waits here with an error."""
        if self.join is not None:
            settle(self.join, Joined(code, self.id))
        if self.sync is not None:
            settle(self.sync, Synced(code))
        self.join = self.sync = None


@dataclass(frozen=True)
class _Stored:
    """The group as the coordinator's log has it: another coordinator goes on from here."""

    generation: int = 0
    protocol: str | None = None
    leader: str | None = None
    members: tuple[_Member, ...] = field(default=())


class ClassicGroup:
    """``initial_delay``: seconds that an empty group waits for more members (``group.initial.rebalance.delay.ms``)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, initial_delay: float = 0.0) -> None:
        self.loop, self._initial_delay = loop, initial_delay
        self.members: dict[str, _Member] = {}
        self.pending: dict[str, asyncio.TimerHandle] = {}
        """Ids that were given out, and have not joined yet: a rebalance waits for them."""
        self.generation = 0
        self.state = State.EMPTY
        self.protocol: str | None = None
        self.leader: str | None = None
        self._protocol_type = ""
        self._is_initial = False
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count(1)
        self._stored = _Stored()

    # -- requests ------------------------------------------------------------------------------------------------------

    def join(self, joining: Joining) -> asyncio.Future[Joined]:
        """JoinGroup. The answer comes when the rebalance is complete."""
        member = joining.member
        if not self._supports(joining):
            return self._now(Joined(INCONSISTENT_PROTOCOL, member))
        if not member:
            return self._join_new(joining)
        if member in self.pending:
            self.pending.pop(member).cancel()
            return self._add(member, joining)
        if code := self._stranger(member, joining.instance):
            return self._now(Joined(code, member))
        known = self.members[member]
        says_the_same = joining.says_the_same(known.protocols)
        # The answer to its last join was lost, or a follower asks for what it has: no rebalance.
        has_answer = self.state is State.COMPLETING or (self.state is State.STABLE and member != self.leader)
        if has_answer and says_the_same:
            self._alive(known)
            return self._now(self._joined(known))
        return self._join_again(known, joining)

    def sync(
        self, member: str, generation: int, assignments: Mapping[str, bytes], instance: str | None = None,
        protocol: str | None = None,
    ) -> asyncio.Future[Synced]:  # fmt: skip
        """SyncGroup. ``assignments``: the leader's plan, by member. ``protocol`` (version 5): the one it joined by."""
        if code := self._stranger(member, instance) or self._stale(generation):
            return self._now(Synced(code))
        if protocol is not None and protocol != self.protocol:
            return self._now(Synced(INCONSISTENT_PROTOCOL))
        if self.state is State.PREPARING:
            return self._now(Synced(REBALANCE))
        known = self.members[member]
        known.has_synced = True
        self._alive(known)
        if self.state is State.STABLE:
            return self._now(Synced(NONE, known.assignment, self.protocol))
        if known.sync is not None:
            settle(known.sync, Synced(REBALANCE))  # the client repeats SyncGroup: only its newest request gets the plan
        answer = known.sync = self.loop.create_future()
        if member == self.leader:
            self._share_out(assignments)
        return answer

    def heartbeat(self, member: str, generation: int, instance: str | None = None) -> int:
        """Heartbeat: the code."""
        if code := self._stranger(member, instance) or self._stale(generation):
            return code
        self._alive(self.members[member])
        return REBALANCE if self.state is State.PREPARING else NONE

    def leave(self, member: str, instance: str | None = None) -> int:
        """LeaveGroup of one member, by its id or, static ones, by the instance: the code."""
        if member in self.pending:
            self._drop_pending(member)
            return NONE
        if not member and instance is not None:
            member = self._static(instance) or ""
        if code := self._stranger(member, instance):
            return code
        self._remove(self.members[member])
        return NONE

    def commits(
        self, member: str, generation: int, instance: str | None = None, *, in_transaction: bool = False
    ) -> int:
        """Check who commits offsets: the code. Outside of a group, with generation -1, only while it is empty."""
        if generation < 0 and not member and instance is None:
            return NONE if in_transaction or self.state is State.EMPTY else UNKNOWN_MEMBER
        if generation < 0 and self.state is State.EMPTY:
            return NONE
        if code := self._stranger(member, instance) or self._stale(generation):
            return code
        if in_transaction:
            return NONE
        self._alive(self.members[member])
        return REBALANCE if self.state is State.COMPLETING else NONE

    # -- what befalls the coordinator ----------------------------------------------------------------------------------

    def moved(self) -> None:
        """Go on at another coordinator, from its log: joins in flight, and members that were never in a complete
        generation, are gone."""
        self._quiet(NOT_COORDINATOR)
        stored = self._stored
        self.generation, self.protocol, self.leader = stored.generation, stored.protocol, stored.leader
        self.members = {member.id: replace(member) for member in stored.members}
        self.state = State.STABLE if self.members else State.EMPTY
        for member in self.members.values():
            self._alive(member)

    def forget(self) -> None:
        """Go on without any memory."""
        self._stored = _Stored()
        self.moved()

    def _quiet(self, code: int) -> None:
        for member in self.members.values():
            member.answer(code)
            member.quiet()
        for timer in self.pending.values():
            timer.cancel()
        self.pending.clear()
        self._stop_timer()

    def _store(self) -> None:
        members = tuple(
            replace(member, is_new=False, join=None, sync=None, expiry=None) for member in self.members.values()
        )
        self._stored = _Stored(self.generation, self.protocol, self.leader, members)

    # -- joining -------------------------------------------------------------------------------------------------------

    def _join_new(self, joining: Joining) -> asyncio.Future[Joined]:
        member = f"{joining.instance or 'member'}-{next(self._numbers)}"
        if joining.instance is not None:
            former = self._static(joining.instance)
            return self._add(member, joining) if former is None else self._replace(former, member, joining)
        if not joining.needs_id:
            return self._add(member, joining)
        self.pending[member] = self.loop.call_later(joining.session, self._drop_pending, member)
        return self._now(Joined(ID_REQUIRED, member))

    def _add(self, member: str, joining: Joining) -> asyncio.Future[Joined]:
        known = _Member(member, joining.instance, joining.session, joining.rebalance, joining.protocols)
        if not self.members:
            self._protocol_type = joining.protocol_type
        self.members[member] = known
        self.leader = self.leader or member
        known.expiry = self.loop.call_later(NEW_MEMBER_SECONDS, self._expire, known)
        return self._wait(known)

    def _join_again(self, known: _Member, joining: Joining) -> asyncio.Future[Joined]:
        known.protocols, known.session, known.rebalance = joining.protocols, joining.session, joining.rebalance
        if known.join is not None:  # the connection of the first one is gone, or its client impatient
            settle(known.join, Joined(UNKNOWN_MEMBER, known.id))
        return self._wait(known)

    def _wait(self, known: _Member) -> asyncio.Future[Joined]:
        """Have a member wait for the end of a rebalance, which begins with it if there is none."""
        answer = known.join = self.loop.create_future()
        if self.state is State.PREPARING:
            self._complete_if_all_are_here()
        else:
            self._prepare()
        return answer

    def _replace(self, former: str, member: str, joining: Joining) -> asyncio.Future[Joined]:
        """A static member came back, under a new id. In a stable group it takes the old one's place without a
        rebalance, unless the group's protocol changes by it."""
        old = self.members[former]
        old.answer(FENCED_INSTANCE)
        old.quiet()
        known = replace(old, id=member, expiry=None, session=joining.session, rebalance=joining.rebalance)
        known.protocols = joining.protocols
        self.members = {(member if name == former else name): each for name, each in self.members.items()}
        self.members[member] = known
        was_leader = self.leader == former
        if was_leader:
            self.leader = member
        self._alive(known)
        if self.state is not State.STABLE or self._vote() != self.protocol:
            return self._wait(known)
        self._store()
        members = self._for_leader() if was_leader else ()
        return self._now(replace(self._joined(known), members=members, skips_assignment=was_leader))

    def _supports(self, joining: Joining) -> bool:
        if not joining.protocols or not joining.protocol_type:
            return False
        if not self.members:
            return True
        return joining.protocol_type == self._protocol_type and bool(self._common() & set(joining.protocols))

    # -- rebalances ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for member in self.members.values():
            if member.sync is not None:
                settle(member.sync, Synced(REBALANCE))
                self._alive(member)  # its session may have ended while it waited, which did not count
            member.sync, member.assignment = None, b"" if self.state is State.COMPLETING else member.assignment
        self._is_initial = self.state is State.EMPTY and self._initial_delay > 0
        self.state = State.PREPARING
        self._stop_timer()
        seconds = self._initial_delay if self._is_initial else self._patience()
        self._timer = self.loop.call_later(seconds, self._complete)
        self._complete_if_all_are_here()

    def _complete_if_all_are_here(self) -> None:
        here = all(member.join is not None for member in self.members.values())
        if self.state is State.PREPARING and here and not self.pending and not self._is_initial:
            self._complete()

    def _complete(self) -> None:
        """Begin the next generation. Who has not joined is left out, but for static members, who keep their place until
        their session is over."""
        self._stop_timer()
        self._is_initial = False
        for member in [each for each in self.members.values() if each.join is None and each.instance is None]:
            self._forget_member(member)
        if self.members and all(member.join is None for member in self.members.values()):
            self._timer = self.loop.call_later(self._patience(), self._complete)  # until sessions end
            return
        self.generation += 1
        if not self.members:
            self.state, self.protocol = State.EMPTY, None
            self._store()
            return
        if self.members[self.leader or ""].join is None:
            self.leader = next(name for name, member in self.members.items() if member.join is not None)
        self.protocol = self._vote()
        self.state = State.COMPLETING
        for member in self.members.values():
            member.has_synced = member.join is None
            if member.join is not None:
                join, member.join, member.is_new = member.join, None, False
                self._alive(member)
                settle(join, self._joined(member))
        self._timer = self.loop.call_later(self._patience(), self._remove_unsynced)

    def _share_out(self, assignments: Mapping[str, bytes]) -> None:
        self.state = State.STABLE
        for member in self.members.values():
            member.assignment = assignments.get(member.id, b"")
        self._store()
        for member in self.members.values():
            if member.sync is not None:
                sync, member.sync = member.sync, None
                self._alive(member)
                settle(sync, Synced(NONE, member.assignment, self.protocol))

    def _remove_unsynced(self) -> None:
        """Take out members that have joined, and have sent no SyncGroup within the rebalance timeout."""
        late = [member for member in self.members.values() if not member.has_synced]
        for member in late:
            self._forget_member(member)
        if late:
            self._prepare()

    def _joined(self, member: _Member) -> Joined:
        members = self._for_leader() if member.id == self.leader else ()
        return Joined(NONE, member.id, self.generation, self.protocol, self.leader or "", members)

    def _for_leader(self) -> tuple[tuple[str, str | None, bytes], ...]:
        chosen = self.protocol or ""
        return tuple((each.id, each.instance, each.protocols[chosen]) for each in self.members.values())

    def _common(self) -> set[str]:
        each = [set(member.protocols) for member in self.members.values()]
        return each[0].intersection(*each[1:])

    def _vote(self) -> str:
        """Choose a protocol: each member votes for the first one of its own that all support."""
        common = self._common()
        votes = Counter(next(name for name in each.protocols if name in common) for each in self.members.values())
        return votes.most_common(1)[0][0]

    def _patience(self) -> float:
        return max((member.rebalance for member in self.members.values()), default=0.0)

    # -- members -------------------------------------------------------------------------------------------------------

    def _static(self, instance: str) -> str | None:
        return next((name for name, each in self.members.items() if each.instance == instance), None)

    def _stranger(self, member: str, instance: str | None) -> int:
        """Return the code for a member that is not in the group, or is not the one of its instance; 0: it is in it."""
        if instance is not None and (owner := self._static(instance)) is not None and owner != member:
            return FENCED_INSTANCE
        known = self.members.get(member)
        return UNKNOWN_MEMBER if known is None or (instance is not None and known.instance != instance) else NONE

    def _stale(self, generation: int) -> int:
        return NONE if generation == self.generation else ILLEGAL_GENERATION

    def _alive(self, member: _Member) -> None:
        member.quiet()
        member.expiry = self.loop.call_later(member.session, self._expire, member)

    def _expire(self, member: _Member) -> None:
        # A member that waits for the coordinator sends no heartbeats, and may be dead: a new one is given up after
        # ``NEW_MEMBER_SECONDS``, others by the rebalance timeout and their next session.
        waits = not member.is_new and (member.join is not None or member.sync is not None)
        if self.members.get(member.id) is member and not waits:
            self._remove(member)

    def _drop_pending(self, member: str) -> None:
        self.pending.pop(member).cancel()
        self._complete_if_all_are_here()

    def _remove(self, member: _Member) -> None:
        self._forget_member(member)
        if self.state is State.PREPARING:
            self._complete_if_all_are_here()
        else:
            self._prepare()

    def _forget_member(self, member: _Member) -> None:
        del self.members[member.id]
        member.quiet()
        member.answer(UNKNOWN_MEMBER)
        if self.leader == member.id:
            self.leader = next(iter(self.members), None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _now(self, answer: T) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.loop.create_future()
        future.set_result(answer)
        return future


def settle(future: asyncio.Future[T], answer: T) -> None:
    """Give a future its answer, unless the one who waited has gone."""
    if not future.done():
        future.set_result(answer)
