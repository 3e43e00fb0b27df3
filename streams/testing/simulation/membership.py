"""A member of the simulated group, that behaves as ``kafka.group.membership`` does.

Its state is the real ``core.group_member``. Calls of the engine reach it some time later, in order, as calls do that
cross to another thread; its events reach the engine some time later too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from streams.core.group_member import GroupMember, Holdings
from streams.errors import MembershipFatal
from streams.kafka.wire.group_bytes import group_metadata
from streams.model.group import Assigned, Assignor, Copies, Fatal, GroupEvent, GroupMetadata, Lost, Order, Revoked
from streams.testing.simulation.group import Group, Illegal, Inconsistent, Unknown
from streams.testing.simulation.process import Process
from streams.testing.simulation.virtual_time import ORDERED, elapse

POINT_BEFORE = {Assigned: "assigned.before", Revoked: "revoke.before", Lost: "lost.before", Fatal: "fatal.before"}
"""Event that the engine is about to receive, and the point that is passed then."""


class SimMembership:
    """``group.Membership`` of one process (``process.Process``)."""

    def __init__(self, process: Process, instance: str, strategies: Mapping[str, Assignor], heartbeat: float) -> None:
        self._process, self._rng, self._heartbeat = process, process.rng, heartbeat
        self._group: Group = process.group
        self._strategies = strategies
        self._state = GroupMember(
            instance, session_seconds=self._group.session, rebalance_seconds=self._group.rebalance
        )
        self._member = ""
        self._stopped = self._joining = False
        self._must_join = True
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._delivered_until = self._posted_until = 0.0

    # -- what the engine calls -----------------------------------------------------------------------------------------

    def start(self, deliver: Callable[[GroupEvent], None]) -> None:
        loop = self._group.loop

        def send(event: GroupEvent) -> None:
            self._delivered_until = max(self._delivered_until + ORDERED, loop.time() + self._process.faults.hear())
            loop.call_at(self._delivered_until, receive, event)

        def receive(event: GroupEvent) -> None:
            if not self._stopped:
                self._process.passes(POINT_BEFORE[type(event)])
            if not self._stopped:
                deliver(event)
                if isinstance(event, Assigned):
                    for partition in event.releasing:
                        self._process.note("told", partition)

        self._deliver = send
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._beat())]

    def released(self, partitions: Collection[int], incarnation: int, generation: int) -> None:
        self._process.passes("revoke.after")

        def note() -> None:
            self._state.released(partitions, incarnation, generation)
            self._wake.set()

        self._post(note)

    def handed_over(self, partition: int, order: Order) -> None:
        def note() -> None:
            stands = self._state.handed_over(partition, order)
            self._wake.set()
            self._process.note("handed" if stands else "withdrawn", partition)

        self._process.note("handing", partition)
        self._post(note)

    def took(self, partition: int, incarnation: int) -> None:
        def note() -> None:
            if self._state.took(partition, incarnation):
                self._join_for_news()
                self._process.note("took", partition)

        self._process.note("taking", partition)
        self._post(note)

    def report(self, copies: Copies, *, announce: bool) -> None:
        def note() -> None:
            had_news = self._state.has_news
            self._state.copies_changed(copies, announce=announce)
            if self._state.has_news and not had_news:
                self._process.note("announced", -1)
            self._join_for_news()

        self._post(note)

    def leave(self) -> None:
        def note() -> None:
            self._state.leave()
            self._join_for_news()

        self._post(note)

    def close(self, timeout_seconds: float) -> None:
        if self._member:
            self._group.leave(self._member)
        self.kill()

    def _join_for_news(self) -> None:
        if self._state.has_news:
            self._must_join = True
            self._wake.set()

    def _post(self, note: Callable[[], None]) -> None:
        loop = self._group.loop
        self._posted_until = max(self._posted_until + ORDERED, loop.time() + self._process.faults.post())

        def run() -> None:
            if not self._stopped:
                note()

        loop.call_at(self._posted_until, run)

    # -- what the world looks at ---------------------------------------------------------------------------------------

    @property
    def group_metadata(self) -> GroupMetadata:
        """See ``group.Membership``."""
        return self._state.group_metadata

    @property
    def holdings(self) -> Holdings:
        """The claims of this member."""
        return self._state.holdings

    @property
    def member(self) -> str:
        """The member id, empty while it is not a member."""
        return self._member

    @property
    def stopped(self) -> bool:
        """Check whether it was killed or closed."""
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
                    now, refused = self._group.loop.time(), self._state.no_common_strategy
                    if not refused.begins(now) and refused.is_over(now):
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
            member, generation = self._member, self.group_metadata.generation
            if generation < 0 or self._joining:  # a member that waits in JoinGroup is alive
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
        """Check whether nothing of that has changed during an await."""
        return not self._joining and self._member == member and self.group_metadata.generation == generation

    def _void(self, reason: str) -> None:
        self._member = ""
        self._must_join = True
        lost = self._state.lost(reason)
        if lost is not None:
            self._deliver(lost)
        self._wake.set()

    async def _end(self, why: str) -> None:
        self._void(why)
        self._deliver(Fatal(MembershipFatal(why)))
        await asyncio.Event().wait()

    async def _join(self) -> None:
        self._must_join = False
        self._process.passes("join.before")
        report = self._state.report()
        await self._travel()
        new = not self._member
        member = self._member or self._group.new_id()
        generation = await self._group.join(member, report, self._strategies, new=new)
        self._state.no_common_strategy.passed()
        await self._travel()
        if not new and self._member != member:
            raise Illegal
        self._member = member
        incarnation = self.group_metadata.incarnation
        self._state.joined(generation, member, group_metadata("simulated", generation, member, None))
        await self._travel()
        assignment = await self._group.sync(member, generation)
        await self._travel()
        if self.group_metadata.generation != generation or not self._state.is_answer_to_report(assignment):
            raise Illegal
        self._joining = False
        if self._state.is_refused_for_rival(assignment):
            now, rival = self._group.loop.time(), self._state.rival
            if not rival.begins(now) and rival.is_over(now):
                await self._end("another member has this name")
            await elapse(0.5)  # a killed one with our name, that was joining, expires by and by
            raise Illegal
        joins_again = self._state.has_to_join_again(assignment)
        while revoked := self.holdings.revoked_by(assignment):
            self._deliver(self._state.begin_barrier(revoked))
            while not self._state.is_barrier_open and self.group_metadata.incarnation == incarnation:
                self._wake.clear()
                await self._wake.wait()
            if self.group_metadata.incarnation != incarnation:
                return
            self._state.end_barrier()
        if joins_again and not self._state.is_dismissed(assignment):
            self._must_join = True
        self._deliver(self._state.assign(generation, assignment))
