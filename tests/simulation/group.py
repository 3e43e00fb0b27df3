"""A simulated group coordinator, and a member of it that behaves as ``clients.membership`` does."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from streams.core.assignor import sticky_plan
from streams.errors import MembershipFatal
from streams.group import Assigned, Assignment, Fatal, GroupEvent, Lost, MemberReport, Revoked, Snapshot

from .broker import Broker, Refuses
from .virtual_time import ORDERED, elapse


class Unknown(Exception):
    """UNKNOWN_MEMBER_ID."""


class Illegal(Exception):
    """ILLEGAL_GENERATION, REBALANCE_IN_PROGRESS: join again."""


@dataclass(eq=False)
class _Known:
    report: MemberReport
    join: asyncio.Future[int] | None = None
    sync: asyncio.Future[Assignment] | None = None
    expiry: asyncio.TimerHandle | None = None


class Group:
    """Generations, sessions, the join and sync barriers, and the check of offsets that a transaction sends."""

    def __init__(self, broker: Broker, session: float, rebalance: float) -> None:
        self.broker, self.session, self.rebalance = broker, session, rebalance
        self.loop = broker.loop
        self.members: dict[str, _Known] = {}
        self.generation = 0
        self.state = "empty"
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        broker.check_member = self.check

    def check(self, generation: int, member: str) -> None:
        """What TxnOffsetCommit looks at."""
        if member not in self.members:
            self.broker.met.add("UNKNOWN_MEMBER_ID")
            raise Refuses("UNKNOWN_MEMBER_ID", "lost")
        if generation != self.generation:
            self.broker.met.add("ILLEGAL_GENERATION")
            raise Refuses("ILLEGAL_GENERATION", "stale")

    def new_id(self) -> str:
        return f"m{next(self._numbers)}"

    def join(self, member: str, report: MemberReport, *, new: bool) -> asyncio.Future[int]:
        """The future's result is the generation."""
        if not new and member not in self.members:
            raise Unknown
        known = self.members.setdefault(member, _Known(report))
        known.report = report
        future = known.join = self.loop.create_future()
        if known.expiry is not None:
            known.expiry.cancel()
        if self.state != "preparing":
            self._prepare()
        self._complete_if_all_are_here()
        return future

    def sync(self, member: str, generation: int) -> asyncio.Future[Assignment]:
        known = self.members.get(member)
        if known is None:
            raise Unknown
        if generation != self.generation or self.state == "preparing":
            raise Illegal
        future = known.sync = self.loop.create_future()
        self._alive(member)
        if next(iter(self.members)) == member:  # the leader has the plan
            self.state = "stable"
            self._plan = sticky_plan(self.broker.partitions, {name: m.report for name, m in self.members.items()})
        if self.state == "stable":
            for name, other in self.members.items():
                if other.sync is not None:
                    if not other.sync.done():
                        other.sync.set_result(self._plan[name])
                    other.sync = None
        return future

    def heartbeat(self, member: str, generation: int) -> None:
        if member not in self.members:
            raise Unknown
        self._alive(member)
        if generation != self.generation or self.state == "preparing":
            raise Illegal

    def leave(self, member: str) -> None:
        if member in self.members:
            self._remove(member)

    def forget(self) -> None:
        """The coordinator comes back without its memory: members, generation and offsets are gone."""
        for known in self.members.values():
            _fail(known)
            if known.expiry is not None:
                known.expiry.cancel()
        self.members.clear()
        self.generation, self.state = 0, "empty"
        if self._timer is not None:
            self._timer.cancel()
        self.broker.offsets.clear()

    def _alive(self, member: str) -> None:
        known = self.members[member]
        if known.expiry is not None:
            known.expiry.cancel()
        known.expiry = self.loop.call_later(self.session, self._expire, member, known)

    def _expire(self, member: str, known: _Known) -> None:
        if self.members.get(member) is known and known.join is None:
            self._remove(member)

    def _remove(self, member: str) -> None:
        known = self.members.pop(member)
        if known.expiry is not None:
            known.expiry.cancel()
        _fail(known)
        if not self.members:
            self.state = "empty"
            if self._timer is not None:
                self._timer.cancel()
        elif self.state == "preparing":
            self._complete_if_all_are_here()
        else:
            self._prepare()

    def _prepare(self) -> None:
        self.state = "preparing"
        for known in self.members.values():
            if known.sync is not None and not known.sync.done():
                known.sync.set_exception(Illegal())
            known.sync = None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.rebalance, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        for member in [name for name, known in self.members.items() if known.join is None]:
            if self.state == "preparing" and member in self.members:
                self._remove(member)

    def _complete_if_all_are_here(self) -> None:
        if self.state != "preparing" or any(known.join is None for known in self.members.values()):
            return
        assert self._timer is not None
        self._timer.cancel()
        self.generation += 1
        self.state = "completing"
        for member, known in self.members.items():
            join, known.join = known.join, None
            self._alive(member)
            if join is not None and not join.done():
                join.set_result(self.generation)


def _fail(known: _Known) -> None:
    for future in (known.join, known.sync):
        if future is not None and not future.done():
            future.set_exception(Unknown())


class SimMembership:
    """``group.Membership``; ``travel`` is awaited for each way of a message: it takes its time, or never comes back."""

    def __init__(
        self, group: Group, instance: str, rng: random.Random, travel: Callable[[], Collection[float]], heartbeat: float
    ) -> None:
        self._group, self._instance, self._rng, self._heartbeat = group, instance, rng, heartbeat
        self._travel_times = travel
        self.snapshot = Snapshot(0, -1, "", None)
        self._member = ""
        self._owned: frozenset[int] = frozenset()
        self._applied = -1
        self._waiting_for: set[int] = set()
        self._leaving = self._stopped = self._joining = False
        self._must_join = True
        self._wake = asyncio.Event()
        self._sequence = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._said_until = 0.0
        self._rejected_at = math.inf

    # -- what the engine calls -----------------------------------------------------------------------------------------

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        loop = self._group.loop

        def say(event: GroupEvent) -> None:
            delay = self._rng.choice((0.0, 0.0, 0.001, 0.001, 0.02, 0.02, 1.0))
            self._said_until = max(self._said_until + ORDERED, loop.time() + delay)
            loop.call_at(self._said_until, lambda: self._stopped or deliver(event))

        self._deliver = say
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._beat())]

    def released(self, partitions: Collection[int]) -> None:
        given_up = frozenset(partitions) & self._waiting_for
        self._owned -= given_up
        self._waiting_for -= given_up
        self._wake.set()

    def leave(self) -> None:
        self._leaving = self._must_join = True
        self._wake.set()

    def close(self, timeout_seconds: float) -> None:
        if self._member:
            self._group.leave(self._member)
        self.kill()

    @property
    def failures(self) -> list[BaseException]:
        """Mistakes of this simulation."""
        ended = (task for task in self._tasks if task.done() and not task.cancelled())
        return [error for task in ended if (error := task.exception()) is not None]

    def kill(self) -> None:
        """The process is dead, or done."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    # -- the protocol --------------------------------------------------------------------------------------------------

    async def _travel(self) -> None:
        for seconds in self._travel_times():
            await elapse(seconds)

    async def _run(self) -> None:
        while True:
            if self._must_join:
                try:
                    self._joining = True
                    await self._join()
                except Unknown:
                    self._void("the group does not know this member")
                except Illegal:
                    self._must_join = True
                    await elapse(0.05)
                finally:
                    self._joining = False
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _beat(self) -> None:
        while True:
            await elapse(self._heartbeat * self._rng.uniform(0.9, 1.1))
            member, generation = self._member, self.snapshot.generation
            if generation < 0 or self._joining:  # who waits in JoinGroup is alive
                continue
            await self._travel()
            if self._joining or self._member != member or self.snapshot.generation != generation:
                continue
            try:
                self._group.heartbeat(member, generation)
            except Unknown:
                await self._travel()
                if self._member == member:
                    self._void("the group does not know this member")
            except Illegal:
                await self._travel()
                self._must_join = True
                self._wake.set()

    def _void(self, reason: str) -> None:
        self._member = ""
        self._must_join = True
        if self.snapshot.generation >= 0:
            self.snapshot = Snapshot(self.snapshot.incarnation + 1, -1, "", None)
            self._owned, self._applied, self._waiting_for = frozenset(), -1, set()
            self._deliver(Lost(self.snapshot.incarnation, reason))
        self._wake.set()

    async def _join(self) -> None:
        self._must_join = False
        self._sequence += 1
        report = MemberReport(
            instance=self._instance,
            owned=self._owned,
            generation=self._applied,
            leaving=self._leaving,
            sequence=self._sequence,
        )
        await self._travel()
        new = not self._member
        member = self._member or self._group.new_id()
        generation = await self._group.join(member, report, new=new)
        await self._travel()
        if not new and self._member != member:
            raise Illegal
        self._member = member
        incarnation = self.snapshot.incarnation
        self.snapshot = Snapshot(incarnation, generation, member, f"{generation}:{member}".encode())
        await self._travel()
        assignment = await self._group.sync(member, generation)
        await self._travel()
        if self.snapshot.generation != generation or assignment.sequence != self._sequence:
            raise Illegal
        self._applied = generation
        self._joining = False
        if assignment.quit and not assignment.own and not self._leaving:
            self._rejected_at = min(self._rejected_at, self._group.loop.time())
            if self._group.loop.time() - self._rejected_at > self._group.session + self._group.rebalance:
                self._deliver(Fatal(MembershipFatal("another member has this name")))
                await asyncio.Event().wait()
            await elapse(0.5)  # a killed one with our name, that was joining, expires by and by
            raise Illegal
        self._rejected_at = math.inf
        revoked = self._owned - assignment.own
        if revoked:
            self._waiting_for = set(revoked)
            self._deliver(Revoked(incarnation, revoked))
            while self._waiting_for and self.snapshot.incarnation == incarnation:
                self._wake.clear()
                await self._wake.wait()
            if self.snapshot.incarnation != incarnation:
                return
            self._must_join = True
        added = assignment.own - self._owned
        self._owned |= added
        self._deliver(Assigned(incarnation, generation, self._owned, added, assignment))
