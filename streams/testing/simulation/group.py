"""A simulated group coordinator: generations, sessions, barriers, strategies, and what a transaction's offsets need."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streams.model.group import Assignment, Assignor, MemberReport
from streams.testing.simulation.broker import Broker, Refuses


class Unknown(Exception):
    """UNKNOWN_MEMBER_ID."""


class Illegal(Exception):
    """ILLEGAL_GENERATION, REBALANCE_IN_PROGRESS: join again."""


class Inconsistent(Exception):
    """INCONSISTENT_GROUP_PROTOCOL: no strategy that all others support too."""


@dataclass(eq=False)
class _Known:
    report: MemberReport
    strategies: Mapping[str, Assignor]
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
        self.strategy = ""
        self.planned: Callable[[Mapping[str, MemberReport], Mapping[str, Assignment]], None] = lambda reports, plan: (
            None
        )
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._plan: dict[str, Assignment] = {}
        broker.check_member = self.check

    def check(self, generation: int, member: str) -> None:
        """Check member and generation, as TxnOffsetCommit does."""
        if member not in self.members:
            self.broker.met.add("UNKNOWN_MEMBER_ID")
            raise Refuses("UNKNOWN_MEMBER_ID", "lost")
        if generation != self.generation:
            self.broker.met.add("ILLEGAL_GENERATION")
            raise Refuses("ILLEGAL_GENERATION", "stale")

    def new_id(self) -> str:
        return f"m{next(self._numbers)}"

    def join(
        self, member: str, report: MemberReport, strategies: Mapping[str, Assignor], *, new: bool
    ) -> asyncio.Future[int]:
        """The future's result is the generation. ``strategies``: what the member supports, the wanted one first."""
        if not new and member not in self.members:
            raise Unknown
        if not self._common({name: known for name, known in self.members.items() if name != member}, strategies):
            raise Inconsistent
        known = self.members.setdefault(member, _Known(report, strategies))
        known.report, known.strategies = report, strategies
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
            reports = {name: other.report for name, other in self.members.items()}
            self._plan = known.strategies[self.strategy](self.broker.partitions, reports)
            self.planned(reports, self._plan)
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
        """Restart the coordinator without its memory: members, generation and offsets are gone."""
        for known in self.members.values():
            _fail(known)
            if known.expiry is not None:
                known.expiry.cancel()
        self.members.clear()
        self.generation, self.state = 0, "empty"
        if self._timer is not None:
            self._timer.cancel()
        self.broker.offsets.clear()
        self.broker.notes.clear()

    @staticmethod
    def _common(others: Mapping[str, _Known], strategies: Mapping[str, Assignor]) -> set[str]:
        return set(strategies).intersection(*(known.strategies for known in others.values()))

    def _vote(self) -> str:
        """Choose a strategy: each member votes for the first one of its own that all support."""
        common = self._common(self.members, next(iter(self.members.values())).strategies)
        votes = Counter(next(name for name in known.strategies if name in common) for known in self.members.values())
        return votes.most_common(1)[0][0]

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
        self.strategy = self._vote()
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
