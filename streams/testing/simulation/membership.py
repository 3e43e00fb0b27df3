"""A member of the simulated group, that behaves as ``clients.membership`` does.

What it claims is the real ``core.holdings``. What the engine says reaches it some time later, in order, as calls do
that cross to another thread; what it says reaches the engine some time later too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from streams.core.holdings import Holdings
from streams.errors import MembershipFatal
from streams.group import Assigned, Assignor, Copies, Fatal, GroupEvent, Lost, Order, Revoked, Snapshot
from streams.testing.simulation.group import Group, Illegal, Inconsistent, Unknown
from streams.testing.simulation.virtual_time import ORDERED, elapse

if TYPE_CHECKING:
    from streams.testing.simulation.process import Process


HEARD = {Assigned: "assigned.before", Revoked: "revoke.before", Lost: "lost.before", Fatal: "fatal.before"}
"""What the engine is about to hear, and the point that is passed then."""


class SimMembership:
    """``group.Membership`` of one process (``process.Process``)."""

    def __init__(self, process: Process, instance: str, strategies: Mapping[str, Assignor], heartbeat: float) -> None:
        self._process, self._rng, self._heartbeat = process, process.rng, heartbeat
        self._group: Group = process.group
        self._strategies = strategies
        self.snapshot = Snapshot(0, -1, "", None)
        self.holdings = Holdings(instance)
        self._member = ""
        self._waiting_for: set[int] = set()
        self._stopped = self._joining = False
        self._must_join = True
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._said_until = self._asked_until = 0.0
        self._rejected_at = self._refused_at = math.inf

    # -- what the engine calls -----------------------------------------------------------------------------------------

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        loop = self._group.loop

        def say(event: GroupEvent) -> None:
            self._said_until = max(self._said_until + ORDERED, loop.time() + self._process.faults.hear())
            loop.call_at(self._said_until, hear, event)

        def hear(event: GroupEvent) -> None:
            if not self._stopped:
                self._process.passes(HEARD[type(event)])
            if not self._stopped:
                deliver(event)
                if isinstance(event, Assigned):
                    for partition in event.releasing:
                        self._process.note("told", partition)

        self._deliver = say
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._beat())]

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        self._process.passes("revoke.after")

        def note() -> None:
            if not self._is_current(incarnation) or not self._is_answer(generation):
                return
            given_up = frozenset(partitions) & self._waiting_for
            self.holdings.released(given_up)
            self._waiting_for -= given_up
            self._wake.set()

        self._post(note)

    def handed_over(self, partition: int, order: Order) -> None:
        def note() -> None:
            stands = self.holdings.releasing.get(partition) == order
            self.holdings.handed_over(partition, order)
            self._wake.set()
            self._process.note("handed" if stands else "withdrawn", partition)

        self._process.note("handing", partition)
        self._post(note)

    def took(self, partition: int, incarnation: int) -> None:
        def note() -> None:
            if not self._is_current(incarnation):
                return
            self.holdings.took(partition)
            if self.holdings.leaving:
                self._must_join = True
                self._wake.set()
            self._process.note("took", partition)

        self._process.note("taking", partition)
        self._post(note)

    def report(self, copies: Copies, *, announce: bool) -> None:
        def note() -> None:
            self.holdings.copies = copies
            if announce and not self._is_told():
                self._process.note("announced", -1)
                self._must_join = True
                self._wake.set()

        self._post(note)

    def leave(self) -> None:
        def note() -> None:
            self.holdings.leaving = True
            self._must_join = self._must_join or not self.holdings.told.leaving
            self._wake.set()

        self._post(note)

    def close(self, timeout_seconds: float) -> None:
        if self._member:
            self._group.leave(self._member)
        self.kill()

    def _is_current(self, incarnation: int) -> bool:
        return incarnation == self.snapshot.incarnation

    def _is_answer(self, generation: int) -> bool:
        """Whether that is what we wait for: an answer may be late, and another barrier may have begun."""
        return generation == self.snapshot.generation

    def _waits_no_more(self) -> None:
        self._waiting_for = set()

    def _is_told(self) -> bool:
        now, told = self.holdings, self.holdings.told
        claims = (now.copies, now.owned, dict(now.releasing), frozenset(now.incoming))
        return claims == (told.copies, told.owned, told.releasing, told.incoming)

    def _post(self, note: Callable[[], None]) -> None:
        loop = self._group.loop
        self._asked_until = max(self._asked_until + ORDERED, loop.time() + self._process.faults.post())

        def hear() -> None:
            if not self._stopped:
                note()

        loop.call_at(self._asked_until, hear)

    # -- what the world looks at ---------------------------------------------------------------------------------------

    @property
    def member(self) -> str:
        """The member id, empty while it is not a member."""
        return self._member

    @property
    def stopped(self) -> bool:
        """Whether it was killed or closed."""
        return self._stopped

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
        for seconds in self._process.travel_times():
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
                except Inconsistent:  # the others may be what a kill left
                    self._void("the group refuses its strategies")
                    self._refused_at = min(self._refused_at, self._group.loop.time())
                    if self._group.loop.time() > self._refused_at + self._group.session + 1.0:
                        await self._end("the other members share by other strategies")
                    await elapse(0.5)
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
            if not self._is_still(member, generation):
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

    def _is_still(self, member: str, generation: int) -> bool:
        """Whether nothing of that has changed during an await."""
        return not self._joining and self._member == member and self.snapshot.generation == generation

    def _void(self, reason: str) -> None:
        self._member = ""
        self._must_join = True
        if self.snapshot.generation >= 0:
            self.snapshot = Snapshot(self.snapshot.incarnation + 1, -1, "", None)
            self.holdings.void()
            self._waiting_for = set()
            self._deliver(Lost(self.snapshot.incarnation, reason))
        self._wake.set()

    async def _end(self, why: str) -> None:
        self._void(why)
        self._deliver(Fatal(MembershipFatal(why)))
        await asyncio.Event().wait()

    async def _join(self) -> None:
        self._must_join = False
        self._process.passes("join.before")
        report = self.holdings.report()
        await self._travel()
        new = not self._member
        member = self._member or self._group.new_id()
        generation = await self._group.join(member, report, self._strategies, new=new)
        self._refused_at = math.inf
        await self._travel()
        if not new and self._member != member:
            raise Illegal
        self._member = member
        incarnation = self.snapshot.incarnation
        self.snapshot = Snapshot(incarnation, generation, member, f"{generation}:{member}".encode())
        await self._travel()
        assignment = await self._group.sync(member, generation)
        await self._travel()
        if self.snapshot.generation != generation or assignment.sequence != self.holdings.told.sequence:
            raise Illegal
        self._joining = False
        rival = assignment.quit and not assignment.own and not self.holdings.leaving
        if rival and not self.holdings.owned:
            self._rejected_at = min(self._rejected_at, self._group.loop.time())
            if self._group.loop.time() - self._rejected_at > self._group.session + self._group.rebalance:
                await self._end("another member has this name")
            await elapse(0.5)  # a killed one with our name, that was joining, expires by and by
            raise Illegal
        if not rival:
            self._rejected_at = math.inf
        joins_again = self.holdings.has_to_join_again(assignment) and not (assignment.quit and self.holdings.leaving)
        while revoked := self.holdings.revoked_by(assignment):
            self._waiting_for = set(revoked)
            self._deliver(Revoked(incarnation, generation, revoked))
            while self._waiting_for & self.holdings.here and self.snapshot.incarnation == incarnation:
                self._wake.clear()
                await self._wake.wait()
            if self.snapshot.incarnation != incarnation:
                return
        self._waits_no_more()
        if joins_again:
            self._must_join = True
        added = self.holdings.apply(generation, assignment)
        self._deliver(
            Assigned(
                incarnation,
                generation,
                self.holdings.owned,
                added,
                assignment,
                dict(self.holdings.releasing),
                dict(self.holdings.incoming),
                self.holdings.told.copies,
            )
        )
